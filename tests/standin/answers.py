"""What a correct engine answers: deterministic, from the request alone.

A piece is what one step of the engine adds to an answer: `{"c": text}` or `{"t": tool call delta}`.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

FILLER = (
    "the river keeps its course while small stones turn under clear water and every bend shows another "
    "field where quiet rows of trees hold the morning light until wind moves them again"
)
WORDS = FILLER.split()
ECHO = re.compile(r"\b(?:repeat|echo|say|answer|reply|respond|return|output)\b[^:\n]*:\s*(\S[^\n]*)", re.IGNORECASE)
LENGTH = re.compile(r"\b(\d{1,6})\s+(?:words|tokens)\b", re.IGNORECASE)
NONCE = re.compile(r"\b(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{4,}\b")
PIECE = re.compile(r"\s*\S{1,12}")


@dataclass(frozen=True)
class Prompt:
    """The part of a request that decides its answer."""

    text: str  # the last message
    tools: list[dict[str, Any]]  # each {"name", "properties": [names]}
    forced: bool  # tool_choice asks for a call
    from_user: bool  # the last message is the user's, not a tool's result
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    session: str  # hash of the conversation's first user message, or of its `user` field
    turn: int  # how many user messages the conversation has
    call_index: int  # how many tool calls it already has


@dataclass(frozen=True)
class Answer:
    """`arguments` is the tool call's JSON text, None for a text answer."""

    pieces: list[dict[str, Any]]
    finish: str  # stop, length or tool_calls
    arguments: str | None = None
    name: str | None = None


def text_of(content: Any) -> str:
    """The text of an OpenAI message's content: a string, or a list of parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return ""


def session_of(first: str, user: str | None) -> str:
    """The identity of a conversation, in hex."""
    return hashlib.sha256(f"user:{user}".encode() if user else first.encode()).hexdigest()[:32]


def from_chat(body: dict[str, Any], default_tokens: int) -> Prompt:
    """Of a chat completion request; ValueError says what is wrong with it."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
        raise ValueError("found no list of messages, expected `messages` with at least one message")
    users = [text_of(item.get("content")) for item in messages if item.get("role") == "user"]
    choice = body.get("tool_choice", "auto")
    tools = [tool.get("function", {}) for tool in body.get("tools") or []]
    if isinstance(choice, dict):
        wanted = choice.get("function", {}).get("name")
        tools = [tool for tool in tools if tool.get("name") == wanted]
    named = [
        {"name": str(tool.get("name")), "properties": list(tool.get("parameters", {}).get("properties", {}))} for tool in tools
    ]
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    return Prompt(
        text=text_of(messages[-1].get("content")),
        tools=[] if choice == "none" else named,
        forced=choice == "required" or isinstance(choice, dict),
        from_user=messages[-1].get("role") == "user",
        max_tokens=int(limit) if limit else 1 << 20,
        min_tokens=max(int(body.get("min_tokens") or 0), 0 if limit else _filler(users, default_tokens)),
        ignore_eos=bool(body.get("ignore_eos")) and limit is not None,
        session=session_of(users[0] if users else "", body.get("user")),
        turn=max(1, len(users)),
        call_index=sum(len(item.get("tool_calls") or []) for item in messages),
    )


def _filler(users: list[str], default_tokens: int) -> int:
    """Nothing is asked for but a talk: the default length. Zero where the prompt wants something exact."""
    last = users[-1] if users else ""
    return 0 if ECHO.search(last) or NONCE.search(last) or LENGTH.search(last) else default_tokens


