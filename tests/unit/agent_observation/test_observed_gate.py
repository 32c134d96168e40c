"""The gate: each way in which a server only looks as if it ran the wanted state."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agent import engine, gate, paths, proc
from agent.errors import AgentError
from agent.gate import GateRefused

from tests.unit.agent_observation.loopback import Engine, FakeRouter, free_port
from tests.unit.agent_observation.units import ENGINE, FLAG, RELEASE, STATE, ControlGroup, FakeUnit, wait_for

LIMITS = {"gate_s": 20, "soak_s": 0.2, "consecutive": 2, "probe_s": 5, "router_s": 5, "min_admitted": 1}
GENERATION: dict[str, Any] = {"prompt": "2+2?", "expect": r"\b4\b", "max_tokens": 8}


@pytest.fixture
def unit(tmp_path: Path, group: ControlGroup, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeUnit]:
    monkeypatch.setattr(paths, "RELEASES", str(tmp_path / "releases"))
    monkeypatch.setattr(paths, "RUN", str(tmp_path / "run"))
    monkeypatch.setattr(gate, "POLL_S", 0.05)
    monkeypatch.setattr(gate, "LOOK_S", 0.1)
    monkeypatch.setattr(gate, "SETTLE_S", 1.0)
    one = FakeUnit(tmp_path, group, free_port())
    yield one
    one.close()


@pytest.fixture
def statuses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What /health answered, in order; probes that found nobody are left out."""
    seen: list[int] = []
    real = engine.Worker.health

    def health(self: engine.Worker, timeout_s: float) -> tuple[int | None, str | None]:
        status, error = real(self, timeout_s)
        if status is not None:
            seen.append(status)
        return status, error

    monkeypatch.setattr(engine.Worker, "health", health)
    return seen


class Said(list[str]):
    def __call__(self, text: str, event: str = "info", **_: Any) -> None:
        self.append(text)


def prove(unit: FakeUnit, **changed: Any) -> dict[str, Any]:
    """Run the gate on the unit; keywords replace its arguments or add to its limits."""
    limits = {**LIMITS, **{name: changed.pop(name) for name in list(changed) if name in LIMITS}}
    arguments: dict[str, Any] = {
        "worker": unit.worker(),
        "expect": unit.expect(),
        "before": None,
        "limits": limits,
        "generation": GENERATION,
        "secrets": {"router_keys": {}, "api_key": "", "env": {}, "args": {}, "host_key": None},
        "say": Said(),
        "show": unit.show,
        **changed,
    }
    return gate.gate(**arguments)


def refused(unit: FakeUnit, words: str, **changed: Any) -> str:
    with pytest.raises(GateRefused) as caught:
        prove(unit, **changed)
    reason = caught.value.reason
    assert words in reason
    return reason


def spawned(title: str = "from multiprocessing.spawn import spawn_main; spawn_main()") -> dict[str, Any]:
    """A child whose command line is that of an engine process, and which writes no passport."""
    return {"argv": [sys.executable, "-c", f"import time; time.sleep(120) # {title}"]}


# -- the good case


def test_a_right_unit_is_proved(unit: FakeUnit) -> None:
    unit.set()
    unit.start()
    said = Said()
    found = prove(unit, say=said, before={"invocation": "old", "main_pid": 1, "start_time": 1})
    assert found["main_pid"] == unit.main().pid
    assert found["start_time"] == unit.main().start_time
    assert found["invocation"] == unit.invocation
    assert (found["passports"], found["generation"]) == (1, "worker")
    assert found["generation_ms"] >= 0
    assert found["armed"] == {FLAG: []}
    assert found["probes"] >= 4  # two healthy ones, the generation, one after the soak
    assert any(FLAG in note and "no instrument" in note for note in found["notes"])
    assert any("soak" in note for note in found["notes"])
    assert any("/health is 200" in text for text in said)


def test_a_flag_that_has_no_instrument_needs_no_note(unit: FakeUnit) -> None:
    unit.start()
    found = prove(unit, expect=unit.expect(instruments=[]))
    assert not any("no instrument" in note for note in found["notes"])


