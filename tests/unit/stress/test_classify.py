"""Each class, each kind, by tables of answers; and the same class however the bytes were cut."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from dsv4_fleet.stress.answer import Answer, Assembler
from dsv4_fleet.stress.classify import CLEAN, FAILED, HARD, SOFT, Finding, classify
from dsv4_fleet.stress.scripts import Expected, Nonces, session

MINE, OTHER = session(1, "w1", 1), session(1, "w1", 2)
OWNERS = {nonce: item.name for item in (MINE, OTHER) for nonce in item.nonces}
FOREIGN = sorted(OTHER.nonces)[0]
UNKNOWN = Nonces("some", "earlier", "run")()
OWN = sorted(MINE.nonces)[0]
ARGUMENTS = {"room": OWN, "place": f"東京 {OWN}", "minutes": 30, "private": True, "guests": [OWN, OWN]}
EXPECTED = Expected("book_slot", ARGUMENTS)
TEXT = Expected(None, text=f"{OWN} {OWN}")


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def call(arguments: Any = ARGUMENTS, name: str | None = "book_slot") -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else dumps(arguments)
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": text}}


def changed(**values: Any) -> dict[str, Any]:
    return {**copy.deepcopy(ARGUMENTS), **values}


def whole(content: str | None = None, calls: Iterable[dict[str, Any]] = (), finish: str = "tool_calls") -> bytes:
    """The body of an answer that is not streamed."""
    message = {"role": "assistant", "content": content, "tool_calls": list(calls) or None}
    usage = {"prompt_tokens": 5, "completion_tokens": 7}
    return json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": usage}).encode()


def streamed(
    content: str | None = None, calls: Iterable[dict[str, Any]] = (), finish: str = "tool_calls", end: str = "\n"
) -> bytes:
    """The same answer as server-sent events: text and arguments in small parts."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": content[at : at + 3]} for at in range(0, len(content or ""), 3) if content]
    for index, item in enumerate(calls):
        function = item["function"]
        deltas.append({"tool_calls": [{"index": index, "function": {"name": function["name"], "arguments": ""}}]})
        text = function["arguments"]
        for at in range(0, len(text), 5):
            part = {"index": index, "function": {"name": None, "arguments": text[at : at + 5]}}
            deltas.append({"tool_calls": [part]})
    chunks: list[Any] = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    chunks.append({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}})
    lines = [f"data: {dumps(chunk)}{end}{end}" for chunk in chunks]
    return ("".join(lines) + f"data: [DONE]{end}{end}").encode("utf-8", "surrogatepass")


def assembled(body: bytes, stream: bool, cut: int | None = None) -> Answer:
    assembler = Assembler(stream)
    for at in range(0, len(body), cut or len(body) or 1):
        assembler.feed(body[at : at + (cut or len(body))])
    return assembler.close()


def found(answer: Answer, expected: Expected = EXPECTED) -> Finding:
    return classify(answer, expected, OWNERS, MINE.name)


