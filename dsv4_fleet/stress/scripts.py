"""What the sessions say: conversations made from a seed, with answers that are known beforehand.

A script (lengths, tools, streaming) depends on the run's seed and its index alone, so that two arms can be paired
by it. Its nonces depend on the worker too, so that no two sessions ever share one.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from dataclasses import dataclass, field
from typing import Any

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
NONCE = re.compile(r"zq[0-9a-hjkmnp-tv-z]{12}")
PLACES = ("Zürich", "東京", "Kraków", "São Paulo", "Århus", "Θήρα", "Oslo", "Lima")
LONG = 24  # values in the list of a long call


@dataclass(frozen=True)
class Expected:
    """The right answer to a turn: a call, or where `name` is None this text."""

    name: str | None
    arguments: dict[str, Any] = field(default_factory=dict)
    text: str = ""

    @property
    def alphabet(self) -> frozenset[str]:
        """Characters that the answer is made of."""
        return frozenset(json.dumps(self.arguments, ensure_ascii=False) + self.text)


@dataclass(frozen=True)
class Turn:
    """One request of a session, with the whole history that comes before it."""

    messages: list[dict[str, Any]]
    expected: Expected
    stream: bool
    long: bool

    @property
    def most_tokens(self) -> int:
        """A bound that a right answer never reaches: a token for each character, and more."""
        return 512 + 2 * len(json.dumps(self.expected.arguments)) + 2 * len(self.expected.text)


@dataclass(frozen=True)
class Session:
    """A conversation. `script` is a digest of what it has in common with the same index on another worker."""

    worker: str
    index: int
    script: str
    turns: tuple[Turn, ...]
    nonces: frozenset[str]

    @property
    def name(self) -> str:
        return f"{self.worker}/{self.index}"


def _tool(name: str, about: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


_STRINGS = {"type": "array", "items": {"type": "string"}}
TOOLS = [
    _tool(
        "record_measurement",
        "Record what a station measured.",
        {
            "station": {"type": "string"},
            "place": {"type": "string"},
            "value": {"type": "number"},
            "unit": {"type": "string", "enum": ["mV", "kPa", "lux"]},
            "samples": _STRINGS,
        },
    ),
    _tool(
        "book_slot",
        "Book a room.",
        {
            "room": {"type": "string"},
            "place": {"type": "string"},
            "minutes": {"type": "integer"},
            "private": {"type": "boolean"},
            "guests": _STRINGS,
        },
    ),
    _tool(
        "store_note",
        "Store a note under a key.",
        {
            "key": {"type": "string"},
            "note": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "body": {"type": "string"}},
                "required": ["place", "body"],
                "additionalProperties": False,
            },
            "labels": _STRINGS,
        },
    ),
]
SCHEMAS: dict[str, dict[str, Any]] = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


def _checksum(body: str) -> str:
    digest = hashlib.sha256(body.encode()).digest()
    return ALPHABET[digest[0] % 32] + ALPHABET[digest[1] % 32]


class Nonces:
    """The nonces of one session; the last two characters check the ten before, so a miscopied one is told apart."""

    def __init__(self, *words: object) -> None:
        self.random = random.Random("\0".join(str(word) for word in words))
        self.made: list[str] = []

    def __call__(self) -> str:
        body = "".join(self.random.choices(ALPHABET, k=10))
        self.made.append(f"zq{body}{_checksum(body)}")
        return self.made[-1]


def is_whole(nonce: str) -> bool:
    """Whether some session made this nonce: a model that copies one wrongly breaks its check characters."""
    return _checksum(nonce[2:12]) == nonce[12:]


def session(seed: int, worker: str, index: int, turns: int = 3) -> Session:
    """The conversation of that index on that worker: `turns` calls, and for one script in four a text at the end."""
    shape = random.Random(f"{seed}\0script\0{index}")
    nonce = Nonces(seed, "nonces", worker, index)
    messages: list[dict[str, Any]] = [
        {
            "role": "system",
            "content": f"{nonce()} is this session. Work exactly. Copy every value character by character.",
        }
    ]
    made, outline = [], []
    for number in range(turns + (shape.random() < 0.25)):
        long, stream = shape.random() < 0.25, shape.random() < 0.7
        if number < turns:
            expected = _call(shape, nonce, LONG if long else 2)
            text = (
                f"{nonce()}: call the tool {expected.name} once with exactly these arguments: "
                f"{json.dumps(expected.arguments, ensure_ascii=False)}"
            )
        else:
            expected = Expected(None, text=" ".join(nonce() for _ in range(LONG if long else 3)))
            text = f"{nonce()}: call no tool. Repeat the following line and nothing else: {expected.text}"
        outline.append([expected.name, long, stream])
        messages = [*messages, {"role": "user", "content": text}]
        made.append(Turn(messages, expected, stream, long))
        # The history holds the right answers: what a turn gets does not depend on errors before it.
        messages = [*messages, *_answered(expected, nonce)]
    digest = hashlib.sha256(json.dumps(outline).encode()).hexdigest()[:16]
    return Session(worker, index, digest, tuple(made), frozenset(nonce.made))


def _call(shape: random.Random, nonce: Nonces, values: int) -> Expected:
    # Every text holds a nonce of its own: one that comes from another session is then known at sight.
    name, place = shape.choice(list(SCHEMAS)), f"{shape.choice(PLACES)} {nonce()}"
    if name == "record_measurement":
        arguments = {
            "station": nonce(),
            "place": place,
            "value": shape.randrange(1, 9999) / 8,
            "unit": shape.choice(["mV", "kPa", "lux"]),
            "samples": [nonce() for _ in range(values)],
        }
    elif name == "book_slot":
        arguments = {
            "room": nonce(),
            "place": place,
            "minutes": shape.randrange(5, 240),
            "private": shape.random() < 0.5,
            "guests": [nonce() for _ in range(values)],
        }
    else:
        arguments = {
            "key": nonce(),
            "note": {"place": place, "body": f"{nonce()} then {nonce()}"},
            "labels": [nonce() for _ in range(values)],
        }
    return Expected(name, arguments)


def _answered(expected: Expected, nonce: Nonces) -> list[dict[str, Any]]:
    if expected.name is None:
        return [{"role": "assistant", "content": expected.text}]
    call = f"call_{nonce()}"
    function = {"name": expected.name, "arguments": json.dumps(expected.arguments, ensure_ascii=False)}
    return [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call, "content": json.dumps({"ok": True, "receipt": nonce()})},
    ]


def request(turn: Turn, model: str) -> dict[str, Any]:
    """The body of the chat completion request."""
    body: dict[str, Any] = {
        "model": model,
        "messages": turn.messages,
        "tools": TOOLS,
        "tool_choice": "auto",
        "temperature": 0,
        "max_tokens": turn.most_tokens,
        "stream": turn.stream,
    }
    if turn.stream:
        body["stream_options"] = {"include_usage": True}
    return body
