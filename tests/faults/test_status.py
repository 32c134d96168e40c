"""status.yml: exit code 0 when every worker is as wanted, 3 on drift, each drift named; and it only reads."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults import operate
from tests.faults.conftest import FaultFleet
from tests.faults.operate import CANARY, CLOSED, DECODES, GE_DIFF, OVERLAP, QUICK
from tests.local import handmade
from tests.local.playbook import Outcome
from tests.local.settings import ROUTER_PORT

STATUS = "dsv4.fleet.status"
DRIFT = 3


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An inventory with the decode workers alone, and the fix committed."""
    hosts = ["router1", *DECODES]
    return operate.inventory(tmp_path_factory.mktemp("status"), hosts, every={"dsv4_flag_multi_stream_overlap": False})


@pytest.fixture(scope="module")
def wanted(fleet: FaultFleet, place: Path) -> FaultFleet:
    """The decode workers as wanted, with an override on decode1 alone."""
    extra_vars = {**QUICK, "sglang_worker_clear_overrides": ["all"]}
    for play, limit in (("enable-gediff", "decode1"), ("site", "decode2:decode3")):
        outcome = fleet.playbook(play, extra_vars=extra_vars, limit=limit, inventory=place)
        assert outcome.ok, outcome.stdout
    return fleet


def status(fleet: FaultFleet, place: Path, **extra_vars: object) -> Outcome:
    """Run status.yml; it must change nothing."""
    outcome = fleet.playbook("status", inventory=place, extra_vars={**QUICK, **extra_vars})
    assert not outcome.stats["changed"], outcome.stdout
    return outcome


def rows(outcome: Outcome) -> dict[str, dict[str, Any]]:
    """What status says, by worker."""
    ((_, result),) = outcome.results(STATUS)
    return {row["worker"]: row for row in result["workers"]}


def test_as_wanted_ends_with_0_and_tells_of_every_worker(wanted: FaultFleet, place: Path) -> None:
    before = operate.marks(wanted, DECODES)
    outcome = status(wanted, place)
    assert outcome.ok, outcome.stdout
    told = rows(outcome)
    assert list(told) == list(DECODES)
    for host in DECODES:
        shown, row = operate.live(wanted, host), told[host]
        assert (row["state"], row["release"]) == (shown["DSV4_FLEET_STATE"], shown["DSV4_FLEET_RELEASE"])
        assert row["wanted"] == row["state"] and row["drift"] == {}
        assert row["flags"][OVERLAP] == ["0", "0"] and row["flags"][CANARY] == ["0", "0"]
        assert row["health"] == 200 and row["routers"] == {"http://router1:8000": "admitted"}
        assert f"{host}: {operate.unit_of(host)} active, state {row['state'][:12]}, release " in outcome.stdout
    assert told["decode1"]["flags"][GE_DIFF] == ["1", "1"]
    assert "    override: ge_diff=1 since " in outcome.stdout and "(enable-gediff)" in outcome.stdout
    assert told["decode2"]["overrides"] == {}
    assert "3 workers, drift on 0" in outcome.stdout
    assert operate.marks(wanted, DECODES) == before


def test_what_the_instruments_of_a_live_process_say_is_shown(wanted: FaultFleet, place: Path) -> None:
    run = operate.live(wanted, "decode1")["DSV4_FLEET_PASSPORTS"]
    passport = json.loads(wanted.run("decode1", ["sh", "-c", f"cat $(ls {run}/*.json | head -n 1)"]).out)
    told = {name: passport[name] for name in ("format", "pid", "release")}
    told |= {"rank": 0, "live": [], "disarmed": {"ge_diff": "torch sees no CUDA device"}, "replays": 0}
    wanted.run("decode1", ["mkdir", f"{run}/instruments"])
    try:
        wanted.write("decode1", f"{run}/instruments/{passport['pid']}.json", json.dumps(told), 0o644)
        wanted.write("decode1", f"{run}/instruments/1.json", json.dumps({**told, "pid": 1}), 0o644)  # no such passport
        outcome = status(wanted, place)
    finally:
        wanted.run("decode1", ["rm", "-r", f"{run}/instruments"])
    assert outcome.ok, outcome.stdout
    [one] = rows(outcome)["decode1"]["instruments"]
    assert (one["pid"], one["disarmed"]) == (passport["pid"], told["disarmed"])
    assert f"    instruments of process {passport['pid']} (rank 0): none at work in 0 graphs" in outcome.stdout
    assert "ge_diff disarmed: torch sees no CUDA device" in outcome.stdout


