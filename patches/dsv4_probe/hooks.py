"""What the lines spliced into upstream's files call. With no instrument on, each returns at once.

An instrument that fails disarms itself, says so once and counts; whatever happens in it, upstream's
code goes on as if the line were not there.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable
from typing import Any

from . import INSTRUMENTS, settings

_probe: Any = None
_settled = False


class Probe:
    """The instruments that are on in this process."""

    def __init__(self, wanted: settings.Settings) -> None:
        from . import ALIAS_AUDIT, CANARY, GE_DIFF, report
        from .passport import release

        flags = {CANARY: wanted.canary, GE_DIFF: wanted.ge_diff, ALIAS_AUDIT: wanted.alias_audit}
        identity = {"pid": os.getpid(), "rank": int(os.environ.get("RANK", 0)), "release": release()}
        self.report = report.Report(report.directory(), identity)
        self.report.status["flags"] = flags
        self.instruments: dict[str, Any] = {}
        self.replays = 0
        self.captured: dict[str, list[str]] = {}
        self.hooks: set[str] = set()
        reason = _unfit()
        for name, on in (
            ("canary", wanted.canary),
            ("ge_diff", wanted.ge_diff),
            ("alias_audit", wanted.alias_audit),
        ):
            if on and reason:
                self.report.disarm(name, reason)
        if reason:
            return
        if wanted.canary:
            from .canary import Canary

            self.instruments["canary"] = Canary(self.report)
        if wanted.ge_diff:
            from .ge_diff import GeDiff

            self.instruments["ge_diff"] = GeDiff(wanted, self.report)
        if wanted.alias_audit:
            from .alias_audit import AliasAudit

            self.instruments["alias_audit"] = AliasAudit(self.report)
        atexit.register(self.flush)

    def call(self, name: str, method: str, *args: Any, **kwargs: Any) -> None:
        """Call an instrument, if it is armed; a failure disarms it."""
        instrument = self.instruments.get(name)
        if instrument is None:
            return
        try:
            getattr(instrument, method)(*args, **kwargs)
        except Exception as error:  # an instrument must never end the server
            self.instruments.pop(name, None)
            stop = getattr(instrument, "_stop", None)
            if stop is not None:
                stop()
            self.report.disarm(name, f"{type(error).__name__}: {error}")

    def status(self, force: bool = False) -> None:
        """Renew the status file, if it is time."""
        if not force and not self.report.status_is_due():
            return
        rank = _rank()
        if rank is not None:
            self.report.identity["rank"] = rank
        self.report.write_status(
            True,
            armed=sorted(self.instruments),
            live=sorted(flag for flag, name in INSTRUMENTS.items() if name in self.instruments),
            replays=self.replays,
            hooks_captured=self.captured,
            **{name: instrument.status() for name, instrument in self.instruments.items()},
        )

    def flush(self) -> None:
        """Judge everything that is under way, and write the status."""
        for name in ("canary", "ge_diff"):
            self.call(name, "poll", wait=True)
        self.status(force=True)


def _unfit() -> str | None:
    """Why no instrument can run here, or None."""
    import torch

    if torch.version.hip is not None:
        return "this is a ROCm build of torch; the instruments know CUDA only"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return None


def _rank() -> int | None:
    import torch

    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else None


def probe() -> Any:
    """The process's instruments, or None where none is on."""
    global _probe, _settled
    if not _settled:
        _settled = True
        try:
            wanted = settings.read()
            _probe = Probe(wanted) if wanted.any else None
        except Exception as error:  # a wrong setting or a missing package: off, and said
            print(f"dsv4_probe: no instrument is armed: {error}", flush=True)
    return _probe


def _harmless(hook: Callable[..., None]) -> Callable[..., None]:
    """Whatever goes wrong in a hook itself switches all instruments off, and upstream's code goes on."""

    @functools.wraps(hook)
    def guarded(*args: Any, **kwargs: Any) -> None:
        global _probe
        if _settled and _probe is None:
            return
        try:
            hook(*args, **kwargs)
        except Exception as error:
            _probe = None
            print(f"dsv4_probe: no instrument is armed any more: {hook.__name__}: {error!r}", flush=True)

    return guarded


