"""What the hosts say of their workers: as the play writes it down, one file each, or gathered in one file."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, Final

import fastjsonschema

#: The flags that switch an instrument on. It may hide the fault that the sessions look for.
INSTRUMENTS: Final = ("SGLANG_DSV4_IDXK_CANARY", "SGLANG_DSV4_GE_DIFF", "SGLANG_DSV4_ALIAS_AUDIT")


def load(path: Path) -> dict[str, dict[str, Any]]:
    """By worker's name; ValueError where a file is not what is expected."""
    if not path.is_dir():
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict) or not isinstance(value.get("workers"), dict):
            raise ValueError(f"found no workers in {path}, expected an object with `workers`, or a folder")
        workers: dict[str, dict[str, Any]] = value["workers"]
        for name, worker in workers.items():
            try:
                _check()(worker)
            except fastjsonschema.JsonSchemaException as error:
                raise ValueError(f"found {name} wrong in {path} ({error}), expected what docs/stress.md says") from error
        return workers
    files = sorted(path.glob("*.json"))
    if not files:
        raise ValueError(f"found no *.json in {path}, expected one for each worker")
    return {file.stem: _one(file) for file in files}


@functools.lru_cache(maxsize=1)
def _check() -> Callable[[Any], Any]:
    """Raises fastjsonschema.JsonSchemaException for what says nothing of a worker."""
    text = resources.files("dsv4_fleet.stress").joinpath("result.schema.json").read_text(encoding="utf-8")
    made: Callable[[Any], Any] = fastjsonschema.compile(json.loads(text)["definitions"]["declared"])
    return made


def _one(file: Path) -> dict[str, Any]:
    value = json.loads(file.read_text(encoding="utf-8"))
    try:
        return from_inspection(value["seen"], float(value["elapsed_s"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"found {file} without {error}, expected the answer of inspect and elapsed_s") from error


def from_inspection(seen: dict[str, Any], elapsed_s: float) -> dict[str, Any]:
    """From the agent's answer to `inspect`. The flags are those that its processes parsed, by their passports.

    A flag on which the passports disagree is None, so that no plan's expectation is met by it.
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
        "flags": {name: values.pop() if len(values) == 1 else None for name, values in sorted(parsed.items())},
        "armed": sorted({item for passport in passports for item in passport["armed"]}),
        "instruments": _instruments(process.get("environment") or {}, passports),
        "boot_id": seen["host"]["boot_id"],
        "main_pid": process.get("pid"),
        "start_time": process.get("start_time"),
        "restarted_at": seen["host"]["now"] - elapsed_s,
    }


def _instruments(environment: dict[str, str], passports: list[dict[str, Any]]) -> list[str]:
    """Those that are on in any process, by its passport, or that the environment may switch on where none says."""
    on = []
    for name in INSTRUMENTS:
        told = [bool(passport["flags"][name]) for passport in passports if name in passport["flags"]]
        value = environment.get(name, environment.get(name.replace("SGLANG_", "SGL_"), "0"))
        unsaid = not told and value.strip().lower() not in ("", "0", "false", "no", "n", "f", "off")
        if any(told) or unsaid or any(name in passport["armed"] for passport in passports):
            on.append(name)
    return on
