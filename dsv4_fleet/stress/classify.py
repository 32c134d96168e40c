"""What is wrong with an answer, if anything.

hard: no healthy model writes this; it counts at once. soft: a healthy model errs like this now and then; it counts
only as excess. failed: no answer, so never clean. The text is looked at as a whole, never chunk by chunk.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import fastjsonschema

from dsv4_fleet.stress.answer import Answer
from dsv4_fleet.stress.scripts import NONCE, PLACES, SCHEMAS, Expected, is_whole

CLEAN: Final = "clean"
HARD: Final = "hard"
SOFT: Final = "soft"
FAILED: Final = "failed"

BAR: Final = "[|\uff5c]?"  # upstream's special tokens have a full-width bar
MARKUP: Final = re.compile(
    rf"</?\s*{BAR}\s*(?:DSML\s*{BAR}\s*)?"
    r"(?:tool[_\u2581 ]?calls?|tool[_\u2581 ]?sep|function[_\u2581 ]?calls?|invoke|parameter|function=)"
    r"|[|\uff5c]DSML[|\uff5c]|\[TOOL_CALLS\]",
    re.IGNORECASE,
)
ODD: Final = re.compile(r"[^\x00-\x7f\s]{2,}")
EAST_ASIAN: Final = frozenset(
    {"CJK", "HIRAGANA", "KATAKANA", "IDEOGRAPHIC", "FULLWIDTH", "HALFWIDTH", "KANGXI", "HANGUL"}
)
SYSTEMS: Final = frozenset({"APL", "ARABIC", "ARMENIAN", "CYRILLIC", "DEVANAGARI", "GREEK", "HEBREW", "LATIN", "THAI"})
LOOP: Final = re.compile(r"(.{1,8}?)\1{30,}", re.DOTALL)
# What prompts hold, and what a model sets beside it by itself.
KNOWN: Final = frozenset("".join(PLACES)) | frozenset(
    "\u00a0\u00b0\u00b7\u00d7\u2013\u2014\u2018\u2019\u201c\u201d\u2022\u2026\u2192\u2713"
)
VALIDATORS: Final = {name: fastjsonschema.compile(schema) for name, schema in SCHEMAS.items()}


@dataclass(frozen=True)
class Finding:
    """`detail` says where or what; `parser`: the model's text was right and the server read it wrongly."""

    level: str
    kind: str = ""
    detail: str = ""
    parser: bool = False

    @property
    def signature(self) -> tuple[str, str, str]:
        """Two answers with one signature show the same error."""
        return self.level, self.kind, self.detail


def classify(answer: Answer, expected: Expected, owners: Mapping[str, str], mine: str) -> Finding:
    """Class of an answer; `owners` maps each nonce of the run to its session, of which `mine` is this one."""
    text = answer.text
    if found := _foreign(text, owners, mine) or _garbled(answer, expected):
        return found
    if answer.failed:
        return Finding(FAILED, answer.failed)
    if found := _broken_calls(answer, expected):
        return found
    if expected.name is None:
        return _text(answer, expected)
    return _call(answer, expected)


def _foreign(text: str, owners: Mapping[str, str], mine: str) -> Finding | None:
    for nonce in NONCE.findall(text):
        owner = owners.get(nonce)
        if owner is not None and owner != mine:
            return Finding(HARD, "foreign nonce", f"{nonce} of {owner}")
        # A whole nonce that nobody has now comes from an earlier run: a leak too.
        if owner is None and is_whole(nonce):
            return Finding(HARD, "foreign nonce", f"{nonce} of no session of this run")
    return None


def _garbled(answer: Answer, expected: Expected) -> Finding | None:
    copied = "\n".join(call.arguments for call in answer.calls)
    if expected.name is None:
        copied += answer.content
    known, strange = expected.alphabet | KNOWN, ""
    scripts = {_script(char) for char in known} | {"LATIN"}
    for char in copied:
        if ord(char) < 128 or char in known:
            strange = ""
            continue
        strange += char
        # One variant of a known letter may be a model's slip; two in a row, or another script, are not.
        if len(strange) > 1 or _script(char) not in scripts:
            return Finding(HARD, "garbled", f"U+{ord(strange[0]):04X}")
    text = answer.text
    for char in text:
        if char == "\ufffd" or (unicodedata.category(char) in ("Cc", "Co", "Cn", "Cs") and char not in "\n\r\t"):
            return Finding(HARD, "garbled", f"U+{ord(char):04X}")
    # A model may chat in another language, but it does not mix writing systems inside a word.
    for word in ODD.findall("".join(" " if char in known else char for char in answer.content)):
        if len(groups := {_group(char) for char in word} - {""}) > 1:
            return Finding(HARD, "garbled", "writing systems " + " ".join(sorted(groups)))
    if len(groups := {_group(char) for char in answer.content if char not in known} - {"", "LATIN"}) > 2:
        return Finding(HARD, "garbled", "writing systems " + " ".join(sorted(groups)))
    if loop := LOOP.search(text):
        return Finding(HARD, "garbled", f"{loop.group(1)!r} over and over")
    return None


