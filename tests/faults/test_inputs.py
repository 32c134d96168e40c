"""Inputs through the public way: right values, or errors before any host is touched. Cases A3 to A7, A12, A13, A14, E9."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import FaultFleet
from tests.local.playbook import Outcome


def check(
    fleet: FaultFleet, tmp_path: Path, files: dict[str, str] | None = None, *arguments: str, limit: str = "decode", **how: Any
) -> Outcome:
    """site.yml in check mode on the decode workers, with more inventory files laid over inventory/local."""
    more: tuple[str, ...] = ()
    if files:
        for name, text in files.items():
            path = tmp_path / "more" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / "more/hosts.yml").write_text("---\nall: {}\n")
        more = ("--inventory", str(tmp_path / "more"))
    return fleet.playbook("site", limit=limit, check=True, diff=True, arguments=(*more, *arguments), **how)


@pytest.fixture(scope="module", autouse=True)
def found_by_hand(fleet: FaultFleet) -> None:
    """Decode workers in the state that an operator left them in: everything is still to be changed there."""
    fleet.reset("decode1", "decode2", "decode3")


def touched(fleet: FaultFleet) -> bool:
    """Whether the agent has left anything of a change on decode1."""
    listing = "ls -A /var/lib/dsv4/units /var/lib/dsv4/tx /run/dsv4/tx 2>/dev/null | wc -w"
    return fleet.run("decode1", ["sh", "-c", listing]).out.strip() != "0"


def test_every_way_to_say_on_renders_the_same_one(fleet: FaultFleet, tmp_path: Path) -> None:
    words = {"decode1": "yes", "decode2": '"on"', "decode3": "1"}
    files = {f"host_vars/{host}.yml": f"---\ndsv4_flag_ge_diff: {word}\n" for host, word in words.items()}
    outcome = check(fleet, tmp_path, files)
    assert outcome.ok, outcome.stdout
    assert outcome.stdout.count("+export SGLANG_DSV4_GE_DIFF=1\n") == 3


def test_false_by_key_and_value_is_off_and_wins_over_the_inventory(fleet: FaultFleet, tmp_path: Path) -> None:
    files = {"host_vars/decode1.yml": "---\ndsv4_flag_ge_diff: true\n"}
    outcome = check(fleet, tmp_path, files, "--extra-vars", "dsv4_flag_ge_diff=false")
    assert outcome.ok, outcome.stdout
    assert "+export SGLANG_DSV4_GE_DIFF=0\n" in outcome.stdout
    assert "SGLANG_DSV4_GE_DIFF=1" not in outcome.stdout


def test_a_host_says_more_than_its_group(fleet: FaultFleet, tmp_path: Path) -> None:
    files = {
        "group_vars/decode.yml": "---\ndsv4_flag_ge_diff: true\ndsv4_flag_idxk_canary: true\n",
        "host_vars/decode2.yml": "---\ndsv4_flag_idxk_canary: false\n",
    }
    outcome = check(fleet, tmp_path, files)
    assert outcome.ok, outcome.stdout
    # One flag of a host does not lose the others of its group, as one key of a dict would.
    assert outcome.stdout.count("+export SGLANG_DSV4_GE_DIFF=1\n") == 3
    assert outcome.stdout.count("+export SGLANG_DSV4_IDXK_CANARY=0\n") == 1


MINE = "host_vars/decode1.yml"
# A line of decode1's own variables, and what the refusal must say.
SAID = [
    ("dsv4_flag_ge_diff: enabled", "dsv4_flag_ge_diff: found 'enabled'", "true or false", f"{MINE}:2"),
    ("dsv4_flag_ge_diff:", "dsv4_flag_ge_diff: found nothing (null)", MINE),
    ('dsv4_flag_ge_diff: ""', "dsv4_flag_ge_diff: found ''", MINE),
    ("dsv4_flag_gediff: true", "dsv4_flag_gediff: found a variable", "dsv4_flag_ge_diff", MINE),
    ("dsv4_extra_env: {SGLANG_OPT_USE_MULTISTREAM_OVERLAP: 0}", "SGLANG_OPT_USE_MULTI_STREAM_OVERLAP", MINE),
    ("dsv4_extra_env: {SGLANG_DSV4_GE_DIFF_EVRY: 8}", "Close to it: SGLANG_DSV4_GE_DIFF_EVERY", MINE),
    ("dsv4_extra_env: {SGL_LOG_MS: 1}", "legacy SGL_ name", "SGLANG_LOG_MS", MINE),
    ('dsv4_extra_env: {SGLANG_LOG_MS: "1\\u200b"}', "U+200B", "SGLANG_LOG_MS", MINE),
    ("dsv4_extra_env: {SGLANG_SORT_WEIGHT_FILES: soon}", "SGLANG_SORT_WEIGHT_FILES is 'soon'; expected a whole number", MINE),
    ("sglang_serve_arguments: [{--max-running-requests: 010}]", "found 010", "in quotes", f"{MINE}:2:51"),
    ("sglang_serve_arguments: [{--max-running-requests: 1:30}]", "found 1:30", "in quotes"),
    ("sglang_serve_arguments: [{--max-running-request: 8}]", "--max-running-request ", "--max-running-requests", MINE),
    ("sglang_serve_arguments: [{--no-such-thing: 8}]", "--no-such-thing", MINE),
    ("sglang_serve_arguments: [{--api-key: hunter2}]", "a secret among the launch arguments", "sglang_serve_secret_arguments"),
    ("dsv4_allow_known_corruption: false", "known to corrupt", "rollout-overlap-fix"),
    ("sglang_release_overlays: []", "nothing in the tree or its overlays reads SGLANG_DSV4_BF16_INDEX_K", "overlay"),
    ("sglang_worker_port: many", "sglang_worker_port", "int", MINE),
]


def test_what_cannot_be_right_is_refused_with_its_place_and_nothing_is_touched(fleet: FaultFleet, tmp_path: Path) -> None:
    for number, (line, *says) in enumerate(SAID):
        outcome = check(fleet, tmp_path / str(number), {MINE: f"---\n{line}\n"}, limit="decode1")
        text = outcome.stdout.replace("\\n", "\n").replace("\\'", "'")
        assert not outcome.ok, line
        for said in says:
            assert said in text, f"{line}: expected {said!r} in:\n{text}"
        assert "hunter2" not in text
    assert not touched(fleet)


def test_what_the_instruments_in_the_release_read_may_be_set(fleet: FaultFleet, tmp_path: Path) -> None:
    line = 'dsv4_extra_env: {SGLANG_DSV4_GE_DIFF_EVERY: 8, SGLANG_DSV4_GE_DIFF_LAYERS: "0-3,10", SGLANG_DSV4_ALIAS_AUDIT: true}'
    outcome = check(fleet, tmp_path, {MINE: f"---\n{line}\n"}, limit="decode1")
    assert outcome.ok, outcome.stdout
    for said in ("GE_DIFF_EVERY=8", "GE_DIFF_LAYERS=0-3,10", "ALIAS_AUDIT=1"):
        assert f"+export SGLANG_DSV4_{said}\n" in outcome.stdout, outcome.stdout


def test_a_duplicate_key_is_an_error_that_names_it(fleet: FaultFleet, tmp_path: Path) -> None:
    outcome = check(fleet, tmp_path, {"group_vars/all.yml": "---\ndsv4_flag_ge_diff: true\ndsv4_flag_ge_diff: false\n"})
    assert not outcome.ok
    assert "dsv4_flag_ge_diff" in outcome.stdout and "uplicate" in outcome.stdout


def test_a_configuration_that_lets_duplicates_through_is_refused(fleet: FaultFleet, tmp_path: Path) -> None:
    outcome = check(fleet, tmp_path, env={"ANSIBLE_DUPLICATE_YAML_DICT_KEY": "ignore"})
    assert not outcome.ok and "duplicate_dict_key" in outcome.stdout


def test_an_untested_ansible_is_named(fleet: FaultFleet, tmp_path: Path) -> None:
    outcome = check(fleet, tmp_path, None, "--extra-vars", json.dumps({"fleet_preflight_tested_ansible": ["2.18"]}))
    assert outcome.ok and "is not a tested version" in outcome.stdout


@pytest.mark.parametrize("complete", [False, True], ids=["empty directory", "complete tree"])
def test_a_stray_tree_is_reported_before_anything_is_touched(fleet: FaultFleet, tmp_path: Path, complete: bool) -> None:
    # The hand-made script changes into /root/sglang-dsv4; whatever lies there is what its server would import.
    place = "/root/sglang-dsv4/sglang"
    make = f"cp -r /root/sglang-dsv4/python/sglang {place}" if complete else f"mkdir {place}"
    fleet.run("decode1", ["sh", "-c", make])
    try:
        outcome = check(fleet, tmp_path)
        assert not outcome.ok
        assert f"stray tree: found {place}" in outcome.stdout
    finally:
        fleet.run("decode1", ["rm", "-r", place])
    assert check(fleet, tmp_path).ok
