"""The agent against real systemd: its death at every step, a reboot, foreign unit names, processes that stay."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.faults import operate
from tests.faults.agent.hand import Hand
from tests.local.fleet import Fleet
from tests.local.podman import podman

HOST = "decode3"
WAIT_S = 240  # for what takes seconds on a machine at rest

# Waits in the container for a step's beginning and kills the agent then: nothing from outside is that quick.
ASSASSIN = """
import glob, os, signal, sys, time
step, program, before, end = sys.argv[1], sys.argv[2], set(glob.glob("/var/lib/dsv4/tx/*")), time.time() + 240
mark = '"step": "%s", "event": "begin"' % step
def agents():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = open("/proc/%s/cmdline" % pid).read().split(chr(0))
        except OSError:
            continue
        if program in words and any(word.endswith("agent.pyz") for word in words):
            yield int(pid)
print("ready", flush=True)
while time.time() < end:
    for path in set(glob.glob("/var/lib/dsv4/tx/*")) - before:
        try:
            text = open(path + "/journal.jsonl").read()
        except OSError:
            continue
        if mark in text:
            for pid in agents():
                os.kill(pid, signal.SIGKILL)
                print("killed", flush=True)
                sys.exit(0)
    time.sleep(0.002)
sys.exit("no such step")
"""


@pytest.fixture(scope="module")
def hand(fleet: Fleet) -> Hand:
    """A worker in the hand-made state."""
    fleet.reset(HOST)
    return Hand(fleet, HOST)


@pytest.fixture(scope="module")
def proved(hand: Hand) -> dict[str, Any]:
    """The worker's last proved state: GE_DIFF on."""
    target = hand.target(hand.inspect(), {"SGLANG_DSV4_GE_DIFF": True})
    result = hand.change(target)
    assert (result["end_state"], result["failed"]) == ("applied", False), result
    return target


