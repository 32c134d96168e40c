"""The alias audit on the CPU: its own code, with an allocator's history and streams that a test writes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dsv4_probe import alias_audit
from dsv4_probe.alias_audit import AliasAudit

MAIN, SIDE, OTHER = 1, 7, 9
BLOCK = 4096


class Event:
    """torch.cuda.Event's two methods that everything goes through."""

    def record(self, stream: Any = None) -> None:
        """Nothing happens on the CPU."""

    def wait(self, stream: Any = None) -> None:
        """Nothing happens on the CPU."""


class Cuda:
    """Streams, capture mode and the allocator's history, as far as the audit asks for them."""

    def __init__(self, patch: pytest.MonkeyPatch, metadata: bool) -> None:
        self.stream, self.capturing, self.history, self.mark, self.now = MAIN, False, False, "", 1000.0
        self.trace: list[dict[str, Any]] = []
        self.event: Any = type("Event", (Event,), {"record": Event.record, "wait": Event.wait})
        memory = torch.cuda.memory
        patch.setattr(torch.cuda, "Event", self.event)
        patch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=self.stream))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: self.history, raising=False)
        patch.setattr(memory, "_record_memory_history", self._record)
        patch.setattr(memory, "_snapshot", lambda: {"device_traces": [self.trace]})
        patch.setattr(alias_audit.time, "time", self._tick)
        if metadata:
            patch.setattr(memory, "_set_memory_metadata", lambda text: setattr(self, "mark", text), raising=False)
        else:
            patch.delattr(memory, "_set_memory_metadata", raising=False)

    def _record(self, enabled: str | None, clear_history: bool = False, **_: Any) -> None:
        self.history = enabled is not None
        if clear_history:
            self.trace.clear()

    def _tick(self) -> float:
        self.now += 0.001
        return self.now

    def _entry(self, action: str, address: int, size: int, line: int = 0) -> None:
        if self.history:
            ours = {"filename": "/site/torch/nn/functional.py", "line": 1, "name": "linear"}
            frames = [ours, {"filename": "/release/python/sglang/srt/models/m.py", "line": line, "name": "forward"}]
            entry = {"action": action, "addr": address, "size": size, "stream": self.stream, "frames": frames}
            self.trace.append({**entry, "user_metadata": self.mark, "time_us": self._tick() * 1e6})

    def alloc(self, tensor: torch.Tensor, line: int) -> None:
        """The allocator gives out this tensor's memory."""
        self._entry("alloc", tensor.data_ptr(), tensor.nbytes, line)

    def free(self, tensor: torch.Tensor) -> None:
        """The allocator gets it back."""
        self._entry("free_requested", tensor.data_ptr(), tensor.nbytes)
        self._entry("free_completed", tensor.data_ptr(), tensor.nbytes)

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """What is inside runs on another stream."""
        before, self.stream = self.stream, stream
        yield
        self.stream = before


@pytest.fixture(params=[True, False], ids=["by metadata", "by time"])
def cuda(request: Any, monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch, request.param)


def prepare(cuda: Cuda, audit: AliasAudit, early: bool) -> None:
    """Upstream's overlapped prepare: qkv_a is read on a side stream; `early`, it is dropped before the join."""
    memory = torch.zeros(BLOCK, dtype=torch.uint8)
    ready, done = cuda.event(), cuda.event()
    cuda.alloc(memory, 10)
    audit.made(3, qkv_a=memory, x=None)
    main, side = SimpleNamespace(cuda_stream=MAIN), SimpleNamespace(cuda_stream=SIDE)
    ready.record()
    ready.wait(side)
    with cuda.on(SIDE):
        audit.read(3, "kv", qkv_a=memory)
    done.record(side)
    if early:
        cuda.free(memory)
        cuda.alloc(memory, 20)
    with cuda.on(OTHER):
        done.wait(main)
    if not early:
        cuda.free(memory)
        cuda.alloc(memory, 20)


def capture(cuda: Cuda, audit: AliasAudit, early: bool = True, warm_up_early: bool = False) -> None:
    audit.capture_begins(None, "key")
    prepare(cuda, audit, warm_up_early)  # a warm-up
    cuda.capturing = True
    prepare(cuda, audit, early)
    cuda.capturing = False
    audit.capture_ends(None, "key")


