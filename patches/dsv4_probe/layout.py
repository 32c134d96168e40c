"""How index-K lies in its pool: pages of 64 tokens of the compressed cache, values first, then scales."""

from __future__ import annotations

from dataclasses import dataclass

PAGE_TOKENS = 64
"""Tokens of the compressed cache in a page."""

TOKENS_PER_SLOT = 4
"""Tokens of the sequence that make one of the compressed cache."""

PAGE_LOCATIONS = PAGE_TOKENS * TOKENS_PER_SLOT
"""Locations of the token pool that one page stands for."""


@dataclass(frozen=True)
class KLayout:
    """32-bit words of one token: its values, and its scale."""

    name: str
    value_words: int
    scale_words: int

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return PAGE_TOKENS * (self.value_words + self.scale_words) * 4


LAYOUTS: dict[int, KLayout] = {
    layout.page_bytes: layout
    for layout in (KLayout("fp4", 16, 1), KLayout("fp8", 32, 1), KLayout("bf16", 64, 0))
}


def layout_of(page_bytes: int) -> KLayout:
    """The layout of a pool whose pages have this many bytes. Raises ValueError for any other."""
    if page_bytes not in LAYOUTS:
        known = ", ".join(f"{size} ({layout.name})" for size, layout in LAYOUTS.items())
        raise ValueError(f"index-K pages of {page_bytes} bytes; known are {known}")
    return LAYOUTS[page_bytes]
