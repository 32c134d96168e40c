"""Reads one worker and works out its wanted state. Nothing on the host changes."""

from __future__ import annotations

import functools
import getpass
import platform
import secrets as random
import time
import typing as t

from ansible.plugins.action import ActionBase
from ansible_collections.dsv4.fleet.plugins.plugin_utils import (
    compare,
    flags,
    origin,
    remote,
    render,
    settings,
    specs,
    store,
    wanted,
)
from ansible_collections.dsv4.fleet.plugins.plugin_utils import tree as upstream
from ansible_collections.dsv4.fleet.plugins.plugin_utils.flags import SettingError

ARGUMENTS = frozenset({"worker", "serve", "release", "secrets", "overrides", "clear_overrides", "why", "rollback", "look_only"})

SECRETS = {
    "router_keys": "sglang_worker_router_keys",
    "env": "sglang_serve_secret_env",
    "args": "sglang_serve_secret_arguments",
}
ROLES = ("fleet_preflight", "sglang_worker", "sglang_serve", "sglang_release")


class ActionModule(ActionBase):
    """See the module of the same name for its documentation."""

    TRANSFERS_FILES = False
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        """Returns ``dsv4``: worker, seen, wanted, reasons, notes, diff. Fails with every problem found, one a line."""
        result = super().run(tmp, task_vars)
        variables = task_vars or {}
        args = self._task.args
        if set(args) != ARGUMENTS:
            return {
                **result,
                "failed": True,
                "msg": f"found the arguments {sorted(args)}, expected {sorted(ARGUMENTS)}",
            }
        agent = remote.Agent(self, remote.interpreter(variables))
        try:
            found = _Inspection(self, agent, variables, args).run()
        except (SettingError, remote.AgentError) as error:
            end = {"dsv4": {"end_state": "unreachable"}} if isinstance(error, remote.Unreachable) else {}
            return {**result, "failed": not args["look_only"], "msg": str(error), **end}
        return {**result, "changed": False, "dsv4": found}


