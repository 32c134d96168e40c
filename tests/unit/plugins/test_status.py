"""What the status play says of a worker."""

from __future__ import annotations

from typing import Any

from ansible_collections.dsv4.fleet.plugins.plugin_utils import status

FLAG = "SGLANG_DSV4_GE_DIFF"
TOLD = {
    "pid": 124,
    "rank": 1,
    "live": [FLAG],
    "disarmed": {"canary": "no pool"},
    "buckets": 12,
    "replays": 4711,
    "events": {"ge_diff": {"overwritten": 11, "clean": 4700}},
}


def inspected(instruments: list[dict[str, Any]]) -> dict[str, Any]:
    seen = {
        "process": {"environment": {FLAG: "1", "DSV4_FLEET_RELEASE": "b" * 64}, "state": "a" * 64},
        "unit": {"name": "sglang-dsv4-decode.service", "active": "active"},
        "routers": [],
        "transaction": None,
        "ledger": {"overrides": {}},
        "health": {"status": 200, "error": None},
        "instruments": instruments,
    }
    wanted = {"state": "a" * 64, "expect": {"flags": {FLAG: True}}}
    return {"dsv4": {"seen": seen, "wanted": wanted, "reasons": {}, "notes": []}}


def test_what_the_instruments_of_each_process_say_is_shown() -> None:
    row = status.row("decode1", inspected([TOLD, {**TOLD, "pid": 125, "live": [], "disarmed": {}, "events": {}}]))
    assert [line.strip() for line in status.table([row]) if "instruments" in line] == [
        f"instruments of process 124 (rank 1): {FLAG} at work in 12 graphs, 4711 replays; events: ge_diff clean 4700, "
        "ge_diff overwritten 11; canary disarmed: no pool",
        "instruments of process 125 (rank 1): none at work in 12 graphs, 4711 replays",
    ]


def test_where_none_is_at_work_nothing_is_said_of_them() -> None:
    lines = status.table([status.row("decode1", inspected([]))])
    assert not any("instruments" in line for line in lines) and any(f"{FLAG}=1" in line for line in lines)
