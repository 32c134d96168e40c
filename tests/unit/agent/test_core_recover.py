"""An agent that dies at any point: what recovery makes of it at once, and at the next boot."""

from __future__ import annotations

import pytest
from agent import boot_unit, paths, recover
from agent.errors import AgentError
from agent.journal import Transaction
from agent.transaction import Change

from tests.unit.agent.made_up import UNIT, Killed, MadeUpHost

POINTS = ["drain", "drained", "stop", "start", "gate", "admit"]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("first", [True, False], ids=["first contact", "with a proved state"])
def test_a_dead_agent_leaves_the_last_proved_state_serving(host: MadeUpHost, point: str, first: bool) -> None:
    last = "baseline"
    if not first:
        good = host.target("good")
        host.change(good)
        last = good["state"]
    before = host.script.read_bytes()
    pid = host.pid
    identity = host.die(host.target("new"), point)
    result = recover.after_stop(identity, host.tools())
    assert result is not None and (result["end_state"], result["failed"]) == ("interrupted", True)
    assert host.live() == last and host.script.read_bytes() == before and host.listed() and UNIT in host.enabled
    assert not host.leftovers() and Transaction(identity).result() == result
    assert (host.pid == pid) == (point in ("drain", "drained", "stop")), "restarted only if it had been stopped"
    with pytest.raises(AgentError, match="acknowledge"):
        host.change(host.target("new"))
    assert host.change(host.target("new"), acknowledge=True)["end_state"] == "applied"


def test_before_the_switch_a_script_that_somebody_changed_is_left_as_it_is(host: MadeUpHost) -> None:
    host.change(host.target("good"))
    host.script.write_text("#!/bin/bash\n# drifted\nexec python3 -m server\n")
    pid = host.pid
    identity = host.die(host.target("new"), "drained")
    result = recover.after_stop(identity, host.tools())
    assert result is not None and result["end_state"] == "interrupted" and host.listed()
    assert "# drifted" in host.script.read_text() and host.pid == pid


@pytest.mark.parametrize("point", POINTS)
def test_after_a_reboot_the_last_proved_script_is_there_before_the_worker_starts(host: MadeUpHost, point: str) -> None:
    good = host.target("good")
    host.change(good)
    identity = host.die(host.target("new"), point)
    host.reboot()
    host.log.clear()
    (result,) = recover.at_boot(host.tools())
    assert (result["id"], result["end_state"]) == (identity, "interrupted")
    assert host.script.read_text() == good["script"] and host.unit_path.read_text() == good["unit"]
    assert host.log == [], "nothing is started, stopped or admitted then"
    assert recover.at_boot(host.tools()) == []


def test_recovery_that_fails_drains_the_worker(host: MadeUpHost) -> None:
    identity = host.die(host.target("new"), "gate")
    host.bad_states.add("baseline")
    result = recover.after_stop(identity, host.tools())
    assert result is not None and result["end_state"] == "drained"
    assert not host.active and not host.listed() and UNIT not in host.enabled


def test_a_finished_transaction_is_left_alone(host: MadeUpHost) -> None:
    result = host.change(host.target("a"))
    host.log.clear()
    assert recover.after_stop(result["id"], host.tools()) is None and host.log == []


def test_while_the_host_goes_down_only_files_are_put_back(host: MadeUpHost) -> None:
    before = host.script.read_bytes()
    identity = host.die(host.target("new"), "gate")
    host.going_down = True
    host.log.clear()
    assert recover.after_stop(identity, host.tools()) is None
    assert host.script.read_bytes() == before and host.log == [] and Transaction(identity).result() is None
    host.reboot()
    assert recover.at_boot(host.tools())[0]["end_state"] == "interrupted"


