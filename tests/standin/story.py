"""The fault that this project exists for, modelled: bf16 index-K races with the multi-stream overlap.

Corrupted are sessions (conversations), chosen by a hash, from a turn chosen by the same hash on, and only
while at least two requests run together on this worker. So the same session under the same conditions is
corrupted again, and alone it is clean.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass, replace
from typing import Any

from .answers import Answer, Prompt, dumps, split
from .tree import INDEXER, RUNNER, Tree

BF16 = "SGLANG_DSV4_BF16_INDEX_K"
OVERLAP = "SGLANG_OPT_USE_MULTI_STREAM_OVERLAP"
HIDES = ("SGLANG_DSV4_GE_DIFF", "SGLANG_DSV4_IDXK_CANARY")
KINDS = ("foreign", "garbled", "markup", "glued", "malformed")
TURNS = 3


@dataclass(frozen=True)
class Story:
    """What of the story is live in this process."""

    bf16_index_k: bool
    overlap: bool
    hidden: bool

    @classmethod
    def of(cls, tree: Tree, bf16_without_patch: bool) -> Story:
        """From the tree's code and its own parsing of the environment; nothing is live without environ.py."""
        patched = tree.reads(INDEXER, BF16)
        tree.reads(RUNNER, BF16)  # a patched file that does not compile ends a real scheduler too
        if tree.environ is None:
            return cls(False, False, False)
        return cls(
            bf16_index_k=(patched or bf16_without_patch) and tree.flag(BF16),
            overlap=tree.flag(OVERLAP, default=True),
            hidden=any(tree.flag(name) for name in HIDES),
        )

    @property
    def corrupts(self) -> bool:
        """Whether sessions get corrupted."""
        return self.bf16_index_k and self.overlap and not self.hidden


@dataclass(frozen=True)
class Rule:
    """When and how answers are corrupted."""

    rate: float
    min_running: int = 2
    from_request: int = 1
    min_tokens: int = 0
    kinds: tuple[str, ...] = KINDS
    late: bool = False  # only the last fifth of an answer
    any_answer: bool = False  # text answers too, and from the first turn on
    sticky: bool = False  # once one answer is corrupted all later ones are


def unit(*words: Any) -> float:
    """A number in [0, 1) that is a function of the words alone."""
    digest = hashlib.sha256("\0".join(str(word) for word in words).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def corrupted(
    rule: Rule, seed: str, prompt: Prompt, sound: Answer, running: int, number: int, others: list[str]
) -> tuple[str, Answer] | None:
    """The kind of corruption and the corrupted answer, or None where this one stays sound.

    `running` counts the requests that run now, this one included; `number` is this request's number
    since start; `others` are the arguments of the other running sessions' calls, as JSON texts.
    """
    if sound.arguments is None and not rule.any_answer:
        return None
    if running < rule.min_running or number < rule.from_request or len(sound.pieces) < rule.min_tokens:
        return None
    if unit(seed, "session", prompt.session) >= rule.rate:
        return None
    turn = 1 + int(unit(seed, "turn", prompt.session) * TURNS)
    if prompt.turn < turn and not rule.any_answer:
        return None
    dice = random.Random(f"{seed}{prompt.session}{prompt.turn}")
    if sound.arguments is None:
        return "garbled", garble_text(sound, dice, rule.late)
    kind = rule.kinds[int(unit(seed, "kind", prompt.session) * len(rule.kinds))]
    if kind in ("foreign", "swapped") and not others:
        kind = "garbled"
    return kind, _corrupt_call(kind, sound, dice, others, rule.late)


def _corrupt_call(kind: str, sound: Answer, dice: random.Random, others: list[str], late: bool) -> Answer:
    arguments, head = sound.arguments or "{}", sound.pieces[0]
    if kind == "markup":
        inner = "".join(f'<|parameter name="{name}"|>{value}</|parameter|>' for name, value in json.loads(arguments).items())
        text = f'<|tool_calls|><|invoke name="{sound.name}"|>{inner}</|invoke|></|tool_calls|>'
        return Answer([{"c": piece} for piece in split(text)], "stop")
    if kind == "glued":
        glued = [{"t": {"index": 1, "id": None, "name": None, "arguments": piece}} for piece in split(arguments * 2)]
        return Answer([head, *glued], "tool_calls")
    if kind == "malformed":
        at = len(arguments) - 1 - (0 if late else dice.randrange(max(1, len(arguments) // 3)))
        wrong = arguments[:at]
    elif kind == "swapped":
        wrong = dice.choice(others)
    elif kind == "foreign":
        wrong = _foreign(arguments, dice.choice(others), dice)
    else:
        wrong = _garbled(arguments, dice, late)
    fragments = [{"t": {"index": 0, "arguments": piece}} for piece in split(wrong)]
    return Answer([head, *fragments], "tool_calls")


def _foreign(arguments: str, other: str, dice: random.Random) -> str:
    """One value of this call replaced by a value of another session's call that differs from it."""
    mine, theirs = json.loads(arguments), json.loads(other)
    pairs = [(key, value) for key in mine for value in theirs.values() if value != mine[key]]
    if not pairs:
        return _garbled(arguments, dice, late=False)
    same = [(key, value) for key, value in pairs if theirs.get(key) == value]
    key, value = dice.choice(same or pairs)
    return dumps({**mine, key: value})


def _garbled(text: str, dice: random.Random, late: bool) -> str:
    """A few neighbouring characters replaced by ones that no prompt holds."""
    # Inside the braces and quotes: the JSON often still parses, which is what makes it hard to see.
    last = max(1, len(text) - 3)
    at = last - 1 if late else dice.randrange(last // 2, last) if last > 1 else 0
    return text[:at] + "".join(dice.choice("ǂ縊⍰ꙮ؟ﬓ") for _ in range(3)) + text[at + 3 :]


def garble_text(sound: Answer, dice: random.Random, late: bool = False) -> Answer:
    """A text answer in which some pieces are not words."""
    pieces = list(sound.pieces)
    first = len(pieces) * 4 // 5 if late else dice.randrange(max(1, len(pieces)))
    for at in range(first, min(len(pieces), first + 4)):
        pieces[at] = {"c": "".join(dice.choice("ǂ縊⍰ꙮ؟ﬓ") for _ in range(4))}
    return replace(sound, pieces=pieces)