def test_an_armed_flag_is_shown_and_needs_no_note(unit: FakeUnit) -> None:
    unit.set(passport=unit.passport(armed=[FLAG]))
    unit.start()
    found = prove(unit)
    assert found["armed"] == {FLAG: [FLAG]}
    assert not any("no instrument" in note for note in found["notes"])
    assert found["instruments"] == [] and any("not seen at work" in note and FLAG in note for note in found["notes"])


def test_what_the_instruments_say_of_themselves_is_shown(unit: FakeUnit) -> None:
    unit.set(passport=unit.passport(armed=[FLAG]))
    unit.start()
    pid, directory = unit.main().pid, Path(unit.settings["passports"]) / "instruments"
    directory.mkdir()
    status = {"format": 1, "pid": pid, "rank": 0, "release": RELEASE, "live": [FLAG], "hooks_captured": {"8": ["q"]}}
    (directory / f"{pid}.json").write_text(json.dumps(status))
    found = prove(unit)
    assert [(one["pid"], one["live"], one["buckets"]) for one in found["instruments"]] == [(pid, [FLAG], 1)]
    assert not any("not seen at work" in note for note in found["notes"])
    (directory / f"{pid}.json").write_text(json.dumps({**status, "live": [], "disarmed": {"ge_diff": "no CUDA"}}))
    assert any("ge_diff" in note and "no CUDA" in note for note in prove(unit)["notes"])


# -- the process


def test_the_old_process_keeps_the_port(unit: FakeUnit, tmp_path: Path) -> None:
    """B1: a left-over answers 200 while the new one cannot bind."""
    config = tmp_path / "old.json"
    config.write_text(f'{{"port": {unit.port}, "passport": null, "passports": ""}}')
    old = subprocess.Popen([sys.executable, str(ENGINE), str(config)])
    try:
        wait_for(lambda: proc.listener(unit.port))
        unit.restart = False
        unit.set(listen=False)
        unit.start()
        reason = refused(unit, "another process keeps the port")
        assert f"process {old.pid} " in reason
        assert unit.name in reason
    finally:
        old.kill()
        old.wait(20)


def test_another_units_server_on_the_port_is_named_with_its_unit(unit: FakeUnit, tmp_path: Path) -> None:
    """B8: what listens is another unit's server."""
    other = ControlGroup()
    config = tmp_path / "old.json"
    config.write_text(f'{{"port": {unit.port}, "passport": null, "passports": ""}}')
    rival = subprocess.Popen([sys.executable, str(ENGINE), str(config)], preexec_fn=other.join)
    try:
        wait_for(lambda: proc.listener(unit.port))
        unit.set(listen=False)
        unit.start()
        assert other.name in refused(unit, "another process keeps the port")
    finally:
        other.remove()
        rival.wait(20)


def test_a_child_that_holds_the_port_too_is_no_rival(unit: FakeUnit) -> None:
    """Between fork and exec every child of the server does."""
    unit.set(heir=True)
    unit.start()
    assert prove(unit)


def test_a_child_that_left_the_unit_with_the_port_is_a_rival(unit: FakeUnit) -> None:
    """B1: re-parented, in another control group, with the listening socket."""
    unit.set(heir=True)
    unit.start()
    wait_for(lambda: len(proc.listener(unit.port)) == 2)
    (heir,) = set(proc.listener(unit.port)) - {unit.main().pid}
    other = ControlGroup()
    try:
        (other.path / "cgroup.procs").write_text(str(heir))
        assert f"process {heir} (/bin/sleep 120) in {other.name}" in refused(unit, "another process keeps the port")
    finally:
        other.remove()


def test_a_crash_loop_is_refused_at_once(unit: FakeUnit) -> None:
    """B2: 200 once, dead, restarted with a new PID, for ever."""
    unit.set(health="exit")
    unit.start()
    started = time.monotonic()
    reason = refused(unit, "200, then dead; crash loop", gate_s=60)
    assert "NRestarts 0 → 1" in reason
    assert time.monotonic() - started < 20