def test_memory_given_out_before_the_join_is_named_with_both_stacks(cuda: Cuda, report: Any) -> None:
    audit = AliasAudit(report)
    capture(cuda, audit)
    [event] = report.lines()
    assert (event["instrument"], event["verdict"], event["alarm"]) == ("alias_audit", "alias", True)
    assert (event["bucket"], event["layer"], event["input"], event["reader"]) == ("key", 3, "qkv_a", "kv")
    assert (event["reading_stream"], event["allocating_stream"], event["bytes"]) == ("0x7", "0x1", BLOCK)
    assert event["made"] == ["/release/python/sglang/srt/models/m.py:10 forward"]
    assert event["reused"] == ["/release/python/sglang/srt/models/m.py:20 forward"]
    status = audit.status()
    assert (status["captures_audited"], status["tensors_watched"], status["aliases"]) == (1, 1, 1)
    assert (status["graph_nodes_added"], status["bytes"]) == (0, 0)
    assert status["ordered_by"] == audit.order


def test_after_the_join_it_is_fine(cuda: Cuda, report: Any) -> None:
    capture(cuda, AliasAudit(report), early=False)
    assert report.events == {("alias_audit", "clean"): 1}


def test_warm_ups_are_no_part_of_the_graph(cuda: Cuda, report: Any) -> None:
    capture(cuda, AliasAudit(report), early=False, warm_up_early=True)
    assert report.events == {("alias_audit", "clean"): 1}


def test_each_capture_is_judged_by_itself(cuda: Cuda, report: Any) -> None:
    audit = AliasAudit(report)
    for early in (True, False, True):
        capture(cuda, audit, early)
    assert report.events == {("alias_audit", "alias"): 2, ("alias_audit", "clean"): 1}


def test_a_capture_that_never_ended_is_forgotten(cuda: Cuda, report: Any) -> None:
    audit = AliasAudit(report)
    audit.capture_begins(None, "key")
    cuda.capturing = True
    prepare(cuda, audit, early=True)
    capture(cuda, audit, early=False)
    assert report.events == {("alias_audit", "clean"): 1}


def test_an_event_is_not_taken_for_one_that_is_gone(cuda: Cuda, report: Any) -> None:
    audit = AliasAudit(report)
    memory = torch.zeros(BLOCK, dtype=torch.uint8)
    audit.capture_begins(None, "key")
    cuda.capturing = True
    cuda.alloc(memory, 10)
    audit.made(3, qkv_a=memory)
    with cuda.on(SIDE):
        audit.read(3, "kv", qkv_a=memory)
        cuda.event().record()  # nobody holds it: another object may lie where it was
    for event in [cuda.event() for _ in range(50)]:
        event.wait()  # never recorded: it orders nothing
    cuda.free(memory)
    cuda.alloc(memory, 20)
    cuda.capturing = False
    audit.capture_ends(None, "key")
    assert report.events == {("alias_audit", "alias"): 1}


def test_nothing_is_left_behind_for_replays(cuda: Cuda, report: Any) -> None:
    audit = AliasAudit(report)
    audit.capture_begins(None, "key")
    assert (cuda.event.record is Event.record, cuda.history) == (False, True)
    audit.capture_ends(None, "key")
    assert (cuda.event.record, cuda.event.wait) == (Event.record, Event.wait)
    assert (cuda.history, cuda.mark, audit.log) == (False, "", [])
    prepare(cuda, audit, early=True)
    assert not audit.log and not cuda.trace


def test_a_fp4_pair_is_watched_as_two(cuda: Cuda, report: Any) -> None:
    audit = AliasAudit(report)
    values, scales = torch.zeros(64), torch.zeros(8)
    audit.capture_begins(None, "key")
    cuda.capturing = True
    cuda.alloc(scales, 10)
    audit.made(3, q=(values, scales))
    with cuda.on(SIDE):
        audit.read(3, "logits", q=(values, scales))
    cuda.free(scales)
    cuda.alloc(scales, 20)
    cuda.capturing = False
    audit.capture_ends(None, "key")
    assert [event["input"] for event in report.lines()] == ["q_scale"]


def test_someone_elses_history_is_left_alone(cuda: Cuda, report: Any) -> None:
    cuda.history = True
    with pytest.raises(ValueError, match="already recorded by someone else"):
        AliasAudit(report).capture_begins(None, "key")
    assert cuda.history and cuda.event.record is Event.record


def test_a_history_that_someone_switched_off_is_not_judged(cuda: Cuda, report: Any) -> None:
    audit = AliasAudit(report)
    audit.capture_begins(None, "key")
    cuda.history = False
    with pytest.raises(ValueError, match="switched off by someone else"):
        audit.capture_ends(None, "key")
    assert cuda.event.record is Event.record and not report.events


def test_a_history_that_is_full_is_not_judged(cuda: Cuda, report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alias_audit, "HISTORY_ENTRIES", 4)
    with pytest.raises(ValueError, match="more than 4 allocator events"):
        capture(cuda, AliasAudit(report))
    assert cuda.event.record is Event.record and not cuda.history and not report.events


def test_an_end_without_a_beginning_is_nothing(cuda: Cuda, report: Any) -> None:
    AliasAudit(report).capture_ends(None, "key")
    assert not report.events
