"""What ansible-core would let pass, and what these playbooks make of it: no run here may change or restart a worker.

The rows X1 to X22 and X26, X27 that need a change in the middle are told in test_halt.py and test_rollout.py, under their
numbers; here are those that must be refused, and those that a look at the fleet shows.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.faults import operate
from tests.faults.conftest import FaultFleet
from tests.faults.operate import CLOSED, DECODES, QUICK, WORKERS
from tests.local.playbook import CHANGE, Outcome, environment
from tests.local.settings import ROOT

FIX = "rollout-overlap-fix"
FLAG = "dsv4_flag_ge_diff"
EXPORT = "export SGLANG_DSV4_GE_DIFF="
FLEET = ["router1", "decode1"]


@pytest.fixture(scope="module", autouse=True)
def untouched(fleet: FaultFleet) -> Iterator[None]:
    """Whatever happens here to hand-made workers, none restarts and no script or unit is written."""
    operate.hand_made(fleet)
    before = operate.marks(fleet)
    yield
    assert operate.marks(fleet) == before


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An inventory with one worker, so that a look takes little time."""
    return operate.inventory(tmp_path_factory.mktemp("one"), FLEET)


def look(fleet: FaultFleet, inventory: Path, play: str = "site", **more: Any) -> Outcome:
    """What a play would do to decode1, by --check --diff."""
    extra_vars = {**QUICK, "sglang_worker_min_admitted": 0, **more}
    return fleet.playbook(play, extra_vars=extra_vars, limit="decode", check=True, diff=True, inventory=inventory)


def refused(outcome: Outcome, *words: str) -> None:
    """The run failed before any worker was begun, and said these words."""
    assert outcome.rc != 0, outcome.stdout
    assert operate.count(outcome, CHANGE) == 0, outcome.stdout
    for word in words:
        assert word in outcome.stdout, outcome.stdout


def command(fleet: FaultFleet, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """ansible-playbook as an operator types it, from the repository."""
    return subprocess.run(
        ["ansible-playbook", *arguments], cwd=ROOT, env={**os.environ, **environment(fleet.settings), **env},
        capture_output=True, text=True, timeout=300, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


# -- waves and hosts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([0], id="serial-0-is-the-whole-fleet-at-once"),
        pytest.param([1, -1], id="serial-minus-1-is-the-whole-fleet-at-once"),
        pytest.param(["0%"], id="0-percent-is-one-by-one"),
        pytest.param([], id="empty"),
        pytest.param(["101%"], id="101-percent"),
    ],
)
def test_a_wave_size_that_means_something_else_is_refused(fleet: FaultFleet, one_worker: Path, sizes: list[object]) -> None:
    refused(look(fleet, one_worker, FIX, dsv4_waves=sizes), "waves: found ", "; expected ")


def test_no_host_matches_d8_a_misspelt_group_is_an_error(fleet: FaultFleet, one_worker: Path) -> None:
    refused(look(fleet, one_worker, FIX, dsv4_target="decodee"), "target: found no hosts in 'decodee'")