def test_a_unit_that_fails_is_refused_at_once(unit: FakeUnit) -> None:
    unit.restart = False
    unit.set(exit_at_start=True)
    unit.start()
    started = time.monotonic()
    reason = refused(unit, "the server died", gate_s=60)
    assert "failed" in reason
    assert "exit 1/3" in reason
    assert time.monotonic() - started < 20


def test_waiting_for_an_automatic_restart_is_a_crash_loop(unit: FakeUnit) -> None:
    unit.start()
    refused(unit, "crash loop", show=lambda name: replace(unit.show(name), active="activating", sub="auto-restart"))


def test_the_same_process_is_not_restarted(unit: FakeUnit) -> None:
    unit.start()
    main = unit.main()
    refused(unit, "not restarted", before={"invocation": "x", "main_pid": main.pid, "start_time": main.start_time})


def test_the_same_invocation_is_not_restarted(unit: FakeUnit) -> None:
    unit.start()
    refused(unit, "not restarted", before={"invocation": unit.invocation, "main_pid": 1, "start_time": 1})


def test_a_pid_that_was_used_before_is_no_old_process(unit: FakeUnit) -> None:
    unit.start()
    assert prove(unit, before={"invocation": "old", "main_pid": unit.main().pid, "start_time": 1})


def test_wrapper_without_exec(unit: FakeUnit) -> None:
    """B6: systemd would signal the shell only."""
    unit.exec = ""
    unit.tail = "true\n"  # bash itself would exec a last command
    unit.start()
    reason = refused(unit, "wrapper without exec")
    assert "exec" in reason
    assert str(unit.script) in reason


def test_a_script_that_still_prepares_is_waited_for(unit: FakeUnit) -> None:
    unit.exec = "sleep 1\nexec "
    unit.start()
    assert prove(unit)["main_pid"] == unit.main().pid


# -- the unit


def test_a_unit_that_runs_another_script(unit: FakeUnit) -> None:
    unit.start()
    unit.exec_start = "{ path=/bin/bash ; argv[]=/bin/bash /root/other.sh ; ignore_errors=no ; pid=0 }"
    reason = refused(unit, "wrong script")
    assert "/root/other.sh" in reason
    assert str(unit.script) in reason


def test_a_script_as_an_argument_of_the_program_counts(unit: FakeUnit) -> None:
    unit.start()
    unit.exec_start = f"{{ path={unit.script} ; argv[]={unit.script} ; ignore_errors=no ; pid=0 }}"
    assert prove(unit)


def test_a_unit_that_systemd_does_not_know(unit: FakeUnit) -> None:
    unit.start()
    unit.load = "not-found"
    refused(unit, "wrong unit")


def test_a_unit_file_that_systemd_has_not_read(unit: FakeUnit) -> None:
    unit.start()
    unit.need_daemon_reload = True
    refused(unit, "daemon-reload")


# -- health


def test_redirect_is_never_healthy(unit: FakeUnit) -> None:
    """C1: /health sends to a page that answers 200."""
    unit.set(health=302)
    unit.start_and_listen()
    assert "redirect" in refused(unit, "deadline", gate_s=2)


def test_the_deadlines_own_cut_does_not_hide_what_was_seen(unit: FakeUnit) -> None:
    unit.set(health=[302, "hang"])
    unit.start_and_listen()
    assert "redirect" in refused(unit, "deadline", gate_s=5, probe_s=100)


def test_closed_port_and_503_are_waited_for(unit: FakeUnit) -> None:
    """C8, C9: refused, then busy, then healthy, all inside the budget."""
    unit.set(delay=0.7, health=[503, 503, 503, 200])
    unit.start()
    said = Said()
    assert prove(unit, say=said)["probes"] >= 6
    assert any("Connection refused" in text for text in said)
    assert any("503" in text for text in said)


