"""What the gate refuses, and what it waits for, on three decode workers at a time; the cases are those of each test's name.

Each run of a playbook changes all three at once, each with another fault: a fault holds for processes with the new flags
alone, so that the state before is proved again. tests/unit/agent_observation shows the gate's rules one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.faults import operate
from tests.faults.conftest import FaultFleet
from tests.faults.operate import ALL_DECODES_AT_ONCE, CANARY, DECODES, GE_DIFF, OVERLAP, QUICK
from tests.local.playbook import Outcome
from tests.local.settings import ROOT

ONLY_NEW = {"when_env": {GE_DIFF: "1"}}
RELEASES = "/var/lib/dsv4/releases"
#: What Debian's interpreter runs at each start: it is no part of the tree, of the unit or of any package.
SITECUSTOMIZE = "/etc/python3.11/sitecustomize.py"
ANOTHER_TREE = f"""
import os, sys
if os.environ.get("{GE_DIFF}") == "0":
    sys.path.insert(0, "/opt/other/python")
"""
#: Makes states other than those that the first run's faults left refused.
OTHER = {"SGLANG_LOG_MS": True}


@pytest.fixture(scope="module")
def gates(fleet: FaultFleet) -> FaultFleet:
    """The hand-made fleet."""
    operate.hand_made(fleet)
    return fleet


def change(
    fleet: FaultFleet,
    faults: Mapping[str, Mapping[str, object]],
    play: str = "enable-gediff",
    limit: str = "decode",
    env: Mapping[str, str] | None = None,
    **extra_vars: object,
) -> Outcome:
    """Run a play on all decode workers at once, with these faults in force on each."""
    for host, one in faults.items():
        fleet.fault(host, one)
    try:
        wanted = {**QUICK, **ALL_DECODES_AT_ONCE, "dsv4_extra_env": OTHER, **extra_vars}
        return fleet.playbook(play, extra_vars=wanted, limit=limit, env=env)
    finally:
        for host in faults:
            fleet.fault(host, {})


@pytest.fixture(scope="module")
def first(gates: FaultFleet) -> Iterator[Outcome]:
    """A crash loop, a server that dies after its first 200, and a hung engine; from the hand-made state."""
    faults: dict[str, dict[str, object]] = {
        "decode1": {"crash_at_start": ONLY_NEW},
        "decode2": {"dies": {"after_health": 1, **ONLY_NEW}},
        "decode3": {"hung_engine": ONLY_NEW},
    }
    yield change(gates, faults, sglang_worker_gate_timeout_s=25, dsv4_extra_env={})


@pytest.mark.parametrize(
    ("host", "said"),
    [
        pytest.param("decode1", r"^(crash loop|the server died): ", id="b2-crash-loop-that-shows-active"),
        pytest.param("decode2", r"^200, then dead[:;] ", id="b2-200-then-dead"),
        pytest.param("decode3", r"^deadline: .* last seen: generation: ", id="c7-200-with-a-hung-engine"),
    ],
)
def test_refused_and_the_hand_made_state_is_proved_again(gates: FaultFleet, first: Outcome, host: str, said: str) -> None:
    end = first.dsv4[host]
    assert end["end_state"] == "rolled_back" and end["failed_step"] in ("start", "gate"), end
    assert re.search(said, end["error"]), end["error"]
    assert first.rc != 0
    shown = operate.live(gates, host)
    assert "DSV4_FLEET_STATE" not in shown and shown[CANARY] == "1"
    assert end["state"]["now"] == "baseline"
    assert host in operate.admitted(gates)


def test_a_state_that_failed_its_gate_is_refused_until_it_is_asked_for_by_name(gates: FaultFleet, first: Outcome) -> None:
    before = operate.marks(gates, DECODES)
    state = first.dsv4["decode1"]["state"]["wanted"]
    refused = change(gates, {}, limit="decode1", dsv4_extra_env={})
    assert refused.rc != 0
    assert f"decode1: found that state {state[:12]} failed its gate here" in refused.errors["decode1"]
    assert f"-e sglang_worker_retry_state={state[:12]}" in refused.errors["decode1"]
    assert operate.marks(gates, DECODES) == before


@pytest.fixture(scope="module")
def second(gates: FaultFleet, first: Outcome) -> Iterator[Outcome]:
    """Waits that end well: a port that stays closed, 503 for a while, 200 before generation; proxies and ::1 in the way."""
    dead = "http://127.0.0.1:9"
    for host in DECODES:
        names = ["http_proxy", "https_proxy", "HTTP_PROXY", "all_proxy"]
        gates.run(host, ["systemctl", "set-environment", *(f"{name}={dead}" for name in names)])
        hosts = gates.read(host, "/etc/hosts").replace("127.0.0.1 localhost\n", "")
        gates.run(host, ["sh", "-ec", "cat > /etc/hosts"], stdin=hosts.encode())
    faults: dict[str, dict[str, object]] = {
        "decode1": {"start_s": {"seconds": 8, **ONLY_NEW}},
        "decode2": {"health_503": {"seconds": 8, **ONLY_NEW}},
        "decode3": {"health_early": {"generation_after_s": 8, **ONLY_NEW}},
    }
    env = {"http_proxy": dead, "HTTP_PROXY": dead, "https_proxy": dead, "no_proxy": ""}
    yield change(gates, faults, env=env)
    for host in DECODES:
        gates.run(host, ["systemctl", "unset-environment", *names])
        hosts = "127.0.0.1 localhost\n" + gates.read(host, "/etc/hosts")
        gates.run(host, ["sh", "-ec", "cat > /etc/hosts"], stdin=hosts.encode())


@pytest.mark.parametrize(
    "host",
    [
        pytest.param("decode1", id="c9-closed-port"),
        pytest.param("decode2", id="c8-busy-is-not-dead"),
        pytest.param("decode3", id="c6-200-before-warm-up-ends"),
    ],
)
def test_waited_for_behind_proxies_and_with_localhost_on_ipv6_c2_c3(gates: FaultFleet, second: Outcome, host: str) -> None:
    end = second.dsv4[host]
    assert end["end_state"] == "applied", end
    waited = sum(step["seconds"] for step in end["timeline"] if step["step"] in ("start", "gate"))
    assert waited >= 7, end["timeline"]
    assert host in operate.admitted(gates)


@pytest.fixture(scope="module")
def third(gates: FaultFleet, second: Outcome) -> Iterator[Outcome]:
    """A redirect, a flag that a process parsed otherwise, and a health that never answers; by the canary."""
    new = {"when_env": {CANARY: "1"}}
    faults: dict[str, dict[str, object]] = {
        "decode1": {"health_redirect": new},
        "decode2": {"child_env": {"set": {CANARY: "off"}, **new}},
        "decode3": {"health_silent": new},
    }
    yield change(gates, faults, play="enable-canary", sglang_worker_gate_timeout_s=15, sglang_worker_probe_timeout_s=5)


@pytest.mark.parametrize(
    ("host", "said"),
    [
        pytest.param("decode1", "302", id="c1-redirect"),
        pytest.param("decode2", CANARY, id="flag-parsed-to-another-value"),
        pytest.param("decode3", "/health", id="c4-one-deadline-by-the-wall-clock"),
    ],
)
def test_refused_and_the_last_proved_state_is_proved_again(gates: FaultFleet, third: Outcome, host: str, said: str) -> None:
    end = third.dsv4[host]
    assert (end["end_state"], end["failed_step"]) == ("rolled_back", "gate") and said in end["error"], end
    shown = operate.live(gates, host)
    assert (shown[CANARY], shown[GE_DIFF]) == ("0", "1")
    assert end["state"]["now"] == shown["DSV4_FLEET_STATE"] == end["state"]["before"]
    assert host in operate.admitted(gates)
    # The first gate's time is the deadline and not the probes' times added up.
    assert next(step["seconds"] for step in end["timeline"] if step["step"] == "gate") < 15 + 5 + 5


@pytest.fixture(scope="module")
def fourth(gates: FaultFleet, third: Outcome) -> Iterator[Outcome]:
    """The old server's child keeps the port; a tree that no look at the host shows; a process without a passport."""
    release = operate.live(gates, "decode2")["DSV4_FLEET_RELEASE"]
    gates.run("decode2", ["sh", "-ec", f"mkdir -p /opt/other && cp -r {RELEASES}/{release}/python /opt/other/"])
    customize = gates.read("decode2", SITECUSTOMIZE)
    gates.write("decode2", SITECUSTOMIZE, customize + ANOTHER_TREE)
    gates.fault("decode1", {"orphan": {"seconds": 300}})
    gates.run("decode1", ["systemctl", "restart", operate.unit_of("decode1")])
    gates.wait_ready(["router1", "decode1"])
    new = {"when_env": {GE_DIFF: "0", CANARY: "0"}}
    faults: dict[str, dict[str, object]] = {
        "decode1": {},
        "decode2": {},
        "decode3": {"no_passport": {"process": "scheduler", **new}},
    }
    try:
        outcome = change(
            gates, faults, play="disable-diagnostics", sglang_worker_gone_timeout_s=4, sglang_worker_gate_timeout_s=25,
        )  # fmt: skip
    finally:
        gates.write("decode2", SITECUSTOMIZE, customize)
    yield outcome


