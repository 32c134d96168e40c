"""An answer put together from the bytes that came, however they were cut."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

RAW_LIMIT = 1 << 20  # bytes kept of one answer


@dataclass
class Call:
    """A tool call as it came: both parts may be missing."""

    name: str | None = None
    arguments: str = ""


@dataclass
class Answer:
    """What the server said. `failed` names why this is no answer at all; what had come by then is kept."""

    content: str = ""
    calls: list[Call] = field(default_factory=list)
    finish: str | None = None
    failed: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    raw: bytes = b""

    @property
    def text(self) -> str:
        """All that the model wrote, in one string."""
        return "\n".join([self.content, *(f"{call.name or ''} {call.arguments}" for call in self.calls)])


class Events:
    """Server-sent events from bytes. Lines end with LF or CR LF only: U+2028 inside a value ends none."""

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of the `data:` lines that are complete by now."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

    def close(self) -> list[bytes]:
        """A last line without its end."""
        return self.feed(b"\n") if self.rest else []


class Assembler:
    """Collects one answer; feed it the body's bytes as they come, then take `close()`."""

    def __init__(self, stream: bool) -> None:
        self.stream = stream
        self.answer = Answer()
        self.events = Events()
        self.calls: dict[int, Call] = {}
        self.kept: list[bytes] = []
        self.size = 0
        self.done = False
        self.choices = False

    def feed(self, data: bytes) -> None:
        if self.size < RAW_LIMIT or not self.stream:
            self.kept.append(data)
        self.size += len(data)
        if self.stream:
            for payload in self.events.feed(data):
                self._event(payload)

    def close(self, failed: str | None = None) -> Answer:
        """The answer; `failed` is what ended the connection, if anything did."""
        answer = self.answer
        body = b"".join(self.kept)
        if not self.stream:
            self._body(body, failed)
        for payload in self.events.close():
            self._event(payload)
        answer.calls = [self.calls[index] for index in sorted(self.calls)]
        answer.raw = body[:RAW_LIMIT]
        answer.failed = answer.failed or failed or self._missing()
        return answer

    def _missing(self) -> str | None:
        if self.stream and not self.done:
            return "no [DONE]"
        if not self.choices:
            return "no choices"
        if self.answer.finish is None:
            return "no finish reason"
        return "aborted" if self.answer.finish in ("abort", "error") else None

    def _body(self, body: bytes, failed: str | None) -> None:
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            self.answer.failed = failed or "a body that is not JSON"
            return
        self._read(value, "message")

    def _event(self, payload: bytes) -> None:
        if payload == b"[DONE]":
            self.done = True
            return
        try:
            value = json.loads(payload)
        except (ValueError, RecursionError):
            self.answer.failed = self.answer.failed or "an event that is not JSON"
            return
        self._read(value, "delta")

    def _read(self, value: Any, part: str) -> None:
        try:
            self._chunk(value, part)
        except (AttributeError, TypeError):  # a list or a number where an object or a text belongs
            self.answer.failed = self.answer.failed or "JSON of another shape than an answer's"

    def _chunk(self, value: Any, part: str) -> None:
        answer = self.answer
        if not isinstance(value, dict) or value.get("error") or value.get("object") == "error":
            answer.failed = answer.failed or "an error inside a 200 answer"
            return
        usage = value.get("usage") or {}
        answer.prompt_tokens = max(answer.prompt_tokens, usage.get("prompt_tokens") or 0)
        answer.completion_tokens = max(answer.completion_tokens, usage.get("completion_tokens") or 0)
        for choice in value.get("choices") or []:
            self.choices = True
            delta = choice.get(part) or {}
            answer.content += delta.get("content") or ""
            answer.finish = choice.get("finish_reason") or answer.finish
            for position, item in enumerate(delta.get("tool_calls") or []):
                index = item.get("index") if self.stream else position
                call = self.calls.setdefault(position if index is None else index, Call())
                function = item.get("function") or {}
                call.name = call.name or function.get("name")
                call.arguments += function.get("arguments") or ""