class _Inspection:
    """One host's inspection: settings first (no connection), then the host, then what both make together."""

    def __init__(self, action: ActionModule, agent: remote.Agent, variables: dict[str, t.Any], args: dict[str, t.Any]) -> None:
        self._action = action
        self._agent = agent
        self._variables = variables
        self._args = args
        self._where = origin.Finder(variables)
        self._worker = args["worker"]
        self._secrets = args["secrets"]
        self._store = store.Store(args["release"]["cache"])

    def run(self) -> dict[str, t.Any]:
        problems = _Problems()
        problems.collect(lambda: specs.check(ROLES, self._variables, self._action._templar.template, self._where.variable))
        table = flags.table(self._args["serve"]["flags"])
        # Overrides are not known yet; the variables themselves must be right before any host is asked.
        problems.collect(lambda: self._resolve(table, {}))
        arguments = problems.collect(lambda: settings.launch_arguments(self._args["serve"]["arguments"], self._where.value))
        command = problems.collect(
            lambda: settings.words(self._input("serve_engine_command"), "serve_engine_command", self._where.value)
        )
        reserved = {row.env for row in table} | {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "SPT_NOENV"}
        extra = problems.collect(
            lambda: settings.environment(self._input("dsv4_extra_env"), "dsv4_extra_env", reserved, self._where.value)
        )
        for kind, name in SECRETS.items():
            problems.collect(functools.partial(settings.secrets, self._secrets[kind], name, self._where.value))
        overlays = problems.collect(lambda: store.overlays(self._args["release"]["overlays"]))
        consent = problems.collect(
            lambda: settings.consent(self._variables, "dsv4_allow_known_corruption", False, self._where.value)
        )
        problems.stop()

        needed = [*store.HOOKED_FILES, *upstream.ARGUMENT_FILES, *(overlay.file for overlay in overlays)]
        seen = self._agent.call(
            {
                "format": 1,
                "op": "inspect",
                "worker": self._worker,
                "secrets": {**self._secrets, "host_key": None},
                "tree_files": needed,
                "known_trees": self._store.known_trees(needed),
                "fast": False,
            }
        )
        common = {"worker": self._worker, "seen": _without_bulk(seen)}
        if self._args["rollback"]:
            return {**common, **_rollback(seen)}

        tree = self._store.tree(seen["tree"], needed)
        resolved = self._resolve(table, seen["ledger"]["overrides"])
        release = self._store.release(tree, overlays)
        files = store.release_files(release)
        notes = list(resolved.notes)
        problems.collect(lambda: wanted.refuse_known_corruption(resolved, consent, self._worker["name"]))
        for text in wanted.drop_in_conflicts(seen["unit"]["drop_ins"]):
            problems.add(text)
        for path in seen["stray"]:
            problems.add(
                f"stray tree: found {path}, which a server started in that directory imports before any release; "
                "expected none; move it away"
            )
        declared, known_arguments = self._store.facts(tree)
        read = store.names_read(tree, files)
        for name in self._secrets["args"]:
            if f"--{name}" not in known_arguments:
                problems.add(f"sglang_serve_secret_arguments.{name}: found no argument --{name} in the tree; correct the name")
        self._check_tree(table, resolved, extra, arguments, declared, known_arguments, read, problems, notes)
        if release["digest"] not in seen["releases"]:
            self._compile(files, problems)
        problems.stop()

        digest, host_key = self._secrets_digest(seen)
        unit_settings = {
            name: int(self._args["serve"][name])
            for name in ("stop_timeout_s", "restart_delay_s", "start_limit_burst", "start_limit_interval_s")
        }
        inputs = wanted.Inputs(
            self._worker, table, resolved, extra, command, arguments, digest,
            bool(self._secrets["env"]), bool(self._secrets["args"]), unit_settings,
        )  # fmt: skip
        unit = self._render("unit_template", {"dsv4_unit": wanted.unit_variables(inputs)})
        unit_digest = wanted.unit_digest(unit, seen["unit"]["drop_ins"])
        script = wanted.script_variables(inputs, release["digest"], unit_digest, seen["python"]["fingerprint"])
        text = self._render("template", {"dsv4_script": script})
        release["changes"] = _changes(release["manifest"])
        want = {
            **wanted.finish(text, script, inputs),
            "unit": unit,
            "unit_digest": unit_digest,
            "release": release,
            "secrets": digest,
            "host_key": host_key,
            "overrides": resolved.overrides,
            "flags": {short: one.value for short, one in resolved.flags.items()},
        }
        why = compare.reasons(want, seen)
        return {**common, "wanted": want, "reasons": why, "notes": notes, "diff": compare.difference(want, seen, why)}

    def _input(self, name: str) -> t.Any:
        row = next(row for row in self._args["serve"]["inputs"] if row["variable"] == name)
        return self._action._templar.template(self._variables[name]) if name in self._variables else row["default"]

    def _resolve(self, table: list[flags.Flag], kept: dict[str, t.Any]) -> flags.Resolved:
        mine = {name: value for name, value in self._variables.items() if name.startswith(flags.PREFIX)}
        values = {name: self._action._templar.template(value) for name, value in mine.items()}
        stamp = {
            "since": _utc(time.time()),
            "by": f"{getpass.getuser()}@{platform.node()}",
            "why": str(self._args["why"]),
        }
        play = {
            name: flags.parse_bool(f"sglang_worker_overrides.{name}", value, self._where.variable("sglang_worker_overrides"))
            for name, value in self._args["overrides"].items()
        }
        return flags.resolve(table, values, self._where.variable, kept, play, self._args["clear_overrides"], stamp)

    def _check_tree(
        self,
        table: list[flags.Flag],
        resolved: flags.Resolved,
        extra: dict[str, str],
        arguments: list[str],
        declared: dict[str, upstream.EnvVar],
        known: dict[str, upstream.Argument],
        read: t.Collection[str],
        problems: _Problems,
        notes: list[str],
    ) -> None:
        """Names, types and launch arguments against what the tree itself declares and reads."""
        for variable, found in (
            ("dsv4_extra_env", upstream.check_environment(extra, declared, read)),
            ("sglang_serve_arguments", upstream.check_launch_arguments(arguments, known)),
        ):
            for one in found:
                text = f"{one.text} {variable} is set at {self._where.variable(variable)}."
                if one.severity == "error":
                    problems.add(text)
                else:
                    notes.append(text)
        for row in table:
            if not resolved.on(row.short) or row.env in read:
                continue
            if row.instrument is None:
                problems.add(
                    f"{row.variable}: found it on, but nothing in the tree or its overlays reads {row.env}; expected a tree "
                    "that does; add the overlay to sglang_release_overlays, or turn the flag off"
                )
            else:
                notes.append(f"live flag, no instrument: {row.env}=1, and nothing in the release reads it")

    def _compile(self, files: dict[str, bytes], problems: _Problems) -> None:
        """Patched files must compile with the Python of the host that will run them."""
        sources = {name: remote.pack_text(data) for name, data in files.items() if name.endswith(".py")}
        answer = self._agent.call({"format": 1, "op": "compile", "python": self._worker["python"], "sources": sources})
        for error in answer["errors"]:
            problems.add(
                f"release: {error['file']} line {error['line']}: {error['error']}, found by Python {answer['version']} of "
                f"{self._worker['name']}; expected source that it compiles; mend the overlay"
            )

    def _secrets_digest(self, seen: dict[str, t.Any]) -> tuple[str, str | None]:
        """The secrets' digest, and a new host key where the worker has none yet."""
        if not seen["host"]["needs_host_key"]:
            return seen["secrets_digest"], None
        key = random.token_hex(32)
        return wanted.keyed_digest(key, self._secrets["env"], self._secrets["args"]), key

    def _render(self, template: str, ours: dict[str, t.Any]) -> str:
        variables = {**self._variables, **ours}
        return render.template(self._action._templar, self._args["serve"][template], variables)


