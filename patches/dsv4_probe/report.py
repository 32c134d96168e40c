"""What the instruments say: one JSON line an event, counters, and a status file a process.

Everything lies in `$DSV4_FLEET_EVENTS`, or in `instruments/` beside the passports: `<pid>.jsonl`
(and `<pid>.jsonl.1`, the part before), `<pid>.json`. docs/instruments.md has the schema.
"""

from __future__ import annotations

import collections
import json
import os
import sys
import time
from typing import Any

EVENT_FILE_BYTES = 8 << 20
"""A full event file becomes `.1` and replaces the one before: at most twice this on disk."""

BURST, PER_SECOND = 50, 5.0
"""Events of one instrument and verdict that may be written at once, and refilled each second."""

STATUS_SECONDS = 2.0

NOT_ALARMS = frozenset({"clean", "external", "late_overwrite", "inconclusive", "k_changed"})
"""Verdicts that are counted, and written as events, without saying that this server is at fault."""

SILENT = frozenset({"clean"})
"""Verdicts that are only counted."""


class Report:
    """Counts and writes for one process. Never raises: a full disk must not end a server."""

    def __init__(self, directory: str | None, identity: dict[str, Any], clock: Any = time) -> None:
        self.directory = directory
        self.identity = identity
        self.clock = clock
        self.events: collections.Counter[tuple[str, str]] = collections.Counter()
        self.suppressed: collections.Counter[tuple[str, str]] = collections.Counter()
        self.status: dict[str, Any] = {}
        self.disarmed: dict[str, str] = {}
        self._tokens: dict[tuple[str, str], tuple[float, float]] = {}
        self._written_at = 0.0
        self._failed = False
        self._metrics = _Metrics()

    def event(self, instrument: str, verdict: str, **details: Any) -> None:
        """Count an event and write its line, unless it is silent or over the rate."""
        key = (instrument, verdict)
        self.events[key] += 1
        self._metrics.count(instrument, verdict)
        if verdict in SILENT:
            return
        if not self._may_write(key):
            self.suppressed[key] += 1
            return
        line = {
            "format": 1,
            "at": round(self.clock.time(), 6),
            **self.identity,
            "instrument": instrument,
            "verdict": verdict,
            "alarm": verdict not in NOT_ALARMS,
            "suppressed": self.suppressed.pop(key, 0),
            **details,
        }
        self._append(json.dumps(line, separators=(",", ":"), default=str))

    def say(self, text: str) -> None:
        """One line for people, on standard error."""
        print(f"dsv4_probe: {text}".replace("\n", " "), file=sys.stderr, flush=True)

    def disarm(self, instrument: str, reason: str) -> None:
        """Take note that an instrument went off by itself; said once."""
        if instrument not in self.disarmed:
            self.disarmed[instrument] = reason
            self.say(f"{instrument} is disarmed: {reason}; the server goes on without it")
            self.event(instrument, "disarmed", reason=reason)
            self.write_status(force=True)

    def status_is_due(self) -> bool:
        """Whether the status file is older than STATUS_SECONDS."""
        return bool(self.clock.monotonic() - self._written_at >= STATUS_SECONDS)

    def write_status(self, force: bool = False, **fields: Any) -> None:
        """Renew the status file, at most every STATUS_SECONDS unless forced."""
        self.status.update(fields)
        now = self.clock.monotonic()
        if self.directory is None or (not force and now - self._written_at < STATUS_SECONDS):
            return
        self._written_at = now
        content = {
            "format": 1,
            "at": round(self.clock.time(), 3),
            **self.identity,
            **self.status,
            "disarmed": self.disarmed,
            "events": _nested(self.events),
            "suppressed": _nested(self.suppressed),
        }
        try:
            os.makedirs(self.directory, exist_ok=True)
            path = os.path.join(self.directory, f"{os.getpid()}.json")
            with open(f"{path}.new", "w", encoding="utf-8") as file:
                json.dump(content, file, sort_keys=True, default=str)
            os.replace(f"{path}.new", path)
        except OSError as error:
            self._fail(error)

    def _may_write(self, key: tuple[str, str]) -> bool:
        now = self.clock.monotonic()
        tokens, then = self._tokens.get(key, (float(BURST), now))
        tokens = min(float(BURST), tokens + (now - then) * PER_SECOND)
        allowed = tokens >= 1.0
        self._tokens[key] = (tokens - 1.0 if allowed else tokens, now)
        return allowed

    def _append(self, line: str) -> None:
        if self.directory is None:
            self.say(line)
            return
        try:
            os.makedirs(self.directory, exist_ok=True)
            path = os.path.join(self.directory, f"{os.getpid()}.jsonl")
            with open(path, "a", encoding="utf-8") as file:
                file.write(line + "\n")
                full = file.tell() >= EVENT_FILE_BYTES
            if full:
                os.replace(path, f"{path}.1")
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            self.say(f"cannot write events to {self.directory}: {error}")


def _nested(counts: collections.Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    nested: dict[str, dict[str, int]] = {}
    for (instrument, verdict), count in sorted(counts.items()):
        nested.setdefault(instrument, {})[verdict] = count
    return nested


class _Metrics:
    """A Prometheus counter where the server exports metrics from several processes, else nothing."""

    def __init__(self) -> None:
        self.counter: Any = None
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return
        try:
            from prometheus_client import Counter

            self.counter = Counter(
                "dsv4_probe_events", "Verdicts of the instruments", ["instrument", "verdict"]
            )
        except Exception as error:  # whatever the client library does, the server goes on without counters
            print(f"dsv4_probe: no Prometheus counters: {error!r}", file=sys.stderr, flush=True)

    def count(self, instrument: str, verdict: str) -> None:
        if self.counter is not None:
            self.counter.labels(instrument, verdict).inc()


def directory() -> str | None:
    """Where events go: see the module's own words. None: to standard error."""
    if os.environ.get("DSV4_FLEET_EVENTS"):
        return os.environ["DSV4_FLEET_EVENTS"]
    passports = os.environ.get("DSV4_FLEET_PASSPORTS")
    return os.path.join(passports, "instruments") if passports else None