def test_one_200_among_others_is_not_health(unit: FakeUnit, statuses: list[int]) -> None:
    unit.set(health=[200, 503, 200, 503, 200])
    unit.start()
    prove(unit)
    assert statuses == [200, 503, 200, 503, 200, 200, 200]  # two in a row, and one after the soak


def test_one_deadline_by_the_wall_clock(unit: FakeUnit) -> None:
    """C4: every probe hangs; the end is at gate_s, not at probes times their limit."""
    unit.set(health="hang")
    unit.start_and_listen()
    started = time.monotonic()
    refused(unit, "deadline", gate_s=2, probe_s=1.5)
    assert 2 <= time.monotonic() - started < 20


def test_a_probe_longer_than_the_deadline_ends_with_it(unit: FakeUnit) -> None:
    unit.set(health="hang")
    unit.start_and_listen()
    started = time.monotonic()
    refused(unit, "deadline", gate_s=1, probe_s=100)
    assert time.monotonic() - started < 20


def test_one_probe_in_flight_at_a_time(unit: FakeUnit, monkeypatch: pytest.MonkeyPatch) -> None:
    flying: list[int] = []
    real = engine.Worker.health

    def health(self: Any, timeout_s: float) -> Any:
        flying.append(1)
        assert len(flying) == 1
        found = real(self, timeout_s)
        flying.pop()
        return found

    monkeypatch.setattr(engine.Worker, "health", health)
    unit.start()
    assert prove(unit)


def test_proxy_variables_do_not_matter(unit: FakeUnit, monkeypatch: pytest.MonkeyPatch, dead_port: int) -> None:
    """C2."""
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{dead_port}")
    unit.start()
    assert prove(unit)


def test_a_name_is_no_probe_address(unit: FakeUnit) -> None:
    """C3: localhost may be ::1 while the server listens on IPv4."""
    unit.start()
    with pytest.raises(AgentError, match="literal address"):
        prove(unit, worker=unit.worker(host="localhost"))


def test_ipv6_loopback(unit: FakeUnit) -> None:
    unit.set(host="::1")
    unit.start()
    assert prove(unit, worker=unit.worker(host="::1"))
    refused(unit, "deadline", worker=unit.worker(host="127.0.0.1"), gate_s=1)


def test_dead_after_its_200(unit: FakeUnit) -> None:
    unit.restart = False
    unit.set(health=[200, 200, "exit"])
    unit.start()
    reason = refused(unit, "200, then dead", soak_s=5)
    # Its socket goes a moment before it: both are seen, and either may be seen first.
    assert "the server died" in reason or "no longer listens" in reason


def test_a_busy_moment_at_the_end_of_the_soak_is_waited_for(unit: FakeUnit, statuses: list[int]) -> None:
    """C8 again."""
    unit.set(health=[200, 200, 503, 200])
    unit.start()
    prove(unit)
    assert statuses == [200, 200, 503, 200]


