"""Programs are bounded, and their words are in the message."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.local.process import run
from tests.local.settings import ROOT, LocalError


def gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] == "Z"


def test_a_failure_says_status_and_words() -> None:
    with pytest.raises(LocalError, match=r"exit status 3 from `sh -c .*`, expected 0. It said:\nno such thing"):
        run(["sh", "-c", "echo no such thing >&2; exit 3"])
    assert run(["sh", "-c", "exit 3"], check=False).rc == 3


def test_a_missing_program_says_how_to_get_it() -> None:
    with pytest.raises(LocalError, match="found no program 'dsv4-nothing'"):
        run(["dsv4-nothing"])


def test_input_is_given_and_never_the_callers() -> None:
    assert run(["cat"], stdin=b"a").out == "a"
    assert run(["cat"]).out == ""


def test_a_program_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="still running"):
        run(["sh", "-c", f"sleep 300 & echo $! > {tmp_path}/pid; wait"], timeout=1)
    assert gone(int((tmp_path / "pid").read_text(encoding="utf-8")))


@pytest.mark.parametrize(("finish", "ended"), [(True, False), (False, True)])
def test_an_interruption_waits_for_what_must_finish(tmp_path: Path, finish: bool, ended: bool) -> None:
    program = f"touch {tmp_path}/begun; sleep 1; touch {tmp_path}/finished"
    code = f"from tests.local.process import run; run(['sh', '-c', {program!r}], finish={finish})"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) != 0
    assert (tmp_path / "finished").exists() != ended
