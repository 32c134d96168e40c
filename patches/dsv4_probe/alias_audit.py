"""The alias audit: name, at capture, memory that is reused while another stream may still read it.

The allocator's history tells when a block was freed and given out again, but not which stream waited
for which; that is taken from the stream and event calls themselves, wrapped while one graph is
captured. Nothing is left behind after the capture, so replays cost nothing.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from . import aliases
from .report import Report

NAME = "alias_audit"

HISTORY_ENTRIES = 200_000
FRAMES = 8


class AliasAudit:
    """The audit of one process."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.log: list[tuple[int, float, Any]] = []
        self.running = False
        self.captured = 0
        self.found = 0
        self.watched = 0
        self.order = "metadata" if hasattr(torch.cuda.memory, "_set_memory_metadata") else "time"
        self._unwrap: list[tuple[Any, str, Any]] = []
        self._live: list[Any] = []

    def capture_begins(self, runner: Any, key: Any) -> None:
        """Switch the history on for one capture. Someone else's history is left alone: ValueError."""
        self._stop()
        if _history_is_on():
            raise ValueError(
                "the allocator's history is already recorded by someone else (a profiler, or "
                "--enable-profile-cuda-graph); switch that off to use the audit"
            )
        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=HISTORY_ENTRIES, clear_history=True
        )
        self.running = True
        self.log = []
        self._wrap()

    def capture_ends(self, runner: Any, key: Any) -> None:
        """Judge what was captured, and leave everything as it was."""
        if not self.running:
            return
        try:
            if not _history_is_on(default=True):
                raise ValueError("the allocator's history was switched off by someone else during a capture")
            traces = torch.cuda.memory._snapshot()["device_traces"]
            trace = traces[torch.cuda.current_device()]
        finally:
            log, self.log = self.log, []
            self._stop()
        if len(trace) >= HISTORY_ENTRIES:
            raise ValueError(
                f"one capture had more than {HISTORY_ENTRIES} allocator events; it is not judged"
            )
        self.captured += 1
        found = aliases.audit(self._merged(log, trace))
        self.found += len(found)
        for alias in found:
            self.report.event(
                NAME,
                "alias",
                bucket=str(key),
                layer=alias.layer,
                input=alias.name,
                reader=alias.reader,
                reading_stream=_hex(alias.reading_stream),
                allocating_stream=_hex(alias.allocating_stream),
                address=hex(alias.start),
                bytes=alias.size,
                made=_frames(alias.made),
                reused=_frames(alias.reused),
            )
        if not found:
            self.report.event(NAME, "clean")

    def made(self, layer: int, **tensors: Any) -> None:
        """These tensors were made on the current stream."""
        if self._listening():
            stream = torch.cuda.current_stream().cuda_stream
            for name, tensor in tensors.items():
                for part, one in _parts(name, tensor):
                    start = one.data_ptr()
                    end = start + one.numel() * one.element_size()
                    self.watched += 1
                    self._note(aliases.Watch(layer, part, start, end, stream))

    def read(self, layer: int, reader: str, **tensors: Any) -> None:
        """`reader` was launched on the current stream, with these tensors."""
        if self._listening():
            stream = torch.cuda.current_stream().cuda_stream
            for name, tensor in tensors.items():
                for part, _ in _parts(name, tensor):
                    self._note(aliases.Read(layer, part, reader, stream))

    def status(self) -> dict[str, Any]:
        """For the status file."""
        return {
            "captures_audited": self.captured,
            "tensors_watched": self.watched,
            "aliases": self.found,
            "ordered_by": self.order,
            "graph_nodes_added": 0,
            "bytes": 0,
        }

    def _listening(self) -> bool:
        # Warm-ups allocate from another pool and are no part of the graph.
        return self.running and torch.cuda.is_current_stream_capturing()

    def _note(self, item: Any) -> None:
        number = len(self.log) + 1
        self.log.append((number, time.time(), item))
        if self.order == "metadata":
            torch.cuda.memory._set_memory_metadata(str(number))

    def _wrap(self) -> None:
        """Listen to Event.record and Event.wait, through which all of torch's stream calls go."""
        event = torch.cuda.Event
        record, wait = event.record, event.wait
        audit = self

        def recorded(self: Any, stream: Any = None) -> Any:
            result = record(self, stream)
            if audit._listening():
                audit._live.append(self)  # its id names it until the capture ends
                on = torch.cuda.current_stream() if stream is None else stream
                audit._note(aliases.Record(id(self), on.cuda_stream))
            return result

        def waited(self: Any, stream: Any = None) -> Any:
            result = wait(self, stream)
            if audit.running:
                on = torch.cuda.current_stream() if stream is None else stream
                audit._note(aliases.Wait(on.cuda_stream, id(self)))
            return result

        self._unwrap = [(event, "record", record), (event, "wait", wait)]
        event.record, event.wait = recorded, waited

    def _stop(self) -> None:
        for owner, name, original in self._unwrap:
            setattr(owner, name, original)
        self._unwrap, self._live = [], []
        if self.running:
            self.running = False
            if self.order == "metadata":
                torch.cuda.memory._set_memory_metadata("")
            torch.cuda.memory._record_memory_history(None)

    def _merged(self, log: list[tuple[int, float, Any]], trace: list[dict[str, Any]]) -> list[Any]:
        """Our notes and the allocator's entries in the order in which they happened."""
        if not log:
            return []
        merged: list[tuple[float, int, Any]] = []
        by_metadata = self.order == "metadata"
        first = log[0][1]
        for number, at, item in log:
            merged.append((number if by_metadata else at, 0, item))
        last_mark = 0.0
        for index, entry in enumerate(trace):
            item = _allocator_item(entry)
            if item is None:
                continue
            if by_metadata:
                mark = entry.get("user_metadata") or ""
                # Before our first note nothing is watched, but what was given out then is worth knowing.
                last_mark = float(mark) if str(mark).isdigit() else last_mark
                merged.append((last_mark, 1 + index, item))
            elif entry.get("time_us", 0) / 1e6 >= first - 60:
                merged.append((entry["time_us"] / 1e6, 1 + index, item))
        merged.sort(key=lambda one: one[:2])
        return [item for _, _, item in merged]


def _allocator_item(entry: dict[str, Any]) -> aliases.Alloc | aliases.Free | None:
    start, size = entry.get("addr", 0), entry.get("size", 0)
    if entry["action"] == "alloc":
        return aliases.Alloc(start, start + size, entry.get("stream", 0), entry.get("frames"))
    return aliases.Free(start, start + size) if entry["action"] == "free_completed" else None


def _history_is_on(default: bool = False) -> bool:
    asked = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return bool(asked()) if asked is not None else default


def _parts(name: str, tensor: Any) -> list[tuple[str, torch.Tensor]]:
    if tensor is None:
        return []
    if isinstance(tensor, tuple):
        return [(name, tensor[0]), (f"{name}_scale", tensor[1])]
    return [(name, tensor)]


def _hex(stream: Any) -> str:
    return hex(int(stream))


def _frames(frames: Any) -> list[str]:
    """The innermost frames of a stack, without torch's own and this package's."""
    lines = []
    for frame in frames or ():
        if "/dsv4_probe/" not in frame["filename"] and "/torch/" not in frame["filename"]:
            lines.append(f"{frame['filename']}:{frame['line']} {frame['name']}")
    return lines[:FRAMES]
