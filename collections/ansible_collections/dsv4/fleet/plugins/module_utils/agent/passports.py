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


def _read(directory: str, name: str) -> dict[str, Any] | None:
    try:
        with open(os.path.join(directory, name), "rb") as file:
            passport = json.loads(file.read(_MAX_BYTES))
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(passport, dict) or passport.get("format") != 1:
        return None
    pid, start_time = passport.get("pid"), passport.get("start_time")
    if not isinstance(pid, int) or name != f"{pid}.json" or proc.start_time(pid) != start_time or start_time is None:
        return None
    return passport


def _inside(path: str, directory: str) -> bool:
    """Both as given and with links followed: a link out of the release is not inside it."""
    real = os.path.join(os.path.realpath(directory), "")
    return path.startswith(directory) and os.path.realpath(path).startswith(real)