def test_no_host_matches_an_empty_inventory_is_an_error(fleet: FaultFleet, tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text("all:\n  children:\n    decode:\n")
    done = command(fleet, f"playbooks/{FIX}.yml", "-i", str(tmp_path))
    assert done.returncode == 1, done.stdout
    assert "found no hosts, expected at least one" in done.stdout + done.stderr


def test_no_host_matches_a_limit_without_hosts_is_an_error(fleet: FaultFleet, one_worker: Path) -> None:
    done = command(fleet, f"playbooks/{FIX}.yml", "-i", str(one_worker), "--limit", "decode9")
    assert done.returncode != 0


def test_limit_that_leaves_workers_out_is_refused_for_a_roll_out(fleet: FaultFleet) -> None:
    outcome = fleet.playbook(FIX, extra_vars=QUICK, limit="decode1", check=True)
    refused(outcome, "found --limit leaving out decode2, decode3, prefill1, prefill2", "-e dsv4_partial=true")


def test_x3_x13_a_worker_behind_a_closed_port_stops_everything_before_it_begins(fleet: FaultFleet, tmp_path: Path) -> None:
    """Twelve workers in waves of four; eleven cannot be reached."""
    hosts = ["decode1", *(f"decode{number}" for number in range(11, 22))]
    place = operate.inventory(tmp_path, hosts, host_vars={host: CLOSED for host in hosts[1:]})
    outcome = fleet.playbook(FIX, extra_vars={**QUICK, "dsv4_waves": [4], "sglang_worker_min_admitted": 0}, inventory=place)
    refused(outcome)
    assert not outcome.stats["dark"] and operate.waves(outcome) == []
    told = operate.last_lines(outcome.stdout)
    assert all(told[host].startswith("UNREACHABLE: ") for host in hosts[1:]), told


def test_x15_strategy_free_does_not_undo_the_halt(fleet: FaultFleet, one_worker: Path) -> None:
    checked = fleet.playbook(
        FIX, check=True, inventory=one_worker, env={"ANSIBLE_STRATEGY": "free"},
        extra_vars={**QUICK, "sglang_worker_min_admitted": 0},
    )  # fmt: skip
    assert checked.ok and operate.count(checked, "dsv4.fleet.preflight") == 1, checked.stdout


def test_x18_a_router_that_cannot_be_reached_stops_site_before_the_workers(fleet: FaultFleet, tmp_path: Path) -> None:
    """Another router can be reached: without a word of ours ansible-core would go on with it and with all workers."""
    place = operate.inventory(tmp_path, ["router1", "router9", "prefill1", "decode1"], host_vars={"router9": CLOSED})
    outcome = fleet.playbook("site", extra_vars=QUICK, inventory=place, check=True)
    refused(outcome, "router9")
    assert operate.count(outcome, "dsv4.fleet.inspect") == 0, outcome.stdout


def test_x23_h2_check_of_a_whole_roll_out_ends_well_and_says_what_would_change(fleet: FaultFleet) -> None:
    outcome = fleet.playbook("enable-canary", extra_vars={**QUICK, "dsv4_waves": [1, "100%"]}, check=True)
    assert outcome.ok, outcome.stdout
    told = operate.last_lines(outcome.stdout)
    assert list(told) == list(DECODES)
    assert all(line.startswith("would change: ") and "restart" in line for line in told.values()), told


# -- variables ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["false", "no", "0"])
def test_a4_flag_as_a_string_from_the_command_line_renders_0(fleet: FaultFleet, one_worker: Path, word: str) -> None:
    others = {"sglang_worker_clear_overrides": ["all"], "sglang_worker_min_admitted": 0, "dsv4_flag_idxk_canary": True}
    done = command(
        fleet, "playbooks/site.yml", "-i", str(one_worker), "--limit", "decode", "--check", "--diff",
        "-e", json.dumps(others), "-e", f"{FLAG}={word}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert f"+{EXPORT}1" not in done.stdout and f"{EXPORT}0" in done.stdout


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        pytest.param(FLAG, "enabled", "found 'enabled' (string)", id="a5-misspelt-word"),
        pytest.param(FLAG, "", "expected true or false", id="a6-blank"),
        pytest.param("dsv4_flag_gediff", True, "a variable that begins with dsv4_flag_", id="misspelt-variable"),
        pytest.param("dsv4_extra_env", {"SGLANG_NO_SUCH_NAME": 1}, "SGLANG_NO_SUCH_NAME", id="a14-name-that-nothing-reads"),
        pytest.param("dsv4_extra_env", {"SGL_LOG_MS": 1}, "SGL_LOG_MS", id="stray-sgl-name"),
    ],
)
def test_a_value_that_would_pass_silently_is_refused(
    fleet: FaultFleet, one_worker: Path, name: str, value: Any, words: str
) -> None:
    refused(look(fleet, one_worker, **{name: value}), name, words)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        pytest.param(f"{FLAG}: true\n{FLAG}: false\n", FLAG, id="a12-duplicate-key"),
        pytest.param(f"{FLAG}:\n", "found nothing (null)", id="a6-null"),
        pytest.param("sglang_serve_arguments:\n  - --max-running-requests: 010\n", "found 010", id="a7-010-is-8"),
        pytest.param("sglang_serve_arguments:\n  - --watchdog-timeout: 1:30\n", "found 1:30", id="a7-1-30-is-90"),
    ],
)
def test_what_yaml_makes_of_a_value_is_refused_with_its_place(fleet: FaultFleet, tmp_path: Path, raw: str, words: str) -> None:
    place = operate.inventory(tmp_path, FLEET, raw=raw)
    if "sglang_serve_arguments" in raw:  # in place of the inventory's own, which stand nearer to the host
        (place / "group_vars" / "decode.yml").write_text("dsv4_flag_triton_indexer: true\n")
    outcome = look(fleet, place)
    # The duplicate key is Ansible's own error, by our ansible.cfg; all others say where.
    refused(outcome, words, "YAML parsing failed: Found duplicate mapping key" if raw.count(FLAG) == 2 else "2.yml:")


