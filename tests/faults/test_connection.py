"""A broken connection or a killed controller changes nothing of a transaction: it ends by itself, and the next run
attaches to it or finds it done. Shown at every step of the life cycle."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import operate
from tests.faults.conftest import FaultFleet
from tests.local.playbook import environment
from tests.local.settings import ROOT

UNIT = "sglang-dsv4-decode.service"
STEPS = ("stage", "drain", "switch", "stop", "start", "gate", "admit")


class Controller:
    """One ansible-playbook with its own process group, read line by line."""

    def __init__(self, fleet: FaultFleet, playbook: str) -> None:
        argv = ["ansible-playbook", f"playbooks/{playbook}.yml", "--limit", "decode1"]
        self._process = subprocess.Popen(
            argv, cwd=ROOT, env={**os.environ, **environment(fleet.settings), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self.lines: list[str] = []

    def until(self, text: str) -> None:
        """Read on until a line holds *text*; an error with the output where none does."""
        assert self._process.stdout
        for line in self._process.stdout:
            self.lines.append(line)
            if text in line:
                return
        raise AssertionError(f"found no line with {text!r} in:\n{''.join(self.lines)}")

    def kill(self) -> None:
        """SIGKILL the controller and all its forks: they can do nothing about it."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)

    def end(self) -> int:
        """Read to the end; the exit code."""
        assert self._process.stdout
        self.lines += list(self._process.stdout)
        return self._process.wait(60)

    @property
    def output(self) -> str:
        return "".join(self.lines)


def ssh_processes(fleet: FaultFleet) -> list[int]:
    """Our ssh processes to decode1 of this fleet: masters and clients, by the fleet's own control directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):
            continue
        mine = f"{fleet.settings.control_directory}/" in words
        # A client names the host; a master names only its socket.
        if mine and (words.startswith("ssh:") or (words.startswith("ssh ") and "decode1" in words)):
            found.append(int(entry.name))
    return found


def kill(pids: list[int]) -> None:
    """SIGKILL each; a client ends by itself when its master is gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def transactions(fleet: FaultFleet) -> set[str]:
    """The directories of all transactions that decode1 knows."""
    script = 'for tx in /var/lib/dsv4/tx/*/; do [ ! -d "$tx" ] || echo "$tx"; done'
    return set(fleet.run("decode1", ["sh", "-c", script]).out.split())


@pytest.fixture(scope="module")
def playbooks() -> Iterator[str]:
    """Two plays that undo each other, in turn, so that each run has something to change."""

    def turn() -> Iterator[str]:
        while True:
            yield "enable-gediff"
            yield "disable-diagnostics"

    return turn()


@pytest.mark.parametrize("step", STEPS)
def test_a_transaction_outlives_its_controller_and_its_connection(fleet: FaultFleet, playbooks: Iterator[str], step: str) -> None:
    """The controller is killed at the step; the next one attaches, loses its ssh at once, and still sees the end.

    The gate stays shut until then; admit may be over before the next run comes.
    """
    playbook = next(playbooks)
    pid, known = fleet.main_pid("decode1", UNIT), transactions(fleet)
    if step == "gate":
        shut = {operate.GE_DIFF: "1" if playbook == "enable-gediff" else "0"}
        fleet.fault("decode1", {"health_503": {"seconds": 600, "when_env": shut}})
    first = Controller(fleet, playbook)
    first.until(f"decode1 | {step}: ")
    first.kill()
    second = Controller(fleet, playbook)
    second.until("plan | decode1: ")
    if step != "admit":
        second.until("decode1 | attached to the running transaction")
        kill(ssh_processes(fleet))
    fleet.fault("decode1", {})
    assert second.end() == 0, second.output
    assert fleet.main_pid("decode1", UNIT) not in (0, pid)
    assert "decode1: applied" in second.output or (step == "admit" and "decode1: unchanged" in second.output), second.output
    # There was one restart: what was followed is the first run's transaction.
    begun = [fleet.read("decode1", f"{tx}journal.jsonl") for tx in sorted(transactions(fleet) - known)]
    assert len(begun) == 1 or step == "admit"
    assert f'"step": "{step}"' in begun[0]
    assert sum(text.count('"step": "start", "event": "begin"') for text in begun) == 1


def test_a_broken_connection_is_made_anew_and_the_same_run_ends_well(fleet: FaultFleet, playbooks: Iterator[str]) -> None:
    run = Controller(fleet, next(playbooks))
    run.until("decode1 | stop: ")
    killed = ssh_processes(fleet)
    assert killed, run.output
    kill(killed)
    assert run.end() == 0, run.output
    assert "decode1: applied" in run.output
