"""Starting a transaction as a unit of its own."""

from __future__ import annotations

import os
import sys
from typing import Any

from . import check, files, inspect, journal, paths, recover, secrets, states, systemd, transaction
from .errors import AgentError
from .follow import running_transaction
from .ledger import Ledger


def start(request: dict[str, Any], program: bytes, manager: systemd.Systemd | None = None) -> dict[str, Any]:
    """Check the request, keep it and start it; or attach to the same change. Raises AgentError."""
    manager = manager or systemd.Systemd()
    check.request(request, ("id", "worker", "secrets", "seen", "target", "limits", "generation"))
    worker, known = check.worker(request["worker"]), check.secrets(request["secrets"])
    limits, target = check.limits(request["limits"]), check.target(request["target"])
    check.generation(request["generation"])
    mine = journal.Transaction(request["id"])
    with files.locked(paths.LOCK):
        running = running_transaction(manager)
        if running is not None:
            return _attach(running, worker, target)
        if mine.exists() and (mine.result() is not None or mine.lines()):
            return _answer(mine, attached=True)
        ledger = Ledger(worker["unit"])
        _may_start(request, worker, target, ledger)
        for old in journal.unfinished():
            if old.id == mine.id:
                continue
            if old.lines() and not request.get("acknowledge"):
                raise AgentError(
                    f"transaction {old.id} of {old.request()['worker']['unit']}: found it dead in step "
                    f"{old.step()} without a result, "
                    "expected an end. Look at the worker, then run again with acknowledge: its files are "
                    "put back first."
                )
            recover.settle(old, transaction.Tools(systemd=manager))
            ledger = Ledger(worker["unit"])
        if ledger.needs_person:
            ledger.acknowledge()
            ledger.save()
        kept = {name: value for name, value in request.items() if name not in ("secrets", "op")}
        try:
            mine.create({**kept, "worker": worker, "boot_id": inspect.boot_id()}, program)
            secrets.store(mine.id, known)
            _launch(mine, limits, manager)
        except AgentError:
            secrets.forget(mine.id)
            journal.remove(mine)
            raise
    return _answer(mine, attached=False)


def _answer(one: journal.Transaction, attached: bool) -> dict[str, Any]:
    return {"id": one.id, "attached": attached, "program": one.program}


def _attach(running: str, worker: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    one = journal.Transaction(running)
    request = one.request()
    if request["worker"]["unit"] == worker["unit"] and request["target"]["state"] == target["state"]:
        return _answer(one, attached=True)
    raise AgentError(
        f"transaction {running}: found it running on this host ({request['worker']['unit']} towards state "
        f"{request['target']['state'][:12]}, step {one.step()}), expected none or the same change. Wait "
        "for its end and run again."
    )


def _may_start(request: dict[str, Any], worker: dict[str, Any], target: dict[str, Any], ledger: Ledger) -> None:
    """Compare-and-set, refused states, ends that need a person."""
    data = files.read(worker["script"])
    found = None if data is None else files.sha256(data)
    if found != request["seen"].get("script"):
        raise AgentError(
            f"{worker['script']}: found sha256 {found}, expected {request['seen'].get('script')} as it was"
            " inspected. Somebody changed it meanwhile: run again."
        )
    refused = ledger.refused.get(target["state"])
    if refused is not None and not request.get("retry_refused"):
        raise AgentError(
            f"state {target['state']}: found that it failed its gate here ({refused['reason']}), expected "
            "another. Mend the cause, then ask for it by name."
        )
    if ledger.needs_person and ledger.last is not None and not request.get("acknowledge"):
        raise AgentError(
            f"transaction {ledger.last['id']}: found that it ended {ledger.last['end_state']} and nobody "
            "has looked since, expected a person's word. Look at the worker, then run again with "
            "acknowledge."
        )
    if target["state"] != states.BASELINE and "script" not in target and target["state"] not in states.Store(worker).names():
        raise AgentError(
            f"state {target['state']}: found no such state kept on this worker, expected one of those that inspect lists."
        )


def _launch(one: journal.Transaction, limits: dict[str, Any], manager: systemd.Systemd) -> None:
    """Run the kept program as a transient unit that no connection and no controller can take along."""
    python = os.path.realpath(sys.executable)
    both = transaction.forward_s(limits) + transaction.backward_s(limits)
    properties = [
        "Type=exec",
        "StandardInput=null",
        f"WorkingDirectory={paths.LIB}",
        f"RuntimeMaxSec={both + transaction.RUNTIME_MARGIN_S:.0f}",
        # ExecStopPost may have to restart and prove a server; systemd gives it this long.
        f"TimeoutStopSec={transaction.backward_s(limits) + transaction.RUNTIME_MARGIN_S:.0f}",
        f"ExecStopPost={python} -I {one.program} recover {one.id}",
        # When the agent dies, recovery must begin at once. With another KillMode systemd first waits for what the
        # agent had started, and on cgroup v1 it can miss that it went; `recover` ends what is left instead.
        "KillMode=process",
        # Out of memory is likelier here than anywhere: let it be the server, which is proved afterwards.
        "OOMScoreAdjust=-900",
    ]
    if paths.ROOT:
        properties.append(f"Environment=DSV4_ROOT={paths.ROOT}")
    manager.run(
        paths.AGENT_UNIT,
        f"dsv4-fleet transaction {one.id}",
        [python, "-I", one.program, "run", one.id],
        properties,
    )