def test_exports_that_glue_together_are_found_by_what_bash_makes_of_them(
    fleet: FaultFleet, one_worker: Path, tmp_path: Path
) -> None:
    """An inline if at a line's end eats the newline; the result still passes `bash -n`."""
    template = tmp_path / "serve.sh.j2"
    text = (ROOT / "templates" / "serve_dsv4_decode.sh.j2").read_text()
    line = "export {{ name }}={{ value | quote }}\n{% endfor %}\n\n# The release"
    assert line in text
    glued = "export {{ name }}={% if value == '1' %}1{% else %}0{% endif %}\n{% endfor %}\n\n# The release"
    template.write_text(text.replace(line, glued))
    outcome = look(fleet, one_worker, sglang_serve_template=str(template))
    refused(outcome, "serve script: bash does not end up with what was wanted", "SGLANG_DSV4_IDXK_CANARY: found ")


def test_roles_find_the_templates_at_the_repository_s_top(fleet: FaultFleet, one_worker: Path) -> None:
    """Also from the folder playbooks/, with its own ansible.cfg."""
    arguments = ["enable-canary.yml", "-i", str(one_worker), "--limit", "decode", "--check", "--diff"]
    done = subprocess.run(
        ["ansible-playbook", *arguments, "-e", json.dumps({"sglang_worker_min_admitted": 0})], cwd=ROOT / "playbooks",
        env={**os.environ, **environment(fleet.settings), "ANSIBLE_CONFIG": str(ROOT / "playbooks" / "ansible.cfg")},
        capture_output=True, text=True, timeout=300, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "serve_dsv4_decode.sh (state " in done.stdout


def test_a_duplicate_key_can_not_be_allowed_by_another_configuration(fleet: FaultFleet, one_worker: Path) -> None:
    outcome = fleet.playbook(
        "site", extra_vars={**QUICK, "sglang_worker_min_admitted": 0}, limit="decode", check=True, inventory=one_worker,
        env={"ANSIBLE_DUPLICATE_YAML_DICT_KEY": "warn"},
    )  # fmt: skip
    refused(outcome, "found duplicate_dict_key set to something else than error")


def test_the_plays_themselves_use_none_of_what_misleads(fleet: FaultFleet) -> None:
    """X1, X16, X17: no percentage that must be exceeded, no end of the play for one host, and no other strategy."""
    assert set(WORKERS) <= set(fleet.nodes())
    plays = yaml.safe_load((ROOT / "playbooks" / "shared" / "change-workers.yml").read_text())
    for play in plays:
        assert play["any_errors_fatal"] is True and play["strategy"] == "ansible.builtin.linear"
    assert plays[1]["max_fail_percentage"] == 0
    for path in [*ROOT.glob("playbooks/**/*.yml"), *ROOT.glob("roles/*/tasks/*.yml")]:
        text = path.read_text()
        for word in ("ignore_errors", "rescue:", "end_play", "failed_when: false"):
            assert word not in text, f"{path}: {word}"
