"""The life cycle: every end state, and what must be true of the host at each."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agent import paths, python_env, states, transaction
from agent.errors import AgentError
from agent.journal import Transaction

from tests.unit.agent.made_up import UNIT, MadeUpHost


def test_first_change_is_applied_in_the_order_of_the_life_cycle(host: MadeUpHost) -> None:
    target = host.target("a")
    result = host.change(target, overrides={"ge_diff": {"value": True}})
    short = target["state"][:8]
    assert (result["end_state"], result["failed"], result["error"]) == ("applied", False, None)
    assert [line for line in host.log if line.split()[0] in ("drain", "stop", "start", "gate", "admit")] == [
        "drain", "stop", f"start {short}", f"gate {short}", "admit",
    ]  # fmt: skip
    assert result["state"] == {"before": "baseline", "wanted": target["state"], "now": target["state"]}
    assert result["changed"] == ["release", "script", "unit", "restart", "overrides"]
    assert host.script.read_text() == target["script"] and os.stat(host.script).st_mode & 0o777 == 0o755
    assert host.unit_path.read_text() == target["unit"]
    assert [one["state"] for one in host.ledger()["proved"]] == ["baseline", target["state"]]
    assert host.ledger()["overrides"] == {"ge_diff": {"value": True}}
    assert host.listed() and not host.leftovers()
    assert [step["step"] for step in result["timeline"]] == [
        "stage",
        "drain",
        "switch",
        "stop",
        "start",
        "gate",
        "admit",
    ]


def test_second_run_changes_nothing_and_restarts_nothing(host: MadeUpHost) -> None:
    target = host.target("a")
    host.change(target)
    pid = host.pid
    host.log.clear()
    result = host.change(target)
    assert (result["end_state"], result["failed"], result["changed"]) == ("unchanged", False, [])
    assert host.pid == pid and "drain" not in host.log and "stop" not in host.log


def test_overrides_are_written_without_a_restart_when_the_target_runs(host: MadeUpHost) -> None:
    target = host.target("a")
    host.change(target)
    pid = host.pid
    result = host.change(target, overrides={"canary": {"value": False}})
    assert (result["end_state"], result["changed"]) == ("applied", ["overrides"])
    assert host.pid == pid and host.ledger()["overrides"] == {"canary": {"value": False}}


def test_a_live_target_that_is_not_listed_is_admitted_without_a_restart(host: MadeUpHost) -> None:
    target = host.target("a")
    host.change(target)
    pid, host.router.listed = host.pid, []
    result = host.change(target)
    assert (result["end_state"], result["changed"]) == ("applied", ["admit"])
    assert host.pid == pid and host.listed()


@pytest.mark.parametrize("drift", ["text", "mode", "gone"])
def test_a_drifted_script_under_the_right_process_is_put_back_without_a_restart(host: MadeUpHost, drift: str) -> None:
    target = host.target("a")
    host.change(target)
    pid = host.pid
    if drift == "text":
        host.script.write_text("#!/bin/bash\nexec something else\n")
    elif drift == "mode":
        host.script.chmod(0o644)
    else:
        host.script.unlink()
    result = host.change(target)
    assert (result["end_state"], result["changed"], host.pid) == ("applied", ["script"], pid)
    assert host.script.read_text() == target["script"] and os.stat(host.script).st_mode & 0o777 == 0o755


def test_a_drifted_unit_file_is_put_back_with_a_restart(host: MadeUpHost) -> None:
    target = host.target("a")
    host.change(target)
    pid = host.pid
    host.unit_path.write_text(target["unit"].replace("mixed", "process"))
    host.daemon_reload()
    result = host.change(target)
    assert result["changed"] == ["unit", "restart"] and host.pid != pid
    assert host.unit_path.read_text() == target["unit"]


def test_a_sick_process_of_the_right_state_is_restarted(host: MadeUpHost) -> None:
    target = host.target("a")
    host.change(target)
    pid, host.sick = host.pid, True
    result = host.change(target)
    assert result["end_state"] == "applied" and host.pid != pid
    assert any("did not prove it" in note for note in result["notes"])


def test_restart_is_done_when_asked_for(host: MadeUpHost) -> None:
    target = host.target("a")
    host.change(target)
    pid = host.pid
    assert host.change(target, restart=True)["changed"] == ["restart"] and host.pid != pid


def test_a_hung_server_that_never_gets_idle_can_still_be_replaced(host: MadeUpHost) -> None:
    host.change(host.target("a"))
    host.sick = host.drain_fails = True
    result = host.change(host.target("b"))
    assert result["end_state"] == "applied"
    assert any("is not healthy" in note for note in result["notes"])


def test_a_unit_file_that_systemd_has_not_read_is_a_reason_to_restart(host: MadeUpHost) -> None:
    target = host.target("a")
    host.change(target)
    pid, host.loaded_unit = host.pid, host.loaded_unit + "# what systemd still knows\n"
    assert host.change(target)["changed"] == ["restart"] and host.pid != pid
    assert host.loaded_unit == target["unit"]


# --- failures before the switch ---


def test_refused_drain_leaves_the_worker_admitted_and_unchanged(host: MadeUpHost) -> None:
    host.drain_fails = True
    before, pid = host.script.read_bytes(), host.pid
    result = host.change(host.target("a"))
    assert (result["end_state"], result["failed"], result["failed_step"]) == ("unchanged", True, "drain")
    assert host.script.read_bytes() == before and host.pid == pid and host.listed() and not host.leftovers()


def test_router_lost_before_the_switch_leaves_everything(host: MadeUpHost) -> None:
    host.router.reachable = False
    before, pid = host.script.read_bytes(), host.pid
    result = host.change(host.target("a"))
    assert (result["end_state"], result["failed"]) == ("unchanged", True)
    assert host.script.read_bytes() == before and host.pid == pid and "stop" not in host.log


def test_a_masked_unit_is_refused_at_once(host: MadeUpHost) -> None:
    host.masked = True
    result = host.change(host.target("a"))
    assert result["end_state"] == "unchanged" and "masked" in result["error"] and "drain" not in host.log


def test_a_tree_that_changed_since_inspect_is_refused(host: MadeUpHost) -> None:
    target = host.target("a")
    (host.tree / "sglang/srt/environ.py").write_text("WHO = 'else'\n")
    result = host.change(target)
    assert result["end_state"] == "unchanged" and "The tree changed" in result["error"]
    assert not [name for name in os.listdir(paths.RELEASES)], "nothing half staged is left"


def test_drop_ins_that_changed_since_inspect_are_refused(host: MadeUpHost) -> None:
    target = host.target("a")
    host.drop_ins = [{"path": "/etc/systemd/system/x.conf", "text": "[Service]\n"}]
    result = host.change(target)
    assert result["end_state"] == "unchanged" and "Drop-ins changed" in result["error"]


def resealed(target: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """The target with another text in its script, under its right state."""
    body = target["script"].replace(old, new)
    state = states.state_of(body.encode())
    return {**target, "script": body.replace(target["state"], state), "state": state}


def test_a_python_environment_that_changed_since_inspect_is_refused(host: MadeUpHost) -> None:
    line = "export WORD=a\n"
    found = python_env.look("python3")["fingerprint"]
    good = resealed(host.target("a"), line, f"{line}export DSV4_FLEET_PYTHON={found}\n")
    result = host.change(resealed(host.target("a"), line, f"{line}export DSV4_FLEET_PYTHON={'0' * 64}\n"))
    assert result["end_state"] == "unchanged" and "What is installed changed" in result["error"]
    assert host.change(good)["end_state"] == "applied"


def test_a_script_that_does_not_end_in_exec_is_refused(host: MadeUpHost) -> None:
    result = host.change(resealed(host.target("a"), "exec python3 -m server\n", "python3 -m server\n"))
    assert result["end_state"] == "unchanged" and "exec" in result["error"]


def test_secrets_that_are_not_those_of_the_script_are_refused(host: MadeUpHost) -> None:
    result = host.change(host.target("a"), secrets={"env": {"HF_TOKEN": "hunter2hunter2"}, "host_key": "ab" * 32})
    assert result["end_state"] == "unchanged" and "secrets: found digest" in result["error"]
    assert "hunter2" not in json.dumps(result)


# --- failures after the switch ---


def test_a_failed_gate_brings_the_last_proved_state_back_and_fails(host: MadeUpHost) -> None:
    good, bad = host.target("good"), host.target("bad")
    host.change(good, overrides={"kept": {}})
    host.bad_states.add(bad["state"])
    result = host.change(bad, overrides={"new": {}})
    assert (result["end_state"], result["failed"], result["failed_step"]) == ("rolled_back", True, "gate")
    assert host.live() == good["state"] and host.listed() and host.script.read_text() == good["script"]
    assert Path(result["evidence"], "journal.txt").exists()
    assert host.ledger()["overrides"] == {"kept": {}} and bad["state"] in host.ledger()["refused"]
    assert not host.leftovers()


def test_a_state_that_failed_its_gate_is_refused_until_it_is_asked_for_again(host: MadeUpHost) -> None:
    bad = host.target("bad")
    host.bad_states.add(bad["state"])
    host.change(bad)
    with pytest.raises(AgentError, match="failed its gate here"):
        host.change(bad)
    host.bad_states.clear()
    assert host.change(bad, retry_refused=True)["end_state"] == "applied"
    assert host.ledger()["refused"] == {}


def test_the_first_rollback_goes_back_to_the_hand_made_state_byte_for_byte(host: MadeUpHost) -> None:
    script, unit = host.script.read_bytes(), host.unit_path.read_bytes()
    bad = host.target("bad")
    host.bad_states.add(bad["state"])
    result = host.change(bad)
    assert result["end_state"] == "rolled_back" and host.live() == "baseline"
    assert host.script.read_bytes() == script and os.stat(host.script).st_mode & 0o777 == 0o750
    assert host.unit_path.read_bytes() == unit


def test_a_link_is_replaced_by_a_file_and_restored_as_a_link(host: MadeUpHost) -> None:
    elsewhere = host.directory / "shared.sh"
    os.rename(host.script, elsewhere)
    host.script.symlink_to("shared.sh")
    before = elsewhere.read_bytes()
    good = host.target("good")
    host.change(good)
    assert not host.script.is_symlink() and elsewhere.read_bytes() == before
    result = host.change({"state": "baseline"})
    assert result["end_state"] == "applied" and host.live() == "baseline"
    assert os.readlink(host.script) == "shared.sh" and elsewhere.read_bytes() == before


def test_the_baseline_is_recorded_once_and_never_replaced(host: MadeUpHost) -> None:
    pristine = host.script.read_bytes()
    for word in ("a", "b", "c"):
        host.change(host.target(word))
    assert Path(paths.worker(UNIT), "baseline/script").read_bytes() == pristine
    assert host.change({"state": "baseline"})["end_state"] == "applied"
    assert host.script.read_bytes() == pristine


def test_when_going_back_fails_too_the_worker_is_drained(host: MadeUpHost) -> None:
    bad = host.target("bad")
    host.bad_states |= {bad["state"], "baseline"}
    result = host.change(bad)
    assert (result["end_state"], result["failed"]) == ("drained", True)
    assert not host.active and UNIT not in host.enabled and not host.listed()
    assert host.ledger()["last"]["end_state"] == "drained"


def test_a_drained_worker_needs_a_persons_word_and_is_enabled_again_by_a_good_change(host: MadeUpHost) -> None:
    bad, good = host.target("bad"), host.target("good")
    host.bad_states |= {bad["state"], "baseline"}
    host.change(bad)
    with pytest.raises(AgentError, match="acknowledge"):
        host.change(good)
    result = host.change(good, acknowledge=True)
    assert result["end_state"] == "applied" and UNIT in host.enabled and host.listed()
    assert host.change(good)["end_state"] == "unchanged", "an acknowledged end stays acknowledged"


def test_an_old_process_that_stays_is_never_started_beside(host: MadeUpHost) -> None:
    host.stubborn = True
    result = host.change(host.target("a"))
    assert (result["end_state"], result["failed_step"]) == ("drained", "stop")
    assert "still lives" in result["error"] and "listens on port 30002" in result["error"]
    assert not any(line.startswith("start") for line in host.log) and host.log.count("stop") == 1, "no rollback loop"


def test_gpu_memory_held_by_the_old_tree_is_named_and_nothing_is_started(host: MadeUpHost) -> None:
    host.gpu = [(host.pid, 100_000)]
    result = host.change(host.target("a"))
    assert result["end_state"] == "drained" and f"process {host.gpu[0][0]} holds 100000 MiB" in result["error"]
    assert not any(line.startswith("start") for line in host.log)


def test_a_forced_kill_is_reported(host: MadeUpHost) -> None:
    host.slow_stop = True
    result = host.change(host.target("a"))
    assert result["end_state"] == "applied" and "kill" in host.log
    assert any("forced kill" in note for note in result["notes"])


def test_preserve_leaves_the_failed_server_running_out_of_the_routers(host: MadeUpHost) -> None:
    bad = host.target("bad")
    host.bad_states.add(bad["state"])
    result = host.change(bad, preserve=True)
    assert result["end_state"] == "drained" and host.live() == bad["state"] and not host.listed()
    assert UNIT not in host.enabled and Path(result["evidence"]).is_dir()


def test_router_lost_between_drain_and_admit_ends_drained_without_another_restart(
    host: MadeUpHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_arguments: object) -> list[str]:
        host.router.reachable = False
        host.router.workers()
        return []

    monkeypatch.setattr(host, "_admit", lost)
    result = host.change(host.target("a"))
    assert (result["end_state"], result["failed_step"]) == ("drained", "admit")
    assert sum(line.startswith("start") for line in host.log) == 1 and not host.active
    assert host.ledger()["refused"] == {}, "its gate it had passed"


def test_a_new_worker_whose_first_state_fails_ends_drained_with_nothing_left(host: MadeUpHost) -> None:
    host.stop(UNIT, 1, lambda: True)
    host.script.unlink()
    host.unit_path.unlink()
    host.enabled.clear()
    host.router.listed = []
    bad = host.target("bad")
    host.bad_states.add(bad["state"])
    result = host.change(bad)
    assert result["end_state"] == "drained" and not host.active
    assert not host.script.exists() and not host.unit_path.exists()


def test_a_failed_restart_of_the_last_proved_state_does_not_go_back_to_an_older_one(host: MadeUpHost) -> None:
    old, new = host.target("old"), host.target("new")
    host.change(old)
    host.change(new)
    host.bad_states.add(new["state"])
    result = host.change(new, restart=True)
    assert result["end_state"] == "drained" and host.script.read_text() == new["script"]


def test_a_last_proved_state_that_cannot_be_admitted_is_not_restarted_once_more(
    host: MadeUpHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = host.target("a")
    host.change(target)
    host.log.clear()

    def refuses(*_arguments: object) -> list[str]:
        raise AgentError("a request through the router failed")

    monkeypatch.setattr(host, "_admit", refuses)
    result = host.change(target, restart=True)
    assert (result["end_state"], result["failed_step"]) == ("drained", "admit")
    assert sum(line.startswith(("start", "gate")) for line in host.log) == 2


def test_a_router_that_lists_the_worker_again_meanwhile_is_made_to_forget_it(
    host: MadeUpHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = host.target("bad")
    host.bad_states |= {bad["state"], "baseline"}
    collect = host._collect

    def restarted(*arguments: Any) -> list[str]:
        host.router.add("http://decode1:30002")  # a router that restarts lists its command line's workers again
        return collect(*arguments)

    monkeypatch.setattr(host, "_collect", restarted)
    assert host.change(bad)["end_state"] == "drained" and not host.listed()


def test_rolling_back_to_a_kept_state_proves_it_again(host: MadeUpHost) -> None:
    old, new = host.target("old"), host.target("new")
    host.change(old)
    host.change(new)
    result = host.change({"state": old["state"]}, overrides={})
    assert result["end_state"] == "applied" and host.live() == old["state"]
    assert [one["state"] for one in host.ledger()["proved"]][-2:] == [new["state"], old["state"]]


def test_a_kept_state_whose_release_was_written_into_is_refused(host: MadeUpHost) -> None:
    old = host.target("old")
    host.change(old)
    host.change(host.target("new"))
    Path(paths.release(old["release"]["digest"]), "python/sglang/srt/environ.py").write_text("WHO = 'thief'\n")
    result = host.change({"state": old["state"]})
    assert result["end_state"] == "unchanged" and "found its files changed" in result["error"]


# --- what is said ---


def test_no_secret_reaches_journal_result_or_ledger(host: MadeUpHost) -> None:
    token = "sk-very-secret-1234"
    bad = host.target("bad")
    host.bad_states.add(bad["state"])
    result = host.change(bad, secrets={"api_key": token})  # the made-up gate says the key in its refusal
    assert result["end_state"] == "rolled_back" and "(secret)" in result["error"]
    kept = [path for path in Path(paths.LIB).rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
    assert kept == [] and token not in json.dumps(result)


def test_each_step_is_on_disk_before_it_begins(host: MadeUpHost, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    change = host.begin(host.request(host.target("a")))

    def looking(inner: Callable[..., Any]) -> Callable[..., Any]:
        def look(*arguments: Any) -> Any:
            seen.append(change.transaction.step())
            return inner(*arguments)

        return look

    for name in ("drain", "gate", "admit"):
        setattr(change.tools, name, looking(getattr(change.tools, name)))
    change.run()
    assert seen == ["drain", "gate", "admit"]


def test_the_forward_deadline_ends_a_step_that_hangs(host: MadeUpHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction, "forward_s", lambda limits: 0.5)

    def hangs(*_arguments: object) -> dict[str, object]:
        try:
            time.sleep(30)
        except Exception:  # a step that swallows everything
            time.sleep(30)
        return {}

    change = host.begin(host.request(host.target("a")))
    change.tools.gate = hangs
    original = host._gate
    monkeypatch.setattr(change.ledger, "refuse", lambda *a: setattr(change.tools, "gate", original))
    result = change.run()
    assert result["end_state"] == "rolled_back" and "deadline" in result["error"]


def test_result_and_journal_can_be_read_by_id(host: MadeUpHost) -> None:
    result = host.change(host.target("a"))
    one = Transaction(result["id"])
    assert one.result() == result and one.lines()[-1]["step"] == "done"