@pytest.fixture(scope="module")
def drifted(wanted: FaultFleet, place: Path) -> Iterator[tuple[Outcome, FaultFleet]]:
    """decode1's script is edited, decode2 is stopped, decode3 is taken out of the router."""
    path = handmade.script_of("decode1")
    text = wanted.read("decode1", path)
    wanted.write("decode1", path, text + "# by hand\n", 0o755)
    wanted.run("decode2", ["systemctl", "stop", operate.unit_of("decode2")])
    worker = wanted.router_workers()["decode3"]["id"]
    url = f"http://{wanted.address('router1')}:{ROUTER_PORT}/workers/{worker}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    opener.open(urllib.request.Request(url, method="DELETE"), timeout=10).close()
    operate.wait_until(lambda: "decode3" not in wanted.router_workers(), "decode3 taken out")
    yield status(wanted, place), wanted


def test_x24_drift_ends_with_3(drifted: tuple[Outcome, FaultFleet]) -> None:
    outcome, _ = drifted
    assert outcome.rc == DRIFT, outcome.stdout
    assert "3 workers, drift on 3: decode1, decode2, decode3" in outcome.stdout


def test_each_drift_is_named(drifted: tuple[Outcome, FaultFleet]) -> None:
    told = rows(drifted[0])
    assert set(told["decode1"]["drift"]) == {"script"}
    # A stop that had to kill something leaves the unit failed.
    assert told["decode2"]["drift"]["restart"] in ("found the unit inactive", "found the unit failed")
    assert told["decode2"]["state"] == "stopped" and "refused" in str(told["decode2"]["health"])
    assert told["decode3"]["drift"] == {"admit": "not admitted by http://router1:8000"}


def test_a_live_flag_that_differs_from_the_wanted_one_is_shown_with_both(
    drifted: tuple[Outcome, FaultFleet], place: Path
) -> None:
    outcome = status(drifted[1], place, dsv4_flag_idxk_canary=True)
    assert outcome.rc == DRIFT
    assert rows(outcome)["decode3"]["flags"][CANARY] == ["0", "1"]
    assert f"{CANARY}=0 (wanted 1)" in outcome.stdout
    assert rows(outcome)["decode3"]["drift"]["restart"].startswith("the live process runs state ")


def test_a_worker_that_cannot_be_reached_is_drift_and_the_others_are_told(
    drifted: tuple[Outcome, FaultFleet], tmp_path: Path
) -> None:
    place = operate.inventory(tmp_path, ["decode3", "decode9"], host_vars={"decode9": CLOSED})
    outcome = status(drifted[1], place)
    assert outcome.rc == DRIFT, outcome.stdout
    assert rows(outcome)["decode9"]["state"] == "unknown"
    assert set(rows(outcome)["decode9"]["drift"]) == {"inspection"}  # decode3 drifts anyway: it decides nothing here
    assert rows(outcome)["decode3"]["health"] == 200


def test_site_repairs_each_drift_and_restarts_only_what_must(drifted: tuple[Outcome, FaultFleet], place: Path) -> None:
    fleet = drifted[1]
    before = operate.marks(fleet, DECODES)
    outcome = fleet.playbook("site", extra_vars=QUICK, limit="decode", inventory=place)
    assert outcome.ok, outcome.stdout
    after = operate.marks(fleet, DECODES)
    assert [after[host].main_pid == before[host].main_pid for host in DECODES] == [True, False, True]
    assert status(fleet, place).ok
    assert json.loads(fleet.get("router1", ROUTER_PORT, "/workers")[1])["total"] == 5
