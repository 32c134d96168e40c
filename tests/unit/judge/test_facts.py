"""What the hosts say becomes what the judge compares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsv4_fleet import facts

GE_DIFF = "SGLANG_DSV4_GE_DIFF"


def seen(*flags: bool) -> dict[str, Any]:
    passports = [{"release": "r1", "flags": {GE_DIFF: value}, "armed": [GE_DIFF] if value else []} for value in flags]
    process = {"pid": 12, "start_time": 345, "state": "s1", "environment": {}}
    return {"host": {"boot_id": "b1", "now": 1000.0}, "process": process, "passports": passports}


def test_a_folder_with_a_file_for_each_worker(tmp_path: Path) -> None:
    (tmp_path / "decode1.json").write_text(json.dumps({"seen": seen(True, True), "elapsed_s": "40"}), encoding="utf-8")
    assert facts.load(tmp_path) == {
        "decode1": {
            "state": "s1",
            "release": "r1",
            "flags": {GE_DIFF: True},
            "armed": [GE_DIFF],
            "instruments": [GE_DIFF],
            "boot_id": "b1",
            "main_pid": 12,
            "start_time": 345,
            "restarted_at": 960.0,
        }
    }


def test_a_flag_on_which_the_processes_disagree_is_no_fact() -> None:
    assert facts.from_inspection(seen(True, False), 0)["flags"] == {GE_DIFF: None}


def test_an_instrument_counts_as_on_wherever_it_is_or_may_be() -> None:
    assert facts.from_inspection(seen(True, False), 0)["instruments"] == [GE_DIFF]
    assert facts.from_inspection(seen(False, False), 0)["instruments"] == []
    without_instrument = seen(True)
    without_instrument["passports"][0]["armed"] = []  # a flag alone may slow a server enough to hide the fault
    assert facts.from_inspection(without_instrument, 0)["instruments"] == [GE_DIFF]
    audit = seen(False)
    audit["process"]["environment"] = {"SGLANG_DSV4_ALIAS_AUDIT": "1", GE_DIFF: "1"}
    # Of GE_DIFF the passports say how it was parsed; of the audit nothing says that it is off.
    assert facts.from_inspection(audit, 0)["instruments"] == ["SGLANG_DSV4_ALIAS_AUDIT"]
    for value, on in (("0", []), ("false", []), ("", []), ("true", ["SGLANG_DSV4_ALIAS_AUDIT"])):
        audit["process"]["environment"] = {"SGLANG_DSV4_ALIAS_AUDIT": value}
        assert facts.from_inspection(audit, 0)["instruments"] == on


def test_a_worker_that_does_not_run_has_no_state() -> None:
    found = facts.from_inspection({**seen(), "process": None}, 0)
    assert (found["state"], found["main_pid"], found["release"]) == (None, None, None)


@pytest.mark.parametrize("text", ["{}", '{"seen": {}}', '{"seen": {"process": null}, "elapsed_s": 1}'])
def test_what_is_no_inspection_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "w.json").write_text(text, encoding="utf-8")
    for path in (tmp_path, tmp_path / "w.json"):
        with pytest.raises(ValueError, match="found"):
            facts.load(path)


def test_a_file_whose_workers_lack_something_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    path.write_text(json.dumps({"workers": {"w1": {"state": "s1"}}}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"found w1 wrong in .*expected what docs/stress\.md says"):
        facts.load(path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="found no"):
        facts.load(tmp_path)