def port_holder(end: Mapping[str, str]) -> str:
    """The process that an error names as the holder of the worker's port."""
    found = re.search(r"process (\d+) listens on port 30002", end["error"])
    assert found, end["error"]
    return found[1]


def test_b1_the_old_process_that_keeps_the_port_is_named_and_nothing_starts_beside_it(gates: FaultFleet, fourth: Outcome) -> None:
    end = fourth.dsv4["decode1"]
    assert end["end_state"] == "drained", end
    assert "orphan.py" in gates.read("decode1", f"/proc/{port_holder(end)}/cmdline")
    assert operate.unit_state(gates, "decode1")[1] == "disabled"
    assert "decode1" not in operate.admitted(gates)
    told = operate.last_lines(fourth.stdout)["decode1"]
    assert told.startswith("DRAINED: ") and "docs/runbook.md" in told


def test_a_process_that_imported_another_tree_is_refused_with_both_paths(fourth: Outcome) -> None:
    end = fourth.dsv4["decode2"]
    assert end["end_state"] == "rolled_back", end
    assert "/opt/other/python/sglang/__init__.py" in end["error"] and RELEASES in end["error"], end["error"]


def test_a_process_without_a_passport_is_refused(fourth: Outcome) -> None:
    end = fourth.dsv4["decode3"]
    assert end["end_state"] == "rolled_back" and "passport" in end["error"], end


