"""The alias audit's judgement of one capture, from a list of what happened in order. No torch here."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from .clocks import Clocks


@dataclass(frozen=True)
class Record:
    """Event `event` was recorded on `stream`."""

    event: Hashable
    stream: Hashable


@dataclass(frozen=True)
class Wait:
    """`stream` waits for `event`."""

    stream: Hashable
    event: Hashable


@dataclass(frozen=True)
class Watch:
    """A tensor to watch: its bytes lie at [start, end), made on `stream`."""

    layer: int
    name: str
    start: int
    end: int
    stream: Hashable


@dataclass(frozen=True)
class Read:
    """`reader` has been launched on `stream` and reads the layer's watched tensor `name`."""

    layer: int
    name: str
    reader: str
    stream: Hashable


@dataclass(frozen=True)
class Alloc:
    """The allocator gave out [start, end) for use on `stream`."""

    start: int
    end: int
    stream: Hashable
    frames: Any = None


@dataclass(frozen=True)
class Free:
    """The allocator took [start, end) back (free_completed)."""

    start: int
    end: int


@dataclass(frozen=True)
class Alias:
    """A race: memory of a watched tensor given out again while `reader` may still read it."""

    layer: int
    name: str
    reader: str
    reading_stream: Hashable
    allocating_stream: Hashable
    start: int
    size: int
    made: Any
    reused: Any


@dataclass
class _Watched:
    watch: Watch
    made: Any
    readers: dict[tuple[str, Hashable], int] = field(default_factory=dict)
    freed: bool = False


def audit(happened: Iterable[Record | Wait | Watch | Read | Alloc | Free]) -> list[Alias]:
    """Races among what happened, in its order; each (tensor, reader) at most once."""
    clocks = Clocks()
    watched: list[_Watched] = []
    allocated: dict[int, Alloc] = {}
    found: list[Alias] = []
    for item in happened:
        if isinstance(item, Record):
            clocks.record(item.event, item.stream)
        elif isinstance(item, Wait):
            clocks.wait(item.stream, item.event)
        elif isinstance(item, Watch):
            made = next((a.frames for a in allocated.values() if a.start <= item.start < a.end), None)
            watched.append(_Watched(item, made))
        elif isinstance(item, Read):
            for one in reversed(watched):
                if (one.watch.layer, one.watch.name) == (item.layer, item.name):
                    one.readers[item.reader, item.stream] = clocks.tick(item.stream)
                    break
        elif isinstance(item, Free):
            allocated.pop(item.start, None)
            for one in watched:
                if item.start <= one.watch.start < item.end:
                    one.freed = True
        else:
            allocated[item.start] = item
            for one in watched:
                if one.freed and item.start < one.watch.end and one.watch.start < item.end:
                    found += _races(clocks, one, item)
    return found


def _races(clocks: Clocks, one: _Watched, alloc: Alloc) -> list[Alias]:
    """Readers of a freed tensor that the allocating stream has not waited for; each is reported once."""
    races = []
    for (reader, stream), point in list(one.readers.items()):
        if clocks.reached(alloc.stream, stream, point):
            continue
        del one.readers[reader, stream]
        low, high = max(one.watch.start, alloc.start), min(one.watch.end, alloc.end)
        races.append(
            Alias(
                one.watch.layer,
                one.watch.name,
                reader,
                stream,
                alloc.stream,
                low,
                high - low,
                one.made,
                alloc.frames,
            )
        )
    return races
