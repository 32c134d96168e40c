"""The run: sessions on every target at once, suspects replayed alone, all of it written down."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from tqdm import tqdm

from dsv4_fleet.stress.classify import CLEAN, FAILED, HARD, SOFT, Finding, classify
from dsv4_fleet.stress.client import Client, Target
from dsv4_fleet.stress.scripts import Session, request, session

FORMAT: Final = 1
MODEL: Final = "model"  # the same error alone, three times
REPLAYS: Final = 3
LOAD_EVERY_S: Final = 0.25
RAW_SHOWN: Final = 1 << 16  # characters of a suspect's raw text


@dataclass(frozen=True)
class Options:
    """Of one run; times in seconds."""

    sessions: int = 80  # on each target
    concurrency: int = 80  # sessions open at once on each target
    turns: int = 3
    seed: int = 1
    timeout_s: float = 600
    only: int | None = None  # the one session to run, alone
    plan: str | None = None  # hash of the plan that the run is for
    facts: dict[str, Any] = field(default_factory=dict)  # what the hosts say of each worker, by name


@dataclass
class TurnOutcome:
    number: int
    finding: Finding
    raw: bytes
    stream: bool
    long: bool
    request: int  # its number among those sent to this target
    beside: int  # requests open on the target when it began, this one included
    prompt_tokens: int
    completion_tokens: int


@dataclass
class Outcome:
    """One session with its turns; `level` is set once its suspects have been replayed."""

    session: Session
    started: float
    ended: float = 0.0
    turns: list[TurnOutcome] = field(default_factory=list)
    level: str = CLEAN
    suspect: str = ""  # unconfirmed, or which level of error the model makes alone too
    replays: list[dict[str, Any]] = field(default_factory=list)

    def worst(self) -> str:
        """The class before any replay: what is broken counts before what failed, and that before what is wrong."""
        levels = {turn.finding.level for turn in self.turns}
        return next((level for level in (HARD, FAILED, SOFT) if level in levels), CLEAN)


Enough = Callable[[list[int], list[int]], bool]


def never(hard: list[int], ended: list[int]) -> bool:
    """Whatever was seen, all sessions run."""
    return False


class Stress:
    """One run against some targets."""

    def __init__(
        self,
        targets: list[Target],
        options: Options,
        client: Client,
        bar: tqdm[Any],
        enough: Enough = never,
    ) -> None:
        """`enough` says from the hard and the ended sessions of each treated worker that no more are needed."""
        self.targets, self.options, self.client, self.bar, self.enough = targets, options, client, bar, enough
        self.treated = [target.name for target in targets if target.arm == "treatment"]
        self.models: dict[str, str] = {}
        self.owners: dict[str, str] = {}
        self.outcomes: list[Outcome] = []
        self.stop = asyncio.Event()  # interrupted: the result so far, now
        self.stop_load = asyncio.Event()  # enough was seen, or interrupted: no more sessions
        self.cut = 0

    async def run(self) -> dict[str, Any]:
        """The result, also of a run that was interrupted. RuntimeError where a target cannot be used at all."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)
        started, processor = time.time(), time.process_time()
        for target in self.targets:
            self.models[target.name] = await self.client.model(target)
            target.before = await self.client.identity(target)
            target.flushed = await self.client.flush(target)
        work = {
            target.name: [
                session(self.options.seed, target.name, index, self.options.turns) for index in self._indices()
            ]
            for target in self.targets
        }
        self.owners = {nonce: item.name for items in work.values() for item in items for nonce in item.nonces}
        watch = asyncio.create_task(self._watch())
        # All tasks of a target share one iterator: scripts start in their order, each once.
        todo = {name: iter(items) for name, items in work.items()}
        await self._until(
            self.stop_load,
            [
                self._sessions(target, todo[target.name])
                for target in self.targets
                for _ in range(self.options.concurrency)
            ],
        )
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        loaded = time.time()
        used = time.process_time() - processor
        for outcome in self.outcomes:
            outcome.level = outcome.worst()
            outcome.suspect = "unconfirmed" if outcome.level in (HARD, SOFT) else ""
        await self._until(self.stop, [self._replays(group) for group in self._groups()])
        for target in self.targets:
            target.after = await self.client.identity(target)
        return self._result(started, loaded, used)

    def _indices(self) -> Iterable[int]:
        return range(self.options.sessions) if self.options.only is None else [self.options.only]

    def _interrupt(self) -> None:
        self.stop.set()
        self.stop_load.set()

    async def _until(self, stop: asyncio.Event, work: list[Any]) -> None:
        """Run all of `work` together until it is done or `stop` is set; errors of ours are raised."""
        tasks = [asyncio.create_task(item) for item in work]
        stopped = asyncio.create_task(stop.wait())
        try:
            waiting = set(tasks)
            while waiting and not stopped.done():
                done, _ = await asyncio.wait([*waiting, stopped], return_when=asyncio.FIRST_COMPLETED)
                waiting -= done
                for task in done - {stopped}:
                    task.result()
        finally:
            for task in (*tasks, stopped):
                task.cancel()
            await asyncio.gather(*tasks, stopped, return_exceptions=True)

    async def _watch(self) -> None:
        """What the workers say of their own load, every quarter of a second."""
        while True:
            for target in self.targets:
                for url in target.servers:
                    if load := await self.client.load(url):
                        target.samples += 1
                        target.peak_running = max(target.peak_running or 0, load[0])
                        target.peak_waiting = max(target.peak_waiting or 0, load[1])
            await asyncio.sleep(LOAD_EVERY_S)

    async def _sessions(self, target: Target, todo: Iterator[Session]) -> None:
        """One of the sessions that are open at once: takes the next script when the last one is done."""
        for item in todo:
            await self._session(target, item)

    async def _session(self, target: Target, item: Session) -> None:
        outcome = Outcome(item, time.time())
        target.open_sessions += 1
        target.peak_sessions = max(target.peak_sessions, target.open_sessions)
        finished = False
        try:
            for number, turn in enumerate(item.turns):
                sent, beside = target.sent + 1, target.open_requests + 1
                answer = await self.client.ask(target, request(turn, self.models[target.name]))
                finding = classify(answer, turn.expected, self.owners, item.name)
                raw = b"" if finding.level == CLEAN else answer.raw
                outcome.turns.append(
                    TurnOutcome(
                        number,
                        finding,
                        raw,
                        turn.stream,
                        turn.long,
                        sent,
                        beside,
                        answer.prompt_tokens,
                        answer.completion_tokens,
                    )
                )
            finished = True
        finally:
            target.open_sessions -= 1
            self.cut += not finished
        outcome.ended = time.time()
        self.outcomes.append(outcome)
        if self.enough(*self._seen()):
            self.stop_load.set()
        counts = Counter(outcome.worst() for outcome in self.outcomes)
        self.bar.set_postfix(
            hard=counts[HARD],
            soft=counts[SOFT],
            failed=counts[FAILED],
            open=sum(target.open_sessions for target in self.targets),
            refresh=False,
        )
        self.bar.update()

    def _seen(self) -> tuple[list[int], list[int]]:
        """Of each treated worker: its hard sessions so far, and all that ended."""
        hard, ended = dict.fromkeys(self.treated, 0), dict.fromkeys(self.treated, 0)
        for outcome in self.outcomes:
            if (name := outcome.session.worker) in ended:
                hard[name] += outcome.worst() == HARD
                ended[name] += 1
        return list(hard.values()), list(ended.values())

    # ---- replays

    def _groups(self) -> list[list[Outcome]]:
        """Suspects that must not be replayed beside one another: those of one worker, or all that share a prefill."""
        suspects = [outcome for outcome in self.outcomes if outcome.level in (HARD, SOFT)]
        if any(target.prefills or not target.direct for target in self.targets):
            return [suspects]
        return [[outcome for outcome in suspects if outcome.session.worker == target.name] for target in self.targets]

    async def _replays(self, suspects: list[Outcome]) -> None:
        for done, outcome in enumerate(suspects, 1):
            await self._replay(outcome)
            self.bar.set_postfix_str(f"replayed alone: {done} of {len(suspects)}")

    async def _replay(self, outcome: Outcome) -> None:
        """Each bad turn, until one is not the model's own: then the session counts."""
        target = next(target for target in self.targets if target.name == outcome.session.worker)
        for bad in (turn for turn in outcome.turns if turn.finding.level == outcome.level):
            turn = outcome.session.turns[bad.number]
            same = 0
            for _ in range(REPLAYS):
                # What a corrupted request left in the cache would come up again, and look like the model's error.
                flushed = await self.client.flush(target)
                answer = await self.client.ask(target, request(turn, self.models[target.name]))
                finding = classify(answer, turn.expected, self.owners, outcome.session.name)
                same += flushed and finding.signature == bad.finding.signature
                outcome.replays.append(
                    {
                        "turn": bad.number,
                        "class": finding.level,
                        "kind": finding.kind,
                        "detail": finding.detail,
                        "cache_flushed": flushed,
                    }
                )
            if same < REPLAYS:
                return
        outcome.suspect, outcome.level = outcome.level, MODEL

    # ---- result

    def _result(self, started: float, loaded: float, used: float) -> dict[str, Any]:
        counts = Counter(outcome.level for outcome in self.outcomes)
        tokens = sum(turn.completion_tokens for outcome in self.outcomes for turn in outcome.turns)
        wrong = counts[HARD]
        return {
            "format": FORMAT,
            "kind": "dsv4-fleet stress",
            "plan": self.options.plan,
            "seed": self.options.seed,
            "started": started,
            "ended": time.time(),
            "interrupted": self.stop.is_set(),
            "stopped_early": self.stop_load.is_set() and not self.stop.is_set(),
            "cut_sessions": self.cut,
            "asked": {
                "sessions": self.options.sessions,
                "concurrency": self.options.concurrency,
                "turns": self.options.turns,
                "only": self.options.only,
            },
            "client": {
                "load_s": loaded - started,
                "processor_s": used,
                "peak_sessions": sum(target.peak_sessions for target in self.targets),
            },
            "counts": {level: counts[level] for level in (CLEAN, HARD, SOFT, MODEL, FAILED)},
            "rates": {
                "hard_per_session": wrong / len(self.outcomes) if self.outcomes else None,
                "hard_per_million_tokens": wrong / tokens * 1e6 if tokens else None,
                "completion_tokens": tokens,
            },
            "workers": {target.name: self._worker(target) for target in self.targets},
            "sessions": [
                _session(outcome)
                for outcome in sorted(
                    self.outcomes, key=lambda outcome: (outcome.session.worker, outcome.session.index)
                )
            ],
        }

    def _worker(self, target: Target) -> dict[str, Any]:
        return {
            "arm": target.arm,
            "url": target.url,
            "direct": target.direct,
            "declared": self.options.facts.get(target.name),
            "before": target.before,
            "after": target.after,
            "cache_flushed": target.flushed,
            "peak": {
                "client_sessions": target.peak_sessions,
                "client_requests": target.peak_requests,
                "running": target.peak_running,
                "waiting": target.peak_waiting,
                "samples": target.samples,
            },
            "requests": target.sent,
        }


def _session(outcome: Outcome) -> dict[str, Any]:
    turns = outcome.turns
    return {
        "worker": outcome.session.worker,
        "index": outcome.session.index,
        "script": outcome.session.script,
        "started": outcome.started,
        "ended": outcome.ended,
        "class": outcome.level,
        "suspect": outcome.suspect,
        "turns": [
            {
                "class": turn.finding.level,
                "kind": turn.finding.kind,
                "detail": turn.finding.detail,
                "parser": turn.finding.parser,
                "stream": turn.stream,
                "long": turn.long,
                "request": turn.request,
                "beside": turn.beside,
                "prompt_tokens": turn.prompt_tokens,
                "completion_tokens": turn.completion_tokens,
                **(
                    {}
                    if turn.finding.level == CLEAN
                    else {"raw": turn.raw.decode("utf-8", "backslashreplace")[:RAW_SHOWN]}
                ),
            }
            for turn in turns
        ],
        "replays": outcome.replays,
    }
