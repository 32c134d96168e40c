"""The states of a worker that are kept, and putting one of them on disk.

A state is its serve script and what that names. Switching is one rename of the script; the unit file follows
from the state that the script on disk names, and putting it there twice does no harm.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from . import files, paths
from .errors import AgentError
from .systemd import Unit

BASELINE = "baseline"
_STATE_LINE = re.compile(rb"^export DSV4_FLEET_STATE=.*\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (DSV4_FLEET_[A-Z]+)=(.*)$", re.MULTILINE)
_SECRET = {
    "KEY",
    "KEYS",
    "APIKEY",
    "TOKEN",
    "SECRET",
    "SECRETS",
    "PASSWORD",
    "PASSWD",
    "PASSPHRASE",
    "CREDENTIAL",
    "CREDENTIALS",
}


def state_of(script: bytes) -> str:
    """sha256 of the script without its own DSV4_FLEET_STATE line."""
    return files.sha256(_STATE_LINE.sub(b"", script, count=1))


def exports(script: bytes) -> dict[str, str]:
    """The DSV4_FLEET_* names that the script exports, without quotes."""
    return {name: value.strip().strip("'\"") for name, value in _EXPORT.findall(script.decode(errors="replace"))}


@dataclass(frozen=True)
class State:
    """A kept state. `script` is None where first contact found none; `unit` likewise."""

    name: str
    script: bytes | None
    unit: str | None
    expect: dict[str, Any]

    @property
    def runnable(self) -> bool:
        """Whether there is something to start: what first contact found may be nothing at all."""
        return self.script is not None and self.unit is not None

    @property
    def secrets(self) -> str:
        return exports(self.script or b"").get("DSV4_FLEET_SECRETS", "none")

    @property
    def release(self) -> str | None:
        return self.expect.get("release")


class Store:
    """What /var/lib/dsv4/units/<unit> holds of one worker's states."""

    def __init__(self, worker: dict[str, Any]) -> None:
        self.unit = worker["unit"]
        self.script = worker["script"]
        self.directory = paths.worker(self.unit)

    # --- kept states ---

    def path(self, name: str) -> str:
        return f"{self.directory}/{BASELINE}" if name == BASELINE else f"{self.directory}/states/{name}"

    def names(self) -> list[str]:
        """Digests of the kept states, without the baseline."""
        try:
            return sorted(name for name in os.listdir(f"{self.directory}/states") if not name.startswith("."))
        except FileNotFoundError:
            return []

    def has_baseline(self) -> bool:
        return os.path.isdir(self.path(BASELINE))

    def load(self, name: str) -> State:
        """A kept state, checked against its own digest. Raises AgentError."""
        path = self.path(name)
        expect = files.read_json(f"{path}/expect.json")
        if not isinstance(expect, dict):
            raise AgentError(
                f"state {name}: found none in {path}, expected a kept state. Kept are: {', '.join(self.names()) or 'none'}."
            )
        script, unit = files.read(f"{path}/script"), files.read(f"{path}/unit")
        if name != BASELINE and (script is None or unit is None or state_of(script) != name):
            raise AgentError(
                f"state {name}: found {path} damaged (its script does not have that digest), expected it "
                "as it was kept. Deploy that state anew."
            )
        return State(name, script, None if unit is None else unit.decode(), {**expect, "state": name})

    def keep(self, name: str, script: bytes, unit: str, expect: dict[str, Any]) -> State:
        """Keep a state; the directory appears whole or not at all."""
        self._keep(name, {"script": script, "unit": unit.encode(), "expect.json": files.canonical(expect)})
        return self.load(name)

    def _keep(self, name: str, content: dict[str, bytes]) -> None:
        path = self.path(name)
        if os.path.isdir(path) and all(files.read(f"{path}/{file}") == data for file, data in content.items()):
            return
        staging = files.temporary_path(path, "staging")
        files.directory(os.path.dirname(path), 0o700)
        files.remove_tree(staging)
        files.directory(staging, 0o700)
        try:
            for file, data in content.items():
                files.replace(f"{staging}/{file}", data, 0o600)
            files.remove_tree(path)
            os.rename(staging, path)
        finally:
            files.remove_tree(staging)
        files.sync_directory(os.path.dirname(path))

    def record_baseline(self, unit: Unit, environment: dict[str, str] | None, arguments: list[str] | None) -> None:
        """At first contact, keep what is there. Never again: the caller asks first whether there is one.

        environment, arguments: of the running main process, None where nothing runs.
        """
        script = files.read(self.script)
        expect: dict[str, Any] = {
            "baseline": True,
            "release": None,
            "flags": {},
            "environment": None
            if environment is None
            else {name: value for name, value in environment.items() if not secret_name(name)},
            "arguments": arguments,
            "script": _look(self.script),
            "unit": {
                **_look(paths.unit_file(self.unit)),
                "file_state": unit.file_state,
                "fragment": unit.fragment,
                "digest": unit.digest,
            },
        }
        content = {"expect.json": files.canonical(expect)}
        if script is not None:
            content["script"] = script
        if unit.text is not None:
            content["unit"] = unit.text.encode()
        self._keep(BASELINE, content)

    # --- what is on disk ---

    def on_disk(self) -> str | None:
        """The state that the script on disk is: a digest, `baseline`, or None where there is no script."""
        script = files.read(self.script)
        if self.has_baseline() and script == files.read(f"{self.path(BASELINE)}/script"):
            return BASELINE
        return None if script is None else state_of(script)

    def stage_script(self, state: State, tag: str) -> str | None:
        """Write what will replace the script, beside it. None: the state has no script, switching removes it."""
        if state.script is None:
            return None
        found = state.expect.get("script") if state.name == BASELINE else None
        files.directory_exists(os.path.dirname(self.script))
        if found and found["kind"] == "link":
            return files.prepare_link(self.script, found["link"], tag)
        if found:
            return files.prepare(self.script, state.script, found["mode"], (found["uid"], found["gid"]), tag)
        return files.prepare(self.script, state.script, 0o755, tag=tag)

    def switch_script(self, temporary: str | None) -> None:
        """The commit point: one rename."""
        if temporary is None:
            files.remove(self.script)
        else:
            files.commit(temporary, self.script)

    def script_is(self, state: State) -> bool:
        """Whether the script's path holds exactly this state already, link and mode included."""
        found = state.expect.get("script") if state.name == BASELINE else None
        kind = files.kind(self.script)
        if state.script is None:
            return kind == "missing"
        if found and found["kind"] == "link":
            return kind == "link" and os.readlink(self.script) == found["link"]
        if kind != "file" or files.read(self.script) != state.script:
            return False
        return stat.S_IMODE(os.stat(self.script).st_mode) == (found["mode"] if found else 0o755)

    def unit_is(self, state: State) -> bool:
        """Whether the unit's file in /etc is this state's."""
        path = paths.unit_file(self.unit)
        kind = files.kind(path)
        found = state.expect.get("unit") if state.name == BASELINE else None
        if found and found["kind"] == "link":
            return kind == "link" and os.readlink(path) == found["link"]
        if found and found["kind"] == "missing":
            return kind == "missing"
        return kind == "file" and files.read(path) == (state.unit or "").encode()

    def install_unit(self, state: State, tag: str) -> bool:
        """Put the state's unit file into /etc; whether that changed anything. systemd is not told."""
        if self.unit_is(state):
            return False
        path = paths.unit_file(self.unit)
        found = state.expect.get("unit") if state.name == BASELINE else None
        if found and found["kind"] == "link":
            files.commit(files.prepare_link(path, found["link"], tag), path)
        elif found and found["kind"] == "missing":
            files.remove(path)
        else:
            files.replace(path, (state.unit or "").encode(), 0o644, tag=tag)
        return True

    def discard_temporary(self, tag: str) -> None:
        """Remove what a transaction that died left beside its targets."""
        for path in (self.script, paths.unit_file(self.unit)):
            temporary = files.temporary_path(path, tag)
            if os.path.lexists(temporary):
                files.remove(temporary)

    # --- garbage ---

    def collect_garbage(self, needed: set[str]) -> None:
        """Remove states not in `needed` whose release is gone, and secrets that no kept state names."""
        for name in self.names():
            if name in needed:
                continue
            expect = files.read_json(f"{self.path(name)}/expect.json") or {}
            if not os.path.isdir(paths.release(str(expect.get("release")))):
                files.remove_tree(self.path(name))
        named = {exports(files.read(f"{self.path(name)}/script") or b"").get("DSV4_FLEET_SECRETS") for name in self.names()}
        for digest in _listed(f"{self.directory}/secrets"):
            if digest not in named:
                files.remove_tree(f"{self.directory}/secrets/{digest}")