def test_a_drained_worker_is_repaired_by_a_run_that_acknowledges_it(gates: FaultFleet, fourth: Outcome) -> None:
    unasked = change(gates, {}, play="disable-diagnostics", limit="decode1", sglang_worker_min_admitted=1)
    assert unasked.rc != 0 and "ended drained" in unasked.errors["decode1"], unasked.stdout
    gates.run("decode1", ["kill", "-KILL", port_holder(fourth.dsv4["decode1"])])
    asked = change(
        gates, {}, play="disable-diagnostics", limit="decode1",
        sglang_worker_acknowledge=["decode1"], sglang_worker_min_admitted=1,
    )  # fmt: skip
    assert asked.ok, asked.stdout
    assert asked.dsv4["decode1"]["end_state"] == "applied"
    assert operate.unit_state(gates, "decode1") == ("active", "enabled")
    assert "decode1" in operate.admitted(gates)


# -- refused before anything is touched -----------------------------------------------------------------------


def test_b6_a_wrapper_without_exec_is_refused_before_anything_is_touched(gates: FaultFleet, tmp_path: Path) -> None:
    template = tmp_path / "serve.sh.j2"
    template.write_text((ROOT / "templates" / "serve_dsv4_decode.sh.j2").read_text().replace("\nexec ", "\n"))
    before = operate.mark(gates, "decode2")
    outcome = change(gates, {}, play="site", limit="decode2", sglang_serve_template=str(template))
    assert outcome.rc != 0 and "expected the script to end in exec" in outcome.errors["decode2"]
    assert operate.mark(gates, "decode2") == before


