"""Starting: what is refused, what is attached to, and that nothing of a refused request is left."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest
from agent import follow, inspect, paths, start, systemd
from agent.errors import AgentError
from agent.journal import Journal, Transaction
from agent.ledger import Ledger

from tests.unit.agent.made_up import UNIT, MadeUpHost


def call(host: MadeUpHost, request: dict[str, Any]) -> dict[str, Any]:
    return start.start(request, b"program", cast(systemd.Systemd, host))


def test_the_unit_is_started_with_the_kept_program_and_its_own_recovery(host: MadeUpHost) -> None:
    request = host.request(host.target("a"), secrets={"api_key": "sk-secret"})
    answer = call(host, request)
    command, properties = host.launched
    assert Path(answer["program"]).read_bytes() == b"program" and command[1:] == [
        "-I",
        answer["program"],
        "run",
        request["id"],
    ]
    assert any(one.startswith("ExecStopPost=") and one.endswith(f"recover {request['id']}") for one in properties)
    assert "KillMode=process" in properties
    kept = Path(paths.transaction(request["id"]), "request.json").read_text()
    assert "sk-secret" not in kept and "sk-secret" not in " ".join(command)
    assert os.stat(paths.secrets(request["id"])).st_mode & 0o777 == 0o600


def test_a_script_that_changed_since_inspect_is_refused_and_nothing_is_kept(host: MadeUpHost) -> None:
    request = host.request(host.target("a"))
    host.script.write_text("another\n")
    with pytest.raises(AgentError, match="Somebody changed it"):
        call(host, request)
    assert not os.path.exists(paths.transaction(request["id"])) and not host.leftovers() and host.log == []


def test_a_script_that_vanished_or_appeared_is_refused(host: MadeUpHost) -> None:
    request = host.request(host.target("a"))
    host.script.unlink()
    with pytest.raises(AgentError, match="found sha256 None"):
        call(host, request)
    absent = host.request(host.target("a"))
    host.script.write_text("appeared\n")
    with pytest.raises(AgentError, match="expected None"):
        call(host, absent)


def test_the_same_change_attaches_and_another_is_refused(host: MadeUpHost) -> None:
    target = host.target("a")
    first = call(host, host.request(target))
    again = call(host, host.request(target))
    assert (again["attached"], again["id"]) == (True, first["id"]) and again["program"] == first["program"]
    with pytest.raises(AgentError, match=first["id"]):
        call(host, host.request(host.target("b")))
    seen = inspect.look_at_transaction(UNIT, Ledger(UNIT), cast(systemd.Systemd, host))
    assert seen is not None and (seen["id"], seen["running"], seen["target"]) == (first["id"], True, target["state"])


def test_a_request_sent_twice_is_carried_out_once(host: MadeUpHost) -> None:
    request = host.request(host.target("a"))
    change = host.begin(request)
    change.run()
    host.log.clear()
    assert call(host, request)["attached"] is True and host.log == []
    assert follow.follow(request["id"], 0, 0, cast(systemd.Systemd, host))["result"]["end_state"] == "applied"


def test_a_unit_that_could_not_be_started_leaves_nothing(host: MadeUpHost, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_arguments: object) -> None:
        raise AgentError("systemd-run: found exit status 1")

    monkeypatch.setattr(host, "run", fails)
    request = host.request(host.target("a"))
    with pytest.raises(AgentError, match="exit status 1"):
        call(host, request)
    assert not os.path.exists(paths.transaction(request["id"])) and not host.leftovers()


def test_a_state_that_is_not_kept_is_refused(host: MadeUpHost) -> None:
    with pytest.raises(AgentError, match="no such state kept"):
        call(host, host.request({"state": "ab" * 32}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"limits": {}}, "limits.drain_s"),
        ({"id": "../../etc"}, "found id"),
        ({"generation": {"prompt": "x", "expect": "(", "max_tokens": 1}}, "regular expression"),
        ({"target": {"state": "short"}}, "target.state"),
        ({"worker": {}}, "worker."),
    ],
)
def test_a_malformed_request_is_refused(host: MadeUpHost, change: dict[str, Any], said: str) -> None:
    with pytest.raises(AgentError, match=said):
        call(host, {**host.request(host.target("a")), **change})
    assert host.log == [] and not os.path.exists(paths.TRANSACTIONS)


def test_following_gives_lines_from_a_number_on_and_the_result_at_the_end(host: MadeUpHost) -> None:
    change = host.begin(host.request(host.target("a")))
    host.agent = ("active", f"dsv4-fleet transaction {change.transaction.id}")
    nothing = follow.follow(change.transaction.id, 0, 0, cast(systemd.Systemd, host))
    assert nothing == {"lines": [], "next": 0, "running": True, "result": None}
    change.run()
    whole = follow.follow(change.transaction.id, 0, 0, cast(systemd.Systemd, host))
    assert whole["result"]["end_state"] == "applied" and whole["running"] is False
    assert [line["step"] for line in whole["lines"] if line["event"] == "begin"][:3] == ["stage", "drain", "switch"]
    rest = follow.follow(change.transaction.id, whole["next"] - 1, 0, cast(systemd.Systemd, host))
    assert rest["lines"] == whole["lines"][-1:]


def test_following_a_dead_transaction_says_that_nothing_runs(host: MadeUpHost) -> None:
    identity = host.die(host.target("a"), "gate")
    answer = follow.follow(identity, 10_000, 0, cast(systemd.Systemd, host))
    assert answer == {"lines": [], "next": 10_000, "running": False, "result": None}
    assert follow.follow(identity, 0, 0, cast(systemd.Systemd, host))["running"] is False, "whatever there is to read"


def test_a_line_that_a_crash_cut_is_not_shown_and_does_not_spoil_the_next(host: MadeUpHost) -> None:
    identity = host.die(host.target("a"), "gate")
    one = Transaction(identity)
    count = len(one.lines())
    with open(f"{one.directory}/journal.jsonl", "a") as file:
        file.write('{"at": 1, "st')
    assert len(one.lines()) == count
    Journal(one, []).write("info", "after the crash")
    assert [line["text"] for line in one.lines()[count:]] == ["after the crash"]
