"""Prints the last lines of a run: worker by worker, what state it is in and what to do."""

from __future__ import annotations

import typing as t

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: report
type: aggregate
short_description: The last lines of a run, worker by worker, and its exit code where Ansible's would mislead
version_added: 0.1.0
description:
  - Collects the results of C(dsv4.fleet.inspect) and C(dsv4.fleet.change) and prints one line per worker at the end,
    also after a run that stopped.
  - Ends with 1 where a run reached no host at all, and with 3 where C(dsv4.fleet.status) found drift.
requirements:
  - enabled in C(callbacks_enabled)
"""

ADVICE = {
    "unchanged": "nothing was changed on it; read the error, then run again",
    "rolled_back": "it serves its last proved state; read the evidence, mend the cause, then run again",
    "drained": "it is out of the routers and stopped; it needs a person: docs/runbook.md, A drained worker",
    "interrupted": "it was repaired after an interruption; look at it, then acknowledge it: docs/runbook.md",
    "unreachable": "its state is not known; a running transaction goes on there; mend the connection, then run again",
}

NO_HOSTS = 1
DRIFT = 3


class CallbackModule(CallbackBase):
    """Keeps the newest result of each worker."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "dsv4.fleet.report"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self._planned: list[str] = []
        self._ends: dict[str, dict[str, t.Any]] = {}
        self._inventory: dict[str, list[str]] = {}
        self._drift = False

    def _keep(self, result: t.Any, failed: bool = False) -> None:
        # Ansible 2.19 takes the key `failed` out of what callbacks get: is_failed() says False of a failure.
        action = result.task.action
        if action == "dsv4.fleet.change":
            self._ends[result.host.get_name()] = result.result.get("dsv4") or {
                "end_state": "unchanged", "failed": True, "error": result.result.get("msg", "")
            }  # fmt: skip
            for line in result.result.get("inventory_lines", []):
                self._inventory.setdefault(line, []).append(result.host.get_name())
        elif action == "dsv4.fleet.status":
            self._drift = bool(result.result.get("drift"))
        elif action == "dsv4.fleet.preflight":
            self._planned = result.result.get("hosts", [])
        elif action == "dsv4.fleet.inspect" and failed:
            end = (result.result.get("dsv4") or {}).get("end_state", "unchanged")
            self._ends[result.host.get_name()] = {
                "end_state": end,
                "failed": True,
                "error": result.result.get("msg", ""),
            }

    def v2_runner_on_ok(self, result: t.Any) -> None:
        self._keep(result)

    def v2_runner_on_failed(self, result: t.Any, ignore_errors: bool = False) -> None:
        self._keep(result, failed=True)

    def v2_runner_on_unreachable(self, result: t.Any) -> None:
        self._keep(result, failed=True)

    def v2_playbook_on_stats(self, stats: t.Any) -> None:
        if not stats.processed:
            # Ansible ends 0 here; a run that reached nobody must not look like one that did its work.
            self._display.error("found no hosts, expected at least one; correct the inventory or the group's name")
            raise SystemExit(NO_HOSTS)
        if self._drift:
            raise SystemExit(DRIFT)
        if self._ends or self._planned:
            self._display.banner("WORKERS")
        for host in dict.fromkeys([*self._planned, *self._ends]):
            self._display.display(f"{host}: {self._line(self._ends.get(host))}")
        if self._inventory:
            self._display.display("\nOverrides on the workers until the inventory says the same; lines to commit:")
        for line, hosts in self._inventory.items():
            self._display.display(f"  {line}  # {', '.join(hosts)}")

    def _line(self, end: dict[str, t.Any] | None) -> str:
        if end is None:
            return "not touched: the run stopped before it; it is as it was"
        word = end["end_state"]
        if end.get("would_change"):
            return f"would change: {', '.join(end['would_change'])}"
        if not end.get("failed"):
            healthy = end.get("healthy_after_s")
            return word if healthy is None else f"{word}, healthy after {healthy:.1f} s"
        if word == "not touched":
            return str(end["error"])
        first = str(end.get("error") or "").partition("\n")[0]
        return f"{word.upper()}: {first}; {ADVICE.get(word, 'read the messages above')}"