def test_health_from_nobody_knows_where_is_not_ours(unit: FakeUnit, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packet filter may carry the port elsewhere: 200, and no socket of this host listens."""
    unit.start_and_listen()
    monkeypatch.setattr(proc, "listener", lambda *_: [])
    assert f"no process of {unit.name} listens" in refused(unit, "deadline", gate_s=5)


def test_health_that_goes_during_the_soak(unit: FakeUnit) -> None:
    unit.set(health=[200, 200, 503])
    unit.start()
    assert "soak" in refused(unit, "200, then dead")


# -- generation


def test_hung_engine_behind_a_green_health(unit: FakeUnit) -> None:
    """C7: refused within the budget."""
    unit.set(chat_delay=120)
    unit.start_and_listen()
    started = time.monotonic()
    assert "generation" in refused(unit, "deadline", gate_s=3, probe_s=1)
    assert time.monotonic() - started < 30


def test_generation_that_works_only_later_is_waited_for(unit: FakeUnit) -> None:
    """C6: green before the warm-up's end."""
    unit.set(chat=503)
    unit.start()

    class Say(Said):
        def __call__(self, text: str, event: str = "info", **fields: Any) -> None:
            super().__call__(text)
            if "generation" in text:
                unit.set(chat="so it is 4")

    say = Say()
    assert prove(unit, say=say)["generation"] == "worker"
    assert any("generation: found status 503" in text for text in say)


def test_wrong_content_is_refused_at_once(unit: FakeUnit) -> None:
    unit.set(chat="!!!!!!!!")
    unit.start()
    reason = refused(unit, "generation")
    assert reason.startswith("generation: found answer '!!!!!!!!'")
    assert GENERATION["expect"] in reason.replace("\\\\", "\\")


def test_refused_key_is_refused_at_once(unit: FakeUnit) -> None:
    unit.set(chat=401)
    unit.start()
    assert refused(unit, "status 401").startswith("generation: ")


def test_death_during_the_generation(unit: FakeUnit) -> None:
    unit.restart = False
    unit.set(chat="exit")
    unit.start()
    refused(unit, "200, then dead")


# -- passports


def test_no_passport(unit: FakeUnit) -> None:
    unit.set(passport=None)
    unit.start()
    reason = refused(unit, "no passport")
    assert f"process {unit.main().pid} " in reason


@pytest.mark.parametrize("title", ["from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5, pipe_handle=7)"])
def test_a_spawned_engine_process_without_passport(unit: FakeUnit, title: str) -> None:
    unit.set(children=[spawned(title)])
    unit.start()
    assert "spawn_main" in refused(unit, "no passport")


def test_a_child_that_comes_and_goes_needs_no_passport(unit: FakeUnit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between fork and exec a child has its parent's command line."""
    monkeypatch.setattr(gate, "SETTLE_S", 60)
    command = spawned()["argv"]
    unit.set(children=[{"argv": [*command[:2], command[2].replace("120", "4")]}])
    unit.start()
    assert prove(unit, consecutive=1, gate_s=60)["passports"] == 1


def test_a_resource_tracker_needs_no_passport(unit: FakeUnit) -> None:
    unit.set(children=[spawned("from multiprocessing.resource_tracker import main;main(4)")])
    unit.start()
    assert prove(unit)["passports"] == 1


def test_wrong_tree_names_both_paths(unit: FakeUnit) -> None:
    """E3: the interpreter imports another tree than the release."""
    unit.set(passport=unit.passport(sglang="/root/sglang/__init__.py", environ="/root/sglang/srt/environ.py"))
    unit.start()
    reason = refused(unit, "wrong tree")
    assert "/root/sglang/__init__.py" in reason
    assert str(unit.release) in reason


def test_a_flag_that_is_parsed_differently(unit: FakeUnit) -> None:
    unit.set(passport=unit.passport(flags={FLAG: False}))
    unit.start()
    assert FLAG in refused(unit, "flag parsed differently")


def test_a_wrong_passport_is_refused_before_health(unit: FakeUnit) -> None:
    unit.set(passport=unit.passport(release="c" * 64), delay=60)
    unit.start()
    refused(unit, f"release {'c' * 64}", gate_s=30)


def test_passport_of_another_state(unit: FakeUnit) -> None:
    unit.set(passport=unit.passport(state="c" * 64))
    unit.start()
    assert STATE in refused(unit, f"runs state {'c' * 64}")


# -- environment and arguments


def test_state_in_the_environment_of_every_python_process(unit: FakeUnit) -> None:
    child = {"argv": [sys.executable, "-c", "import time; time.sleep(120)"], "env": {"DSV4_FLEET_STATE": "c" * 64}}
    unit.set(children=[child])
    unit.start()
    assert STATE in refused(unit, f"DSV4_FLEET_STATE={'c' * 64}")


def test_an_environment_that_was_written_over(unit: FakeUnit) -> None:
    child = {"argv": ["/usr/bin/env", "-i", sys.executable, "-c", "import time; time.sleep(120)"]}
    unit.set(children=[child])
    unit.start()
    assert "SPT_NOENV" in refused(unit, "DSV4_FLEET_STATE=None")


def test_the_state_of_another_script(unit: FakeUnit) -> None:
    unit.environment["DSV4_FLEET_STATE"] = "c" * 64
    unit.start()
    assert f"found DSV4_FLEET_STATE={'c' * 64}, expected '{STATE}'" in refused(unit, "environment of")


def test_a_main_process_without_its_environment(unit: FakeUnit) -> None:
    unit.exec = "exec env -i "
    unit.start()
    assert "DSV4_FLEET_STATE=(absent)" in refused(unit, "environment of")


def test_a_wrong_environment_is_refused_before_health(unit: FakeUnit) -> None:
    unit.environment["SGLANG_DSV4_TRITON_INDEXER"] = "0"
    unit.set(delay=60)
    unit.start()
    refused(unit, "SGLANG_DSV4_TRITON_INDEXER=0, which nobody asked for", gate_s=30)


def test_an_extra_flag_is_named(unit: FakeUnit) -> None:
    """B4: the same or another flag from the unit's EnvironmentFile."""
    unit.environment["SGLANG_DSV4_TRITON_INDEXER"] = "0"
    unit.environment["SGL_FORCE_SHUTDOWN"] = "1"
    unit.environment["SGLANG_API_KEY"] = "hush"
    unit.start()
    reason = refused(unit, "environment of")
    assert "found SGLANG_API_KEY=(secret), which nobody asked for" in reason
    assert "hush" not in reason
    assert "SGLANG_DSV4_TRITON_INDEXER=0, which nobody asked for" in reason
    assert "SGL_FORCE_SHUTDOWN=1, which nobody asked for" in reason


def test_another_value_and_a_missing_variable_are_named(unit: FakeUnit) -> None:
    unit.environment[FLAG] = "0"
    unit.start()
    reason = refused(unit, "environment of", expect=unit.expect(environment={FLAG: "1", "NCCL_DEBUG": "INFO"}))
    assert f"found {FLAG}=0, expected '1'" in reason
    assert "found NCCL_DEBUG=(absent), expected 'INFO'" in reason


def test_secret_variables_are_compared_and_never_shown(unit: FakeUnit) -> None:
    unit.environment["SGLANG_ADMIN"] = "hush-live"
    unit.start()
    secrets = {"api_key": "", "env": {"SGLANG_ADMIN": "hush-live"}}
    assert prove(unit, secrets=secrets)
    reason = refused(unit, "SGLANG_ADMIN", secrets={"api_key": "", "env": {"SGLANG_ADMIN": "hush-sent"}})
    assert "hush" not in reason


def test_other_arguments(unit: FakeUnit) -> None:
    unit.start()
    expect = unit.expect(arguments=["python3", "-m", "sglang.launch_server", "--port", "1"])
    assert "sglang.launch_server" in refused(unit, "arguments", expect=expect)


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        (["/usr/bin/python3", "-m", "s", "--a"], ["python3", "-m", "s", "--a"], True),
        (["python3", "-m", "s"], ["numactl", "-l", "python3", "-m", "s"], True),
        (["/usr/bin/python3", "/opt/serve", "--a"], ["serve", "--a"], True),
        (["python3", "-m", "s", "--a"], ["python3", "-m", "s", "--b"], False),
        (["python3", "-m", "s"], ["python3", "-m", "s", "--a"], False),
        ([], ["python3"], False),
    ],
)
def test_same_command(found: list[str], wanted: list[str], same: bool) -> None:
    assert gate._same_command(found, wanted) is same