@_harmless
def prepare_made(layer: Any, backend: Any, **tensors: Any) -> None:
    """In MQALayer's overlapped prepare: x and qkv_a, then q_lora, were made on the current stream."""
    if (on := probe()) is not None:
        on.hooks.add("made")
        metadata = getattr(backend, "forward_metadata", None)
        on.call("ge_diff", "made", layer.layer_id, metadata, **tensors)
        on.call("alias_audit", "made", layer.layer_id, **tensors)


@_harmless
def prepare_read(layer: Any, reader: str, **tensors: Any) -> None:
    """In MQALayer's overlapped prepare: `reader` was launched on the current stream."""
    if (on := probe()) is not None:
        on.hooks.add(reader)
        on.call("ge_diff", "read", layer.layer_id, reader, **tensors)
        on.call("alias_audit", "read", layer.layer_id, reader, **tensors)


@_harmless
def indexer_compressed(backend: Any, indexer: Any, x: Any) -> None:
    """In the indexer's prepare: its compressor has read x."""
    if (on := probe()) is not None:
        on.hooks.add("indexer_compressor")
        on.call("ge_diff", "read", indexer.layer_id, "indexer_compressor", x=x)
        on.call("alias_audit", "read", indexer.layer_id, "indexer_compressor", x=x)


@_harmless
def indexer_q_made(
    backend: Any, indexer: Any, x: Any, q_lora: Any, positions: Any, q: Any, weights: Any
) -> None:
    """In the indexer's prepare: q and weights were made; q_lora and x were read."""
    if (on := probe()) is not None:
        on.hooks.add("q")
        metadata = getattr(backend, "forward_metadata", None)
        made = {"q": q, "weights": weights, "positions": positions}
        on.call("ge_diff", "q_made", indexer.layer_id, indexer, metadata, x, q_lora, **made)
        on.call("alias_audit", "read", indexer.layer_id, "q", q_lora=q_lora, x=x)
        on.call("alias_audit", "made", indexer.layer_id, q=q, weights=weights)


@_harmless
def logits_read(backend: Any, indexer: Any, function: Any, logits: Any, *arguments: Any) -> None:
    """After `logits = fn(…)`, on its stream."""
    if (on := probe()) is not None:
        on.hooks.add("logits")
        on.call("ge_diff", "logits", indexer.layer_id, function, logits, arguments)
        on.call("alias_audit", "read", indexer.layer_id, "logits", q=arguments[0], weights=arguments[2])


@_harmless
def capture_begins(runner: Any, key: Any) -> None:
    """A graph of this key is about to be warmed up and captured."""
    if (on := probe()) is not None:
        on.hooks = set()
        for name in tuple(on.instruments):
            on.call(name, "capture_begins", runner, key)


@_harmless
def capture_ends(runner: Any, key: Any) -> None:
    """It is captured."""
    if (on := probe()) is not None:
        for name in ("ge_diff", "alias_audit"):
            on.call(name, "capture_ends", runner, key)
        if on.instruments:
            on.captured[str(key)] = sorted(on.hooks)
        on.status(force=True)


@_harmless
def replay_begins(runner: Any, key: Any, batch: Any) -> None:
    """The graph of this key is about to be replayed, on the current stream."""
    if (on := probe()) is not None:
        on.call("ge_diff", "begins", runner, key, batch)
        on.call("canary", "begins", runner, key, batch)


@_harmless
def replay_ends(runner: Any, key: Any, batch: Any) -> None:
    """It has been enqueued."""
    if (on := probe()) is not None:
        on.call("canary", "ends", runner, key, batch)
        on.call("ge_diff", "ends", runner, key, batch)
        if on.instruments:
            on.replays += 1
            on.status()
