"""Settings (how this stand-in is) and faults (what a test makes it do wrong), both from JSON files.

A name or field that is not known ends the process with exit code 78: a misspelt fault must not read as
"no fault". Values are documented in README.md beside this file.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass, field
from typing import Any, NoReturn

SETTINGS_FILE = "/etc/dsv4-standin.json"
FAULTS_FILE = "/run/dsv4-standin-faults.json"
EXIT_CONFIG = 78

# name -> field -> default; None means that the field may be left out and then does nothing.
FAULTS: dict[str, dict[str, Any]] = {
    "start_never": {},
    "start_s": {"seconds": 60.0},
    "crash_at_start": {"exit_code": 1, "after_s": 0.0},
    "listen": {"host": "127.0.0.1"},
    "child_env": {"set": {}},
    "no_passport": {"process": "both"},
    "health_redirect": {"location": "/standin/page"},
    "health_503": {"seconds": 40.0},
    "health_silent": {},
    "health_early": {"generation_after_s": 60.0},
    "hung_engine": {"from_request": 1},
    "slow_generation": {"seconds": 60.0},
    "dies": {"after_s": None, "after_health": None, "exit_code": 1},
    "wrong_content": {"text": "lorem"},
    "stream_error": {"after_chunks": 3},
    "stream_no_done": {},
    "stream_no_choices": {},
    "ignore_sigterm": {},
    "orphan": {"escape_cgroup": True, "seconds": 600.0},
    "pd_broken": {},
    "models_500": {},
    "corrupt": {
        "rate": None,
        "min_running": 2,
        "from_request": 1,
        "min_tokens": 0,
        "kinds": None,
        "late": False,
        "sticky": False,
    },
    "soft_errors": {"rate": 0.015},
}


def fail(message: str) -> NoReturn:
    """Say what is wrong with a file of ours and end the process, whatever task notices it."""
    print(f"stand-in: {message}", file=sys.stderr, flush=True)
    os._exit(EXIT_CONFIG)


def _read(path: str) -> dict[str, Any]:
    """The JSON object in the file; an empty one where there is no file."""
    try:
        with open(path, encoding="utf-8") as stream:
            value = json.load(stream)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        fail(f"found {path} that is not JSON ({error}), expected an object, correct the file")
    if not isinstance(value, dict):
        fail(f"found {type(value).__name__} in {path}, expected an object, correct the file")
    return value


@dataclass(frozen=True)
class Settings:
    """Seconds unless the name says otherwise."""

    start_s: float = 1.0  # from launch to healthy
    listen_s: float | None = None  # from launch to an open port; half of start_s where null
    health_min_s: float = 1.0  # a health probe takes at least this long, as upstream's
    health_timeout_s: float = 20.0
    sigterm_poll_s: float = 5.0
    scheduler_exit_s: float = 15.0
    shutdown_ignored: bool = False  # as a PD scheduler up to 0.5.20: it runs into the kill
    exit_by_kill: bool = False  # end a graceful stop by SIGKILL to itself instead of exit code 0
    token_ms: float = 5.0
    prefill_ms: float = 20.0
    default_tokens: int = 64
    pd_timeout_s: float = 30.0
    corruption_rate: float = 0.165
    bf16_without_patch: bool = False
    seed: str = "dsv4"

    @classmethod
    def load(cls) -> Settings:
        """From $STANDIN_SETTINGS or /etc/dsv4-standin.json; all defaults where there is no file."""
        path = os.environ.get("STANDIN_SETTINGS", SETTINGS_FILE)
        values = _read(path)
        known = {item.name for item in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            fail(f"found settings {unknown} in {path}, expected only {sorted(known)}, correct the file")
        return cls(**values)


@dataclass
class Faults:
    """The faults in force, read again whenever the file changes."""

    path: str = field(default_factory=lambda: os.environ.get("STANDIN_FAULTS", FAULTS_FILE))
    _seen: tuple[int, int, int] | None = None
    _faults: dict[str, dict[str, Any]] = field(default_factory=dict)

    def get(self, name: str) -> dict[str, Any] | None:
        """The fields of a fault that is on for this process, else None."""
        self._refresh()
        fault = self._faults.get(name)
        if fault is None or not _matches(fault["when_env"]):
            return None
        return fault

    def _refresh(self) -> None:
        try:
            stat = os.stat(self.path)
        except FileNotFoundError:
            self._seen, self._faults = None, {}
            return
        seen = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
        if seen != self._seen:
            self._faults = _checked(self.path, _read(self.path))
            self._seen = seen
            print(f"stand-in: faults in force: {sorted(self._faults)}", file=sys.stderr, flush=True)


def _checked(path: str, raw: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each fault with all of its fields; `false` or null switches one off, `true` takes its defaults."""
    faults = {}
    for name, value in raw.items():
        if name not in FAULTS:
            fail(f"found fault {name!r} in {path}, expected one of {sorted(FAULTS)}, correct the file")
        if value is None or value is False:
            continue
        given = {} if value is True else value
        allowed = {**FAULTS[name], "when_env": {}}
        if not isinstance(given, dict) or set(given) - set(allowed):
            fail(
                f"found fault {name!r}: {value!r} in {path}, expected an object with fields of "
                f"{sorted(allowed)}, correct the file"
            )
        faults[name] = {**allowed, **given}
    return faults


def _matches(when: dict[str, str | None]) -> bool:
    """Whether this process's environment has each name with that value (null: is without it)."""
    return all(os.environ.get(name) == value for name, value in when.items())