class _Problems:
    """Collects every problem, so that an operator mends all of them in one go."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def add(self, text: str) -> None:
        self._texts.append(text)

    def collect(self, make: t.Callable[[], t.Any]) -> t.Any:
        try:
            return make()
        except SettingError as error:
            self._texts.append(str(error))
            return None

    def stop(self) -> None:
        if self._texts:
            raise SettingError("\n".join(dict.fromkeys(self._texts)))


def _without_bulk(seen: dict[str, t.Any]) -> dict[str, t.Any]:
    """What the host answered, less the tree's content and the unit's and script's text, which are in the difference."""
    return {
        **{name: value for name, value in seen.items() if name not in ("format", "ok")},
        "tree": {name: value for name, value in seen["tree"].items() if name not in ("content", "names")},
        "script": {name: value for name, value in seen["script"].items() if name != "text"},
    }


def _changes(manifest: dict[str, t.Any]) -> list[dict[str, t.Any]]:
    """File, base and result digest of each file that a release puts over its tree."""
    rows = [
        {"file": file, "base": entry["base"] and compare.short(entry["base"]), "result": compare.short(entry["result"])}
        for file, entry in sorted(manifest["files"].items())
    ]
    return [row for row in rows if row["base"] != row["result"]]


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _rollback(seen: dict[str, t.Any]) -> dict[str, t.Any]:
    """The newest proved state that is not the live one, by name; its script lies on the worker."""
    live = seen["process"] and (seen["process"]["state"] or "baseline")
    for entry in reversed(seen["ledger"]["proved"]):
        if entry["state"] != live or entry["state"] != (seen["script"]["declared"] or "baseline"):
            stored = {"state": entry["state"], "stored": True, "overrides": entry.get("overrides", {}), "flags": None}
            why = {"restart": f"roll back to {compare.short(entry['state'])}, proved {_utc(entry['at'])}"}
            return {"wanted": stored, "reasons": why, "notes": [], "diff": []}
    note = "found no proved state other than the live one; nothing to roll back to"
    return {
        "wanted": {"state": live, "stored": True, "overrides": {}, "flags": None},
        "reasons": {},
        "notes": [note],
        "diff": [],
    }
