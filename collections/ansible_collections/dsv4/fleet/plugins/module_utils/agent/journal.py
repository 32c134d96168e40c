"""A transaction's directory: its program, its request, its journal, its result."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from typing import Any

from . import files, paths
from .errors import AgentError

KEEP = 20  # finished transactions whose directories stay
_IDENTITY = re.compile(r"[0-9]{8}T[0-9]{6}-[0-9a-f]{8}")


class Transaction:
    """One change, by its id. Reads tell the truth at any moment; writes are on disk when they return."""

    def __init__(self, identity: str) -> None:
        if not _IDENTITY.fullmatch(identity):
            raise AgentError(f"transaction: found id {identity!r}, expected one like 20260921T101500-1a2b3c4d.")
        self.id = identity
        self.directory = paths.transaction(identity)

    @property
    def program(self) -> str:
        return f"{self.directory}/agent.pyz"

    @property
    def evidence(self) -> str:
        return f"{self.directory}/evidence"

    def exists(self) -> bool:
        return os.path.exists(f"{self.directory}/request.json")

    def create(self, request: dict[str, Any], program: bytes) -> None:
        """Store program and request; the request last, so that what has one is complete."""
        files.directory(paths.TRANSACTIONS)
        files.directory(self.directory, 0o700)
        files.replace(self.program, program, 0o600)
        files.replace(f"{self.directory}/request.json", files.canonical(request), 0o600)

    def request(self) -> dict[str, Any]:
        found = files.read_json(f"{self.directory}/request.json")
        if not isinstance(found, dict):
            raise AgentError(
                f"transaction {self.id}: found no request in {self.directory}, expected one. It was never started here."
            )
        return found

    def lines(self) -> list[dict[str, Any]]:
        """The journal's whole lines; one that was cut by a crash is not there."""
        data = files.read(f"{self.directory}/journal.jsonl") or b""
        return [json.loads(line) for line in data.split(b"\n")[:-1] if line]

    def size(self) -> int:
        """The journal's size in bytes: whether to read it again."""
        try:
            return os.stat(f"{self.directory}/journal.jsonl").st_size
        except FileNotFoundError:
            return 0

    def result(self) -> dict[str, Any] | None:
        found = files.read_json(f"{self.directory}/result.json")
        return found if isinstance(found, dict) else None

    def pending(self) -> dict[str, Any] | None:
        """A result that was decided on, but not yet given."""
        found = files.read_json(f"{self.directory}/result.pending")
        return found if isinstance(found, dict) else None

    def decide(self, result: dict[str, Any]) -> None:
        files.replace(f"{self.directory}/result.pending", files.canonical(result), 0o600)

    def give(self) -> None:
        files.commit(f"{self.directory}/result.pending", f"{self.directory}/result.json")

    def step(self) -> str | None:
        """The step that began last."""
        began = [line["step"] for line in self.lines() if line["event"] == "begin"]
        return began[-1] if began else None

    def began(self, step: str) -> bool:
        return any(line["step"] == step and line["event"] == "begin" for line in self.lines())


class Journal:
    """Appends to the journal. Nothing that is secret gets into it, whoever hands it over."""

    def __init__(self, transaction: Transaction, secret: list[str]) -> None:
        self.path = f"{transaction.directory}/journal.jsonl"
        self._secret = secret
        self._mend()
        self._step = "stage"  # between steps: the last one
        self._depth = 0
        self.timeline: list[dict[str, Any]] = []

    def _mend(self) -> None:
        """Cut off a line that a crash left unfinished, so that what follows stays readable."""
        data = files.read(self.path)
        if data and not data.endswith(b"\n"):
            os.truncate(self.path, data.rfind(b"\n") + 1)

    def write(self, event: str, text: str, **fields: Any) -> None:
        line = {"at": round(time.time(), 3), "step": self._step, "event": event, "text": text, **fields}
        data = json.dumps(hide(line, self._secret), ensure_ascii=True).encode() + b"\n"
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, data)
            os.fsync(handle)
        finally:
            os.close(handle)

    def say(self, text: str, event: str = "info", **fields: Any) -> None:
        """A line of the current step, in the form in which steps' own modules call it."""
        self.write(event, text, **fields)

    @contextlib.contextmanager
    def step(self, name: str, text: str) -> Iterator[None]:
        """One step: its beginning is on disk before the block runs; its end or failure after it."""
        outer, self._step = self._step, name
        self._depth += 1
        self.write("begin", text)
        started = time.monotonic()
        failed: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failed = error
            raise
        finally:
            seconds = round(time.monotonic() - started, 3)
            self.timeline.append({"step": name, "seconds": seconds})
            if failed is None:
                self.write("end", f"{name} done", seconds=seconds)
            else:
                self.write("fail", str(failed) or type(failed).__name__, seconds=seconds)
            self._depth -= 1
            if self._depth:
                self._step = outer


def hide(value: Any, secret: list[str]) -> Any:
    """The value with every secret in any of its texts replaced."""
    if isinstance(value, str):
        for one in secret:
            value = value.replace(one, "(secret)")
        return value
    if isinstance(value, dict):
        return {hide(key, secret): hide(item, secret) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [hide(item, secret) for item in value]
    return value


def remove(transaction: Transaction) -> None:
    """Forget a transaction that could not be started."""
    if os.path.isdir(transaction.directory):
        shutil.rmtree(transaction.directory)


def everything() -> list[Transaction]:
    """All transactions, oldest first."""
    try:
        names = os.listdir(paths.TRANSACTIONS)
    except FileNotFoundError:
        return []
    known = (Transaction(name) for name in sorted(names) if _IDENTITY.fullmatch(name))
    return sorted(
        (one for one in known if one.exists()),
        key=lambda one: os.stat(f"{one.directory}/request.json").st_mtime_ns,
    )


def unfinished() -> list[Transaction]:
    """Transactions without a result, oldest first."""
    return [one for one in everything() if one.result() is None]


def collect_garbage(keep: set[str]) -> None:
    """Remove directories of finished transactions beyond KEEP, and secrets that belong to none that runs."""
    finished = [one for one in everything() if one.result() is not None and one.id not in keep]
    for one in finished[: max(0, len(finished) - KEEP)]:
        shutil.rmtree(one.directory)
    running = {f"{one.id}.secrets" for one in unfinished()}
    for name in _listed(paths.SECRETS):
        if name not in running:
            files.remove(f"{paths.SECRETS}/{name}")


def _listed(path: str) -> list[str]:
    try:
        return [item.name for item in os.scandir(path) if stat.S_ISREG(item.stat(follow_symlinks=False).st_mode)]
    except FileNotFoundError:
        return []
