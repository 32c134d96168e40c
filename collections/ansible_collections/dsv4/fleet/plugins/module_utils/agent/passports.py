"""Passports: what each process of a server says it imported and how it parsed its flags."""

from __future__ import annotations

import json
import os
from typing import Any

from . import paths, proc

_MAX_BYTES = 1 << 20


def read(directory: str) -> list[dict[str, Any]]:
    """The passports of processes that are alive now, by PID.

    A passport counts only if /proc knows that PID with that start time. One that is cut, of another
    format or of a dead process is none: the process behind it then counts as having no passport.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    passports = (_read(directory, name) for name in names if name.endswith(".json"))
    return sorted((one for one in passports if one is not None), key=lambda one: one["pid"])


def mismatches(passport: dict[str, Any], expect: dict[str, Any]) -> list[str]:
    """How a passport disagrees with what is wanted, a sentence each; [] when it agrees."""
    wrong: list[str] = []
    state, release = expect["state"], expect["release"]
    who = f"process {passport['pid']}"
    if passport.get("state") != state:
        wrong.append(
            f"{who} runs state {passport.get('state')}, expected {state}: it was not started from the wanted script"
        )
    inside = os.path.join(paths.release(str(release)), "python", "sglang", "")
    imported = passport.get("sglang")
    if not isinstance(imported, str) or not _inside(imported, inside):
        wrong.append(
            f"wrong tree: {who} imported sglang from {imported}, expected it from {inside}; look for a directory "
            "sglang in the unit's working directory or an editable install"
        )
    environ = passport.get("environ")
    if not isinstance(environ, str) or not _inside(environ, inside):
        wrong.append(f"wrong tree: {who} runs {environ}, expected environ.py inside {inside}")
    if passport.get("release") != release:
        wrong.append(
            f"wrong tree: {who} has dsv4_probe of release {passport.get('release')}, expected release {release}; look "
            "for another dsv4_probe on its import path"
        )
    parsed = passport.get("flags")
    parsed = parsed if isinstance(parsed, dict) else {}
    for name, wanted in sorted(expect.get("flags", {}).items()):
        if name not in parsed:
            wrong.append(f"{who} did not report flag {name}, expected {wanted}: it is not in DSV4_FLEET_FLAGS")
        elif parsed[name] is not wanted and (type(parsed[name]) is not type(wanted) or parsed[name] != wanted):
            wrong.append(
                f"flag parsed differently: {who} parsed {name} as {parsed[name]!r}, expected {wanted!r}; look at how "
                "that tree's environ.py declares it and for a stray SGL_ name"
            )
    return wrong


def armed(passports: list[dict[str, Any]], flags: dict[str, Any]) -> dict[str, list[str]]:
    """Per flag that is on: its instruments that run in some process; [] is a live flag without instrument."""
    names = {str(name) for passport in passports for name in passport.get("armed") or ()}
    return {
        flag: sorted(name for name in names if name == flag or name.startswith(flag + ":"))
        for flag, value in sorted(flags.items())
        if value is True
    }


def at_work(directory: str, passports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the instruments of the processes with these passports say of themselves, by PID (docs/instruments.md).

    A file counts only beside its process's passport, and if both are of one release. `live`: flags whose
    instrument is armed. `buckets`: how many graphs were captured with its hooks.
    """
    told = []
    for passport in passports:
        status = _json(os.path.join(directory, "instruments"), f"{passport['pid']}.json")
        if status is None or (status.get("pid"), status.get("release")) != (passport["pid"], passport.get("release")):
            continue
        told.append(
            {
                "pid": passport["pid"],
                "rank": _field(status, "rank", 0),
                "live": _field(status, "live", []),
                "disarmed": _field(status, "disarmed", {}),
                "buckets": len(_field(status, "hooks_captured", {})),
                "replays": _field(status, "replays", 0),
                "events": {name: n for name, n in _field(status, "events", {}).items() if isinstance(n, dict)},
            }
        )
    return told


def asleep(armed: dict[str, list[str]], told: list[dict[str, Any]]) -> list[str]:
    """Instruments that are on and of which it is not shown that they see anything, a sentence each."""
    seen = {flag for one in told if one["buckets"] for flag in one["live"]}
    return [
        f"instrument disarmed: {name} of process {one['pid']} (rank {one['rank']}) went off by itself: {reason}"
        for one in told
        for name, reason in sorted(one["disarmed"].items())
    ] + [
        f"live flag, not seen at work: the instrument of {flag} is in the release, and no process says yet that it "
        "captured a graph with it"
        for flag, what in armed.items()
        if what and flag not in seen
    ]


def _field(status: dict[str, Any], name: str, empty: Any) -> Any:
    """A field of the type of `empty`; `empty` where it is missing or of another."""
    value = status.get(name)
    return value if isinstance(value, type(empty)) else empty


def _json(directory: str, name: str) -> dict[str, Any] | None:
    """An object of format 1 in a file; None for anything else."""
    try:
        with open(os.path.join(directory, name), "rb") as file:
            content = json.loads(file.read(_MAX_BYTES))
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) and content.get("format") == 1 else None


def _read(directory: str, name: str) -> dict[str, Any] | None:
    passport = _json(directory, name)
    if passport is None:
        return None
    pid, start_time = passport.get("pid"), passport.get("start_time")
    if not isinstance(pid, int) or name != f"{pid}.json" or proc.start_time(pid) != start_time or start_time is None:
        return None
    return passport


def _inside(path: str, directory: str) -> bool:
    """Both as given and with links followed: a link out of the release is not inside it."""
    real = os.path.join(os.path.realpath(directory), "")
    return path.startswith(directory) and os.path.realpath(path).startswith(real)
