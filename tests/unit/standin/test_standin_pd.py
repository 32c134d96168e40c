"""Prefill and decode: each half needs the other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.unit.standin.standin_process import StandIn, Stream, chunks, free_port, until

Start = Callable[..., StandIn]
BOOTSTRAP = free_port()


@pytest.fixture(scope="module")
def pair(start_for_module: Start) -> tuple[StandIn, StandIn]:
    """A prefill and a decode worker."""
    port = ["--disaggregation-bootstrap-port", str(BOOTSTRAP)]
    prefill = start_for_module("--disaggregation-mode", "prefill", *port)
    decode = start_for_module("--disaggregation-mode", "decode")
    return prefill.wait_healthy(), decode.wait_healthy()


def body(word: str, room: int, **more: Any) -> dict[str, Any]:
    """A request as the router sends it to both halves."""
    bootstrap = {"bootstrap_host": "127.0.0.1", "bootstrap_port": BOOTSTRAP, "bootstrap_room": room}
    return {"messages": [{"role": "user", "content": f"Repeat: {word}"}], **bootstrap, **more}


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_both_halves_together_answer(pair: tuple[StandIn, StandIn], first: str) -> None:
    halves = pair if first == "prefill" else pair[::-1]
    # JSON numbers up to 2**63: the router's rooms are that large.
    room = 2**63 - 25 if first == "prefill" else 7
    with ThreadPoolExecutor(2) as pool:
        earlier = pool.submit(halves[0].post, "/v1/chat/completions", body("Reh-51", room))
        until("the first half to wait", lambda: waiting(halves[0]))
        later = pool.submit(halves[1].post, "/v1/chat/completions", body("Reh-51", room))
        answers = {first: earlier.result()}
        answers["decode" if first == "prefill" else "prefill"] = later.result()
    assert {name: answer.status_code for name, answer in answers.items()} == {"prefill": 200, "decode": 200}
    assert answers["decode"].json()["choices"][0]["message"]["content"] == "Reh-51"
    assert answers["prefill"].json()["usage"]["completion_tokens"] == 1
    assert not any(waiting(half) for half in pair)


def waiting(half: StandIn) -> bool:
    """Whether it holds a request that waits for its other half."""
    section = half.load("disagg")["disaggregation"]
    return bool(section["prefill_inflight_queue_reqs"] + section["decode_transfer_queue_reqs"])


def test_a_prefill_that_waits_to_be_fetched_is_in_neither_total(pair: tuple[StandIn, StandIn]) -> None:
    prefill, _ = pair
    stream = Stream(prefill, body("alone", 8))
    until("a request in flight", lambda: waiting(prefill))
    load = prefill.load()
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0)
    prefill.post("/abort_request", {"abort_all": True})
    assert chunks(stream.result())[-1]["choices"][0]["finish_reason"] == "abort"
    stream.close()


def test_a_half_alone_without_a_room_is_refused(pair: tuple[StandIn, StandIn]) -> None:
    for half in pair:
        answer = half.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Repeat: x"}]})
        assert answer.status_code == 400
        assert "bootstrap room id" in answer.json()["error"]["message"]


def test_a_decode_without_its_prefill_fails(pair: tuple[StandIn, StandIn]) -> None:
    _, decode = pair
    nowhere = {**body("x", 9), "bootstrap_port": free_port()}
    for answer in (
        decode.post("/v1/chat/completions", nowhere),
        decode.post("/v1/chat/completions", {**nowhere, "stream": True}),
    ):
        assert answer.status_code == 500
        assert "transfer failed" in answer.json()["error"]["message"]


def test_the_fake_bootstrap_host_needs_no_prefill_and_proves_no_content(pair: tuple[StandIn, StandIn]) -> None:
    _, decode = pair
    answer = decode.post("/v1/chat/completions", body("Reh-52", 0, bootstrap_host="2.2.2.2", max_tokens=8))
    assert answer.status_code == 200
    content = answer.json()["choices"][0]["message"]["content"]
    assert content and "Reh-52" not in content
