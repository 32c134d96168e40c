"""The engine process: imports the tree's environ.py for itself, then turns requests into tokens.

It talks to the HTTP process over a socket pair, one JSON object a line:
in  `{"op": "generate", "rid", "prompt", "internal", "bootstrap"}`, `{"op": "abort", "rid"}`,
    `{"op": "transferred", "rid"}`, `{"op": "shutdown"}`;
out `{"out": {rid: {"pieces": […], "finish": …, "error": …}}, "prefilled": {rid: room}, "loads": {…},
    "truth": […]}`, and once, at first, `{"ready": true}`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import sys
import time
from dataclasses import dataclass, field
from socket import socket
from typing import Any

from .answers import Answer, Prompt, answer, text_answer
from .settings import Faults, Settings
from .story import KINDS, Rule, Story, corrupted, garble_text, unit
from .tree import Tree

FAKE_BOOTSTRAP_HOST = "2.2.2.2"
LINE_LIMIT = 64 << 20


@dataclass
class Request:
    """One request in the engine; `answer` is decided when it begins to run."""

    rid: str
    prompt: Prompt
    internal: bool  # health probe or warm-up: the story and the counters leave it alone
    bootstrap: dict[str, Any] | None
    number: int
    sound: Answer
    answer: Answer | None = None
    sent: int = 0
    started: float = 0.0
    task: asyncio.Task[None] | None = field(default=None, repr=False)


def run(sock: socket, arguments: dict[str, Any], settings: Settings) -> None:
    """The process's main function."""
    faults = Faults()
    if fault := faults.get("child_env"):
        for name, value in fault["set"].items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    skipped = faults.get("no_passport")
    tree = Tree.load(with_environ=not (skipped and skipped["process"] in ("both", "scheduler")))
    import setproctitle  # upstream sets the title after it imported environ.py, too

    tp = "_TP0" if arguments["tp_size"] > 1 else ""
    setproctitle.setproctitle(f"sglang::scheduler{tp}")
    story = Story.of(tree, settings.bf16_without_patch)
    print(
        f"stand-in: scheduler {os.getpid()}: sglang {tree.version} from {tree.package}, "
        f"bf16 index-K {story.bf16_index_k}, overlap {story.overlap}, hidden by an instrument {story.hidden}",
        file=sys.stderr,
        flush=True,
    )
    asyncio.run(Scheduler(arguments, settings, faults, story).serve(sock))


