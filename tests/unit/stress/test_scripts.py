"""Sessions are made from seeds alone and never share a nonce."""

from __future__ import annotations

import json

from dsv4_fleet.stress.answer import Answer, Call
from dsv4_fleet.stress.classify import CLEAN, classify
from dsv4_fleet.stress.scripts import NONCE, SCHEMAS, is_whole, request, session


def test_a_session_is_made_again_from_its_seed() -> None:
    assert session(3, "w1", 7) == session(3, "w1", 7)
    assert session(3, "w1", 7) != session(4, "w1", 7)


def test_both_arms_have_the_same_scripts_with_other_nonces() -> None:
    for index in range(20):
        one, other = session(1, "w1", index), session(1, "w2", index)
        assert one.script == other.script
        assert not one.nonces & other.nonces
        assert [(turn.long, turn.stream) for turn in one.turns] == [(turn.long, turn.stream) for turn in other.turns]


def test_no_two_sessions_share_a_nonce_and_each_prompt_begins_with_its_own() -> None:
    sessions = [session(1, worker, index) for worker in ("w1", "w2") for index in range(100)]
    seen = [nonce for item in sessions for nonce in item.nonces]
    assert len(set(seen)) == len(seen)
    starts = {turn.messages[0]["content"][:14] for item in sessions for turn in item.turns}
    assert len(starts) == len(sessions)
    assert all(is_whole(start) for start in starts)


def test_a_miscopied_nonce_is_told_apart() -> None:
    nonces = sorted(session(1, "w1", 1).nonces)
    wrong = [
        nonce[:at] + ("0" if nonce[at] != "0" else "1") + nonce[at + 1 :] for nonce in nonces for at in range(2, 14)
    ]
    assert sum(is_whole(nonce) for nonce in wrong) < 0.01 * len(wrong)


def test_scripts_are_short_and_long_streamed_and_not_calls_and_texts() -> None:
    turns = [turn for index in range(100) for turn in session(1, "w1", index).turns]
    assert 0.15 < sum(turn.long for turn in turns) / len(turns) < 0.35
    assert 0.6 < sum(turn.stream for turn in turns) / len(turns) < 0.8
    assert {turn.expected.name for turn in turns} == {None, *SCHEMAS}


def test_the_right_answer_to_every_turn_is_clean() -> None:
    for index in range(50):
        item = session(1, "w1", index)
        owners = dict.fromkeys(item.nonces, item.name)
        for turn in item.turns:
            expected = turn.expected
            if expected.name:
                calls = [Call(expected.name, json.dumps(expected.arguments, ensure_ascii=False))]
                answer = Answer(calls=calls, finish="tool_calls")
            else:
                answer = Answer(content=expected.text, finish="stop")
            assert classify(answer, expected, owners, item.name).level == CLEAN


def test_a_turn_carries_the_whole_history_with_right_answers() -> None:
    item = session(1, "w1", 3)
    body = request(item.turns[2], "model")
    roles = [message["role"] for message in body["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "user", "assistant", "tool", "user"]
    given = json.loads(body["messages"][2]["tool_calls"][0]["function"]["arguments"])
    assert given == item.turns[0].expected.arguments
    assert body["temperature"] == 0
    assert all(
        NONCE.search(message["content"] or "x") or message["role"] == "assistant" for message in body["messages"]
    )
