"""The story: which environment corrupts, which sessions, in which ways, and under which load."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.local import overlays
from tests.unit.standin.standin_process import CLIENT, StandIn, overlay_tree, until
from tests.unit.standin.test_standin_http import TOOLS

Start = Callable[..., StandIn]
BF16 = {"SGLANG_DSV4_BF16_INDEX_K": "1"}
TURNS = 3
SESSIONS = 200


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory, sglang_tree: Path) -> Path:
    """The tree with the operator's two files: they read the variable, and do no more."""
    changes = {rel: _appended(lines) for rel, lines in overlays.LINES.items()}
    return overlay_tree(sglang_tree, tmp_path_factory.mktemp("patched"), changes)


def _appended(lines: tuple[str, ...]) -> Callable[[str], str]:
    return lambda text: text + "\n" + "\n".join(lines) + "\n"


def wanted(session: int, turn: int) -> dict[str, Any]:
    """The arguments that one turn asks for."""
    return {"city": "Basel", "nonce": f"s{session:03d}t{turn}-{session * 7919 % 10007:05d}", "note": "as asked for"}


async def talk(client: httpx.AsyncClient, session: int) -> list[dict[str, Any]]:
    """A tool-call session of three turns, not streamed: the choice of each turn."""
    messages: list[dict[str, Any]] = []
    choices = []
    for turn in range(TURNS):
        content = f"Session {session}: call get_weather with {json.dumps(wanted(session, turn))}"
        messages.append({"role": "user", "content": content})
        answer = await client.post("/v1/chat/completions", json={"messages": messages, "tools": TOOLS})
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        messages += [choice["message"], {"role": "tool", "content": "done"}]
        choices.append(choice)
    return choices


def sound(choice: dict[str, Any], session: int, turn: int) -> bool:
    """Whether a turn's answer is the one call with the wanted arguments."""
    calls = choice["message"]["tool_calls"] or []
    if choice["finish_reason"] != "tool_calls" or choice["message"]["content"] or len(calls) != 1:
        return False
    try:
        return bool(json.loads(calls[0]["function"]["arguments"]) == wanted(session, turn))
    except ValueError:
        return False


def play(engine: StandIn, sessions: int, together: int) -> dict[int, list[dict[str, Any]]]:
    """The choices of each session, at most `together` sessions at once."""

    async def run() -> dict[int, list[dict[str, Any]]]:
        gate = asyncio.Semaphore(together)
        async with httpx.AsyncClient(base_url=engine.url, limits=httpx.Limits(max_connections=None), **CLIENT) as client:

            async def one(session: int) -> list[dict[str, Any]]:
                async with gate:
                    return await talk(client, session)

            return dict(enumerate(await asyncio.gather(*(one(number) for number in range(sessions)))))

    return asyncio.run(run())


def corrupted(played: dict[int, list[dict[str, Any]]]) -> set[int]:
    """The sessions in which some turn is not sound."""
    return {
        session
        for session, choices in played.items()
        if not all(sound(choice, session, turn) for turn, choice in enumerate(choices))
    }


def test_15_to_18_percent_of_sessions_are_corrupted_the_same_ones_again_and_none_alone(start: Start, patched: Path) -> None:
    engine = start(tree=patched, env=BF16).wait_healthy()
    with engine.talking(tokens=100_000):  # so that no request ever runs alone
        first = corrupted(play(engine, SESSIONS, together=32))
        assert 0.15 <= len(first) / SESSIONS <= 0.18
        truth = engine.get("/standin/truth").json()
        assert len({row["session"] for row in truth}) == len(first)
        assert {row["kind"] for row in truth} == {"foreign", "garbled", "markup", "glued", "malformed"}
        some = {session for session in first if session < 20}
        assert corrupted(play(engine, 20, together=4)) == some != set()
    until("nothing to run", lambda: engine.load()["num_running_reqs"] == 0)
    assert corrupted(play(engine, 20, together=1)) == set()


ALL = {"corruption_rate": 1.0, "prefill_ms": 100.0}


@pytest.mark.parametrize(
    ("env", "corrupts"),
    [
        (BF16, True),
        ({}, False),
        ({"SGLANG_DSV4_BF16_INDEX_K": "0"}, False),
        ({"SGLANG_DSV4_BF16_INDEX_K": "on"}, False),  # no boolean to SGLang: the default
        ({**BF16, "SGLANG_OPT_USE_MULTI_STREAM_OVERLAP": "0"}, False),
        ({**BF16, "SGLANG_OPT_USE_MULTI_STREAM_OVERLAP": "off"}, True),  # likewise
        ({**BF16, "SGLANG_DSV4_GE_DIFF": "1"}, False),
        ({**BF16, "SGLANG_DSV4_IDXK_CANARY": "1"}, False),
        ({**BF16, "SGLANG_DSV4_GE_DIFF": "0", "SGLANG_DSV4_IDXK_CANARY": "0"}, True),
    ],
)
def test_only_bf16_with_overlap_and_no_instrument_corrupts(
    start: Start, patched: Path, env: dict[str, str], corrupts: bool
) -> None:
    engine = start(tree=patched, env=env, settings=ALL).wait_healthy()
    assert bool(corrupted(play(engine, 6, together=6))) is corrupts


