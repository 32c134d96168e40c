"""A little load: streaming chat clients through the router, and how many of their requests were lost."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType

import httpx

from tests.local.settings import MODEL, LocalError

#: A request that takes longer is lost.
REQUEST_S = 60.0


@dataclass
class Tally:
    """Requests by their end. One is lost on an HTTP error, on an error inside its stream, and without its [DONE]."""

    served: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0

    @property
    def lost_count(self) -> int:
        """How many were lost, whatever the reason."""
        return sum(self.lost.values())

    def __str__(self) -> str:
        text = f"{self.served} served, {self.lost_count} lost"
        reasons = "; ".join(f"{count} x {reason}" for reason, count in self.lost.most_common(5))
        return f"{text} ({reasons})" if reasons else text


def judge(status: int, lines: list[str]) -> str | None:
    """Why a streamed answer is lost, None where it was served.

    status: of the HTTP answer. lines: its body's lines, as server-sent events.
    """
    if status != 200:
        return f"HTTP {status}"
    done, choices = False, 0
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[len("data:") :].strip()
        if data == "[DONE]":
            done = True
            continue
        try:
            event = json.loads(data)
        except ValueError:
            return "a line of the stream is not JSON"
        if not isinstance(event, dict) or "error" in event:
            return "an error inside the stream"
        choices += len(event.get("choices") or [])
    if not done:
        return "a stream without [DONE]"
    return None if choices else "a stream without choices"


class Load:
    """Clients that ask, read to the end, pause, and ask again; a context manager.

    It stops by itself after ``seconds``. On leaving, requests in flight are read to their end and counted.
    """

    def __init__(self, url: str, *, clients: int = 4, tokens: int = 40, pause_s: float = 0.1, seconds: float = 900.0) -> None:
        self.url, self.clients, self.tokens, self.pause_s, self.seconds = url, clients, tokens, pause_s, seconds
        self.tally = Tally()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="load", daemon=True)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def wait_served(self, count: int, seconds: float = 60.0) -> None:
        """Wait until so many requests have been served; LocalError, with what happened instead, where they are not."""
        deadline = time.monotonic() + seconds
        while self.tally.served < count:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise LocalError(f"found {self.tally} after {seconds:.0f} s, expected {count} served")
            time.sleep(0.05)

    def stop(self) -> Tally:
        """End the load; the whole tally. An error of the generator itself is raised."""
        self._stop.set()
        self._thread.join(REQUEST_S + 10)
        if self._thread.is_alive():
            raise LocalError(f"found a client still reading {REQUEST_S + 10:.0f} s after the load was to stop")
        if self._error is not None:
            raise self._error
        return self.tally

    def _main(self) -> None:
        try:
            asyncio.run(self._clients())
        except BaseException as error:  # carried to the caller's thread, which raises it
            self._error = error

    async def _clients(self) -> None:
        until = time.monotonic() + self.seconds
        limits = httpx.Limits(max_connections=self.clients, max_keepalive_connections=0)
        # No keep-alive: a connection kept open would go on to a router or worker that others no longer reach.
        async with httpx.AsyncClient(timeout=REQUEST_S, limits=limits, trust_env=False) as client:
            await asyncio.gather(*(self._client(client, number, until) for number in range(self.clients)))

    async def _client(self, client: httpx.AsyncClient, number: int, until: float) -> None:
        turn = 0
        while not self._stop.is_set() and time.monotonic() < until:
            turn += 1
            began = time.monotonic()
            reason = await self._ask(client, f"client {number}, turn {turn}: count upwards")
            self.tally.longest_s = max(self.tally.longest_s, time.monotonic() - began)
            if reason is None:
                self.tally.served += 1
            else:
                self.tally.lost[reason] += 1
            await asyncio.sleep(self.pause_s)

    async def _ask(self, client: httpx.AsyncClient, text: str) -> str | None:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self.tokens,
            "stream": True,
        }
        try:
            async with asyncio.timeout(REQUEST_S):
                async with client.stream("POST", f"{self.url}/v1/chat/completions", json=body) as answer:
                    lines = [line async for line in answer.aiter_lines()]
                    return judge(answer.status_code, lines)
        except TimeoutError:
            return f"no end within {REQUEST_S:.0f} s"
        except httpx.HTTPError as error:
            return f"{type(error).__name__} {error}".strip()
