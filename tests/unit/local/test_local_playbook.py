"""What a run of a playbook came to: exit status 0 alone is not success."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.local.playbook import Event, Outcome, run_playbook
from tests.local.settings import FleetSettings, LocalError

INVENTORY = """\
here ansible_connection=local ansible_python_interpreter="{{ ansible_playbook_python }}"
gone ansible_host=127.0.0.1 ansible_port=9
"""
PLAY = """\
- hosts: "{{ target }}"
  gather_facts: false
  tasks:
    - name: Said
      ansible.builtin.debug:
        msg: "{{ word }}"
    - name: Judged
      ansible.builtin.assert:
        that: word == 'good'
        fail_msg: "found {{ word }}, expected good"
    - name: Reached
      ansible.builtin.ping:
"""


@pytest.fixture
def play(tmp_path: Path) -> Path:
    (tmp_path / "hosts").write_text(INVENTORY, encoding="utf-8")
    (tmp_path / "play.yml").write_text(PLAY, encoding="utf-8")
    return tmp_path


def run(play: Path, target: str, word: str = "good") -> Outcome:
    return run_playbook(
        FleetSettings(name="unit"), str(play / "play.yml"), inventory=play / "hosts",
        extra_vars={"target": target, "word": word}, timeout=120,
    )  # fmt: skip


def test_a_run_that_went_well(play: Path) -> None:
    outcome = run(play, "here")
    assert outcome.ok and outcome.rc == 0 and outcome.stats["ok"] == {"here": 3}
    said = outcome.results("ansible.builtin.debug")
    assert [(host, result["msg"]) for host, result in said] == [("here", "good")]
    assert outcome.errors == {} and outcome.dsv4 == {}


def test_a_failure_is_told_by_host(play: Path) -> None:
    outcome = run(play, "here", "bad")
    assert not outcome.ok and outcome.rc == 2
    assert outcome.errors == {"here": "found bad, expected good"}


def test_a_lost_host_is_no_success(play: Path) -> None:
    outcome = run(play, "here,gone")
    assert not outcome.ok and outcome.stats["dark"] == {"gone": 1} and list(outcome.errors) == ["gone"]


def test_no_host_is_no_success(play: Path) -> None:
    outcome = run(play, "nobody")
    assert not outcome.ok


def test_status_0_with_nothing_done_is_no_success() -> None:
    assert Outcome(0, "successful", {"ok": {"decode1": 1}}, "", []).ok
    assert not Outcome(0, "successful", {"ok": {}}, "", []).ok
    assert not Outcome(0, "successful", {}, "", []).ok


def test_a_signal_still_interrupts_afterwards(play: Path) -> None:
    """ansible-runner puts handlers of its own in place, which swallow Ctrl-C."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run(play, "here")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_ends_the_run(play: Path) -> None:
    (play / "play.yml").write_text(
        f"- hosts: here\n  gather_facts: false\n  tasks:\n    - ansible.builtin.shell: kill -INT {os.getpid()}; sleep 60\n",
        encoding="utf-8",
    )
    with pytest.raises(KeyboardInterrupt):
        run(play, "here")


def test_a_play_that_is_not_there(play: Path) -> None:
    with pytest.raises(LocalError, match="found no playbook"):
        run_playbook(FleetSettings(name="unit"), "enable-nothing")


def event(kind: str, host: str, res: dict[str, object], action: str = "dsv4.fleet.change") -> Event:
    return {"event": kind, "event_data": {"host": host, "task_action": action, "res": res}}


def test_the_last_result_of_each_worker_counts() -> None:
    events = [
        event("runner_on_start", "decode1", {}),
        event("runner_on_failed", "decode1", {"msg": "x", "dsv4": {"end_state": "rolled_back"}}),
        event("runner_on_ok", "decode1", {"dsv4": {"end_state": "applied"}}),
        event("runner_on_ok", "decode2", {"dsv4": {"end_state": "no"}}, action="dsv4.fleet.inspect"),
        event("runner_on_unreachable", "decode3", {"msg": "lost"}),
    ]
    outcome = Outcome(0, "successful", {"ok": {"decode1": 1}, "dark": {"decode3": 1}}, "", events)
    assert outcome.dsv4 == {"decode1": {"end_state": "applied"}}
    assert outcome.errors == {"decode1": "x", "decode3": "lost"}
    assert not outcome.ok
