"""Passports count only for the process that wrote them, and only if all of it agrees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agent import passports, paths, proc

STATE, RELEASE, FLAG = "a" * 64, "b" * 64, "SGLANG_DSV4_GE_DIFF"


@pytest.fixture
def expect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(paths, "RELEASES", str(tmp_path / "releases"))
    package = tmp_path / "releases" / RELEASE / "python" / "sglang"
    (package / "srt").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "srt/environ.py").write_text("")
    return {"state": STATE, "release": RELEASE, "flags": {FLAG: True}}


def passport(expect: dict[str, Any], **changed: Any) -> dict[str, Any]:
    package = Path(paths.release(RELEASE)) / "python" / "sglang"
    return {
        "format": 1,
        "pid": os.getpid(),
        "start_time": proc.start_time(os.getpid()),
        "state": STATE,
        "release": RELEASE,
        "sglang": str(package / "__init__.py"),
        "environ": str(package / "srt/environ.py"),
        "flags": dict(expect["flags"]),
        "armed": [],
        **changed,
    }


def test_only_live_processes_have_passports(tmp_path: Path, expect: dict[str, Any]) -> None:
    directory = tmp_path / "run"
    assert passports.read(str(directory)) == []
    directory.mkdir()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(20)
    mine, pid = passport(expect), os.getpid()
    for name, content in {
        f"{pid}.json": mine,
        f"{gone.pid}.json": {**mine, "pid": gone.pid},
        f"{os.getppid()}.json": {**mine, "pid": os.getppid(), "start_time": 1},  # alive, but not since then
        "1.json": mine,  # of another process than its name says
        f".{pid}.json.new": mine,
    }.items():
        (directory / name).write_text(json.dumps(content))
    assert passports.read(str(directory)) == [mine]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}'])
def test_a_broken_passport_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / f"{os.getpid()}.json").write_text(text)
    assert passports.read(str(tmp_path)) == []


@pytest.mark.parametrize("changed", [{"format": 2}, {"pid": str(os.getpid())}, {"start_time": None}])
def test_a_passport_of_another_form_is_none(tmp_path: Path, expect: dict[str, Any], changed: dict[str, Any]) -> None:
    (tmp_path / f"{os.getpid()}.json").write_text(json.dumps(passport(expect, **changed)))
    assert passports.read(str(tmp_path)) == []


def test_a_right_passport_has_no_mismatch(expect: dict[str, Any]) -> None:
    assert passports.mismatches(passport(expect), expect) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"state": "c" * 64}, f"runs state {'c' * 64}, expected {STATE}"),
        ({"state": None}, "runs state None"),
        ({"sglang": "/root/sglang/__init__.py"}, "imported sglang from /root/sglang/__init__.py, expected it from "),
        ({"sglang": None}, "imported sglang from None"),
        ({"environ": "/root/environ.py"}, "runs /root/environ.py, expected environ.py inside"),
        ({"release": "d" * 64}, f"dsv4_probe of release {'d' * 64}, expected release {RELEASE}"),
        ({"flags": {FLAG: False}}, f"parsed {FLAG} as False, expected True"),
        ({"flags": {FLAG: 1}}, f"parsed {FLAG} as 1, expected True"),
        ({"flags": {FLAG: "1"}}, f"parsed {FLAG} as '1', expected True"),
        ({"flags": {}}, f"did not report flag {FLAG}"),
        ({"flags": None}, f"did not report flag {FLAG}"),
    ],
)
def test_each_disagreement_is_named(expect: dict[str, Any], changed: dict[str, Any], words: str) -> None:
    found = passports.mismatches(passport(expect, **changed), expect)
    assert len(found) == 1
    assert words in found[0]


def test_wrong_tree_names_both_paths(expect: dict[str, Any]) -> None:
    (found,) = passports.mismatches(passport(expect, sglang="/root/sglang/__init__.py"), expect)
    assert "/root/sglang/__init__.py" in found
    assert paths.release(RELEASE) in found


@pytest.mark.parametrize("other", ["x/python/sglang/__init__.py", "/python/sglangx/__init__.py"])
def test_a_sibling_whose_name_begins_alike_is_another_tree(expect: dict[str, Any], tmp_path: Path, other: str) -> None:
    path = Path(paths.release(RELEASE) + other)
    path.parent.mkdir(parents=True)
    path.write_text("")
    assert passports.mismatches(passport(expect, sglang=str(path)), expect)


def test_a_link_out_of_the_release_is_another_tree(expect: dict[str, Any], tmp_path: Path) -> None:
    inside = Path(paths.release(RELEASE)) / "python/sglang/srt/environ.py"
    outside = tmp_path / "environ.py"
    outside.write_text("")
    inside.unlink()
    inside.symlink_to(outside)
    (found,) = passports.mismatches(passport(expect), expect)
    assert "wrong tree" in found


def test_armed_instruments_by_flag(expect: dict[str, Any]) -> None:
    flags = {"SGLANG_A": True, "SGLANG_B": True, "SGLANG_C": False}
    stamps = [passport(expect, armed=["SGLANG_C"]), passport(expect, armed=["SGLANG_A"])]
    assert passports.armed(stamps, flags) == {"SGLANG_A": ["SGLANG_A"], "SGLANG_B": []}


WORKING = {
    "format": 1,
    "pid": os.getpid(),
    "rank": 2,
    "release": RELEASE,
    "live": [FLAG],
    "disarmed": {},
    "hooks_captured": {"8": ["q"], "16": ["q"]},
    "replays": 7,
    "events": {"ge_diff": {"clean": 7}},
}


def told(tmp_path: Path, expect: dict[str, Any], **changed: Any) -> list[dict[str, Any]]:
    (tmp_path / "instruments").mkdir(exist_ok=True)
    (tmp_path / "instruments" / f"{os.getpid()}.json").write_text(json.dumps({**WORKING, **changed}))
    return passports.at_work(str(tmp_path), [passport(expect)])


def test_what_the_instruments_say_is_read(tmp_path: Path, expect: dict[str, Any]) -> None:
    [one] = told(tmp_path, expect)
    assert one == {
        "pid": os.getpid(), "rank": 2, "live": [FLAG], "disarmed": {}, "buckets": 2, "replays": 7,
        "events": {"ge_diff": {"clean": 7}},
    }  # fmt: skip
    assert passports.asleep({FLAG: [FLAG]}, [one]) == []


@pytest.mark.parametrize("changed", [{"release": "c" * 64}, {"pid": 1}, {"format": 2}])
def test_what_another_process_or_release_said_does_not_count(
    tmp_path: Path, expect: dict[str, Any], changed: dict[str, Any]
) -> None:
    assert told(tmp_path, expect, **changed) == []
    assert passports.at_work(str(tmp_path), []) == passports.at_work(str(tmp_path / "none"), [passport(expect)]) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"live": [], "disarmed": {"ge_diff": "no CUDA"}}, ["disarmed: ge_diff", "(rank 2)", "no CUDA"]),
        ({"live": []}, ["not seen at work", FLAG]),
        ({"live": ["OTHER"]}, ["not seen at work", FLAG]),
        ({"hooks_captured": {}}, ["not seen at work", FLAG]),
        ({"live": "x", "disarmed": 3, "hooks_captured": None, "events": []}, ["not seen at work", FLAG]),
    ],
)
def test_an_instrument_that_sees_nothing_is_named(
    tmp_path: Path, expect: dict[str, Any], changed: dict[str, Any], words: list[str]
) -> None:
    said = passports.asleep({FLAG: [FLAG]}, told(tmp_path, expect, **changed))
    assert said and all(word in said[0] for word in words), said


def test_a_field_of_another_type_counts_as_none(tmp_path: Path, expect: dict[str, Any]) -> None:
    [one] = told(tmp_path, expect, rank=None, events={"ge_diff": 3}, replays="many")
    assert (one["rank"], one["events"], one["replays"]) == (0, {}, 0)


def test_a_flag_whose_release_has_no_instrument_is_not_waited_for() -> None:
    assert passports.asleep({FLAG: []}, []) == []