class Scheduler:
    """Waiting and running requests, and the step loop over them."""

    def __init__(self, arguments: dict[str, Any], settings: Settings, faults: Faults, story: Story) -> None:
        self.mode = arguments["disaggregation_mode"]
        self.limit = arguments["max_running_requests"]
        self.settings, self.faults, self.story = settings, faults, story
        self.waiting: dict[str, Request] = {}
        self.transferring: dict[str, Request] = {}  # decode: waits for the prefill's half
        self.running: dict[str, Request] = {}
        self.inflight: dict[str, Request] = {}  # prefill: done, waits to be fetched
        self.work = asyncio.Event()
        self.requests = 0
        self.tokens = 0
        self.out: dict[str, dict[str, Any]] = {}
        self.prefilled: dict[str, int] = {}
        self.truth: list[dict[str, Any]] = []
        self.poisoned = False
        self.writer: asyncio.StreamWriter

    async def serve(self, sock: socket) -> None:
        """Until the HTTP process says so or is gone."""
        reader, self.writer = await asyncio.open_connection(sock=sock, limit=LINE_LIMIT)
        steps = asyncio.create_task(self._steps())
        steps.add_done_callback(_die_with)
        self._send({"ready": True})
        while line := await reader.readline():
            message = json.loads(line)
            op, rid = message["op"], message.get("rid", "")
            if op == "generate":
                self._accept(message)
            elif op == "abort":
                self._drop(rid, "abort")
            elif op == "transferred" and rid in self.inflight:
                self._finish(self.inflight.pop(rid), "length")
            elif op == "shutdown" and not self.settings.shutdown_ignored:
                break
            self._flush()
        steps.cancel()

    def _accept(self, message: dict[str, Any]) -> None:
        internal, bootstrap = message["internal"], message["bootstrap"]
        if not internal:
            self.requests += 1
        prompt = Prompt(**message["prompt"])
        request = Request(message["rid"], prompt, internal, bootstrap, self.requests, answer(prompt))
        if self.mode != "null" and (bootstrap is None or bootstrap.get("room") is None):
            self._error(
                request.rid,
                400,
                f"Invalid request: Disaggregated request received without bootstrap room id. req.rid={request.rid!r}",
            )
            return
        if self.mode == "decode" and bootstrap["host"] != FAKE_BOOTSTRAP_HOST:
            self.transferring[request.rid] = request
            request.task = asyncio.create_task(self._fetch(request))
            request.task.add_done_callback(_die_with)
        else:
            self.waiting[request.rid] = request
            self.work.set()

    async def _fetch(self, request: Request) -> None:
        """The prefill's half of a request, over HTTP from its bootstrap port."""
        bootstrap = request.bootstrap or {}
        try:
            if self.faults.get("pd_broken"):
                raise ConnectionError("a fault broke this worker's transfers")
            async with asyncio.timeout(self.settings.pd_timeout_s):
                reader, writer = await asyncio.open_connection(bootstrap["host"], int(bootstrap["port"] or 8998))
                try:
                    writer.write(f"GET /standin/kv?room={bootstrap['room']} HTTP/1.0\r\n\r\n".encode())
                    status = await reader.readline()
                finally:
                    writer.close()
            if b" 200 " not in status:
                raise ConnectionError(f"found {status.decode('latin-1').strip()!r}, expected 200")
        except (OSError, TimeoutError) as error:
            self.transferring.pop(request.rid, None)
            self._error(
                request.rid,
                500,
                f"Decode transfer failed for request {request.rid} with bootstrap "
                f"{bootstrap['host']}:{bootstrap['port']} room {bootstrap['room']}: "
                f"{error or type(error).__name__}",
            )
        else:
            if self.transferring.pop(request.rid, None):
                self.waiting[request.rid] = request
                self.work.set()
        self._flush()

    async def _steps(self) -> None:
        while True:
            await self.work.wait()
            # A step takes longer the more requests it serves, so that many streams do not drown the machine.
            await asyncio.sleep(max(self.settings.token_ms, 0.25 * len(self.running)) / 1000)
            self._admit()
            now = time.monotonic()
            for request in list(self.running.values()):
                self._advance(request, now)
            if not self.running and not (self.waiting and not self._hung()):
                self.work.clear()
            self._flush()
            await self.writer.drain()

    def _hung(self) -> bool:
        fault = self.faults.get("hung_engine")
        return fault is not None and self.requests >= fault["from_request"]

    def _admit(self) -> None:
        for rid, request in list(self.waiting.items()):
            if len(self.running) >= self.limit:
                break
            if not request.internal and self._hung():
                continue
            del self.waiting[rid]
            request.started = time.monotonic() + self._delay(request)
            self.running[rid] = request

    def _delay(self, request: Request) -> float:
        delay = self.settings.prefill_ms / 1000
        if not request.internal and (fault := self.faults.get("slow_generation")):
            delay += fault["seconds"]
        return delay

    def _advance(self, request: Request, now: float) -> None:
        """All pieces that are due by now; several where the machine was late."""
        if now < request.started:
            return
        if self.mode == "prefill":
            del self.running[request.rid]
            if (request.bootstrap or {}).get("host") == FAKE_BOOTSTRAP_HOST:
                self._finish(request, "length")
            else:
                self.inflight[request.rid] = request
                self.prefilled[request.rid] = int((request.bootstrap or {})["room"])
            return
        if request.answer is None:
            request.answer = self._decide(request)
        pieces = request.answer.pieces
        due = min(len(pieces), 1 + int((now - request.started) * 1000 / max(self.settings.token_ms, 0.001)))
        if due > request.sent:
            self._out(request.rid)["pieces"].extend(pieces[request.sent : due])
            self.tokens += due - request.sent
            request.sent = due
        if request.sent == len(pieces):
            del self.running[request.rid]
            self._out(request.rid)["finish"] = request.answer.finish

    def _decide(self, request: Request) -> Answer:
        prompt = request.prompt
        if self.mode == "decode" and (request.bootstrap or {}).get("host") == FAKE_BOOTSTRAP_HOST:
            # No prefill wrote this request's KV: a real engine goes on from whatever is in its memory.
            return text_answer(dataclasses.replace(prompt, text="", tools=[], session="f" * 32), "")
        if request.internal:
            return request.sound
        if fault := self.faults.get("wrong_content"):
            return Answer([{"c": fault["text"]}], "stop")
        if (fault := self.faults.get("soft_errors")) and unit("soft", prompt.session) < fault["rate"]:
            # An honest model's slip: no call, but nothing broken in it either.
            self._spoilt(request, "soft")
            return text_answer(dataclasses.replace(prompt, text="", min_tokens=0), "I need more details to do that.")
        if self.poisoned:
            self._spoilt(request, "sticky")
            return garble_text(
                request.sound if request.sound.arguments is None else text_answer(prompt, "none"),
                random.Random(prompt.session),
            )
        rule = self._rule()
        if rule is None:
            return request.sound
        peers = [peer for peer in self.running.values() if not peer.internal]
        # What the others ask for, whether or not they have been answered yet.
        others = [
            peer.sound.arguments for peer in peers if peer.prompt.session != prompt.session and peer.sound.arguments is not None
        ]
        spoilt = corrupted(rule, self.settings.seed, prompt, request.sound, len(peers), request.number, others)
        if spoilt is None:
            return request.sound
        kind, wrong = spoilt
        self.poisoned = rule.sticky
        self._spoilt(request, kind)
        return wrong

    def _spoilt(self, request: Request, kind: str) -> None:
        self.truth.append({"session": request.prompt.session, "turn": request.prompt.turn, "kind": kind})

    def _rule(self) -> Rule | None:
        if fault := self.faults.get("corrupt"):
            rate = self.settings.corruption_rate if fault["rate"] is None else fault["rate"]
            return Rule(
                rate,
                fault["min_running"],
                fault["from_request"],
                fault["min_tokens"],
                tuple(fault["kinds"] or KINDS),
                fault["late"],
                any_answer=True,
                sticky=fault["sticky"],
            )
        return Rule(self.settings.corruption_rate) if self.story.corrupts and self.mode != "prefill" else None

    def _out(self, rid: str) -> dict[str, Any]:
        return self.out.setdefault(rid, {"pieces": [], "finish": None, "error": None})

    def _error(self, rid: str, status: int, message: str) -> None:
        self._out(rid)["error"] = {"status": status, "message": message}

    def _finish(self, request: Request, finish: str) -> None:
        """The prefill's share of an answer: its first token."""
        first = request.sound.pieces[:1]
        self.tokens += len(first)
        self._out(request.rid).update(pieces=first, finish=finish)

    def _drop(self, rid: str, finish: str) -> None:
        for queue in (self.waiting, self.transferring, self.running, self.inflight):
            if request := queue.pop(rid, None):
                if request.task:
                    request.task.cancel()
                self._out(rid)["finish"] = finish

    def _flush(self) -> None:
        message = {"out": self.out, "prefilled": self.prefilled, "loads": self._loads(), "truth": self.truth}
        self.out, self.prefilled, self.truth = {}, {}, []
        self._send(message)

    def _send(self, message: dict[str, Any]) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")

    def _loads(self) -> dict[str, int]:
        """Counts of requests by queue, and totals since start."""
        return {
            "running": len(self.running),
            "waiting": len(self.waiting),
            "transferring": len(self.transferring),
            "inflight": len(self.inflight),
            "requests": self.requests,
            "tokens": self.tokens,
        }


def _die_with(task: asyncio.Task[None]) -> None:
    """A task of the engine that failed ends the process, as an exception in a real scheduler does."""
    if not task.cancelled() and (error := task.exception()):
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.flush()
        os._exit(1)