# -- baseline


def baseline(unit: FakeUnit, **changed: Any) -> dict[str, Any]:
    return {
        "baseline": True,
        "state": "baseline",
        "environment": {FLAG: "1", "PYTHONPATH": "/root/tree"},
        "arguments": unit.main().cmdline,
        **changed,
    }


@pytest.fixture
def hand_made(unit: FakeUnit) -> FakeUnit:
    unit.set(passport=None)
    unit.environment = {FLAG: "1", "PYTHONPATH": "/root/tree", "NCCL_DEBUG": "INFO"}
    unit.start()
    wait_for(lambda: unit.main().is_python)
    return unit


def test_baseline_is_proved_without_passports(hand_made: FakeUnit) -> None:
    found = prove(hand_made, expect=baseline(hand_made))
    assert found["passports"] == 0
    assert any("baseline" in note for note in found["notes"])


def test_baseline_keeps_secrets_out_of_sight(hand_made: FakeUnit) -> None:
    """Secret values are not recorded at first contact, so they neither count nor show."""
    hand_made.close()
    hand_made.environment["SGLANG_ADMIN_API_KEY"] = "hush"
    hand_made.start()
    wait_for(lambda: hand_made.main().is_python)
    assert prove(hand_made, expect=baseline(hand_made))
    hidden = {"SGLANG_ADMIN_API_KEY": "other hush", FLAG: "1", "PYTHONPATH": "/root/tree"}
    assert "hush" not in refused(hand_made, "SGLANG_ADMIN_API_KEY", expect=baseline(hand_made, environment=hidden))


