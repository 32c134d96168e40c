"""The overlap fix, from the hand-made fleet to the line in the inventory; then the canary and the way back from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults import operate
from tests.faults.conftest import FaultFleet
from tests.faults.operate import CANARY, DECODES, OVERLAP, QUICK, WORKERS, Mark
from tests.local.load import Tally
from tests.local.playbook import Outcome

FIX = "rollout-overlap-fix"
LINE = f"  dsv4_flag_multi_stream_overlap: false  # {', '.join(WORKERS)}"


@dataclass(frozen=True)
class Fixed:
    """The fleet after one roll-out under load."""

    outcome: Outcome
    tally: Tally
    marks: dict[str, Mark]


@pytest.fixture(scope="module")
def fixed(fleet: FaultFleet) -> Iterator[Fixed]:
    operate.hand_made(fleet)
    with fleet.load(clients=4) as load:
        outcome = fleet.playbook(FIX, extra_vars=QUICK)
    yield Fixed(outcome, load.tally, operate.marks(fleet))


@pytest.fixture(scope="module")
def says_the_same(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An inventory in which the fix is committed."""
    return operate.inventory(tmp_path_factory.mktemp("fixed"), every={"dsv4_flag_multi_stream_overlap": False})


def test_every_worker_is_fixed_and_admitted_and_no_request_is_lost(fleet: FaultFleet, fixed: Fixed) -> None:
    assert fixed.outcome.ok, fixed.outcome.stdout
    assert {host: end["end_state"] for host, end in fixed.outcome.dsv4.items()} == dict.fromkeys(WORKERS, "applied")
    for host in WORKERS:
        assert operate.live(fleet, host)[OVERLAP] == "0"
    assert operate.admitted(fleet) == set(WORKERS)
    assert fixed.tally.served > 20 and fixed.tally.lost_count == 0, str(fixed.tally)


def test_default_waves_are_one_worker_a_quarter_and_the_rest(fixed: Fixed) -> None:
    assert operate.waves(fixed.outcome) == [["decode1"], ["decode2"], ["decode3", "prefill1", "prefill2"]]


def test_x19_d7_what_concerns_the_whole_fleet_is_done_once_and_not_once_per_wave(fixed: Fixed) -> None:
    assert operate.count(fixed.outcome, "dsv4.fleet.preflight") == 1
    assert operate.count(fixed.outcome, "dsv4.fleet.inspect") == len(WORKERS)
    assert fixed.outcome.stdout.count("\nWORKERS ") == 1


def test_the_end_says_worker_by_worker_and_prints_the_lines_to_commit(fixed: Fixed) -> None:
    told = operate.last_lines(fixed.outcome.stdout)
    assert list(told) == list(WORKERS)
    assert all(line.startswith("applied, healthy after ") for line in told.values()), told
    assert fixed.outcome.stdout.splitlines()[-1] == LINE


def test_the_fix_is_an_override_that_says_who_when_and_why(fleet: FaultFleet, fixed: Fixed) -> None:
    for host in WORKERS:
        held = operate.ledger(fleet, host)["overrides"]
        assert list(held) == ["multi_stream_overlap"]
        assert held["multi_stream_overlap"]["value"] is False
        assert held["multi_stream_overlap"]["why"] == FIX
        assert "@" in held["multi_stream_overlap"]["by"] and held["multi_stream_overlap"]["since"].endswith("Z")


def test_a_second_run_changes_nothing_and_still_prints_the_lines(fleet: FaultFleet, fixed: Fixed) -> None:
    again = fleet.playbook(FIX, extra_vars=QUICK)
    assert again.ok, again.stdout
    assert {host: end["end_state"] for host, end in again.dsv4.items()} == dict.fromkeys(WORKERS, "unchanged")
    assert not again.stats["changed"]
    assert operate.marks(fleet) == fixed.marks
    assert again.stdout.splitlines()[-1] == LINE


def test_site_keeps_the_fix_and_names_it(fleet: FaultFleet, fixed: Fixed) -> None:
    site = fleet.playbook("site", extra_vars=QUICK, limit="decode:prefill")
    assert site.ok, site.stdout
    assert operate.marks(fleet) == fixed.marks
    for host in WORKERS:
        assert f"plan | {host}: override kept: multi_stream_overlap=0 since " in site.stdout


def test_an_inventory_that_says_the_same_ends_the_override_without_a_restart(
    fleet: FaultFleet, fixed: Fixed, says_the_same: Path
) -> None:
    site = fleet.playbook("site", extra_vars=QUICK, limit="decode:prefill", inventory=says_the_same)
    assert site.ok, site.stdout
    assert "override dropped, the inventory says the same now: multi_stream_overlap=0" in site.stdout
    assert "lines to commit" not in site.stdout
    after = operate.marks(fleet)
    assert {host: one.main_pid for host, one in after.items()} == {host: one.main_pid for host, one in fixed.marks.items()}
    assert all(operate.ledger(fleet, host)["overrides"] == {} for host in WORKERS)


def test_the_canary_goes_over_waves_and_the_way_back_does_too(fleet: FaultFleet, fixed: Fixed, says_the_same: Path) -> None:
    """Two workers of three, so that the third shows what was not meant."""
    before = operate.marks(fleet)
    wanted = {**QUICK, "dsv4_waves": [1, "100%"]}
    canary = fleet.playbook("enable-canary", extra_vars=wanted, limit="decode1:decode2", inventory=says_the_same)
    assert canary.ok, canary.stdout
    assert operate.waves(canary) == [["decode1"], ["decode2"]]
    on = {host: operate.live(fleet, host) for host in DECODES}
    assert [on[host][CANARY] for host in DECODES] == ["1", "1", "0"]
    assert operate.ledger(fleet, "decode1")["overrides"]["idxk_canary"]["why"] == "enable-canary"

    back = fleet.playbook("rollback", extra_vars=wanted, limit="decode1:decode2", inventory=says_the_same)
    assert back.ok, back.stdout
    assert operate.waves(back) == [["decode1"], ["decode2"]]
    for host in ("decode1", "decode2"):
        now = operate.live(fleet, host)
        assert (now[CANARY], now[OVERLAP]) == ("0", "0")
        assert now["DSV4_FLEET_STATE"] != on[host]["DSV4_FLEET_STATE"]
        assert operate.ledger(fleet, host)["overrides"] == {}
    assert operate.admitted(fleet) == set(WORKERS)
    assert operate.mark(fleet, "decode3") == before["decode3"]


def test_x22_a_run_that_died_between_the_script_and_the_restart_is_repaired(
    fleet: FaultFleet, fixed: Fixed, says_the_same: Path
) -> None:
    """The script on disk is the wanted one and the process an older: a handler would have forgotten it."""
    store = f"/var/lib/dsv4/units/{operate.unit_of('decode1')}/states"
    lived = operate.live(fleet, "decode1")["DSV4_FLEET_STATE"]
    script = f'grep --files-with-matches --recursive --include=script "^export {CANARY}=\'*1" {store}'
    (path,) = fleet.run("decode1", ["sh", "-c", script]).out.split()
    fleet.run("decode1", ["install", "-m", "0755", path, "/root/sglang-dsv4/serve_dsv4_decode.sh"])
    again = fleet.playbook("enable-canary", extra_vars=QUICK, limit="decode1", inventory=says_the_same)
    assert again.ok, again.stdout
    assert f"decode1: restart: the live process runs state {lived[:12]}" in again.stdout
    assert operate.live(fleet, "decode1")[CANARY] == "1"
