"""The story on containers, through playbooks/stress.yml: the fault, the fix, and the fault hidden while GE_DIFF is on."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faults import operate
from tests.faults.conftest import FaultFleet
from tests.faults.operate import ALL_DECODES_AT_ONCE, GE_DIFF, OVERLAP, QUICK
from tests.local.playbook import Outcome
from tests.local.settings import BOOTSTRAP_PORT, ROOT, WORKER_PORTS

FAULT, FIX, HIDDEN = "decode1", "decode2", "decode3"
# The stand-in's sessions are independent by construction. It answers so quickly that few of 80 are at one step together.
PLAN = ["--icc", "0", "--at-worker", "10", "--expect", f"control:{OVERLAP}=1"]
TOKEN_MS = 3.0  # suspects are replayed alone, one after another


@dataclass(frozen=True)
class Judged:
    """One run of the play: its outcome, the folder that it left, the result of the sessions, and the verdict."""

    outcome: Outcome
    folder: Path
    result: dict[str, Any]
    verdict: dict[str, Any]

    def rate(self, worker: str) -> float:
        """Share of spoilt sessions: a value of another session's that carries no nonce looks like a soft error."""
        levels = [item["class"] for item in self.result["sessions"] if item["worker"] == worker]
        return (levels.count("hard") + levels.count("soft")) / len(levels)

    @property
    def codes(self) -> set[str]:
        return {reason["code"] for reason in self.verdict["reasons"]}


@pytest.fixture(scope="module")
def story(fleet: FaultFleet, tmp_path_factory: pytest.TempPathFactory) -> FaultFleet:
    """Three decode workers restarted together: one as it was found, one with the fix, one with GE_DIFF on."""
    operate.hand_made(fleet)
    for host in operate.DECODES:
        fleet.write(host, "/etc/dsv4-standin.json", json.dumps({**operate.QUICK_STANDIN, "token_ms": TOKEN_MS}))
    flags = {FIX: {"dsv4_flag_multi_stream_overlap": False}, HIDDEN: {"dsv4_flag_ge_diff": True}}
    inventory = operate.inventory(tmp_path_factory.mktemp("story"), host_vars=flags)
    outcome = fleet.playbook("site", {**QUICK, **ALL_DECODES_AT_ONCE}, limit="decode", inventory=inventory)
    assert outcome.ok, outcome.stdout
    return fleet


Judge = Callable[..., Judged]


@pytest.fixture(scope="module")
def judge(story: FaultFleet, tmp_path_factory: pytest.TempPathFactory) -> Judge:
    """Runs the play on a treated worker, with the one that has the fault as control."""

    def one(treated: str, options: list[str], control: str = FAULT) -> Judged:
        folder = tmp_path_factory.mktemp("wave")
        values = {"dsv4_treated": treated, "dsv4_control": control, "fleet_stress_folder": str(folder),
                  "fleet_stress_plan_options": [*PLAN, *options]}  # fmt: skip
        outcome = story.playbook("stress", values)
        result, verdict = (json.loads((folder / name).read_text()) for name in ("result.json", "verdict.json"))
        return Judged(outcome, folder, result, verdict)

    return one


@pytest.fixture(scope="module")
def fixed(judge: Judge) -> Judged:
    return judge(FIX, ["--expect", f"treatment:{OVERLAP}=0"])


def test_the_fault_corrupts_fifteen_to_eighteen_percent_and_the_fix_none(fixed: Judged) -> None:
    assert 0.15 <= fixed.rate(FAULT) <= 0.18, fixed.outcome.stdout
    assert fixed.rate(FIX) == 0
    assert fixed.result["counts"]["failed"] == 0


def test_the_fix_passes_beside_a_control_that_shows_the_fault(fixed: Judged) -> None:
    assert fixed.outcome.ok, fixed.outcome.stdout
    assert (fixed.verdict["verdict"], fixed.verdict["reasons"]) == ("PASS", [])
    assert fixed.verdict["arms_differ"]
    assert (fixed.folder / "rates.png").read_bytes().startswith(b"\x89PNG")


