"""A transaction whose agent died: repaired at once by ExecStopPost, else at boot before the worker starts."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

from . import journal, paths, proc, secrets
from .journal import Journal, Transaction
from .ledger import Ledger
from .transaction import Change, Tools


def after_stop(identity: str, tools: Tools | None = None) -> dict[str, Any] | None:
    """ExecStopPost: repair this transaction if it has no result. None: there was nothing to do."""
    one = Transaction(identity)
    tools = tools or Tools()
    end_left_over()
    if one.result() is not None:
        secrets.forget(identity)
        return None
    if _decided(one):
        return None
    change = Change(one, secrets.load(identity), tools)
    if tools.systemd.stopping():
        # The host goes down: nothing can be started now, and no result given, so that the boot unit has its say.
        change.restore_only()
        return None
    return change.recover()


def end_left_over() -> None:
    """End what a dead agent had started and left in our unit: it must not go on beside the recovery."""
    own = proc.cgroup(os.getpid())
    if os.path.basename(own) != paths.AGENT_UNIT:
        return
    for one in proc.processes_of(own):
        if one.pid != os.getpid() and proc.start_time(one.pid) == one.start_time:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)


def at_boot(tools: Tools | None = None) -> list[dict[str, Any]]:
    """Before any worker starts: put back the files of every transaction without a result."""
    tools = tools or Tools()
    if tools.systemd.show(paths.AGENT_UNIT).active in ("active", "activating", "deactivating"):
        return []  # not at boot, but by hand: what runs now repairs itself
    return [result for one in journal.unfinished() if (result := settle(one, tools)) is not None]


def settle(one: Transaction, tools: Tools | None = None) -> dict[str, Any] | None:
    """Give a dead transaction its end by putting files back, without starting anything."""
    if _decided(one):
        return one.result()
    if not one.lines():
        # It was kept and never began: nothing of it is anywhere.
        result = never_began(one)
        one.decide(result)
        one.give()
        secrets.forget(one.id)
        return result
    return Change(one, secrets.load(one.id), tools).restore_files()


def _decided(one: Transaction) -> bool:
    """Whether the transaction had reached its end and died before it could say so; then it says so now."""
    pending = one.pending()
    last = Ledger(one.request()["worker"]["unit"]).last
    if pending is None or last is None or last["id"] != one.id:
        return False
    Journal(one, []).write("info", "the agent died between its decision and its answer; this is the decision")
    one.give()
    secrets.forget(one.id)
    return True


def never_began(one: Transaction) -> dict[str, Any]:
    wanted = one.request()["target"]["state"]
    return {
        "format": 1, "id": one.id, "end_state": "unchanged", "failed": True,
        "error": "the transaction was kept, but never began; expected systemd to start it. Run again.",
        "failed_step": None, "state": {"before": None, "wanted": wanted, "now": None}, "changed": [], "timeline": [],
        "healthy_after_s": None, "gate": None, "notes": [], "evidence": None,
    }  # fmt: skip