def test_b4_an_environment_file_beside_the_script_is_refused(gates: FaultFleet) -> None:
    directory = f"/etc/systemd/system/{operate.unit_of('decode2')}.d"
    gates.write("decode2", f"{directory}/env.conf", "[Service]\nEnvironmentFile=-/etc/default/sglang\n")
    gates.run("decode2", ["systemctl", "daemon-reload"])
    try:
        outcome = change(gates, {}, play="site", limit="decode2")
    finally:
        gates.run("decode2", ["rm", "-r", directory])
        gates.run("decode2", ["systemctl", "daemon-reload"])
    assert outcome.rc != 0
    assert f"drop-in {directory}/env.conf: found EnvironmentFile" in outcome.errors["decode2"]


def test_e9_a_complete_tree_in_the_way_is_refused_before_anything_is_touched(gates: FaultFleet) -> None:
    gates.run("decode2", ["sh", "-ec", "cp -r /opt/other/python/sglang /sglang"])
    before = operate.mark(gates, "decode2")
    try:
        outcome = change(gates, {}, play="site", limit="decode2")
    finally:
        gates.run("decode2", ["rm", "-r", "/sglang"])
    assert outcome.rc != 0 and "stray tree: found /sglang" in outcome.errors["decode2"], outcome.stdout
    assert operate.mark(gates, "decode2") == before


def test_b8_a_unit_of_another_name_is_the_one_that_is_changed_and_rolled_back(gates: FaultFleet, tmp_path: Path) -> None:
    """Renamed by hand: what is restored, what restarts and what listens belong together."""
    old, new = operate.unit_of("decode3"), "llm-decode.service"
    system = "/etc/systemd/system"
    operate.disable(gates, "decode3", old)
    rename = f"mv {system}/{old} {system}/{new}; systemctl daemon-reload; systemctl enable --now {new}"
    gates.run("decode3", ["sh", "-ec", rename])
    gates.wait_ready(["router1", "decode3"])
    place = operate.inventory(tmp_path, ["decode3"], host_vars={"decode3": {"sglang_worker_unit": new}})
    try:
        gates.fault("decode3", {"hung_engine": {"when_env": {CANARY: "1", OVERLAP: "1"}}})
        failed = gates.playbook("enable-canary", extra_vars={**QUICK, "sglang_worker_gate_timeout_s": 20}, inventory=place)
        gates.fault("decode3", {})
        assert failed.dsv4["decode3"]["end_state"] == "rolled_back", failed.stdout
        assert "idxk_canary" not in operate.ledger(gates, "decode3", new)["overrides"]
        applied = gates.playbook("enable-gediff", extra_vars=QUICK, inventory=place)
        assert applied.dsv4["decode3"]["end_state"] == "applied", applied.stdout
        shown = operate.live(gates, "decode3", new)
        assert (shown[GE_DIFF], shown[CANARY]) == ("1", "0")
        assert applied.dsv4["decode3"]["gate"]["main_pid"] == gates.main_pid("decode3", new)
        assert gates.main_pid("decode3", old) == 0
        assert "decode3" in operate.admitted(gates)
    finally:
        operate.disable(gates, "decode3", new)
        gates.run("decode3", ["sh", "-ec", f"rm {system}/{new}; systemctl daemon-reload"])
        operate.hand_made(gates, ["decode3"])
