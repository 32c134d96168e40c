"""What the instruments were asked to do, read once from this process's environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

from . import ALIAS_AUDIT, CANARY, GE_DIFF

EVERY = "SGLANG_DSV4_GE_DIFF_EVERY"
LAYERS = "SGLANG_DSV4_GE_DIFF_LAYERS"
MAX_MB = "SGLANG_DSV4_GE_DIFF_MAX_MB"

_TRUE, _FALSE = frozenset({"true", "1", "yes", "y"}), frozenset({"false", "0", "no", "n", ""})


class SettingError(ValueError):
    """A setting that cannot be understood; the instruments stay off and say so."""


@dataclass(frozen=True)
class Settings:
    """every: compare each n-th replay. layers: which ones to stash, None for all. max_bytes: of buffers."""

    canary: bool = False
    ge_diff: bool = False
    alias_audit: bool = False
    every: int = 1
    layers: frozenset[int] | None = None
    max_bytes: int = 512 << 20

    @property
    def any(self) -> bool:
        """Whether any instrument is asked for."""
        return self.canary or self.ge_diff or self.alias_audit


def read() -> Settings:
    """Settings of this process. Raises SettingError, naming variable, value and what is expected."""
    return Settings(
        canary=_flag(CANARY),
        ge_diff=_flag(GE_DIFF),
        alias_audit=_flag(ALIAS_AUDIT),
        every=_positive(EVERY, 1),
        layers=_layers(),
        max_bytes=_positive(MAX_MB, 512) << 20,
    )


def _flag(name: str) -> bool:
    """As the tree's own EnvBool reads it; what it would silently take for its default is refused here."""
    value = os.environ.get(name, "").lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise SettingError(f"{name} is {os.environ[name]!r}; expected 1 or 0")


def _positive(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise SettingError(f"{name} is {text!r}; expected a whole number from 1")
    return int(text)


def _layers() -> frozenset[int] | None:
    """`0-3,10` -> {0, 1, 2, 3, 10}; unset or empty for all layers."""
    text = os.environ.get(LAYERS, "")
    if not text:
        return None
    layers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise SettingError(f"{LAYERS} is {text!r}; expected layer numbers such as 0-3,10")
        layers.update(range(int(first), int(last or first) + 1))
    return frozenset(layers)