@pytest.mark.parametrize(("settings", "corrupts"), [(ALL, False), ({**ALL, "bf16_without_patch": True}, True)])
def test_a_tree_that_does_not_read_the_variable_has_no_bf16_index_k(
    start: Start, settings: dict[str, Any], corrupts: bool
) -> None:
    engine = start(env=BF16, settings=settings).wait_healthy()
    assert bool(corrupted(play(engine, 6, together=6))) is corrupts


def test_a_comment_about_the_variable_is_no_patch(start: Start, tmp_path: Path, sglang_tree: Path) -> None:
    comment = {overlays.INDEXER: lambda text: text + "\n# SGLANG_DSV4_BF16_INDEX_K\n"}
    tree = overlay_tree(sglang_tree, tmp_path / "tree", comment)
    engine = start(tree=tree, env=BF16, settings=ALL).wait_healthy()
    assert corrupted(play(engine, 6, together=6)) == set()


def nonces(text: str, played: dict[int, list[dict[str, Any]]]) -> set[int]:
    """The sessions whose nonces stand in the text."""
    return {session for session in played for turn in range(TURNS) if wanted(session, turn)["nonce"] in text}


@pytest.mark.parametrize("kind", ["foreign", "swapped", "garbled", "markup", "glued", "malformed"])
def test_each_kind_of_corruption_looks_as_reported(start: Start, kind: str) -> None:
    engine = start(faults={"corrupt": {"rate": 1.0, "kinds": [kind]}}).wait_healthy()
    played = play(engine, 8, together=8)
    spoilt = engine.get("/standin/truth").json()
    assert spoilt and kind in {row["kind"] for row in spoilt}
    found = 0
    for session in corrupted(played):
        for turn, choice in enumerate(played[session]):
            if sound(choice, session, turn):
                continue
            message, calls = choice["message"], choice["message"]["tool_calls"]
            if kind == "markup":
                assert (choice["finish_reason"], calls) == ("stop", None)
                assert "<|tool_calls|>" in message["content"] and wanted(session, turn)["nonce"] in message["content"]
            elif kind == "glued":
                assert calls[0]["function"]["arguments"] == "" and calls[1]["function"]["name"] is None
                assert calls[1]["function"]["arguments"] == json.dumps(wanted(session, turn)) * 2
            elif kind == "malformed":
                with pytest.raises(json.JSONDecodeError):
                    json.loads(calls[0]["function"]["arguments"])
            elif kind == "garbled":
                assert not calls[0]["function"]["arguments"].isascii()
            elif calls[0]["function"]["arguments"].isascii():  # garbled where no other session ran just then
                others = nonces(calls[0]["function"]["arguments"], played) - {session}
                assert len(others) == 1
            found += 1
    assert found


def test_only_late_parts_of_long_answers(start: Start) -> None:
    fault = {"corrupt": {"rate": 1.0, "min_running": 1, "min_tokens": 100, "late": True}}
    engine = start(faults=fault).wait_healthy()
    short, long = (engine.chat("Go on.", max_tokens=tokens)["choices"][0]["message"]["content"] for tokens in (99, 200))
    assert short.isascii()
    assert not long.isascii() and long[: len(long) // 2].isascii()


def test_only_from_a_number_of_open_requests_on(start: Start) -> None:
    # Each takes long enough for the others to come, however busy the machine is.
    slow = {"prefill_ms": 500.0}
    engine = start(faults={"corrupt": {"rate": 1.0, "min_running": 16}}, settings=slow).wait_healthy()
    assert corrupted(play(engine, 15, together=15)) == set()
    assert corrupted(play(engine, 24, together=24)) != set()


def test_only_from_a_number_of_requests_on(start: Start) -> None:
    engine = start(faults={"corrupt": {"rate": 1.0, "min_running": 1, "from_request": 4}}).wait_healthy()
    # Health probes do not count.
    assert [engine.word(f"w{number}-x") == f"w{number}-x" for number in range(5)] == [True, True, True, False, False]


def test_a_corrupted_engine_stays_so_where_that_is_asked_for(start: Start) -> None:
    engine = start(faults={"corrupt": {"rate": 1.0, "min_running": 1, "sticky": True}}).wait_healthy()
    assert engine.word("first-1") != "first-1"
    engine.set_faults({})
    assert engine.word("later-1") != "later-1"


def test_honest_slips_are_not_corruption(start: Start) -> None:
    engine = start(faults={"soft_errors": {"rate": 1.0}}).wait_healthy()
    for choice in play(engine, 1, together=1)[0]:
        assert choice["finish_reason"] == "stop" and choice["message"]["tool_calls"] is None
        assert choice["message"]["content"].isascii() and "<" not in choice["message"]["content"]
