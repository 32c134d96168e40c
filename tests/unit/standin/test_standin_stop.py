"""SIGTERM as upstream's, and what happens when one of the two processes is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from tests.unit.standin.standin_process import StandIn, Stream, chunks, until

Start = Callable[..., StandIn]


def gone(pid: int) -> bool:
    """Whether the process is no more (or only a zombie of the container's first process)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_sigterm_finishes_what_runs_still_accepts_and_ends_with_0(start: Start) -> None:
    engine = start().wait_healthy()
    scheduler = engine.scheduler()
    with engine.talking(tokens=2500) as stream:
        os.kill(engine.process.pid, signal.SIGTERM)
        until("health 503", lambda: engine.status() == 503)
        assert engine.word("late-1") == "late-1"
        assert engine.process.poll() is None
        events = stream.result()
        assert events[-1] == "[DONE]"
        assert len("".join(chunk["choices"][0]["delta"]["content"] or "" for chunk in chunks(events)).split()) == 2500
    assert engine.exit_code() == 0
    assert gone(scheduler)


def test_sigterm_is_noticed_by_polling(start: Start) -> None:
    engine = start(settings={"sigterm_poll_s": 600.0}).wait_healthy()
    os.kill(engine.process.pid, signal.SIGTERM)
    until("health 503", lambda: engine.status() == 503)
    assert engine.word("still-1") == "still-1"
    assert engine.process.poll() is None


def test_sigterm_to_the_scheduler_cuts_the_streams_and_ends_the_server(start: Start) -> None:
    engine = start().wait_healthy()
    stream = Stream(engine, {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": 5000})
    until("the first chunk", lambda: stream.events)
    os.kill(engine.scheduler(), signal.SIGTERM)
    assert "[DONE]" not in stream.result()
    assert engine.exit_code() == -signal.SIGKILL
    stream.close()


def test_the_scheduler_does_not_outlive_the_server(start: Start) -> None:
    engine = start().wait_healthy()
    scheduler = engine.scheduler()
    engine.process.kill()
    until("the scheduler's end", lambda: gone(scheduler))


def test_health_is_503_when_the_scheduler_gives_nothing(start: Start) -> None:
    engine = start(settings={"health_timeout_s": 0.5}).wait_healthy()
    scheduler = engine.scheduler()
    os.kill(scheduler, signal.SIGSTOP)
    try:
        assert engine.status() == 503
        os.kill(scheduler, signal.SIGCONT)
        until("health 200 again", lambda: engine.status() == 200)
    finally:
        os.kill(scheduler, signal.SIGCONT)


def test_a_scheduler_that_ignores_the_shutdown_is_killed(start: Start) -> None:
    engine = start(settings={"shutdown_ignored": True, "scheduler_exit_s": 0.5}).wait_healthy()
    scheduler = engine.scheduler()
    os.kill(engine.process.pid, signal.SIGTERM)
    assert engine.exit_code() == 0
    assert gone(scheduler)
