"""What a worker's HTTP interface says, and what counts as an answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from agent.engine import ProbeError, Worker
from agent.errors import AgentError

from tests.unit.agent_observation.loopback import Reply, Request, Server, chat_reply

Start = Callable[..., Server]


def worker(server: Server, key: str | None = None) -> Worker:
    return Worker(server.host, server.port, key)


@pytest.mark.parametrize("host", ["localhost", "decode1.example.internal", ""])
def test_only_literal_addresses(host: str) -> None:
    with pytest.raises(AgentError, match="expected a literal address"):
        Worker(host, 1, None)


@pytest.mark.parametrize("status", [200, 204, 302, 503])
def test_health_is_the_status_as_it_is(server: Start, status: int) -> None:
    assert worker(server(lambda _: Reply(status))).health(10) == (status, None)


def test_health_without_an_answer_says_why(dead_port: int) -> None:
    status, error = Worker("127.0.0.1", dead_port, None).health(10)
    assert status is None
    assert "refused" in str(error)


RANK = {"num_running_reqs": 0, "num_waiting_reqs": 0}


@pytest.mark.parametrize(
    ("ranks", "count"),
    [
        ([RANK], 0),
        ([RANK, {**RANK, "num_running_reqs": 3}], 3),
        ([{**RANK, "num_waiting_reqs": 2}], 2),
        ([{**RANK, "disaggregation": {"decode_transfer_queue_reqs": 1, "kv_transfer_latency_ms": 9.0}}], 1),
        ([{**RANK, "disaggregation": {"prefill_inflight_queue_reqs": 1, "prefill_bootstrap_queue_reqs": 1}}], 2),
        # From 0.5.18 on the waiting ones hold the queues already.
        ([{"num_running_reqs": 1, "num_waiting_reqs": 2, "disaggregation": {"decode_prealloc_queue_reqs": 2}}], 3),
        ([{**RANK, "disaggregation": None, "queues": {"retracted": 4}}], 0),
    ],
)  # fmt: skip
def test_loads_count_all_that_runs_or_waits(server: Start, ranks: list[dict[str, Any]], count: int) -> None:
    one = server(lambda _: Reply(json={"loads": ranks}))
    assert worker(one, "k").loads(10) == count
    assert one.requests[0].headers["authorization"] == "Bearer k"


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (Reply(json={"loads": []}), "protocol"),
        (Reply(json={}), "protocol"),
        (Reply(json=[]), "protocol"),
        (Reply(json={"loads": [{"num_running_reqs": 0}]}), "protocol"),
        (Reply(json={"loads": [{"num_running_reqs": 0, "num_waiting_reqs": None}]}), "protocol"),
        (Reply(json={"loads": [7]}), "protocol"),
        (Reply(body=b"<html>"), "protocol"),
        (Reply(404), "status"),
        (Reply(401), "status"),
    ],
)
def test_missing_numbers_are_never_idle(server: Start, reply: Reply, kind: str) -> None:
    with pytest.raises(ProbeError) as caught:
        worker(server(lambda _: reply)).loads(10)
    assert caught.value.kind == kind


def generate(server: Server, expect: str = r"\b4\b", timeout_s: float = 10) -> Any:
    return worker(server, "k").generate("2+2?", expect, 8, timeout_s)


def test_generation_is_one_greedy_request(server: Start) -> None:
    one = server(lambda _: chat_reply("it is 4"))
    found = generate(one)
    assert (found.ok, found.text, found.status, found.error) == (True, "it is 4", 200, None)
    (request,) = one.requests
    assert (request.path, request.headers["authorization"]) == ("/v1/chat/completions", "Bearer k")
    sent = request.json()
    assert sent["messages"] == [{"role": "user", "content": "2+2?"}]
    assert (sent["temperature"], sent["max_tokens"], sent["stream"]) == (0, 8, False)


def test_reasoning_counts_as_content(server: Start) -> None:
    assert generate(server(lambda _: chat_reply(None, reasoning_content="so 4"))).ok


@pytest.mark.parametrize(
    ("reply", "words", "final"),
    [
        (chat_reply("it is 5"), "found answer 'it is 5', expected one that matches", True),
        (chat_reply(""), "expected one that matches", True),
        (Reply(json={"error": {"message": "4"}}), "without an answer", False),
        (Reply(json={"choices": []}), "without an answer", False),
        (Reply(json={"choices": [{"message": {"content": "4"}, "finish_reason": "abort"}]}), "ended as 'abort'", False),
        (Reply(json={"choices": [{"message": {"content": "4"}, "finish_reason": None}]}), "ended as None", False),
        (Reply(body=b"<4>"), "expected JSON", False),
        (Reply(302, headers={"Location": "/"}), "found status 302", False),
        (Reply(503), "found status 503", False),
        (Reply(429), "found status 429", False),
        (Reply(401, body=b"no key"), "found status 401: 'no key'", True),
        (Reply(400), "found status 400", True),
    ],
)
def test_what_is_no_answer(server: Start, reply: Reply, words: str, final: bool) -> None:
    found = generate(server(lambda _: reply))
    assert not found.ok
    assert words in found.error
    assert found.final is final


def test_a_generation_that_never_comes(server: Start) -> None:
    closing = threading.Event()
    found = generate(server(lambda _: Reply(200 if closing.wait(60) else 500)), timeout_s=0.5)
    closing.set()
    assert (found.ok, found.status, found.final) == (False, None, False)
    assert "no complete answer within" in found.error


# -- prefill and decode


def peer(server: Server, role: str) -> dict[str, Any]:
    return {"url": server.url, "role": role, "bootstrap_host": "prefill1", "bootstrap_port": 8998, "api_key": "other"}


@pytest.mark.parametrize("own_role", ["decode", "prefill"])
def test_both_sides_get_the_same_request_at_once(server: Start, own_role: str) -> None:
    """Each side answers only when the other one has the request too, as prefill and decode do."""
    both = threading.Barrier(2, timeout=20)

    def side(text: str) -> Callable[[Request], Reply]:
        def answer(_: Request) -> Reply:
            both.wait()
            return chat_reply(text)

        return answer

    decode, prefill = server(side("decode says 4")), server(side("prefill says nothing"))
    own, other = (decode, prefill) if own_role == "decode" else (prefill, decode)
    other_role = "prefill" if own_role == "decode" else "decode"
    found = worker(own, "own").generate("2+2?", r"\b4\b", 8, 20, peer(other, other_role))
    assert (found.ok, found.text) == (True, "decode says 4")
    (to_decode,), (to_prefill,) = decode.requests, prefill.requests
    assert to_decode.json() == to_prefill.json()
    assert to_decode.json()["bootstrap_host"] == "prefill1"
    assert to_decode.json()["bootstrap_port"] == 8998
    assert 0 < to_decode.json()["bootstrap_room"] < 2**63
    assert own.requests[0].headers["authorization"] == "Bearer own"
    assert other.requests[0].headers["authorization"] == "Bearer other"


def test_rooms_differ(server: Start) -> None:
    decode, prefill = server(lambda _: chat_reply("4")), server(lambda _: chat_reply("x"))
    for _ in range(2):
        assert worker(decode).generate("", "4", 8, 10, peer(prefill, "prefill")).ok
    first, second = (one.json()["bootstrap_room"] for one in decode.requests)
    assert first != second


def test_the_prefills_failure_is_named(server: Start) -> None:
    decode, prefill = server(lambda _: Reply(500, body=b"kv")), server(lambda _: Reply(500, body=b"no bootstrap"))
    found = worker(decode).generate("", "4", 8, 10, peer(prefill, "prefill"))
    assert not found.ok
    assert "kv" in str(found.error)
    assert "no bootstrap" in str(found.error)


def test_only_the_decodes_content_counts(server: Start) -> None:
    decode, prefill = server(lambda _: chat_reply("5")), server(lambda _: chat_reply("4"))
    assert not worker(decode).generate("", "4", 8, 10, peer(prefill, "prefill")).ok
