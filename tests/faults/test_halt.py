"""A roll-out stops at the first worker that is not as it should be, says so, and goes on from there when it is run again.

One story on all five workers, told in the order of its tests: a gate that fails, a worker that is lost, a controller that
is killed, a router that is lost. The rows X… are those of what ansible-core itself would have done.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.faults import operate
from tests.faults.conftest import FaultFleet
from tests.faults.operate import ALL_DECODES_AT_ONCE, CANARY, DECODES, OVERLAP, QUICK, WORKERS, Mark
from tests.local import handmade
from tests.local.playbook import CHANGE, Event, Outcome

FIX = "rollout-overlap-fix"
ROLLOUT: dict[str, object] = {
    **QUICK, "dsv4_waves": [1, 2, "100%"], "dsv4_at_once": 2, "sglang_worker_min_admitted": 0,
}  # fmt: skip
NEW = {"when_env": {OVERLAP: "0"}}
PREFILLS = ("prefill1", "prefill2")


@dataclass(frozen=True)
class Run:
    """One run of a roll-out, with what the workers were before and after."""

    outcome: Outcome
    before: dict[str, Mark]
    after: dict[str, Mark]

    @property
    def told(self) -> dict[str, str]:
        """The last lines, by worker."""
        return operate.last_lines(self.outcome.stdout)


def run(fleet: FaultFleet, extra_vars: dict[str, object], **more: Any) -> Run:
    """Run the roll-out."""
    before = operate.marks(fleet)
    return Run(fleet.playbook(FIX, extra_vars=extra_vars, **more), before, operate.marks(fleet))


@pytest.fixture(scope="module")
def story(fleet: FaultFleet) -> FaultFleet:
    """The hand-made fleet."""
    operate.hand_made(fleet)
    return fleet


# -- a gate that fails ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def failed(story: FaultFleet) -> Iterator[Run]:
    """decode1 alone; then decode2, whose engine hangs with the new flags, beside decode3; the prefills would be last."""
    story.fault("decode2", {"hung_engine": NEW})
    yield run(story, {**ROLLOUT, "sglang_worker_gate_timeout_s": 30})
    story.fault("decode2", {})


def test_x1_x9_x16_d6_one_failed_worker_of_a_wave_of_two_stops_every_later_wave(failed: Run) -> None:
    assert operate.waves(failed.outcome) == [["decode1"], ["decode2", "decode3"]]
    assert failed.outcome.rc != 0


def test_x9_a_rollback_that_succeeds_is_still_a_failure(story: FaultFleet, failed: Run) -> None:
    end = failed.outcome.dsv4["decode2"]
    assert (end["end_state"], end["failed"], end["failed_step"]) == ("rolled_back", True, "gate"), end
    assert end["state"]["now"] == "baseline"
    assert OVERLAP not in operate.live(story, "decode2")
    assert failed.outcome.stats["failures"] == {"decode2": 1}


def test_x10_healthy_peers_are_not_rolled_back(story: FaultFleet, failed: Run) -> None:
    for host in ("decode1", "decode3"):
        assert failed.outcome.dsv4[host]["end_state"] == "applied"
        assert operate.live(story, host)[OVERLAP] == "0"


def test_x12_no_peer_stays_drained(story: FaultFleet, failed: Run) -> None:
    assert operate.admitted(story) == set(WORKERS)


def test_d9_later_waves_see_no_write_and_no_restart(failed: Run) -> None:
    for host in PREFILLS:
        assert failed.after[host] == failed.before[host]
    assert failed.after["decode1"] != failed.before["decode1"]


def test_the_last_lines_say_worker_by_worker_what_it_is_and_what_to_do(failed: Run) -> None:
    told = failed.told
    assert list(told) == list(WORKERS)
    assert told["decode1"].startswith("applied") and told["decode3"].startswith("applied")
    assert told["decode2"].startswith("ROLLED_BACK: ") and told["decode2"].endswith(
        "; it serves its last proved state; read the evidence, mend the cause, then run again"
    )
    for host in PREFILLS:
        assert told[host] == "not touched: the run stopped before it; it is as it was"


def test_x18_a_failed_first_play_is_not_followed_by_the_second(story: FaultFleet, failed: Run) -> None:
    """The state that failed is refused: the checks are the first play, the change would be the second."""
    again = run(story, ROLLOUT)
    state = failed.outcome.dsv4["decode2"]["state"]["wanted"][:12]
    assert again.outcome.rc != 0 and operate.count(again.outcome, CHANGE) == 0
    assert f"ask for it by name: -e sglang_worker_retry_state={state}" in again.outcome.stdout
    assert again.after == again.before


# -- a worker that is lost in the middle, and one in the last wave --------------------------------------------------


@pytest.fixture(scope="module")
def lost_in_the_middle(story: FaultFleet, failed: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """decode1 is as wanted; decode2 is lost, and somebody writes into prefill1's script, which a change refuses.

    Both are in one wave, and fail in one task. prefill2 is the last wave; decode3 is left out knowingly.
    """
    story.fault("decode2", {})
    script = handmade.script_of("prefill1")
    text = story.read("prefill1", script)
    before = operate.marks(story)

    def lose() -> None:
        operate.cut(story, "decode2")
        story.write("prefill1", script, f"{text}# by hand\n", 0o755)

    moment = operate.Moment(tmp_path_factory.mktemp("middle"), lose)
    wanted = {**by_name(failed), "dsv4_partial": True}
    outcome = moment.playbook(story.playbook, FIX, extra_vars=wanted, limit="decode1:decode2:prefill")
    story.write("prefill1", script, text, 0o755)
    operate.mend(story, "decode2")
    yield Run(outcome, before, operate.marks(story))


def by_name(failed: Run) -> dict[str, object]:
    """The roll-out, with the state that failed asked for by its name."""
    return {**ROLLOUT, "sglang_worker_retry_state": failed.outcome.dsv4["decode2"]["state"]["wanted"][:12]}


def test_x3_x4_x5_x6_a_worker_lost_in_the_middle_stops_every_later_wave(lost_in_the_middle: Run) -> None:
    outcome = lost_in_the_middle.outcome
    assert operate.waves(outcome) == [["decode1"], ["decode2", "prefill1"]]
    assert outcome.rc != 0 and not outcome.stats["dark"]
    assert outcome.dsv4["decode2"]["end_state"] == "unreachable"
    assert lost_in_the_middle.after["prefill2"] == lost_in_the_middle.before["prefill2"]
    assert lost_in_the_middle.after["decode2"] == lost_in_the_middle.before["decode2"]
    told = lost_in_the_middle.told["decode2"]
    assert told.startswith("UNREACHABLE: ") and told.endswith("mend the connection, then run again")


def test_x7_one_lost_and_one_failed_in_the_same_task_stop_every_later_wave(lost_in_the_middle: Run) -> None:
    end = lost_in_the_middle.outcome.dsv4["prefill1"]
    if end["end_state"] == "not touched":  # it was not begun any more when decode2 failed
        assert end["error"] == "not touched: decode2 failed before it"
    else:
        assert (end["end_state"], end["failed"]) == ("unchanged", True)
        assert "Somebody changed it meanwhile: run again" in end["error"]
    assert lost_in_the_middle.told["prefill2"].startswith("not touched: ")
    assert lost_in_the_middle.after["prefill1"].main_pid == lost_in_the_middle.before["prefill1"].main_pid


def test_x17_a_worker_with_nothing_to_do_does_not_end_the_run(lost_in_the_middle: Run) -> None:
    assert lost_in_the_middle.outcome.dsv4["decode1"]["end_state"] == "unchanged"
    assert lost_in_the_middle.told["decode1"] == "unchanged"
    assert operate.waves(lost_in_the_middle.outcome)[1:], "found no wave after decode1's"


def test_limit_left_a_worker_out_knowingly(lost_in_the_middle: Run) -> None:
    assert "decode3" not in lost_in_the_middle.told
    assert lost_in_the_middle.after["decode3"] == lost_in_the_middle.before["decode3"]


@pytest.fixture(scope="module")
def lost_at_the_end(
    story: FaultFleet, failed: Run, lost_in_the_middle: Run, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    """On from there: decode2, then prefill1; prefill2, last of the last wave, is lost meanwhile."""
    before = operate.marks(story)
    moment = operate.Moment(tmp_path_factory.mktemp("end"), lambda: operate.cut(story, "prefill2"), CHANGE, "decode2")
    outcome = moment.playbook(story.playbook, FIX, extra_vars={**by_name(failed), "dsv4_at_once": 1})
    operate.mend(story, "prefill2")
    yield Run(outcome, before, operate.marks(story))


def test_a_state_asked_for_by_name_is_tried_again_and_proved_workers_are_left_alone(lost_at_the_end: Run) -> None:
    ends = {host: end["end_state"] for host, end in lost_at_the_end.outcome.dsv4.items()}
    assert ends == {
        "decode1": "unchanged", "decode2": "applied", "decode3": "unchanged", "prefill1": "applied", "prefill2": "unreachable",
    }  # fmt: skip
    for host in ("decode1", "decode3", "prefill2"):
        assert lost_at_the_end.after[host] == lost_at_the_end.before[host]


def test_x21_a_worker_lost_in_the_last_wave_is_not_forgotten(lost_at_the_end: Run) -> None:
    assert lost_at_the_end.outcome.rc != 0
    assert list(lost_at_the_end.told) == list(WORKERS)
    assert lost_at_the_end.told["prefill2"].startswith("UNREACHABLE: ")


def test_a_worker_lost_before_the_run_means_that_nothing_is_touched(story: FaultFleet, lost_at_the_end: Run) -> None:
    operate.cut(story, "prefill1")
    try:
        outcome = story.playbook("enable-canary", extra_vars=QUICK)
    finally:
        operate.mend(story, "prefill1")
    assert outcome.rc != 0 and operate.count(outcome, CHANGE) == 0
    told = operate.last_lines(outcome.stdout)
    assert told["prefill1"].startswith("UNREACHABLE: ")
    assert operate.marks(story) == lost_at_the_end.after


# -- a controller that is killed, and two at once ---------------------------------------------------------------------


@dataclass(frozen=True)
class Killed:
    """Three runs on one decode worker each: two killed, and one that saw another run come."""

    codes: dict[str, int]
    again: Outcome
    rival: Outcome
    pids: dict[str, int]


@pytest.fixture(scope="module")
def killed(story: FaultFleet, lost_at_the_end: Run) -> Iterator[Killed]:
    """SIGINT, SIGTERM and SIGKILL at the gate, which stays shut; a rival with another wish; then the same run again.

    The gate opens once the run has attached to all three.
    """
    wanted = {**QUICK, **ALL_DECODES_AT_ONCE, "sglang_worker_gate_timeout_s": 240}
    signals = {"decode1": signal.SIGINT, "decode2": signal.SIGTERM, "decode3": signal.SIGKILL}
    attached: list[str] = []

    def open_gates(event: Event) -> None:
        if "attached to the running transaction" in event.get("stdout", ""):
            attached.append(event["stdout"])
            if len(attached) == len(DECODES):
                for host in DECODES:
                    story.fault(host, {})

    for host in DECODES:
        story.fault(host, {"health_503": {"seconds": 600, "when_env": {CANARY: "1"}}})
    with contextlib.ExitStack() as stack:
        runs = {host: stack.enter_context(operate.controller(story, "enable-canary", wanted, host)) for host in DECODES}
        for one in runs.values():
            one.wait_for("answers 503")
        codes = {host: runs[host].end(sign) for host, sign in signals.items()}
    rival = story.playbook("enable-gediff", extra_vars=wanted, limit="decode1")
    again = story.playbook("enable-canary", extra_vars=wanted, on_event=open_gates)
    yield Killed(codes, again, rival, {host: story.main_pid(host, operate.unit_of(host)) for host in DECODES})


def test_x13_x14_a_killed_run_leaves_its_transactions_going_and_the_next_run_attaches(story: FaultFleet, killed: Killed) -> None:
    assert all(code != 0 for code in killed.codes.values()), killed.codes
    assert killed.again.ok, killed.again.stdout
    for host in DECODES:
        assert f"{host} | attached to the running transaction " in killed.again.stdout
        assert killed.again.dsv4[host]["end_state"] == "applied"
        assert operate.live(story, host)[CANARY] == "1"
        assert operate.ledger(story, host)["proved"][-1]["state"] == operate.live(story, host)["DSV4_FLEET_STATE"]
    assert set(DECODES) <= operate.admitted(story)


def test_a_proved_worker_is_not_restarted_by_the_run_after(story: FaultFleet, killed: Killed) -> None:
    third = story.playbook("enable-canary", extra_vars=QUICK)
    assert {host: end["end_state"] for host, end in third.dsv4.items()} == dict.fromkeys(DECODES, "unchanged")
    assert {host: story.main_pid(host, operate.unit_of(host)) for host in DECODES} == killed.pids


def test_x26_a_second_run_with_another_wish_is_refused_while_the_first_goes_on(killed: Killed) -> None:
    assert killed.rival.rc != 0 and operate.count(killed.rival, CHANGE) == 0
    assert "decode1: found the transaction " in killed.rival.errors["decode1"]
    assert "wait for its end, then run this again" in killed.rival.errors["decode1"]


# -- a router that is lost, and a worker that cannot go back -------------------------------------------------------------


@pytest.fixture(scope="module")
def without_router(story: FaultFleet, killed: Killed) -> Iterator[Outcome]:
    """router1 stops between drain and admit of decode1, whose gate stays shut until then; decode2 would be next."""
    del killed
    story.fault("decode1", {"health_503": {"seconds": 600, "when_env": {CANARY: "0"}}})

    def lose() -> None:
        began = '"step": "gate", "event": "begin"'
        operate.wait_until(
            lambda: bool(operate.transaction(story, "decode1")) and began in operate.journal(story, "decode1"),
            "decode1 at its gate",
            seconds=240,
        )
        story.run("router1", ["systemctl", "stop", "sglang-router.service"])
        story.fault("decode1", {})

    thread = threading.Thread(target=lose)
    thread.start()
    wanted = {**QUICK, "sglang_worker_router_timeout_s": 6}
    outcome = story.playbook("disable-diagnostics", extra_vars=wanted, limit="decode1:decode2")
    thread.join()
    story.run("router1", ["systemctl", "start", "sglang-router.service"])
    story.wait_ready(["router1", "decode2", "decode3", *PREFILLS])
    yield outcome


def test_a_router_lost_between_drain_and_admit_drains_the_worker_and_stops_the_run(
    story: FaultFleet, without_router: Outcome
) -> None:
    end = without_router.dsv4["decode1"]
    assert (end["end_state"], end["failed_step"]) == ("drained", "admit"), end
    assert without_router.rc != 0
    assert operate.unit_state(story, "decode1") == ("inactive", "disabled")
    told = operate.last_lines(without_router.stdout)
    assert told["decode1"].startswith("DRAINED: ") and "router1:8000" in told["decode1"]
    assert told["decode2"].startswith("not touched")


def test_x27_a_router_that_is_away_is_named_and_no_worker_is_called_unreachable(
    story: FaultFleet, without_router: Outcome
) -> None:
    assert not without_router.ok
    story.run("router1", ["systemctl", "stop", "sglang-router.service"])
    try:
        outcome = story.playbook("disable-diagnostics", extra_vars=QUICK, limit="decode2")
    finally:
        story.run("router1", ["systemctl", "start", "sglang-router.service"])
        story.wait_ready(["router1", "decode2", "decode3", *PREFILLS])
    assert outcome.rc != 0 and not outcome.stats["dark"] and operate.count(outcome, CHANGE) == 0
    assert "decode2: found the router http://router1:8000 unreachable from there" in outcome.errors["decode2"]


@pytest.fixture(scope="module")
def broken(story: FaultFleet, without_router: Outcome) -> Iterator[Outcome]:
    """decode3's server dies with the new flags and with the old ones."""
    del without_router
    story.fault("decode3", {"crash_at_start": True})
    yield story.playbook("disable-diagnostics", extra_vars=QUICK, limit="decode3")
    story.fault("decode3", {})


