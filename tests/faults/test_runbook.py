"""Every command of docs/runbook.md is run, section by section, on a fleet in the state that the section speaks of."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.faults import operate
from tests.faults.conftest import FaultFleet
from tests.local.playbook import environment
from tests.local.settings import ROOT

#: A server that answers /health and generates nothing, when GE_DIFF is on; and one that never does.
HANGS_WITH_GE_DIFF = {"hung_engine": {"when_env": {"SGLANG_DSV4_GE_DIFF": "1"}}}
HANGS = {"hung_engine": True}
QUICK = {"sglang_worker_gate_timeout_s": 15, "sglang_worker_probe_timeout_s": 3}


@dataclass(frozen=True)
class Block:
    """One fenced block: its section, whether it is run on a worker, and its command."""

    section: str
    on_worker: bool
    command: str


def blocks() -> list[Block]:
    """The runbook's blocks, in order."""
    found, section = [], ""
    text = (ROOT / "docs/runbook.md").read_text()
    for match in re.finditer(r"^## ([^\n]+)$|^```sh( on a worker)?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if match[1]:
            section = match[1]
        else:
            found.append(Block(section, bool(match[2]), match[3].strip()))
    return found


@pytest.fixture(scope="module")
def runbook(fleet: FaultFleet) -> Iterator[FaultFleet]:
    operate.hand_made(fleet)
    yield fleet
    fleet.fault("decode1", {})


def run(fleet: FaultFleet, section: str, env: dict[str, str] | None = None) -> list[tuple[int, str]]:
    """Run a section's blocks as an operator would; exit code and output of each."""
    ends = []
    for block in blocks():
        if block.section != section:
            continue
        if block.on_worker:
            done = fleet.run("decode1", ["sh", "-c", f"{block.command}; echo status $?"])
            ends.append((int(done.out.rsplit("status ", 1)[1]), done.out))
            continue
        result = subprocess.run(
            ["bash", "-euc", block.command], cwd=ROOT, env={**os.environ, **environment(fleet.settings), **(env or {})},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600,
        )  # fmt: skip
        ends.append((result.returncode, result.stdout))
    assert ends, f"found no block in the runbook's section {section!r}"
    return ends


def test_look_and_roll_out(runbook: FaultFleet) -> None:
    ((rc, said),) = run(runbook, "Look")
    assert rc == 3 and "5 workers, drift on 5" in said
    (foreseen, rolled, kept) = run(runbook, "Roll out")
    assert foreseen[0] == 0 and "would change" in foreseen[1] and "+export SGLANG_OPT_USE_MULTI_STREAM_OVERLAP=0" in foreseen[1]
    assert rolled[0] == 0 and rolled[1].count(": applied, healthy") == 5, rolled[1]
    assert "dsv4_flag_multi_stream_overlap: false" in rolled[1]
    assert kept[0] == 0 and kept[1].count("override kept: multi_stream_overlap=0") == 5 and kept[1].count(": unchanged") == 5


def test_stop_shows_a_transaction_end_by_itself(runbook: FaultFleet) -> None:
    ((rc, said),) = run(runbook, "Stop")
    assert rc == 0 and "dsv4-agent" in said


def test_roll_back(runbook: FaultFleet) -> None:
    ((rc, said),) = run(runbook, "Roll back")
    assert rc == 0 and "decode1: applied" in said, said


def test_a_refused_gate(runbook: FaultFleet) -> None:
    runbook.fault("decode1", HANGS_WITH_GE_DIFF)
    refused = runbook.playbook("enable-gediff", limit="decode1", extra_vars=QUICK)
    assert refused.dsv4["decode1"]["end_state"] == "rolled_back", refused.stdout
    runbook.fault("decode1", {})
    state = refused.dsv4["decode1"]["state"]["wanted"][:12]
    again = runbook.playbook("enable-gediff", limit="decode1")
    assert not again.ok and f"sglang_worker_retry_state={state}" in again.stdout
    (evidence, retried) = run(runbook, "A refused gate", {"STATE": state})
    assert evidence[0] == 0 and "journal" in evidence[1]
    assert retried[0] == 0 and "decode1: applied" in retried[1], retried[1]


def test_a_drained_worker(runbook: FaultFleet) -> None:
    runbook.fault("decode1", HANGS)
    drained = runbook.playbook("enable-canary", limit="decode1", extra_vars=QUICK)
    assert drained.dsv4["decode1"]["end_state"] == "drained", drained.stdout
    runbook.fault("decode1", {})
    (looked, repaired) = run(runbook, "A drained worker")
    assert looked[0] == 3 and "disabled" in looked[1]  # systemctl's status of a unit that does not run
    assert repaired[0] == 0 and "decode1: applied" in repaired[1], repaired[1]


def test_a_lost_controller(runbook: FaultFleet) -> None:
    (status, recovered) = run(runbook, "A lost controller")
    assert status[0] == 0 and "5 workers, drift on 0" in status[1], status[1]
    assert recovered[0] == 0


def test_every_section_with_a_command_is_run_here() -> None:
    mine = {"Look", "Roll out", "Stop", "Roll back", "A refused gate", "A drained worker", "A lost controller"}
    assert {block.section for block in blocks()} == mine