def secret_name(name: str) -> bool:
    """Whether the name of a variable or option looks as if its value were secret. Ours are digests, not secrets."""
    return not name.startswith("DSV4_FLEET_") and bool(_SECRET & set(re.split("[_-]", name.upper())))


def commands(script: str) -> Iterator[str]:
    """The script's logical lines: comments and blank lines left out, quotes and continued lines held together."""
    line, quote, at = "", "", 0
    while at < len(script):
        char = script[at]
        if quote:
            line += char
            if char == "\\" and quote != "'" and at + 1 < len(script):
                at += 1
                line += script[at]
            elif char == quote[-1]:
                quote = ""
        elif char == "\\" and at + 1 < len(script):
            at += 1
            line += "" if script[at] == "\n" else char + script[at]
        elif char in "'\"":
            quote = "$'" if char == "'" and line.endswith("$") else char
            line += char
        elif char == "#" and (not line or line[-1] in " \t;&|("):
            end = script.find("\n", at)
            at = (len(script) if end < 0 else end) - 1
        elif char == "\n":
            if line.strip():
                yield line.strip()
            line = ""
        else:
            line += char
        at += 1
    if line.strip():
        yield line.strip()


def _look(path: str) -> dict[str, Any]:
    kind = files.kind(path)
    found: dict[str, Any] = {"kind": kind, "link": os.readlink(path) if kind == "link" else None}
    if kind not in ("missing", "link"):
        status = os.stat(path)
        found.update(mode=stat.S_IMODE(status.st_mode), uid=status.st_uid, gid=status.st_gid)
    return found


def _listed(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return []
