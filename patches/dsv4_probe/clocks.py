"""Vector clocks over streams and events: who has waited for whom, and for how much. No torch here."""

from __future__ import annotations

from collections.abc import Hashable

Clock = dict[Hashable, int]


class Clocks:
    """Each stream's own count goes up with each record; a wait takes over all that the event had seen."""

    def __init__(self) -> None:
        self._streams: dict[Hashable, Clock] = {}
        self._events: dict[Hashable, Clock] = {}

    def tick(self, stream: Hashable) -> int:
        """Mark a point in a stream's order; returns its number."""
        clock = self._streams.setdefault(stream, {})
        clock[stream] = clock.get(stream, 0) + 1
        return clock[stream]

    def record(self, event: Hashable, stream: Hashable) -> None:
        """`event` was recorded on `stream`: whoever waits for it has waited for all of it until now."""
        self.tick(stream)
        self._events[event] = dict(self._streams[stream])

    def wait(self, stream: Hashable, event: Hashable) -> None:
        """`stream` waits for `event`. An event that was never recorded orders nothing."""
        seen = self._events.get(event)
        if seen is None:
            return
        clock = self._streams.setdefault(stream, {})
        for other, count in seen.items():
            clock[other] = max(clock.get(other, 0), count)

    def reached(self, stream: Hashable, other: Hashable, point: int) -> bool:
        """Whether what `stream` does next comes after point `point` of stream `other`, transitively."""
        return stream == other or self._streams.get(stream, {}).get(other, 0) >= point