MARKUP = '<|tool_calls|><|invoke name="{name}"|>{inner}</|invoke|></|tool_calls|>'
ANSWERS: list[tuple[str, dict[str, Any], str, str]] = [
    ("right", {"calls": [call()]}, CLEAN, ""),
    ("right, another language", {"content": "好的,我来做。✨", "calls": [call()]}, CLEAN, ""),
    ("right, some words before it", {"content": "I will do that. 好的 ✓", "calls": [call()]}, CLEAN, ""),
    (
        "other order, other spaces",
        {"calls": [call(json.dumps(dict(reversed(ARGUMENTS.items())), indent=3))]},
        CLEAN,
        "",
    ),
    ("30.0 for 30", {"calls": [call(changed(minutes=30.0))]}, CLEAN, ""),
    # hard
    ("another session's nonce", {"calls": [call(changed(room=FOREIGN))]}, HARD, "foreign nonce"),
    ("inside a longer text", {"calls": [call(changed(place=f"x{FOREIGN}y"))]}, HARD, "foreign nonce"),
    ("in the text beside the call", {"content": f"As for {FOREIGN}", "calls": [call()]}, HARD, "foreign nonce"),
    ("in a cut answer", {"content": FOREIGN, "finish": "length"}, HARD, "foreign nonce"),
    ("an earlier run's nonce", {"calls": [call(changed(room=UNKNOWN))]}, HARD, "foreign nonce"),
    (
        "swapped whole",
        {"calls": [call(OTHER.turns[0].expected.arguments, OTHER.turns[0].expected.name)]},
        HARD,
        "foreign nonce",
    ),
    ("strange letters", {"calls": [call(changed(room=OWN[:4] + "ꙮ؟ﬓ" + OWN[7:]))]}, HARD, "garbled"),
    ("two strange letters of a known script", {"calls": [call(changed(place=f"縊縊 {OWN}"))]}, HARD, "garbled"),
    ("strange letters that break the JSON", {"calls": [call(dumps(ARGUMENTS)[:-3] + "⍰⍰⍰")]}, HARD, "garbled"),
    ("replacement character", {"content": "so \ufffd", "calls": [call()]}, HARD, "garbled"),
    ("control character", {"content": "so \x03", "calls": [call()]}, HARD, "garbled"),
    ("half a surrogate pair", {"content": "so \ud83d", "calls": [call()]}, HARD, "garbled"),
    ("the same for ever", {"content": "!" * 200, "finish": "length"}, HARD, "garbled"),
    ("strange letters in the text", {"content": "⍰؟ǂ؟", "finish": "stop"}, HARD, "garbled"),
    ("many scripts in the text", {"content": "да نعم 네 ja", "calls": [call()]}, HARD, "garbled"),
    ("raw markup", {"content": MARKUP.format(name="book_slot", inner=""), "finish": "stop"}, HARD, "raw markup"),
    ("raw markup of upstream", {"content": '<\uff5cDSML\uff5cinvoke name="x">', "finish": "stop"}, HARD, "raw markup"),
    ("raw markup of others", {"content": '<tool_call>{"name": "x"}</tool_call>', "finish": "stop"}, HARD, "raw markup"),
    ("null name", {"calls": [call(name=None)]}, HARD, "null call"),
    (
        "null name, two objects",
        {"calls": [call("", "book_slot"), call(dumps(ARGUMENTS) * 2, None)]},
        HARD,
        "glued call",
    ),
    ("two objects", {"calls": [call(dumps(ARGUMENTS) * 2)]}, HARD, "glued call"),
    ("no arguments", {"calls": [call("")]}, HARD, "malformed JSON"),
    ("objects without end", {"calls": [call("".join(f'{{"k{at}":' for at in range(2000)))]}, HARD, "malformed JSON"),
    ("cut JSON", {"calls": [call(dumps(ARGUMENTS)[:-1])]}, HARD, "malformed JSON"),
    ("NaN", {"calls": [call(dumps(ARGUMENTS).replace("30", "NaN"))]}, HARD, "malformed JSON"),
    ("doubled key", {"calls": [call(dumps(ARGUMENTS)[:-1] + ', "minutes": 30}')]}, HARD, "malformed JSON"),
    ("words after the object", {"calls": [call(dumps(ARGUMENTS) + " done")]}, HARD, "malformed JSON"),
    # soft
    ("no call", {"content": "I need more details.", "finish": "stop"}, SOFT, "missing call"),
    ("call twice", {"calls": [call(), call()]}, SOFT, "more calls"),
    ("another tool", {"calls": [call(name="store_note")]}, SOFT, "wrong tool"),
    ("a tool there is not", {"calls": [call(name="book_a_slot")]}, SOFT, "wrong tool"),
    ("a wrong value", {"calls": [call(changed(minutes=31))]}, SOFT, "wrong arguments"),
    ("a nonce copied wrongly", {"calls": [call(changed(room=OWN[:-1] + "!"))]}, SOFT, "wrong arguments"),
    ("one variant letter", {"calls": [call(changed(place=f"东京 {OWN}"))]}, SOFT, "wrong arguments"),
    ("1 for true", {"calls": [call(changed(private=1))]}, SOFT, "wrong arguments"),
    ("text for a number", {"calls": [call(changed(minutes="30"))]}, SOFT, "wrong arguments"),
    ("a field missing", {"calls": [call({"room": OWN})]}, SOFT, "wrong arguments"),
    ("a field more", {"calls": [call(changed(extra=1))]}, SOFT, "wrong arguments"),
    ("a list for an object", {"calls": [call([ARGUMENTS])]}, SOFT, "wrong arguments"),
    ("a shorter list", {"calls": [call(changed(guests=[OWN]))]}, SOFT, "wrong arguments"),
    ("cut off", {"calls": [call(dumps(ARGUMENTS)[:-9])], "finish": "length"}, SOFT, "cut off"),
    ("markup beside the call", {"content": "<tool_call>", "calls": [call()]}, SOFT, "markup beside the call"),
    ("finish stop with a call", {"calls": [call()], "finish": "stop"}, SOFT, "wrong finish reason"),
]


@pytest.mark.parametrize(("parts", "level", "kind"), [pytest.param(*row[1:], id=row[0]) for row in ANSWERS])
def test_class_and_kind_streamed_or_not(parts: dict[str, Any], level: str, kind: str) -> None:
    for answer in (assembled(whole(**parts), stream=False), assembled(streamed(**parts), stream=True)):
        finding = found(answer)
        assert (finding.level, finding.kind) == (level, kind), finding
        assert (answer.prompt_tokens, answer.completion_tokens) == (5, 7)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("parts", [pytest.param(row[1], id=row[0]) for row in ANSWERS])
