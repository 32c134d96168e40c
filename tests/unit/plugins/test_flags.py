"""Flags: whatever YAML or -e makes of a boolean gives the right value or an error. Cases A3 to A7."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.dsv4.fleet.plugins.plugin_utils import flags

ROWS = [
    flags.Flag("dsv4_flag_ge_diff", "SGLANG_DSV4_GE_DIFF", False, "ge_diff", "…"),
    flags.Flag("dsv4_flag_multi_stream_overlap", "SGLANG_OPT_USE_MULTI_STREAM_OVERLAP", True, None, "…"),
]
STAMP = {"since": "2026-01-01T00:00:00Z", "by": "root@controller", "why": "test"}


def resolve(variables: dict[str, Any], kept: Any = None, wanted: Any = None, clear: Any = ()) -> flags.Resolved:
    return flags.resolve(ROWS, variables, lambda name: f"group_vars/all.yml:{name}", kept or {}, wanted or {}, clear, STAMP)


@pytest.mark.parametrize("value", [True, "yes", "on", "True", "TRUE", "true", "1", 1])
def test_every_way_to_say_on_is_on(value: Any) -> None:
    assert flags.parse_bool("f", value, "x") is True


@pytest.mark.parametrize("value", [False, "no", "off", "False", "FALSE", "false", "0", 0])
def test_every_way_to_say_off_is_off(value: Any) -> None:
    assert flags.parse_bool("f", value, "x") is False


@pytest.mark.parametrize("value", ["enabled", "tru", "1 ", " 0", "y", "n", "", None, 2, 8, 90, -1, 1.5, [], {}, "None", "on\u200b"])
def test_anything_else_names_variable_value_place_and_what_is_allowed(value: Any) -> None:
    with pytest.raises(flags.SettingError) as error:
        resolve({"dsv4_flag_ge_diff": value})
    text = str(error.value)
    assert "dsv4_flag_ge_diff" in text and "group_vars/all.yml:dsv4_flag_ge_diff" in text and flags.ALLOWED in text
    assert ("null" if value is None else repr(str(value))) in text


def test_a_misspelt_flag_is_an_error_that_lists_the_right_names() -> None:
    with pytest.raises(flags.SettingError, match=r"dsv4_flag_gediff.*dsv4_flag_ge_diff"):
        resolve({"dsv4_flag_gediff": True})


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(flags.SettingError) as error:
        resolve({"dsv4_flag_gediff": True, "dsv4_flag_ge_diff": "tru"}, wanted={"nosuch": True})
    assert str(error.value).count("\n") == 2


def test_defaults_come_from_the_table() -> None:
    found = resolve({})
    assert (found.on("ge_diff"), found.on("multi_stream_overlap")) == (False, True)


def test_a_play_leaves_an_override_with_its_stamp() -> None:
    found = resolve({}, wanted={"ge_diff": True})
    assert found.on("ge_diff") and found.overrides == {"ge_diff": {"value": True, **STAMP}}


def test_the_same_play_again_keeps_the_first_stamp() -> None:
    held = {"ge_diff": {"value": True, "since": "2025-01-01T00:00:00Z", "by": "a", "why": "b"}}
    assert resolve({}, kept=held, wanted={"ge_diff": True}).overrides == held


def test_an_override_is_kept_and_named_by_a_run_that_does_not_speak_of_it() -> None:
    held = {"ge_diff": {"value": True, **STAMP}}
    found = resolve({}, kept=held)
    assert found.on("ge_diff") and found.overrides == held and "override kept" in found.notes[0]


def test_an_override_goes_when_the_inventory_says_the_same() -> None:
    found = resolve({"dsv4_flag_ge_diff": True}, kept={"ge_diff": {"value": True, **STAMP}})
    assert found.on("ge_diff") and found.overrides == {} and "dropped" in found.notes[0]


def test_an_override_goes_when_it_is_cleared() -> None:
    held = {"ge_diff": {"value": True, **STAMP}}
    for clear in (["ge_diff"], ["all"]):
        found = resolve({}, kept=held, clear=clear)
        assert not found.on("ge_diff") and found.overrides == {}


def test_a_play_that_wants_what_the_inventory_says_needs_no_override() -> None:
    held = {"ge_diff": {"value": True, **STAMP}}
    assert resolve({}, kept=held, wanted={"ge_diff": False}).overrides == {}