def test_eighty_sessions_are_open_together_at_each_worker_on_a_fraction_of_a_core(fixed: Judged) -> None:
    for worker in (FAULT, FIX):
        seen = fixed.result["workers"][worker]
        assert seen["peak"]["client_sessions"] == seen["peak"]["client_requests"] == 80
        assert seen["peak"]["running"] >= 10
        assert seen["cache_flushed"]
        assert seen["declared"]["flags"][OVERLAP] is (worker == FAULT)
    assert fixed.result["client"]["processor_s"] < 0.8 * fixed.result["client"]["load_s"]


def command(*words: str) -> tuple[int, str]:
    """`bin/dsv4-fleet` as an operator runs it: exit code and what it prints."""
    done = subprocess.run([ROOT / "bin" / "dsv4-fleet", *words], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def test_the_fault_fails_by_hand_before_all_sessions_have_run(
    story: FaultFleet, fixed: Judged, tmp_path: Path
) -> None:
    plan, output, report = (str(tmp_path / name) for name in ("plan.json", "result.json", "verdict.json"))
    code, text = command("judge", "--make-plan", plan, *PLAN)
    assert (code, "can earn a PASS" in text) == (0, True), text
    before, after = str(fixed.folder / "before"), str(fixed.folder / "after")
    hosts = (story.address(name) for name in ("prefill1", "prefill2"))
    prefills = [f"--prefill=http://{host}:{WORKER_PORTS['prefill']},{BOOTSTRAP_PORT}" for host in hosts]
    where = f"--worker={FAULT}={fixed.result['workers'][FAULT]['url']}"
    code, text = command("stress", "--plan", plan, "--facts", before, "--output", output, where, *prefills)
    assert code == 0, text
    assert "stopped early: a FAIL by the plan" in text
    assert 0 < len(json.loads(Path(output).read_text())["sessions"]) < 321
    code, text = command("judge", "--plan", plan, "--result", output, "--after", after, "--report", report)
    assert (code, text.splitlines()[-1]) == (1, "verdict: FAIL"), text
    assert "corrupted: found evidence of" in text


def test_the_fault_hides_while_ge_diff_is_on_and_the_judge_says_so(judge: Judge) -> None:
    judged = judge(HIDDEN, ["--sessions", "100", "--stratum", "15"], control="")
    assert judged.rate(HIDDEN) == 0
    assert judged.result["workers"][HIDDEN]["declared"]["flags"][OVERLAP] is True
    assert judged.verdict["verdict"] == "INCONCLUSIVE", judged.outcome.stdout
    assert "diagnostics" in judged.codes
    assert any(f"{GE_DIFF} on at {HIDDEN}" in reason["text"] for reason in judged.verdict["reasons"])
    assert not judged.outcome.ok


def test_what_would_skip_the_verdict_is_refused(story: FaultFleet, tmp_path: Path) -> None:
    limited = story.playbook("stress", {"fleet_stress_folder": str(tmp_path)}, limit=FIX)
    assert not limited.ok
    assert "expected none; name workers with" in limited.stdout
    (tmp_path / "result.json").write_text("{}")
    again = story.playbook("stress", {"dsv4_treated": FIX, "fleet_stress_folder": str(tmp_path)})
    assert not again.ok
    assert "workers are measured once under one plan" in again.stdout


def test_check_mode_runs_no_session_and_gives_no_verdict(story: FaultFleet, tmp_path: Path) -> None:
    folder = tmp_path / "wave"
    outcome = story.playbook("stress", {"dsv4_treated": FIX, "fleet_stress_folder": str(folder)}, check=True)
    assert outcome.ok, outcome.stdout
    assert not folder.exists()
    assert not outcome.results("ansible.builtin.assert", "localhost")  # no verdict, least of all a PASS