def test_a_crash_between_decision_and_answer_keeps_the_decision(host: MadeUpHost, monkeypatch: pytest.MonkeyPatch) -> None:
    target = host.target("a")
    change = host.begin(host.request(target))

    def dies() -> None:
        raise Killed

    monkeypatch.setattr(change.transaction, "give", dies)
    with pytest.raises(Killed):
        change.run()
    host.log.clear()
    assert recover.after_stop(change.transaction.id, host.tools()) is None
    result = Transaction(change.transaction.id).result()
    assert result is not None and (result["end_state"], result["failed"]) == ("applied", False) and host.log == []
    assert not host.leftovers() and host.change(target)["end_state"] == "unchanged"


def test_a_crash_before_the_ledger_was_written_is_an_interruption(host: MadeUpHost, monkeypatch: pytest.MonkeyPatch) -> None:
    change = host.begin(host.request(host.target("a")))

    def dies(_result: object) -> None:
        raise Killed

    monkeypatch.setattr(change.transaction, "decide", dies)
    with pytest.raises(Killed):
        change.run()
    result = recover.after_stop(change.transaction.id, host.tools())
    assert result is not None and result["end_state"] == "interrupted" and host.live() == "baseline"


def test_a_transaction_that_never_began_does_not_stand_in_the_way(host: MadeUpHost) -> None:
    change = host.begin(host.request(host.target("a")))
    result = host.change(host.target("b"))
    assert result["end_state"] == "applied"
    old = change.transaction.result()
    assert old is not None and (old["end_state"], old["failed"]) == ("unchanged", True)


def test_a_dead_transaction_needs_a_persons_word_and_is_repaired_before_the_next(host: MadeUpHost) -> None:
    good, new = host.target("good"), host.target("new")
    host.change(good)
    identity = host.die(new, "start")
    with pytest.raises(AgentError, match="dead in step start"):
        host.change(new)
    assert host.change(new, acknowledge=True)["end_state"] == "applied"
    result = Transaction(identity).result()
    assert result is not None and result["end_state"] == "interrupted"


def test_recovery_can_die_and_be_done_again(host: MadeUpHost) -> None:
    before = host.script.read_bytes()
    identity = host.die(host.target("new"), "start")
    host.kill_at = "admit"
    with pytest.raises(Killed):
        recover.after_stop(identity, host.tools())
    result = recover.after_stop(identity, host.tools())
    assert result is not None and result["end_state"] == "interrupted"
    assert host.script.read_bytes() == before and host.live() == "baseline" and host.listed()


def test_the_boot_unit_is_ordered_before_every_worker_and_runs_a_copy_of_its_own(host: MadeUpHost) -> None:
    host.change(host.target("a"))
    text = (host.unit_path.parent / paths.RECOVER_UNIT).read_text()
    assert f"Before={UNIT}\n" in text and f"{paths.PROGRAM} recover --boot" in text
    assert paths.RECOVER_UNIT in host.enabled
    with open(paths.PROGRAM, "rb") as file:
        assert file.read() == b"program"
    assert "Before=a.service b.service\n" in boot_unit.unit_text(["a.service", "b.service"])


def test_by_hand_the_boot_unit_touches_nothing_that_runs(host: MadeUpHost) -> None:
    change = host.begin(host.request(host.target("a")))
    host.agent = ("active", f"dsv4-fleet transaction {change.transaction.id}")
    assert recover.at_boot(host.tools()) == [] and change.transaction.result() is None


def test_a_rolled_back_transaction_that_dies_while_going_back_is_still_repaired(host: MadeUpHost) -> None:
    good, bad = host.target("good"), host.target("bad")
    host.change(good)
    host.bad_states.add(bad["state"])
    change: Change = host.begin(host.request(bad))
    inner = change._bring_back

    def dies(state: object) -> None:
        raise Killed

    change._bring_back = dies  # type: ignore[method-assign]  # the agent dies there
    with pytest.raises(Killed):
        change.run()
    assert inner is not None and bad["state"] in host.ledger()["refused"]
    result = recover.after_stop(change.transaction.id, host.tools())
    assert result is not None and result["end_state"] == "interrupted" and host.live() == good["state"]