def test_baseline_of_a_worker_on_which_nothing_ran(hand_made: FakeUnit) -> None:
    found = prove(hand_made, expect=baseline(hand_made, environment=None, arguments=None))
    assert any("nothing ran at first contact" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"environment": {FLAG: "1"}}, "PYTHONPATH=/root/tree, which nobody asked for"),
        ({"environment": {FLAG: "0", "PYTHONPATH": "/root/tree"}}, f"found {FLAG}=1, expected '0'"),
        ({"arguments": ["python3", "-m", "sglang.launch_server"]}, "sglang.launch_server"),
    ],
)
def test_baseline_that_differs(hand_made: FakeUnit, changed: dict[str, Any], words: str) -> None:
    assert words in refused(hand_made, "baseline", expect=baseline(hand_made, **changed))


# -- prefill and decode


@pytest.fixture
def prefill() -> Iterator[Engine]:
    one = Engine()
    yield one
    one.close()


def test_decode_worker_generates_with_a_prefill_from_its_router(
    unit: FakeUnit, prefill: Engine, fake_router: Callable[[], FakeRouter]
) -> None:
    listing = fake_router()
    listing.add("http://127.0.0.1:1", "prefill", healthy=False, bootstrap_port=1)
    listing.add(prefill.url, "prefill", bootstrap_port=8998)
    unit.start()
    worker = unit.worker(role="decode", routers=[{"url": listing.url, "metrics_url": None}])
    assert prove(unit, worker=worker)["generation"] == f"pair with {prefill.url}"
    (sent,) = [one.json() for one in prefill.requests if one.path == "/v1/chat/completions"]
    assert (sent["bootstrap_host"], sent["bootstrap_port"]) == ("127.0.0.1", 8998)
    assert 0 < sent["bootstrap_room"] < 2**63


def test_prefill_worker_generates_with_a_decode_from_its_router(
    unit: FakeUnit, prefill: Engine, fake_router: Callable[[], FakeRouter]
) -> None:
    listing = fake_router()
    listing.add(prefill.url, "decode")
    unit.start()
    unit.set(chat="what the prefill says does not count")
    worker = unit.worker(role="prefill", bootstrap_port=8998, routers=[{"url": listing.url, "metrics_url": None}])
    assert prove(unit, worker=worker)["generation"] == f"pair with {prefill.url}"


@pytest.mark.parametrize("declared", [False, True])
def test_without_a_peer_the_result_says_so(unit: FakeUnit, fake_router: Callable[[], FakeRouter], declared: bool) -> None:
    unit.start()
    routers = [{"url": fake_router().url, "metrics_url": None}] if declared else []
    found = prove(unit, worker=unit.worker(role="decode", routers=routers))
    assert (found["generation"], found["generation_ms"]) == ("health", None)
    why = "has no healthy prefill worker" if declared else "no router is declared"
    assert any("no end-to-end generation" in note and why in note for note in found["notes"])