def test_the_class_does_not_depend_on_how_the_bytes_were_cut(parts: dict[str, Any], end: str) -> None:
    body = streamed(**parts, end=end)
    expected = found(assembled(body, stream=True))
    for cut in (1, 2, 7, len(body) // 2 + 1):
        assert found(assembled(body, stream=True, cut=cut)) == expected
    plain = whole(**parts)
    assert found(assembled(plain, stream=False, cut=1)) == found(assembled(plain, stream=False))


TEXTS: list[tuple[str, dict[str, Any], str, str]] = [
    ("right", {"content": TEXT.text, "finish": "stop"}, CLEAN, ""),
    ("right, with words around it", {"content": f"Here: {TEXT.text}.", "finish": "stop"}, CLEAN, ""),
    ("wrong", {"content": OWN, "finish": "stop"}, SOFT, "wrong text"),
    ("a call", {"calls": [call()]}, SOFT, "unwanted call"),
    ("strange letters", {"content": TEXT.text[:-3] + "ꙮ؟ﬓ", "finish": "stop"}, HARD, "garbled"),
    ("another session's", {"content": FOREIGN, "finish": "stop"}, HARD, "foreign nonce"),
]


@pytest.mark.parametrize(("parts", "level", "kind"), [pytest.param(*row[1:], id=row[0]) for row in TEXTS])
def test_answers_in_text(parts: dict[str, Any], level: str, kind: str) -> None:
    for answer in (assembled(whole(**parts), stream=False), assembled(streamed(**parts), stream=True)):
        finding = found(answer, TEXT)
        assert (finding.level, finding.kind) == (level, kind), finding


def without(text: bytes) -> Callable[[bytes], bytes]:
    return lambda body: body.replace(text, b"")


def ends_after(text: bytes) -> Callable[[bytes], bytes]:
    return lambda body: body[: body.index(text)]


@pytest.mark.parametrize(
    ("change", "stream", "kind"),
    [
        (without(b"data: [DONE]\n\n"), True, "no [DONE]"),
        (ends_after(b'data: {"choices": [], "usage"'), True, "no [DONE]"),
        (ends_after(b'"finish_reason": "tool_calls"'), True, "an event that is not JSON"),
        (lambda body: b"data: [DONE]\n\n", True, "no choices"),
        (
            lambda body: body.replace(b'"finish_reason": "tool_calls"', b'"finish_reason": null'),
            True,
            "no finish reason",
        ),
        (lambda body: body.replace(b'"finish_reason": "tool_calls"', b'"finish_reason": "abort"'), True, "aborted"),
        (
            lambda body: body.replace(b"data: [DONE]", b'data: {"error": {"code": 500}}\n\ndata: [DONE]'),
            True,
            "an error inside a 200 answer",
        ),
        (lambda body: body[:-40] + b"data: {\n\ndata: [DONE]\n\n", True, "an event that is not JSON"),
        (lambda body: b'{"error": {"message": "no"}}', False, "an error inside a 200 answer"),
        (lambda body: b'{"choices": []}', False, "no choices"),
        (lambda body: b'{"choices": [7]}', False, "JSON of another shape than an answer's"),
        (lambda body: b'data: {"choices": {"index": 0}}\n\n' + body, True, "JSON of another shape than an answer's"),
        (lambda body: b"[" * 100_000, False, "a body that is not JSON"),
        (lambda body: b"data: " + b"[" * 100_000 + b"\n\n" + body, True, "an event that is not JSON"),
        (lambda body: body[:30], False, "a body that is not JSON"),
        (lambda body: b"", False, "a body that is not JSON"),
        (lambda body: b"", True, "no [DONE]"),
    ],
)
def test_what_is_no_answer_is_failed_and_never_clean(change: Callable[[bytes], bytes], stream: bool, kind: str) -> None:
    body = change(streamed(calls=[call()]) if stream else whole(calls=[call()]))
    finding = found(assembled(body, stream=stream))
    assert (finding.level, finding.kind) == (FAILED, kind)


def test_what_is_broken_counts_even_where_the_answer_failed() -> None:
    body = streamed(calls=[call(changed(room=FOREIGN))]).replace(b"data: [DONE]\n\n", b"")
    assert found(assembled(body, stream=True)).level == HARD


def test_a_line_separator_inside_a_value_ends_no_event() -> None:
    body = streamed(content="before\u2028after", calls=[call()])
    answer = assembled(body, stream=True)
    assert answer.content == "before\u2028after"
    assert answer.failed is None


@pytest.mark.parametrize("right", [True, False])
def test_a_parser_fault_is_told_apart_where_the_raw_text_is_right(right: bool) -> None:
    values = list(ARGUMENTS.values()) if right else [OWN]
    text = MARKUP.format(name="book_slot", inner="".join(f"<|parameter|>{value}</|parameter|>" for value in values))
    finding = found(assembled(whole(text, finish="stop"), stream=False))
    assert (finding.level, finding.kind, finding.parser) == (HARD, "raw markup", right)
