"""The endpoints of a sound engine, as upstream answers them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.standin.standin_process import CLIENT, StandIn, Stream, chunks, sse, until

Start = Callable[..., StandIn]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"city": {}}}}}
    for name in ("get_time", "get_weather")
]
ARGUMENTS = {"city": "Zürich", "nonce": "k7Qp-31", "deep": {"list": [1, 2.5, None]}}
CALL = f"Call get_weather with {json.dumps(ARGUMENTS)} now."


@pytest.fixture(scope="module")
def engine(start_for_module: Start) -> StandIn:
    """One engine with metrics and no key, shared by the tests that leave it as it was."""
    return start_for_module("--enable-metrics", "--max-running-requests=100").wait_healthy()


def streamed_call(events: list[str]) -> dict[int, dict[str, Any]]:
    """The tool calls put together from a stream's fragments, by index."""
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks(events):
        for choice in chunk["choices"]:
            for call in choice["delta"]["tool_calls"] or []:
                held = calls.setdefault(call["index"], {"id": None, "name": None, "arguments": "", "fragments": 0})
                held["id"] = held["id"] or call["id"]
                held["name"] = held["name"] or call["function"]["name"]
                held["arguments"] += call["function"]["arguments"]
                held["fragments"] += 1
    return calls


@pytest.mark.parametrize("prompt", ["Repeat this word: {}", "Please answer with exactly: '{}'.", "The word is {}, say it"])
def test_it_repeats_what_it_is_asked_to(engine: StandIn, prompt: str) -> None:
    answer = engine.chat(prompt.format("Falke-7421"))
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Falke-7421", "stop")
    assert answer["usage"]["completion_tokens"] > 0


def test_a_stream_says_role_text_finish_and_done(engine: StandIn) -> None:
    body = {"messages": [{"role": "user", "content": "Repeat: one two three"}]}
    events = sse(engine, {**body, "stream_options": {"include_usage": True}})
    assert events[-1] == "[DONE]"
    *parts, usage = chunks(events)
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta["content"] or "" for delta in deltas) == "one two three"
    assert [part["choices"][0]["finish_reason"] for part in parts][-1] == "stop"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(("more", "count"), [({"max_tokens": 17}, 17), ({"max_tokens": 40, "ignore_eos": True}, 40)])
def test_a_talk_is_as_long_as_its_limit(engine: StandIn, more: dict[str, Any], count: int) -> None:
    answer = engine.chat("Tell me something.", **more)
    assert answer["usage"]["completion_tokens"] == count
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_talk_is_as_long_as_it_is_asked_to_be(engine: StandIn) -> None:
    answer = engine.chat("Write about 30 words.", max_tokens=500)
    assert answer["usage"]["completion_tokens"] == 30
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_the_same_question_has_the_same_answer(engine: StandIn) -> None:
    first, again, other = (engine.chat(text, max_tokens=20) for text in ("Tell me.", "Tell me.", "Go on, please."))
    said = [answer["choices"][0]["message"]["content"] for answer in (first, again, other)]
    assert said[0] == said[1] != said[2]


def test_a_tool_call_has_exactly_the_arguments_that_were_named(engine: StandIn) -> None:
    (choice,) = engine.chat(CALL, tools=TOOLS)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS


def test_a_streamed_tool_call_comes_in_fragments(engine: StandIn) -> None:
    events = sse(engine, {"messages": [{"role": "user", "content": CALL}], "tools": TOOLS})
    (call,) = streamed_call(events).values()
    assert call["name"] == "get_weather" and call["id"].startswith("call_")
    assert json.loads(call["arguments"]) == ARGUMENTS
    assert call["fragments"] > 5
    assert chunks(events)[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert events[-1] == "[DONE]"


def test_no_call_without_tools_with_choice_none_or_after_a_tool_result(engine: StandIn) -> None:
    messages = [{"role": "user", "content": CALL}, {"role": "tool", "content": '{"temperature": 3}'}]
    answer = engine.post("/v1/chat/completions", {"messages": messages, "tools": TOOLS}).json()
    for choice in (
        engine.chat(CALL)["choices"][0],
        engine.chat(CALL, tools=TOOLS, tool_choice="none")["choices"][0],
        answer["choices"][0],
    ):
        assert choice["message"]["tool_calls"] is None
        assert choice["finish_reason"] == "stop"


def test_generate_streams_the_text_so_far(engine: StandIn) -> None:
    body = {"text": "Go on.", "sampling_params": {"max_new_tokens": 6}}
    events = sse(engine, body, "/generate")
    texts = [chunk["text"] for chunk in chunks(events)]
    whole = engine.post("/generate", body).json()
    assert events[-1] == "[DONE]"
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert whole["text"] == texts[-1] and len(whole["text"].split()) == 6
    assert whole["meta_info"]["finish_reason"] == {"type": "length", "length": 6}


def test_loads_and_metrics_count_what_runs(engine: StandIn) -> None:
    assert engine.load()["num_running_reqs"] == 0
    with engine.talking(tokens=60_000):
        load = engine.load("all")
        assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (1, 0)
        assert load["disaggregation"]["mode"] == "null"
        assert 'sglang:num_running_reqs{model_name="some/model"' in engine.get("/metrics").text
        running = [line for line in engine.get("/metrics").text.splitlines() if line.startswith("sglang:num_running")]
        assert running[0].endswith(" 1.0")
        assert engine.get("/flush_cache").status_code == 400
    # The client hung up: the engine stops as well.
    until("nothing to run", lambda: engine.load()["num_running_reqs"] == 0)
    assert engine.get("/flush_cache").status_code == 200


def test_an_unknown_section_of_the_loads_is_refused(engine: StandIn) -> None:
    assert engine.get("/v1/loads", params={"include": "core,nonsense"}).status_code == 400


def test_aborting_ends_a_stream_with_that_reason(engine: StandIn) -> None:
    with engine.talking() as stream:
        assert engine.post("/abort_request", {"abort_all": True}).status_code == 200
        events = stream.result()
    assert chunks(events)[-1]["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("body", [{}, {"messages": []}, {"messages": "hi"}, [1]])
def test_a_wrong_body_is_the_callers_error(engine: StandIn, body: Any) -> None:
    answer = engine.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert "expected" in answer.json()["error"]["message"]


def test_what_the_router_asks_for_at_registration(engine: StandIn, sglang_tree: Path) -> None:
    info, model = engine.get("/server_info").json(), engine.get("/model_info").json()
    assert f"'{info['version']}'" in (sglang_tree / "sglang/_version.py").read_text()
    assert info["disaggregation_mode"] == "null" and info["max_running_requests"] == 100 and info["internal_states"]
    assert engine.get("/get_server_info").json().keys() == info.keys()
    assert engine.get("/get_model_info").json() == model
    assert model["model_path"] == "some/model"
    assert engine.get("/v1/models").json()["data"][0]["id"] == "some/model"


async def talk(client: httpx.AsyncClient, number: int) -> tuple[int, bool]:
    """Words of one long streamed answer, and whether it ended as it should."""
    words, ended = 0, False
    body = {"messages": [{"role": "user", "content": f"Talk {number}"}], "max_tokens": 3000, "stream": True}
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith('data: {"id"'):
                words += len((json.loads(line[6:])["choices"][0]["delta"]["content"] or "").split())
            ended = ended or line == "data: [DONE]"
    return words, ended


async def eighty(engine: StandIn) -> tuple[list[tuple[int, bool]], int]:
    """Eighty of them at once, and the most that the engine said to run."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=engine.url, limits=limits, **CLIENT) as client:
        talks = asyncio.gather(*(talk(client, number) for number in range(80)))
        peak = 0
        while not talks.done():
            loads = await client.get("/v1/loads", params={"include": "core"})
            peak = max(peak, loads.json()["loads"][0]["num_running_reqs"])
            await asyncio.sleep(0.2)
        return await talks, peak


def test_eighty_streams_run_together_and_all_end_well(engine: StandIn) -> None:
    talks, peak = asyncio.run(eighty(engine))
    assert peak == 80
    assert set(talks) == {(3000, True)}


def test_more_requests_than_the_limit_wait(start: Start) -> None:
    engine = start("--max-running-requests", "1").wait_healthy()
    with engine.talking() as first:
        second = Stream(engine, {"messages": [{"role": "user", "content": "Repeat: after"}]})
        until("one that waits", lambda: engine.load()["num_waiting_reqs"] == 1)
        assert engine.load()["num_running_reqs"] == 1
        first.close()
        assert second.result()[-1] == "[DONE]"
    second.close()


def test_keys_protect_all_but_health_and_metrics_and_are_never_shown(start: Start, tmp_path: Path) -> None:
    config = tmp_path / "args.yaml"
    config.write_text("api-key: from-config\nadmin-api-key: admin\nserved-model-name: fine\n")
    by_config = start("--config", str(config)).wait_healthy()
    by_argument = start("--api-key=from-argument", "--enable-metrics").wait_healthy()
    assert by_argument.status("/metrics") == 200
    assert by_config.status("/metrics") == 404
    for engine, key in ((by_config, "from-config"), (by_argument, "from-argument")):
        right = {"Authorization": f"Bearer {key}"}
        assert engine.status("/health") == 200
        for path in ("/v1/loads", "/server_info", "/v1/models"):
            assert engine.status(path) == 401
            assert engine.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
            assert engine.get(path, headers=right).status_code == 200
        assert key not in engine.get("/server_info", headers=right).text
        assert key not in engine.text
    assert by_config.get("/v1/models", headers={"Authorization": "Bearer from-config"}).json()["data"][0]["id"] == "fine"
    # With an admin key only that one flushes.
    assert by_config.get("/flush_cache", headers={"Authorization": "Bearer from-config"}).status_code == 401
    assert by_config.get("/flush_cache", headers={"Authorization": "Bearer admin"}).status_code == 200