def from_generate(body: dict[str, Any], default_tokens: int) -> Prompt:
    """Of a `/generate` request; ValueError says what is wrong with it."""
    text, ids = body.get("text"), body.get("input_ids")
    if not isinstance(text, str) and not isinstance(ids, list):
        raise ValueError("found neither text nor input_ids, expected `text` as a string or `input_ids` as a list")
    sampling = body.get("sampling_params") or {}
    prompt = text if isinstance(text, str) else " ".join(str(item) for item in ids or [])
    limit = sampling.get("max_new_tokens")
    return Prompt(
        text=prompt,
        tools=[],
        forced=False,
        from_user=True,
        max_tokens=int(limit) if limit is not None else 1 << 20,
        min_tokens=max(int(sampling.get("min_new_tokens") or 0), 0 if limit else _filler([prompt], default_tokens)),
        ignore_eos=bool(sampling.get("ignore_eos")) and limit is not None,
        session=session_of(prompt, None),
        turn=1,
        call_index=0,
    )


def answer(prompt: Prompt) -> Answer:
    """What a sound engine says to it."""
    if prompt.tools and (prompt.forced or prompt.from_user):
        arguments = json_object(prompt.text)
        if arguments is None and prompt.forced:
            nonces = NONCE.findall(prompt.text) or [prompt.text.strip()[:40]]
            arguments = dict.fromkeys(prompt.tools[0]["properties"], nonces[0])
        if arguments is not None:
            named = [tool["name"] for tool in prompt.tools if tool["name"] in prompt.text]
            return tool_answer(prompt, named[0] if named else prompt.tools[0]["name"], dumps(arguments))
    return text_answer(prompt, reply(prompt.text))


def dumps(value: Any) -> str:
    """JSON as the engine writes it: characters unescaped."""
    return json.dumps(value, ensure_ascii=False)


def json_object(text: str) -> dict[str, Any] | None:
    """The last JSON object that stands in the text."""
    decoder, found, at = json.JSONDecoder(), None, text.find("{")
    while at != -1:
        try:
            value, end = decoder.raw_decode(text, at)
        except ValueError:
            end = at + 1
        else:
            found = value
        at = text.find("{", end)
    return found


def reply(text: str) -> str:
    """The words that are asked for; empty where nothing exact is."""
    if echo := ECHO.search(text):
        return LENGTH.sub("", echo.group(1)).strip().strip("\"'`").rstrip(".\"'` ")
    return " ".join(dict.fromkeys(NONCE.findall(text)))


def text_answer(prompt: Prompt, text: str) -> Answer:
    """`text`, filled up with words to the length that is asked for, cut at the limit."""
    pieces = PIECE.findall(text)
    wanted = max(prompt.min_tokens, prompt.max_tokens if prompt.ignore_eos else 0)
    if length := LENGTH.search(prompt.text):
        wanted = max(wanted, int(length.group(1)))
    elif not text:
        # A talk goes on to its limit.
        wanted = max(wanted, min(prompt.max_tokens, 1 << 16) if prompt.max_tokens < 1 << 20 else 1)
    wanted = min(wanted, prompt.max_tokens)
    start = int(prompt.session[:8], 16)
    while len(pieces) < wanted:
        word = WORDS[(start + len(pieces)) % len(WORDS)]
        pieces.append(f" {word}" if pieces else word)
    cut = len(pieces) > prompt.max_tokens or prompt.ignore_eos or (not text and wanted == prompt.max_tokens)
    return Answer([{"c": piece} for piece in pieces[: prompt.max_tokens]], "length" if cut else "stop")


def tool_answer(prompt: Prompt, name: str, arguments: str) -> Answer:
    """One call of `name`: its head first, then the arguments in fragments, as upstream streams it."""
    call_id = "call_" + hashlib.sha256(f"{prompt.session}{prompt.turn}{prompt.text}".encode()).hexdigest()[:24]
    head = {"index": 0, "id": call_id, "name": name, "arguments": ""}
    fragments = [{"t": {"index": 0, "arguments": piece}} for piece in split(arguments)]
    pieces = [{"t": head}, *fragments]
    if len(pieces) > prompt.max_tokens:
        return Answer(pieces[: prompt.max_tokens], "length", arguments, name)
    return Answer(pieces, "tool_calls", arguments, name)


def split(text: str, size: int = 7) -> list[str]:
    """The text in fragments of `size` characters."""
    return [text[at : at + size] for at in range(0, len(text), size)]
