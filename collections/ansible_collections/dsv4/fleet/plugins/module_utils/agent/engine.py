"""The engine on this host as its HTTP interface shows it: health, load, and one real answer."""

from __future__ import annotations

import ipaddress
import random
import re
import threading
import time
from dataclasses import dataclass
from typing import Any

from . import http
from .errors import AgentError

# Server statuses that say "not now": a start, a busy moment. Any other 4xx says "never like this".
_NOT_NOW = frozenset({408, 425, 429})


class ProbeError(AgentError):
    """The worker did not say what was asked. `kind` as in http.RequestError, or `status`."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True)
class Generation:
    """One request to /v1/chat/completions. `ok`: it was answered in full and held what was expected.

    `final`: asking again would not help (wrong content, refused key, unknown request).
    """

    ok: bool
    text: str
    status: int | None
    error: str | None
    final: bool
    ms: int


class Worker:
    """The server at a literal address; a name such as localhost may be another server's address."""

    def __init__(self, host: str, port: int, api_key: str | None) -> None:
        try:
            ipaddress.ip_address(host.partition("%")[0])
        except ValueError as error:
            raise AgentError(
                f"found probe address {host!r}, expected a literal address such as 127.0.0.1 or ::1; set the worker's "
                "host so"
            ) from error
        self.host, self.port, self.api_key = host, port, api_key or None

    def health(self, timeout_s: float) -> tuple[int | None, str | None]:
        """(status, None) of GET /health, or (None, what went wrong). A redirect is a 3xx, not followed."""
        try:
            answer = http.request("GET", self.host, self.port, "/health", timeout_s=timeout_s)
        except http.RequestError as error:
            return None, str(error)
        return answer.status, None

    def loads(self, timeout_s: float) -> int:
        """Requests that run or wait, those in the queues of prefill and decode included. 0 is idle.

        Raises ProbeError; an answer without the numbers is no answer.
        """
        try:
            answer = http.request("GET", self.host, self.port, "/v1/loads", timeout_s=timeout_s, key=self.api_key)
            body = answer.json() if answer.status == 200 else None
        except http.RequestError as error:
            raise ProbeError(error.kind, str(error)) from error
        if answer.status != 200:
            raise ProbeError("status", f"found status {answer.status} of /v1/loads: {_brief(answer)}, expected 200")
        ranks = body.get("loads") if isinstance(body, dict) else None
        if not isinstance(ranks, list) or not ranks:
            raise ProbeError("protocol", f"found no loads in the answer of /v1/loads: {_brief(answer)}")
        try:
            return sum(_requests(rank) for rank in ranks)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            text = f"found a load without its numbers ({error!r}): {_brief(answer)}"
            raise ProbeError("protocol", f"{text}, expected num_running_reqs and num_waiting_reqs") from error

    def generate(
        self, prompt: str, expect: str, max_tokens: int, timeout_s: float, peer: dict[str, Any] | None = None
    ) -> Generation:
        """Ask for one answer that holds the regular expression `expect`, in its content or its reasoning.

        A decode or prefill worker cannot answer alone. With `peer` (`{"url", "role", "bootstrap_host",
        "bootstrap_port", "api_key"}`, the other role's worker; the bootstrap address is the prefill's)
        both get the same request at once, as from a router, and the decode's answer counts.
        """
        body: dict[str, Any] = chat(prompt, max_tokens)
        own = (self.host, self.port, "", self.api_key)
        if peer is None:
            return ask(*own, body, expect, timeout_s)
        body["bootstrap_host"] = peer["bootstrap_host"]
        body["bootstrap_port"] = peer["bootstrap_port"]
        body["bootstrap_room"] = random.randrange(1, 2**63)  # what names this request to both; 0 means "fake"
        other = (*http.split(peer["url"]), peer.get("api_key") or self.api_key)
        decode, prefill = (other, own) if peer["role"] == "decode" else (own, other)
        side: list[Generation] = []
        deadline = time.monotonic() + timeout_s
        thread = threading.Thread(target=lambda: side.append(ask(*prefill, body, "", timeout_s)), daemon=True)
        thread.start()
        answer = ask(*decode, body, expect, timeout_s)
        thread.join(max(0.0, deadline - time.monotonic()) + 1.0)
        if not answer.ok and side and not side[0].ok and side[0].error:
            text = f"{answer.error}; and the prefill side: {side[0].error}"
            return Generation(False, answer.text, answer.status, text, answer.final or side[0].final, answer.ms)
        return answer


def chat(prompt: str, max_tokens: int, model: str = "default") -> dict[str, Any]:
    """The body of a chat request, greedy, in one piece."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": False,
    }


def ask(
    host: str, port: int, prefix: str, key: str | None, body: dict[str, Any], expect: str, timeout_s: float
) -> Generation:
    """POST a chat request and judge its answer. Never raises for what a server does."""
    started = time.monotonic()

    def end(status: int | None, error: str | None, text: str = "", final: bool = False) -> Generation:
        return Generation(error is None, text, status, error, final, round((time.monotonic() - started) * 1000))

    try:
        answer = http.request(
            "POST", host, port, f"{prefix}/v1/chat/completions", timeout_s=timeout_s, body=body, key=key
        )
        if answer.status != 200:
            final = 400 <= answer.status < 500 and answer.status not in _NOT_NOW
            return end(answer.status, f"found status {answer.status}: {_brief(answer)}, expected 200", final=final)
        content = answer.json()
    except http.RequestError as error:
        return end(None, str(error))
    try:
        choice = content["choices"][0]
        message = choice["message"]
        texts = [str(message[name]) for name in ("content", "reasoning_content") if message.get(name)]
    except (KeyError, IndexError, TypeError, AttributeError):
        return end(200, f"found status 200 without an answer in it: {_brief(answer)}")
    if choice.get("finish_reason") not in ("stop", "length", "tool_calls"):
        return end(200, f"found an answer that ended as {choice.get('finish_reason')!r}: {_brief(answer)}")
    if not any(re.search(expect, text) for text in texts):
        found = http.excerpt(" | ".join(texts))
        return end(200, f"found answer {found!r}, expected one that matches {expect!r}", found, final=True)
    return end(200, None, " | ".join(texts))


def _requests(rank: dict[str, Any]) -> int:
    """Of one data-parallel rank. From 0.5.18 on `num_waiting_reqs` holds the PD queues already, hence max.

    The section `queues` is left out: it repeats counters that are refreshed only while requests run.
    """
    queues = rank.get("disaggregation") or {}
    parts = sum(int(number) for name, number in queues.items() if name.endswith("_queue_reqs"))
    return int(rank["num_running_reqs"]) + max(int(rank["num_waiting_reqs"]), parts)


def _brief(answer: http.Answer) -> str:
    return repr(http.excerpt(answer.body))
