"""What a failed gate leaves for a person: journal, unit, processes, passports, script; bounded, no secret."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from . import passports, paths, proc, redaction

MAX_BYTES = 4 << 20  # of each file
_JOURNAL_LINES = 4000


def collect(worker: dict[str, Any], directory: str, since: float) -> list[str]:
    """Write what is known about the worker into `directory` (made, 0700); the names of the files written.

    `since` is a Unix time: the journal's beginning. A part that cannot be had is a file that says why,
    so that the rest is kept.
    """
    os.makedirs(directory, mode=0o700, exist_ok=True)
    unit = worker["unit"]
    shown = _run(["systemctl", "show", "--no-pager", unit])
    group = next((line.partition("=")[2] for line in shown.splitlines() if line.startswith("ControlGroup=")), "")
    log = ["journalctl", "--no-pager", "-o", "short-iso-precise", f"--since=@{since:.0f}"]
    parts = {
        "journal.txt": redaction.text(_run([*log, "-n", str(_JOURNAL_LINES), "-u", unit])),
        "unit.txt": redaction.text(shown),
        "status.txt": redaction.text(_run(["systemctl", "status", "--no-pager", "-l", "-n", "0", unit])),
        "processes.json": _json([_process(one) for one in proc.processes_of(group)]),
        "listeners.json": _json(
            [_process(one) for pid in proc.listener(int(worker["port"])) if (one := proc.process(pid))]
        ),
        "passports.json": _json(passports.read(paths.passports(unit))),
        "script.sh": redaction.text(_text(worker["script"])),
    }
    for name, text in parts.items():
        _write(os.path.join(directory, name), text)
    return sorted(parts)


def _process(process: proc.Process) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "ppid": process.ppid,
        "start_time": process.start_time,
        "state": process.state,
        "uid": process.uid,
        "exe": process.exe,
        "cmdline": redaction.arguments(process.cmdline),
        "cgroup": proc.cgroup(process.pid),
        "environ": redaction.environment(process.environ),
    }


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(command)}: {error}\n"
    return done.stdout + done.stderr


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        return f"{error}\n"


def _json(content: Any) -> str:
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def _write(path: str, text: str) -> None:
    """At most MAX_BYTES; of more, the end: that is where a log says why."""
    data = text.encode("utf-8", "replace")
    if len(data) > MAX_BYTES:
        data = b"(beginning left out)\n" + data[-MAX_BYTES:]
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(data)
