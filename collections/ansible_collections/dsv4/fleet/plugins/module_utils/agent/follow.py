"""Following a transaction. Imports little: it is asked every few seconds."""

from __future__ import annotations

import time
from typing import Any

from . import journal, paths, systemd
from .errors import AgentError

POLL_S = 0.1


def follow(identity: str, line: int, seconds: float, manager: systemd.Systemd | None = None) -> dict[str, Any]:
    """Journal lines from `line` on, as soon as there are any and at most `seconds` later; and the result."""
    manager = manager or systemd.Systemd()
    one = journal.Transaction(identity)
    one.request()
    deadline = time.monotonic() + seconds
    size = -1
    while one.result() is None and time.monotonic() < deadline:
        if one.size() != size:
            size = one.size()
            if one.lines()[line:]:
                break
        time.sleep(POLL_S)
    running = one.result() is None and running_transaction(manager) == one.id
    result = one.result()  # before the lines: with a result, they are complete
    lines = one.lines()[line:]
    return {"lines": lines, "next": line + len(lines), "running": running and result is None, "result": result}


def running_transaction(manager: systemd.Systemd) -> str | None:
    """The id of the transaction whose agent runs, or recovers, now."""
    shown = manager.show(paths.AGENT_UNIT)
    if shown.active not in ("active", "activating", "deactivating", "reloading"):
        return None
    identity = shown.description.rpartition(" ")[2]
    if not shown.description.startswith("dsv4-fleet transaction "):
        raise AgentError(
            f"{paths.AGENT_UNIT}: found a unit described {shown.description!r}, expected ours. Something "
            "else uses that name: stop it."
        )
    return identity
