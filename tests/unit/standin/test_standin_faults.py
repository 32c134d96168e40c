"""Each fault that a test can switch on does what it says, alone, and nothing before it is switched on."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.unit.standin.standin_process import CLIENT, StandIn, Stream, chunks, free_port, sse, until
from tests.unit.standin.test_standin_pd import body

Start = Callable[..., StandIn]
TALK = {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": 30}


def test_a_fault_can_hold_for_one_environment_only(start: Start) -> None:
    fault = {"crash_at_start": {"exit_code": 9, "when_env": {"SGLANG_DSV4_GE_DIFF": "1", "DSV4_NOT_SET": None}}}
    old = start(faults=fault)
    new = start(faults=fault, env={"SGLANG_DSV4_GE_DIFF": "1"})
    assert new.exit_code() == 9
    old.wait_healthy()


def test_faults_are_read_again_when_the_file_changes(start: Start) -> None:
    engine = start().wait_healthy()
    assert engine.word("a-1") == "a-1"
    engine.set_faults({"wrong_content": {"text": "nonsense"}})
    assert engine.word("a-2") == "nonsense"
    engine.set_faults({"wrong_content": False})
    assert engine.word("a-3") == "a-3"
    engine.faults_file.unlink()
    assert engine.word("a-4") == "a-4"


def test_a_wrong_faults_file_ends_a_running_engine(start: Start) -> None:
    engine = start().wait_healthy()
    engine.set_faults({"wrong_contents": {}})
    until("the end", lambda: engine.status() is None)
    assert engine.exit_code() != 0
    assert "wrong_contents" in engine.text


def test_start_never(start: Start) -> None:
    engine = start(faults={"start_never": True})
    until("health 503", lambda: engine.status() == 503)
    time.sleep(0.5)
    assert engine.status() == 503


def test_start_s(start: Start) -> None:
    engine = start(faults={"start_s": {"seconds": 3.0}})
    began = time.monotonic()
    engine.wait_healthy()
    assert time.monotonic() - began > 2.0


def test_crash_at_start(start: Start) -> None:
    assert start(faults={"crash_at_start": {"exit_code": 41}}).exit_code() == 41


def test_listen(start: Start) -> None:
    engine = start("--host", "127.0.0.1", faults={"listen": {"host": "::1"}})
    until("::1 to listen", lambda: _connects(socket.AF_INET6, "::1", engine.port))
    assert not _connects(socket.AF_INET, "127.0.0.1", engine.port)


def _connects(family: int, host: str, port: int) -> bool:
    with socket.socket(family) as probe:
        return probe.connect_ex((host, port)) == 0


def test_child_env(start: Start) -> None:
    env = {"SGLANG_OPT_USE_MULTI_STREAM_OVERLAP": "0"}
    right = start(env=env).wait_healthy()
    wrong = start(env=env, faults={"child_env": {"set": {"SGLANG_OPT_USE_MULTI_STREAM_OVERLAP": None}}}).wait_healthy()
    assert "overlap False" in right.text and "overlap True" in wrong.text


@pytest.mark.parametrize(("process", "count"), [("main", 1), ("scheduler", 1), ("both", 0)])
def test_no_passport(start: Start, tmp_path: Path, process: str, count: int) -> None:
    # `SGL_*` makes environ.py warn when it is executed: once in each process.
    engine = start(env={"SGL_EXAMPLE": "1"}, faults={"no_passport": {"process": process}}).wait_healthy()
    assert engine.text.count("SGL_EXAMPLE is deprecated") == count


def test_health_redirect(start: Start) -> None:
    engine = start().wait_healthy()
    engine.set_faults({"health_redirect": True})
    assert engine.status() == 302
    with httpx.Client(**CLIENT, follow_redirects=True) as client:
        assert client.get(engine.url + "/health").status_code == 200


def test_health_503_for_a_while(start: Start) -> None:
    engine = start(faults={"health_503": {"seconds": 3600.0}})
    until("up", lambda: "ready to roll" in engine.text)
    assert engine.status() == 503
    assert engine.word("busy-1") == "busy-1"
    engine.set_faults({"health_503": {"seconds": 0.1}})
    until("health 200", lambda: engine.status() == 200)


def test_health_silent(start: Start) -> None:
    engine = start().wait_healthy()
    engine.set_faults({"health_silent": True})
    with pytest.raises(httpx.ReadTimeout):
        engine.get("/health", timeout=0.5)
    assert engine.status("/server_info") == 200


def test_health_early(start: Start) -> None:
    fault = {"generation_after_s": 3600.0}
    engine = start(settings={"start_s": 3600.0, "listen_s": 0.0}, faults={"health_early": fault}).wait_healthy()
    stream = Stream(engine, TALK)
    assert not stream.done.wait(1.0) and not stream.events
    engine.set_faults({"health_early": {"generation_after_s": 0.1}})
    assert engine.word("patient-1") == "patient-1"
    engine.close()
    stream.close()


def test_hung_engine(start: Start) -> None:
    engine = start(faults={"hung_engine": {"from_request": 3}}).wait_healthy()
    assert [engine.word("w-1"), engine.word("w-2")] == ["w-1", "w-2"]
    stream = Stream(engine, TALK)
    until("a request that waits", lambda: engine.load()["num_waiting_reqs"] == 1)
    assert engine.status() == 200
    assert not stream.done.wait(0.5) and not stream.events
    engine.set_faults({})
    engine.word("w-4")  # whatever comes next wakes it
    assert stream.result()[-1] == "[DONE]"
    stream.close()


def test_slow_generation(start: Start) -> None:
    engine = start(faults={"slow_generation": {"seconds": 2.0}}).wait_healthy()
    began = time.monotonic()
    assert engine.word("slow-1") == "slow-1"
    assert time.monotonic() - began > 2.0


@pytest.mark.parametrize("fault", [{"after_s": 4.0}, {"after_health": 1}])
def test_dies_after_it_was_healthy(start: Start, fault: dict[str, float]) -> None:
    engine = start(faults={"dies": {**fault, "exit_code": 7}})
    until("health 200", lambda: engine.status() == 200)
    assert engine.exit_code() == 7


def test_broken_streams(start: Start) -> None:
    engine = start(settings={"token_ms": 10.0}).wait_healthy()
    whole = sse(engine, TALK)
    assert whole[-1] == "[DONE]" and chunks(whole)[-1]["choices"][0]["finish_reason"] == "length"
    engine.set_faults({"stream_error": {"after_chunks": 2}})
    with_error = chunks(sse(engine, TALK))
    assert "error" in with_error[-1] and len(with_error) == 3
    engine.set_faults({"stream_no_done": True})
    assert "[DONE]" not in sse(engine, TALK)
    engine.set_faults({"stream_no_choices": True})
    events = sse(engine, TALK)
    assert events[-1] == "[DONE]"
    assert not any(choice["finish_reason"] for chunk in chunks(events) for choice in chunk["choices"])


def test_ignore_sigterm(start: Start) -> None:
    engine = start(faults={"ignore_sigterm": True}).wait_healthy()
    os.kill(engine.process.pid, signal.SIGTERM)
    time.sleep(1.0)
    assert engine.status() == 200


def test_orphan_keeps_the_port(start: Start) -> None:
    engine = start(faults={"orphan": {"escape_cgroup": False, "seconds": 30.0}}).wait_healthy()
    left = int(engine.text.split("leaves process ")[1].split()[0])
    try:
        os.kill(left, signal.SIGTERM)
        os.kill(engine.process.pid, signal.SIGTERM)
        assert engine.exit_code() == 0
        until("the left-over to answer", lambda: engine.status() == 200)
        assert engine.status("/v1/loads") == 200
        second = start(port=engine.port)
        assert second.exit_code() == 1
    finally:
        os.kill(left, signal.SIGKILL)


def test_pd_broken(start: Start) -> None:
    decode = start("--disaggregation-mode", "decode", faults={"pd_broken": True}).wait_healthy()
    answer = decode.post("/v1/chat/completions", {**body("x", 3), "bootstrap_port": free_port()})
    assert (answer.status_code, decode.status()) == (500, 200)
    assert "a fault broke" in answer.text


def test_models_500(start: Start) -> None:
    engine = start(faults={"models_500": True}).wait_healthy()
    assert engine.status("/v1/models") == 500
    assert engine.word("fine-1") == "fine-1"
