"""Carries one worker's change to the agent and follows it to its end."""

from __future__ import annotations

import pathlib
import secrets as random
import time
import typing as t

from ansible import constants
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.dsv4.fleet.plugins.plugin_utils import compare, remote, store

ARGUMENTS = frozenset({"inspected", "worker", "secrets", "limits", "generation", "acknowledge", "retry_state", "preserve"})
FOLLOW_S = 5
"""How long one read waits for the next journal line."""
RECONNECT_S = 2
GIVE_UP_S = 120
"""How long a host may stay unreachable while a transaction runs on it, before the run reports it lost."""
display = Display()


class ActionModule(ActionBase):
    """See the module of the same name for its documentation."""

    TRANSFERS_FILES = False
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        """Returns ``dsv4``: the agent's result. A worker that cannot be reached is a failure, never an unreachable host."""
        result = super().run(tmp, task_vars)
        args = self._task.args
        if set(args) != ARGUMENTS:
            return {
                **result,
                "failed": True,
                "msg": f"found the arguments {sorted(args)}, expected {sorted(ARGUMENTS)}",
            }
        inspected = args["inspected"]
        result["inventory_lines"] = [
            f"dsv4_flag_{short}: {str(bool(one['value'])).lower()}" for short, one in inspected["wanted"]["overrides"].items()
        ]
        if not inspected["reasons"]:
            state = inspected["wanted"]["state"]
            return {
                **result,
                "changed": False,
                "dsv4": {"end_state": "unchanged", "failed": False, "state": {"now": state}},
            }
        if self._task.check_mode:
            changed = sorted(inspected["reasons"])
            foreseen = {
                "end_state": "unchanged",
                "failed": False,
                "would_change": changed,
                "state": {"wanted": inspected["wanted"]["state"]},
            }
            return {**result, "changed": True, "diff": inspected["diff"], "dsv4": foreseen}
        halt = pathlib.Path(constants.DEFAULT_LOCAL_TMP) / "dsv4-halt"
        if halt.exists():
            text = f"not touched: {halt.read_text()} failed before it"
            return {
                **result,
                "failed": True,
                "msg": text,
                "dsv4": {"end_state": "not touched", "failed": True, "error": text},
            }
        outcome = self._change(args, task_vars or {})
        if outcome["failed"]:
            # The directory is this run's own and all its forks share it: the rest of the wave must not begin.
            halt.write_text(args["worker"]["name"])
        return {**result, **outcome}

    def _change(self, args: dict[str, t.Any], variables: dict[str, t.Any]) -> dict[str, t.Any]:
        agent = remote.Agent(self, remote.interpreter(variables))
        inspected = args["inspected"]
        try:
            started = agent.call(request(args))
            end = self._follow(agent, started, args)
        except remote.Unreachable as error:
            lost = {"end_state": "unreachable", "failed": True, "error": str(error)}
            return {"failed": True, "msg": f"unreachable: {error}", "dsv4": lost}
        except remote.AgentError as error:
            refused = {"end_state": "unchanged", "failed": True, "error": str(error)}
            return {"failed": True, "msg": str(error), "dsv4": refused}
        text = f"{end['end_state']}: {end['error']}" if end["failed"] else end["end_state"]
        return {
            "changed": bool(end["changed"]),
            "failed": end["failed"],
            "msg": text,
            "dsv4": end,
            **({"diff": inspected["diff"]} if self._task.diff else {}),
        }

    def _follow(self, agent: remote.Agent, started: dict[str, t.Any], args: dict[str, t.Any]) -> dict[str, t.Any]:
        """Short reads until the transaction has its result; its deadlines are its own. A lost connection is retried for
        a while: the transaction goes on without us."""
        name = args["worker"]["name"]
        if started["attached"]:
            display.display(f"{name} | attached to the running transaction {started['id']}")
        line = 0
        lost_since: float | None = None
        while True:
            try:
                answer = agent.follow(started["program"], started["id"], line, FOLLOW_S)
            except remote.Unreachable as error:
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since > GIVE_UP_S:
                    raise
                display.warning(f"{name}: connection lost ({error}); transaction {started['id']} goes on; trying again")
                self._connection.reset()
                time.sleep(RECONNECT_S)
                continue
            lost_since = None
            for entry in answer["lines"]:
                display.display(f"{name} | {entry['step']}: {entry['text']}")
            line = answer["next"]
            if answer["result"] is not None:
                return answer["result"]
            if not answer["running"]:
                raise remote.AgentError(
                    f"transaction {started['id']} on {name}: found its unit gone and no result; expected one; read "
                    f"'journalctl -u dsv4-agent' there and run playbooks/site.yml, which reports it"
                )


def request(args: dict[str, t.Any]) -> dict[str, t.Any]:
    """The agent's ``start`` request (docs/agent.md)."""
    inspected = args["inspected"]
    wanted = inspected["wanted"]
    seen = inspected["seen"]
    if wanted.get("stored"):
        target: dict[str, t.Any] = {"state": wanted["state"]}
    else:
        release = {name: wanted["release"][name] for name in ("digest", "tree", "manifest")}
        # A release that is on the host already is named, not sent.
        absent = wanted["release"]["digest"] not in seen["releases"]
        files = store.release_files(wanted["release"]) if absent else {}
        release["files"] = {name: remote.pack_text(data) for name, data in files.items()}
        target = {
            **{name: wanted[name] for name in ("state", "script", "unit", "unit_digest", "secrets", "expect")},
            "release": release,
        }
    retry = str(args["retry_state"])
    return {
        "format": 1,
        "op": "start",
        "id": f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{random.token_hex(4)}",
        "worker": args["worker"],
        "secrets": {**args["secrets"], "host_key": wanted.get("host_key")},
        "seen": {"script": seen["script"]["sha256"], "process": seen["process"] and seen["process"]["state"]},
        "target": target,
        "overrides": wanted["overrides"],
        "limits": args["limits"],
        "generation": args["generation"],
        "acknowledge": bool(args["acknowledge"]),
        "retry_refused": len(retry) >= len(compare.short(wanted["state"])) and wanted["state"].startswith(retry),
        "preserve": bool(args["preserve"]),
        "restart": "restart" in inspected["reasons"],
    }