@pytest.fixture
def assassin(hand: Hand) -> Iterator[Callable[..., None]]:
    """Kills the agent when a step begins."""
    import subprocess

    from tests.local.podman import environment

    waiting: list[subprocess.Popen[str]] = []

    def hire(step: str, program: str = "run") -> None:
        name = hand.fleet.settings.container(HOST)
        one = subprocess.Popen(
            ["podman", "exec", name, "python3", "-c", ASSASSIN, step, program],
            stdout=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip
        waiting.append(one)
        assert one.stdout is not None and one.stdout.readline() == "ready\n"

    yield hire
    for one in waiting:
        assert one.wait(timeout=250) == 0, "the step never began"


def serves(hand: Hand, state: str | None) -> None:
    """The worker is whole: disk, process, unit and router agree on the state, and nothing is left over."""
    seen = hand.inspect()
    assert seen["process"]["state"] == state and seen["script"]["declared"] == state
    assert (
        seen["unit"]["active"] == "active" and seen["unit"]["file_state"] == "enabled" and not seen["unit"]["need_daemon_reload"]
    )
    deadline = time.monotonic() + WAIT_S
    while not seen["routers"][0]["healthy"] and time.monotonic() < deadline:
        time.sleep(0.5)
        seen = hand.inspect()
    assert seen["routers"][0]["listed"] and seen["routers"][0]["healthy"], seen["routers"]
    assert hand.sh("ls -A /run/dsv4/tx; ls -A /root/sglang-dsv4 | grep dsv4- || :") == ""


def test_a_second_run_restarts_nothing(hand: Hand, proved: dict[str, Any]) -> None:
    pid = hand.main_pid()
    result = hand.change(proved)
    assert (result["end_state"], result["changed"]) == ("unchanged", [])
    assert hand.main_pid() == pid


@pytest.mark.parametrize("step", ["stage", "drain", "switch", "stop", "start", "gate", "admit"])
def test_an_agent_killed_at_a_step_leaves_the_last_proved_state_serving(
    hand: Hand, proved: dict[str, Any], assassin: Callable[..., None], step: str
) -> None:
    other = hand.target(hand.inspect(), {"SGLANG_DSV4_IDXK_CANARY": True})
    assassin(step)
    result, lines = hand.end(hand.start(hand.request(hand.inspect(), other)))
    assert (result["end_state"], result["failed"]) == ("interrupted", True), lines
    serves(hand, proved["state"])
    refused = hand.call(hand.request(hand.inspect(), other, acknowledge=False))
    assert not refused["ok"] and "acknowledge" in refused["error"]
    seen = hand.inspect(fast=True)["transaction"]
    assert seen["result"]["end_state"] == "interrupted" and not seen["running"]


def test_after_a_persons_word_the_same_change_goes_through(hand: Hand, proved: dict[str, Any]) -> None:
    other = hand.target(hand.inspect(), {"SGLANG_DSV4_IDXK_CANARY": True})
    assert hand.change(other)["end_state"] == "applied"
    assert hand.inspect(fast=True)["transaction"] is None
    assert hand.change({"state": proved["state"]})["end_state"] == "applied"
    serves(hand, proved["state"])


def test_when_recovery_is_killed_too_the_next_run_says_so_and_repairs(
    hand: Hand, proved: dict[str, Any], assassin: Callable[..., None]
) -> None:
    other = hand.target(hand.inspect(), {"SGLANG_DSV4_IDXK_CANARY": True})
    assassin("start")
    assassin("rollback", "recover")
    identity = hand.start(hand.request(hand.inspect(), other))
    deadline = time.monotonic() + WAIT_S
    while (answer := hand.follow(identity, 0, 1))["running"]:
        assert time.monotonic() < deadline
    assert answer["result"] is None
    refused = hand.call(hand.request(hand.inspect(), proved, acknowledge=False))
    # It may get a step further before it is killed.
    assert not refused["ok"] and re.search(r"dead in step (rollback|evidence) ", refused["error"]), refused
    assert hand.change(proved)["end_state"] == "applied"
    assert hand.follow(identity)["result"]["end_state"] == "interrupted"
    serves(hand, proved["state"])


def test_a_reboot_between_switch_and_proof_starts_the_last_proved_state(hand: Hand, proved: dict[str, Any]) -> None:
    hand.fleet.fault(HOST, {"start_s": {"seconds": 40, "when_env": {"SGLANG_DSV4_IDXK_CANARY": "1"}}})
    other = hand.target(hand.inspect(), {"SGLANG_DSV4_IDXK_CANARY": True})
    identity = hand.start(hand.request(hand.inspect(), other))
    deadline = time.monotonic() + WAIT_S
    while not any(line["step"] == "gate" for line in hand.follow(identity, 0, 1)["lines"]):
        assert time.monotonic() < deadline
    podman("restart", "--time", "5", hand.fleet.settings.container(HOST))
    deadline = time.monotonic() + WAIT_S
    while hand.sh("systemctl is-system-running", check=False).strip() not in ("running", "degraded"):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert hand.live() == proved["state"], "the state that was never proved did not start"
    assert hand.follow(identity)["result"]["end_state"] == "interrupted"
    assert "Before=" in hand.sh("cat /etc/systemd/system/dsv4-recover.service")
    assert hand.change(proved)["end_state"] == "applied"
    serves(hand, proved["state"])


def test_the_same_change_attaches_and_another_is_refused_while_it_runs(hand: Hand, proved: dict[str, Any]) -> None:
    other = hand.target(hand.inspect(), {"SGLANG_DSV4_IDXK_CANARY": True})
    seen = hand.inspect()
    identity = hand.start(hand.request(seen, other))
    again = hand.call(hand.request(seen, other))
    assert (again["ok"], again["attached"], again["id"]) == (True, True, identity)
    third = hand.call(hand.request(seen, proved))
    assert not third["ok"] and identity in third["error"]
    assert hand.inspect(fast=True)["transaction"]["id"] == identity
    assert hand.end(identity)[0]["end_state"] == "applied"
    once_more = hand.request(seen, other) | {"id": identity}
    assert hand.call(once_more)["attached"], "a request that is sent twice is carried out once"
    assert hand.change({"state": proved["state"]})["end_state"] == "applied"


def test_a_worker_that_changed_since_it_was_inspected_is_left_alone(hand: Hand, proved: dict[str, Any]) -> None:
    seen = hand.inspect()
    hand.sh(f"echo '# a hand' >> {hand.worker()['script']}")
    other = hand.target(seen, {"SGLANG_DSV4_IDXK_CANARY": True})
    answer = hand.call(hand.request(seen, other))
    assert not answer["ok"] and "Somebody changed it" in answer["error"]
    pid = hand.main_pid()
    assert hand.change(proved)["changed"] == ["script"]
    assert hand.main_pid() == pid


def test_a_server_that_ignores_sigterm_is_killed_and_that_is_said(hand: Hand, proved: dict[str, Any]) -> None:
    hand.fleet.fault(HOST, {"ignore_sigterm": {}})
    assert hand.change(proved, restart=True)["end_state"] == "applied"  # the fault holds from its start on
    hand.fleet.fault(HOST, {})
    result = hand.change(proved, restart=True)
    assert result["end_state"] == "applied" and any("forced kill" in note for note in result["notes"]), result["notes"]


def test_an_orphan_that_keeps_the_port_ends_drained_and_nothing_is_started(hand: Hand, proved: dict[str, Any]) -> None:
    hand.fleet.fault(HOST, {"orphan": {"escape_cgroup": True, "seconds": 600}})
    # By hand: our own gate would see the second listener.
    hand.sh(f"systemctl restart {hand.unit}; for i in $(seq 200); do pgrep -f '[o]rphan.py' && exit 0; sleep 0.2; done; exit 1")
    hand.fleet.fault(HOST, {})
    result = hand.change(proved, restart=True, limits={"gone_s": 3})
    assert (result["end_state"], result["failed_step"]) == ("drained", "stop"), result
    assert hand.sh(f"systemctl is-enabled {hand.unit}; systemctl is-active {hand.unit}", check=False).split() == [
        "disabled",
        "inactive",
    ]
    assert HOST not in hand.fleet.router_workers()
    orphan = hand.sh("ss -Hltnp 'sport = :30002' | grep -o 'pid=[0-9]*' | cut -d= -f2").split()[0]
    assert orphan in result["error"]
    hand.sh(f"kill -9 {orphan}")
    assert hand.change(proved)["end_state"] == "applied"
    serves(hand, proved["state"])


@pytest.fixture
def renamed(hand: Hand) -> Iterator[Hand]:
    """A hand-made worker whose unit has another name; it has its own again afterwards."""
    operate.hand_made(hand.fleet, [HOST])
    hand.sh(
        f"cd /etc/systemd/system; systemctl disable {hand.unit}; systemctl stop --no-block {hand.unit}; "
        f"while systemctl show -P MainPID {hand.unit} | grep -qv '^0$'; do sleep 0.2; done; sleep 1; "
        f"systemctl daemon-reload; mv {hand.unit} llm@b.service; systemctl daemon-reload; "
        f"systemctl reset-failed {hand.unit}; systemctl enable --now llm@b.service"
    )
    other = Hand(hand.fleet, HOST, "llm@b.service")
    deadline = time.monotonic() + WAIT_S
    while other.inspect()["health"]["status"] != 200:
        assert time.monotonic() < deadline
    yield other
    operate.disable(hand.fleet, HOST, other.unit)
    hand.sh("rm /etc/systemd/system/llm@b.service; systemctl daemon-reload")
    operate.hand_made(hand.fleet, [HOST])


def test_a_unit_of_another_name_is_switched_restarted_and_rolled_back(renamed: Hand) -> None:
    other = renamed
    target = other.target(other.inspect(), {})
    assert other.change(target)["end_state"] == "applied"
    assert other.live() == target["state"]
    other.fleet.fault(HOST, {"crash_at_start": {"when_env": {"SGLANG_DSV4_GE_DIFF": "1"}}})
    result = other.change(other.target(other.inspect(), {"SGLANG_DSV4_GE_DIFF": True}))
    assert result["end_state"] == "rolled_back", result
    serves(other, target["state"])
    listening = other.sh("ss -Hltnp 'sport = :30002' | grep -o 'pid=[0-9]*' | head -n1 | cut -d= -f2").strip()
    assert int(listening) == other.main_pid()
    assert json.loads(other.sh("cat /var/lib/dsv4/units/llm@b.service/ledger.json"))["last"]["end_state"] == "rolled_back"
