"""Launch arguments and extra variables: typed, literal, and refused with their place. Cases A6 to A8."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from ansible_collections.dsv4.fleet.plugins.plugin_utils import settings
from ansible_collections.dsv4.fleet.plugins.plugin_utils.flags import SettingError


def here(_value: Any, name: str) -> str:
    return f"group_vars/all.yml ({name})"


def test_switches_and_options_become_words_in_order() -> None:
    items = ["--trust-remote-code", {"--tp": 4}, {"--cuda-graph-bs-decode": [1, 2]}, {"--mem-fraction-static": 0.85}]
    assert settings.launch_arguments(items, here) == [
        "--trust-remote-code", "--tp", "4", "--cuda-graph-bs-decode", "1", "2", "--mem-fraction-static", "0.85",
    ]  # fmt: skip


def test_values_keep_every_byte() -> None:
    nasty = "$HOME 'x'; # \"y\" `z` \\ *"
    assert settings.launch_arguments([{"--served-model-name": nasty}], here) == ["--served-model-name", nasty]


@pytest.mark.parametrize(
    "item", ["trust-remote-code", "--tp 4", "--tp=4", {"tp": 4}, {"--tp": 4, "--dp": 2}, {"--tp": None}, {"--tp": {}}, 4, None]
)
def test_other_shapes_are_refused_with_their_place(item: Any) -> None:
    with pytest.raises(SettingError, match=r"group_vars/all\.yml"):
        settings.launch_arguments([item], here)


@pytest.mark.parametrize("option", ["--api-key", "--admin-api-key"])
def test_a_secret_is_refused_among_arguments_and_not_repeated(option: str) -> None:
    with pytest.raises(SettingError, match="sglang_serve_secret_arguments") as error:
        settings.launch_arguments([{option: "hunter2"}], here)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(("written", "value"), [("010", 8), ("1:30", 90), ("1_000", 1000), ("0x10", 16)])
def test_a_number_that_yaml_changed_is_refused_literally(tmp_path: pathlib.Path, written: str, value: int) -> None:
    source = tmp_path / "all.yml"
    source.write_text(f"---\nsize: {written}\n")
    with pytest.raises(SettingError, match="in quotes") as error:
        settings.literal(value, "size", f"{source}:2:7")
    assert (written if written != "0x10" else "0") in str(error.value)


def test_a_plain_number_is_taken(tmp_path: pathlib.Path) -> None:
    source = tmp_path / "all.yml"
    source.write_text("---\nsize: 256\n")
    assert settings.literal(256, "size", f"{source}:2:7") == "256"


@pytest.mark.parametrize("hidden", ["\u200b", "\u00a0", "\t", "\r", "\ufeff", "\u2028"])
def test_invisible_characters_are_named(hidden: str) -> None:
    with pytest.raises(SettingError, match=rf"U\+{ord(hidden):04X}"):
        settings.environment({"SGLANG_X": f"1{hidden}"}, "dsv4_extra_env", (), here)


def test_booleans_become_ones_and_zeros() -> None:
    assert settings.environment({"SGLANG_A": True, "SGLANG_B": False}, "dsv4_extra_env", (), here) == {"SGLANG_A": "1", "SGLANG_B": "0"}


@pytest.mark.parametrize(
    ("name", "says"),
    [("SGL_X", "SGLANG_X"), ("A-B", "letters"), ("PYTHONPATH", "sets itself"), ("DSV4_FLEET_STATE", "sets itself"), ("SGLANG_DSV4_GE_DIFF", "sets itself")],
)
def test_names_that_are_not_free_are_refused(name: str, says: str) -> None:
    with pytest.raises(SettingError, match=says):
        settings.environment({name: "1"}, "dsv4_extra_env", {"PYTHONPATH", "SGLANG_DSV4_GE_DIFF"}, here)


@pytest.mark.parametrize("value", [None, "", "  ", "python3 -m 'x y'", "a; b", [], {}, 3])
def test_a_command_that_needs_a_shell_is_refused(value: Any) -> None:
    with pytest.raises(SettingError):
        settings.words(value, "serve_engine_command", here)


def test_a_command_may_be_one_plain_string() -> None:
    assert settings.words("python3 -m sglang.launch_server", "x", here) == ["python3", "-m", "sglang.launch_server"]
