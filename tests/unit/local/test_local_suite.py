"""The count at the end: whatever is not a passed test is a failure."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.local import demo, setup, suite
from tests.local.load import Tally
from tests.local.playbook import Outcome
from tests.local.settings import ROOT, LocalError
from tests.local.suite import Count


def report(tmp_path: Path, tests: int, failures: int = 0, errors: int = 0, skipped: int = 0) -> Path:
    path = tmp_path / "report.xml"
    counts = f'tests="{tests}" failures="{failures}" errors="{errors}" skipped="{skipped}"'
    path.write_text(f"<testsuites><testsuite {counts}/></testsuites>", encoding="utf-8")
    return path


def test_errors_and_skipped_tests_are_failures(tmp_path: Path) -> None:
    assert suite.counted(report(tmp_path, 10, 1, 2, 3)) == Count(4, 6)


@pytest.fixture
def tests_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(suite, "REPORTS", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("def test_a(): pass\ndef test_b(): assert False\n", Count(1, 1)),
        ("", Count(0, 1)),  # pytest's exit status 5: no test
        ("import nothing_of_this_name\n", Count(0, 1)),  # it breaks off while collecting
        ("def test_a(): pass\ndef test_b():\n    import pytest\n    pytest.exit('enough', 3)\n", Count(0, 1)),  # broken off
        ("def test_a(): pass\n", Count(1, 0)),
    ],
)
def test_pytest_is_counted(tests_in: Path, text: str, count: Count) -> None:
    (tests_in / "test_it.py").write_text(text, encoding="utf-8")
    assert suite.pytest_step("it", str(tests_in), "-c", "/dev/null", "-p", "no:cacheprovider") == count


def test_without_torch_the_instruments_fail_and_say_why(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise LocalError("no torch to be had")

    monkeypatch.setattr(setup, "make_torch", refuse)
    assert suite.instruments() == Count(0, 1)
    assert "instruments: no torch to be had" in capfd.readouterr().out


def test_a_program_counts_by_its_exit_status(capfd: pytest.CaptureFixture[str]) -> None:
    assert suite.command("good", "true") + suite.command("bad", "false") == Count(1, 1)
    assert "bad: failed with status 1" in capfd.readouterr().out


def test_a_step_that_hangs_is_ended_with_its_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(suite, "STEP_S", 0.5)
    fifo = tmp_path / "pid"
    assert suite.run_step(["sh", "-c", f"sleep 300 & echo $! > {fifo}; wait"]) == 124
    state = Path(f"/proc/{fifo.read_text(encoding='utf-8').strip()}/stat")
    assert not state.exists() or state.read_text(encoding="utf-8").split()[2] == "Z"


def test_what_is_interrupted_in_a_test_is_interrupted_though_the_suite_runs_in_the_background() -> None:
    part = "lambda: suite.command('it', 'sh', '-c', 'kill -INT $$')"
    code = f"from tests.local import suite; suite.PARTS = {{'lint': {part}}}; suite.main([])"
    ignored = ["sh", "-c", 'trap \'\' INT; exec "$0" "$@"', sys.executable, "-c", code]
    done = subprocess.run(ignored, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "it: failed with status -2" in done.stdout


@pytest.mark.parametrize(
    ("counts", "last", "rc"),
    [
        ([Count(3, 0), Count(2, 0)], "5 passed, 0 failed", 0),
        ([Count(3, 0), Count(2, 1)], "5 passed, 1 failed", 1),
        ([Count(0, 0), Count(0, 0)], "0 passed, 0 failed", 1),
    ],
)
def test_the_last_line_is_the_whole_count(
    counts: list[Count], last: str, rc: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite, "PARTS", {"lint": lambda: counts[0], "unit": lambda: counts[1]})
    assert suite.main([]) == rc
    assert capfd.readouterr().out.splitlines()[-1] == last


@pytest.mark.parametrize(
    ("said", "rc", "count"),
    [
        ("x\n4 passed, 0 failed\n", 0, Count(4, 0)),
        ("x\n4 passed, 2 failed\n", 1, Count(4, 2)),
        ("4 passed, 0 failed\nKilled\n", 137, Count(0, 1)),
        ("4 passed, 0 failed\n", 1, Count(4, 1)),
        ("", 0, Count(0, 1)),
    ],
)
def test_a_part_beside_counts_by_its_last_line_and_status(
    said: str, rc: int, count: Count, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setattr(suite, "REPORTS", tmp_path)
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\nprintf '{said}'\nexit {rc}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert suite.Beside("faults").count() == count


RESULT = {
    "end_state": "applied",
    "changed": ["script"],
    "timeline": [{"step": "drain", "seconds": 1.0}],
    "healthy_after_s": 2.0,
}


def outcome(rc: int = 0, **ends: str) -> Outcome:
    events = [
        {
            "event": "runner_on_ok",
            "event_data": {
                "host": host,
                "task_action": "dsv4.fleet.change",
                "res": {"dsv4": {**RESULT, "end_state": end}},
            },
        }
        for host, end in ends.items()
    ]
    return Outcome(rc, "", {"ok": {host: 1 for host in ends}}, "", events)


GOOD = {"decode1": demo.WANTED, "decode2": demo.WANTED}


def test_the_demo_passes_only_when_all_went_well() -> None:
    hosts = ["decode1", "decode2"]
    assert demo.judge(outcome(decode1="applied", decode2="applied"), Tally(served=5), hosts, GOOD) == []
    bad = {
        "status 2": (outcome(2, decode1="applied", decode2="applied"), Tally(served=5), GOOD),
        "decode2 ended as rolled_back": (outcome(decode1="applied", decode2="rolled_back"), Tally(served=5), GOOD),
        "decode2 ended as not changed": (outcome(decode1="applied"), Tally(served=5), GOOD),
        "no request was served": (outcome(decode1="applied", decode2="applied"), Tally(), GOOD),
        "lost": (outcome(decode1="applied", decode2="applied"), Tally(served=5, lost=Counter({"HTTP 503": 1})), GOOD),
        "decode1 runs with {}": (
            outcome(decode1="applied", decode2="applied"), Tally(served=5), {**GOOD, "decode1": {}},
        ),
    }  # fmt: skip
    for words, (run, tally, flags) in bad.items():
        problems = demo.judge(run, tally, hosts, flags)
        assert len(problems) == 1 and words in problems[0], (words, problems)


def test_a_worker_is_described_with_its_steps() -> None:
    text = demo.describe("decode1", {**RESULT, "error": "found 503", "failed_step": "gate", "notes": ["forced"]})
    assert text.splitlines() == [
        "decode1: applied; changed: script",
        "    drain 1.0 s",
        "    failed in gate: found 503",
        "    note: forced",
    ]
