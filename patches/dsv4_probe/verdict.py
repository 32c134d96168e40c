"""GE_DIFF's judgement of one layer of one replay, from counts alone: no torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

UNPROVEN = frozenset({"x", "qkv_a"})
"""Inputs whose readers' results are not recomputed: when their copies differ, nobody can say that the
reader came first, so it is `overwritten`, never `late_overwrite`."""


@dataclass(frozen=True)
class Findings:
    """What the device counted.

    copies: 32-bit words in which the producer's copy and a reader's copy differ, by (input, reader).
    logits: words of logits, within their rows' lengths, that differ from the recomputed ones.
    rows: rows with such words. k: whether the index-K that was read is no longer what is there.
    q_right: whether q as made equals q recomputed from the producer's copies; None: not recomputed.
    reason: why nothing can be said, or None.
    """

    copies: Mapping[tuple[str, str], int] = field(default_factory=dict)
    logits: int = 0
    rows: int = 0
    k: bool = False
    q_right: bool | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Verdict:
    """inputs: names of what changed in flight. readers: where each was found changed."""

    verdict: str
    inputs: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()


def judge(findings: Findings) -> Verdict:
    """`clean`, `overwritten`, `late_overwrite`, `kernel`, `k_changed` or `inconclusive`."""
    if findings.reason is not None:
        return Verdict("inconclusive")
    changed = sorted(key for key, words in findings.copies.items() if words)
    if changed:
        inputs = tuple(dict.fromkeys(name for name, _ in changed))
        readers = tuple(f"{name}@{reader}" for name, reader in changed)
        if findings.logits == 0 and not findings.k and _readers_were_first(inputs, findings.q_right):
            return Verdict("late_overwrite", inputs, readers)
        return Verdict("overwritten", inputs, readers)
    if findings.k:
        return Verdict("k_changed")
    return Verdict("kernel") if findings.logits else Verdict("clean")


def _readers_were_first(inputs: tuple[str, ...], q_right: bool | None) -> bool:
    """Whether what the readers made of these inputs is proved right; logits already are."""
    if UNPROVEN & set(inputs):
        return False
    return "q_lora" not in inputs or q_right is True