def test_a_worker_whose_old_state_cannot_be_proved_either_is_drained(story: FaultFleet, broken: Outcome) -> None:
    end = broken.dsv4["decode3"]
    assert end["end_state"] == "drained" and broken.rc != 0, end
    assert operate.unit_state(story, "decode3")[1] == "disabled"
    assert operate.unit_state(story, "decode3")[0] in ("inactive", "failed")
    assert "decode3" not in story.router_workers()
    assert story.run("decode3", ["ls", end["evidence"]]).out.split()


def test_drained_workers_are_left_alone_until_a_person_has_looked_and_then_repaired(story: FaultFleet, broken: Outcome) -> None:
    story.fault("decode3", {})
    unasked = story.playbook("disable-diagnostics", extra_vars=QUICK)
    assert unasked.rc != 0 and operate.count(unasked, CHANGE) == 0
    for host in ("decode1", "decode3"):
        assert f'run again with -e \'{{"sglang_worker_acknowledge": ["{host}"]}}\'' in unasked.stdout
    # The two that are away come back first: decode2, the last that is there, stays meanwhile.
    wanted = {
        **QUICK,
        "sglang_worker_acknowledge": ["decode1", "decode3"],
        "sglang_worker_retry_state": broken.dsv4["decode3"]["state"]["wanted"][:12],
    }
    asked = story.playbook("disable-diagnostics", extra_vars=wanted, limit="decode1:decode3")
    assert asked.ok, asked.stdout
    assert {host: operate.unit_state(story, host) for host in DECODES} == dict.fromkeys(DECODES, ("active", "enabled"))
    assert operate.admitted(story) == set(WORKERS)
