"""The passport: what this process really imported and how it parsed each flag.

`sglang/srt/environ.py` calls `write` in every process of a server. Standard library only. A server
must never suffer from it: whatever goes wrong ends in one line on standard error, and the missing
passport is what the gate then sees.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from typing import Any

from . import INSTRUMENTS


def write(environ: Mapping[str, Any]) -> None:
    """Write `$DSV4_FLEET_PASSPORTS/<pid>.json`; `environ` is the namespace of the tree's environ.py."""
    directory = os.environ.get("DSV4_FLEET_PASSPORTS")
    if not directory:
        return
    try:
        _replace(directory, f"{os.getpid()}.json", passport(environ))
    except Exception as error:  # whatever it is, the server goes on: see above
        reason = f"{type(error).__name__}: {error}".replace("\n", " ")
        print(f"dsv4_probe: no passport in {directory}: {reason}", file=sys.stderr, flush=True)


def passport(environ: Mapping[str, Any]) -> dict[str, Any]:
    """This process's passport, format 1."""
    flags = {name: parsed(environ, name) for name in os.environ.get("DSV4_FLEET_FLAGS", "").split()}
    return {
        "format": 1,
        "pid": os.getpid(),
        "start_time": _start_time(),
        "state": os.environ.get("DSV4_FLEET_STATE"),
        "release": release(),
        "sglang": _sglang(),
        "environ": os.path.abspath(str(environ["__file__"])),
        "flags": flags,
        "armed": sorted(name for name in INSTRUMENTS if flags.get(name) is True),
        "python": ".".join(map(str, sys.version_info[:3])),
    }


def parsed(environ: Mapping[str, Any], name: str) -> Any:
    """The flag as this tree parses it: its declared field, else the tree's own EnvBool."""
    field = getattr(environ["envs"], name, None)
    if field is None:
        field = environ["EnvBool"](False)
        field.name = name
    return field.get()


def _start_time() -> int:
    """Field 22 of /proc/self/stat, in clock ticks; the name in field 2 may hold blanks and brackets."""
    with open("/proc/self/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


def release() -> str | None:
    """The directory of the release that this very file lies in: `<digest>/python/dsv4_probe/passport.py`."""
    python = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    return os.path.basename(os.path.dirname(python)) if os.path.basename(python) == "python" else None


def _sglang() -> str | None:
    """Where `sglang` was imported from, or would be."""
    module = sys.modules.get("sglang")
    if module is not None:
        if getattr(module, "__file__", None):
            return os.path.abspath(module.__file__ or "")
        for directory in getattr(module, "__path__", ()):
            return os.path.join(os.path.abspath(directory), "__init__.py")
    spec = PathFinder.find_spec("sglang")
    return os.path.abspath(spec.origin) if spec is not None and spec.origin else None


def _replace(directory: str, name: str, content: dict[str, Any]) -> None:
    """Write a file so that a reader sees all of it or none."""
    temporary = os.path.join(directory, f".{name}.new")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(content, file, sort_keys=True)
        file.write("\n")
    os.replace(temporary, os.path.join(directory, name))