def _script(char: str) -> str:
    """A character's script as its name begins; its category where it is no letter."""
    return unicodedata.name(char, "NONE").split()[0] if char.isalpha() else unicodedata.category(char)


def _group(char: str) -> str:
    """The writing system that a character beyond ASCII belongs to, letter or not; empty where it tells nothing."""
    if ord(char) < 128:
        return ""
    first = unicodedata.name(char, "NONE").split()[0]
    if first in EAST_ASIAN:
        return "CJK"
    return first if first in SYSTEMS or char.isalpha() else ""


def _broken_calls(answer: Answer, expected: Expected) -> Finding | None:
    if MARKUP.search(answer.content) and not (answer.calls and answer.finish == "tool_calls"):
        return Finding(HARD, "raw markup", parser=_all_there(answer.content, expected))
    cut = answer.finish == "length"
    parsed = [_values(call.arguments) for call in answer.calls]
    for number, (values, _) in enumerate(parsed):
        if len(values) > 1:
            return Finding(HARD, "glued call", f"call {number}", parser=values[0] == expected.arguments)
    for number, (values, rest) in enumerate(parsed):
        if not answer.calls[number].name:
            return Finding(HARD, "null call", f"call {number}")
        if rest or not values:
            if cut:
                return Finding(SOFT, "cut off", f"call {number}")
            return Finding(HARD, "malformed JSON", f"call {number}")
    return Finding(SOFT, "cut off") if cut else None


def _all_there(text: str, expected: Expected) -> bool:
    """Whether the raw text holds the tool's name and every nonce of the right arguments, in their order."""
    if expected.name is None or expected.name not in text:
        return False
    wanted = NONCE.findall(json.dumps(expected.arguments, ensure_ascii=False))
    return NONCE.findall(text) == wanted


def _values(text: str) -> tuple[list[Any], str]:
    """The JSON values that the text is made of, and what is left that is none. NaN and doubled keys are no JSON."""
    decoder = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_refuse)
    values: list[Any] = []
    rest = text.strip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):  # a thousand open brackets are none either
            break
        values.append(value)
        rest = rest[end:].lstrip()
    return values, rest


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a doubled key")
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _text(answer: Answer, expected: Expected) -> Finding:
    if answer.calls:
        return Finding(SOFT, "unwanted call", answer.calls[0].name or "")
    if expected.text in answer.content:
        return Finding(CLEAN)
    return Finding(SOFT, "wrong text")


def _call(answer: Answer, expected: Expected) -> Finding:
    if not answer.calls:
        return Finding(SOFT, "missing call")
    if len(answer.calls) > 1:
        return Finding(SOFT, "more calls", str(len(answer.calls)))
    call = answer.calls[0]
    if expected.name is None or call.name != expected.name:
        return Finding(SOFT, "wrong tool", str(call.name))
    value = _values(call.arguments)[0][0]
    try:
        VALIDATORS[expected.name](value)
    except fastjsonschema.JsonSchemaValueException as error:
        return Finding(SOFT, "wrong arguments", f"{error.name} against the schema")
    if differences := sorted(_differences(value, expected.arguments, "$")):
        return Finding(SOFT, "wrong arguments", " ".join(differences))
    if MARKUP.search(answer.content):
        return Finding(SOFT, "markup beside the call", parser=True)
    if answer.finish != "tool_calls":
        return Finding(SOFT, "wrong finish reason", str(answer.finish), parser=True)
    return Finding(CLEAN)


def _differences(value: Any, wanted: Any, path: str) -> list[str]:
    """Paths at which two JSON values differ; 1 and 1.0 are one number, true is none."""
    if isinstance(value, dict) and isinstance(wanted, dict):
        keys = value.keys() | wanted.keys()
        return [
            found
            for key in keys
            for found in (
                _differences(value[key], wanted[key], f"{path}.{key}")
                if key in value and key in wanted
                else [f"{path}.{key}"]
            )
        ]
    if isinstance(value, list) and isinstance(wanted, list):
        if len(value) != len(wanted):
            return [f"{path} (length)"]
        return [
            found
            for at, (one, other) in enumerate(zip(value, wanted, strict=True))
            for found in _differences(one, other, f"{path}[{at}]")
        ]
    same = value == wanted and isinstance(value, bool) == isinstance(wanted, bool)
    return [] if same else [path]
