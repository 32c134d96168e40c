"""The unit that repairs an interrupted change at boot, before any worker starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from . import files, paths
from .journal import Transaction
from .systemd import Systemd


def install(transaction: Transaction, unit: str, manager: Systemd, say: Callable[..., None]) -> None:
    """Have the boot unit there and enabled, ordered before every worker's unit; it runs a copy of this program."""
    program = files.read(transaction.program)
    if program is not None and program != files.read(paths.PROGRAM):
        files.replace(paths.PROGRAM, program, 0o600)
    units = sorted({unit, *os.listdir(paths.WORKERS)})
    text = unit_text(units).encode()
    path = paths.unit_file(paths.RECOVER_UNIT)
    if files.read(path) != text:
        files.replace(path, text, 0o644)
        manager.daemon_reload()
        say(f"{paths.RECOVER_UNIT} installed: it repairs an interrupted change before the worker starts at boot")
    if manager.show(paths.RECOVER_UNIT).file_state != "enabled":
        manager.enable(paths.RECOVER_UNIT)


def unit_text(units: list[str]) -> str:
    """The boot unit's file."""
    return (
        "# Managed by dsv4-fleet's agent: see docs/agent.md.\n"
        "[Unit]\n"
        "Description=Repair of an interrupted dsv4-fleet transaction\n"
        f"Before={' '.join(units)}\n"
        f"ConditionPathExists={paths.PROGRAM}\n"
        "\n"
        "[Service]\n"
        "Type=oneshot\n"
        "RemainAfterExit=yes\n"
        f"ExecStart={os.path.realpath(sys.executable)} -I {paths.PROGRAM} recover --boot\n"
        "\n"
        "[Install]\n"
        "WantedBy=multi-user.target\n"
    )
