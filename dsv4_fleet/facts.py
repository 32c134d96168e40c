"""What the hosts say of their workers: as the play writes it down, one file each, or gathered in one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def load(path: Path) -> dict[str, dict[str, Any]]:
    """By worker's name; ValueError where a file is not what is expected."""
    if not path.is_dir():
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict) or not isinstance(value.get("workers"), dict):
            raise ValueError(f"found no workers in {path}, expected an object with `workers`, or a folder")
        workers: dict[str, dict[str, Any]] = value["workers"]
        return workers
    files = sorted(path.glob("*.json"))
    if not files:
        raise ValueError(f"found no *.json in {path}, expected one for each worker")
    return {file.stem: _one(file) for file in files}


def _one(file: Path) -> dict[str, Any]:
    value = json.loads(file.read_text(encoding="utf-8"))
    try:
        return from_inspection(value["seen"], float(value["elapsed_s"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"found {file} without {error}, expected the answer of inspect and elapsed_s") from error


def from_inspection(seen: dict[str, Any], elapsed_s: float) -> dict[str, Any]:
    """From the agent's answer to `inspect`. The flags are those that its processes parsed, by their passports.

    A flag on which the passports disagree is left out, so that no plan's expectation is met by it.
    """
    process, passports = seen["process"] or {}, seen["passports"]
    parsed: dict[str, set[bool]] = {}
    for passport in passports:
        for name, value in passport["flags"].items():
            parsed.setdefault(name, set()).add(bool(value))
    releases = {passport["release"] for passport in passports}
    return {
        "state": process.get("state"),
        "release": releases.pop() if len(releases) == 1 else None,
        "flags": {name: values.pop() for name, values in sorted(parsed.items()) if len(values) == 1},
        "armed": sorted({item for passport in passports for item in passport["armed"]}),
        "boot_id": seen["host"]["boot_id"],
        "main_pid": process.get("pid"),
        "start_time": process.get("start_time"),
        "restarted_at": seen["host"]["now"] - elapsed_s,
    }
