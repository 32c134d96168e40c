"""Checks of the whole fleet before any worker is touched. Pure."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.dsv4.fleet.plugins.plugin_utils import fleet

STATE = "a" * 64


def worker(name: str, role: str = "decode", reasons: Any = ("restart",), bf16: bool = False, admitted: int = 3, **seen: Any) -> dict[str, Any]:
    return {
        "worker": {"name": name, "role": role},
        "seen": {
            "transaction": None,
            "ledger": {"refused": {}},
            "routers": [{"url": "http://r:8000", "reachable": True, "error": None, "admitted": {"decode": admitted, "prefill": 2}}],
            **seen,
        },
        "wanted": {"state": STATE, "flags": {"bf16_index_k": bf16}},
        "reasons": dict.fromkeys(reasons, "x"),
        "notes": [],
    }


def wanted(hosts: Any = ("d1", "d2", "d3"), **other: Any) -> fleet.Wanted:
    base: dict[str, Any] = {
        "target": "decode", "left_out": [], "whole": False, "waves": [1], "min_admitted": 1, "acknowledge": [], "retry_state": "",
    }  # fmt: skip
    return fleet.Wanted(hosts=list(hosts), **{**base, **other})


def found(plan: fleet.Wanted, **changes: dict[str, Any]) -> str:
    every = {host: worker(host) for host in plan.hosts} | {name.replace("_", "-"): one for name, one in changes.items()}
    return "\n".join(fleet.problems(plan, every))


def test_a_healthy_fleet_has_no_problems() -> None:
    assert found(wanted()) == ""


def test_no_hosts_is_a_problem() -> None:
    assert "found no hosts in 'decode'" in found(wanted(hosts=()))


def test_limit_that_leaves_workers_out_stops_a_rollout_of_the_whole_fleet() -> None:
    assert "leaving out d3" in found(wanted(hosts=("d1", "d2"), left_out=["d3"], whole=True))
    assert found(wanted(hosts=("d1", "d2"), left_out=["d3"])) == ""


@pytest.mark.parametrize(
    ("waves", "cut"),
    [([1], [1, 1, 1, 1, 1]), ([1, "25%", "100%"], [1, 1, 3]), (["100%"], [5]), ([2], [2, 2, 1]), (["1%"], [1] * 5), ([10], [5])],
)
def test_waves_are_cut_as_serial_cuts_them(waves: Any, cut: list[int]) -> None:
    assert fleet.wave_sizes(waves, 5) == cut


@pytest.mark.parametrize("waves", [[], [0], [-1], ["0%"], ["101%"], ["x"], [""], [True], [1.5], None, [[1]]])
def test_sizes_that_mean_nothing_or_everything_are_refused(waves: Any) -> None:
    with pytest.raises(ValueError, match="waves: found"):
        fleet.wave_sizes(waves, 5)


def test_prefill_and_decode_must_agree_on_bf16_index_k() -> None:
    assert "expected prefill and decode workers to agree" in found(wanted(), p1=worker("p1", "prefill", bf16=True))


def test_a_wave_that_leaves_too_few_admitted_is_refused() -> None:
    assert "found 3 workers admitted by http://r:8000 and a wave that takes 3 out" in found(wanted(waves=["100%"]))
    assert found(wanted(waves=[2])) == ""


def test_workers_that_need_no_restart_do_not_count_against_the_minimum() -> None:
    plan = wanted(hosts=("d1",))
    assert found(plan, d1=worker("d1", reasons=(), admitted=1)) == ""
    assert found(plan, d1=worker("d1", admitted=1)) != ""


def test_an_unreachable_router_stops_a_change_and_only_a_change() -> None:
    dead = [{"url": "http://r:8000", "reachable": False, "error": "refused", "admitted": {}}]
    plan = wanted(hosts=("d1",))
    assert "unreachable from there (refused)" in found(plan, d1=worker("d1", routers=dead))
    assert found(plan, d1=worker("d1", reasons=(), routers=dead)) == ""


def test_a_refused_state_needs_its_name() -> None:
    plan = wanted(hosts=("d1",))
    ledger = {"refused": {STATE: {"reason": "gate: hung engine"}}}
    assert "failed its gate here (gate: hung engine)" in found(plan, d1=worker("d1", ledger=ledger))
    assert found(wanted(hosts=("d1",), retry_state=STATE[:12]), d1=worker("d1", ledger=ledger)) == ""
    assert found(wanted(hosts=("d1",), retry_state="a"), d1=worker("d1", ledger=ledger)) != ""


def test_a_transaction_towards_another_state_is_not_disturbed() -> None:
    plan = wanted(hosts=("d1",))
    other = {"id": "t1", "running": True, "target": "b" * 64, "step": "gate", "result": None}
    assert "found the transaction t1 running" in found(plan, d1=worker("d1", transaction=other))
    assert found(plan, d1=worker("d1", transaction={**other, "target": STATE})) == ""


@pytest.mark.parametrize("end", ["drained", "interrupted"])
def test_an_end_that_needs_a_person_stops_the_run_until_acknowledged(end: str) -> None:
    done = {"id": "t1", "running": False, "target": STATE, "step": "gate", "result": {"end_state": end}}
    assert f"ended {end}" in found(wanted(hosts=("d1",)), d1=worker("d1", transaction=done))
    assert found(wanted(hosts=("d1",), acknowledge=["d1"]), d1=worker("d1", transaction=done)) == ""


def test_a_worker_that_was_not_inspected_stops_the_run() -> None:
    assert "found no inspection of d1" in "\n".join(fleet.problems(wanted(hosts=("d1",)), {}))
