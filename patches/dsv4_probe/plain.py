"""The kernels' functions in plain torch operations: for the CPU, for tests, and to compare costs with.

The digests are other ones than the kernels'; what they tell apart is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .layout import PAGE_LOCATIONS, PAGE_TOKENS, TOKENS_PER_SLOT, KLayout

SLOTS = 8


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def copy_many(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    logits: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    window: torch.Tensor | None = None,
) -> None:
    """As kernels.copy_many."""
    for source, target in pairs:
        _bytes(target).copy_(_bytes(source))
    if logits is None or kept is None or lengths is None or window is None:
        return
    start = int(window[0])
    for row in range(logits.shape[0]):
        until = max(0, min(int(lengths.reshape(-1)[row]) - start, kept.shape[1], logits.shape[1] - start))
        kept[row, :until] = logits[row, start : start + until]


def differ_many(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], counters: torch.Tensor) -> None:
    """As kernels.differ_many."""
    for slot, (left, right) in enumerate(pairs):
        different = _bytes(left).view(torch.int32) != _bytes(right).view(torch.int32)
        counters[slot] += different.sum().to(counters.dtype)


def token_digests(pages: torch.Tensor, layout: KLayout) -> torch.Tensor:
    """[pages, words] int32 -> [pages, PAGE_TOKENS] int64."""
    values = pages[:, : PAGE_TOKENS * layout.value_words]
    values = values.reshape(-1, PAGE_TOKENS, layout.value_words).to(torch.int64)
    place = torch.arange(1, layout.value_words + 1, device=pages.device, dtype=torch.int64) * 2654435761 + 1
    digests = (values * place).sum(-1)
    if layout.scale_words:
        scales = pages[:, PAGE_TOKENS * layout.value_words :].reshape(-1, PAGE_TOKENS).to(torch.int64)
        digests = digests + scales * 40503
    return (digests ^ (digests >> 29)) & 0x7FFFFFFF


def digest_rows(
    pages: torch.Tensor, page_table: torch.Tensor, lengths: torch.Tensor, layout: KLayout, out: torch.Tensor
) -> None:
    """As kernels.digest_rows."""
    words = pages.reshape(pages.shape[0], -1).view(torch.int32)
    used = page_table.to(torch.int64).clamp(0, words.shape[0] - 1)
    rows, width = used.shape
    digests = token_digests(words[used.reshape(-1)], layout).reshape(rows, width * PAGE_TOKENS)
    place = torch.arange(width * PAGE_TOKENS, device=out.device)
    keep = place[None] < lengths.reshape(-1, 1)
    total = (digests * (place[None] * 2 + 1) * keep).sum(-1)
    out.zero_()
    out[:, 0] = (total & 0x7FFFFFFF).to(torch.int32)


def canary(
    bases: Any, page_words: int, layout: KLayout, rows: Any, state: Any, width: int, after: bool
) -> None:
    """As kernels.canary; `bases` are the layers' page tensors themselves."""
    for layer, pages in enumerate(bases):
        words = pages.reshape(pages.shape[0], -1).view(torch.int32)
        for row in range(rows.requests.shape[0]):
            mine = rows.positions[row * rows.per_row : (row + 1) * rows.per_row]
            length = int(mine.max()) + 1
            for index in range(min(width, -(-length // PAGE_LOCATIONS))):
                location = int(rows.req_to_token[int(rows.requests[row]), index * PAGE_LOCATIONS])
                page = location // PAGE_LOCATIONS
                digest = token_digests(words[page : page + 1], layout)[0].to(torch.int32)
                kept = state.digests[layer, row, index]
                changed = (digest != kept) & (int(state.pages_seen[layer, row, index]) == page)
                if bool(changed.any()):
                    _judge(rows, state, layer, row, index, page, changed, after)
                kept.copy_(digest)
                if not after:
                    state.pages_seen[layer, row, index] = page


def _judge(
    rows: Any, state: Any, layer: int, row: int, index: int, page: int, changed: torch.Tensor, after: bool
) -> None:
    wrong = changed.clone()
    if after:
        state.counters[0] += 1
        if page == 0:
            wrong[0] = False
        for location, position in zip(rows.locations.tolist(), rows.positions.tolist(), strict=True):
            slot = location // TOKENS_PER_SLOT
            if (position + 1) % TOKENS_PER_SLOT == 0 and slot // PAGE_TOKENS == page:
                wrong[slot % PAGE_TOKENS] = False
        if not bool(wrong.any()):
            return
        state.counters[1] += 1
    else:
        state.counters[2] += 1
    at = int(state.counters[3]) % state.entries.shape[0]
    state.counters[3] += 1
    masks = [_mask(changed[:32]), _mask(changed[32:]), _mask(wrong[:32]), _mask(wrong[32:])]
    state.entries[at] = torch.tensor([int(after), state.first_layer + layer, row, index, page, *masks])


def _mask(flags: torch.Tensor) -> int:
    value = sum(1 << bit for bit, flag in enumerate(flags.tolist()) if flag)
    return value - (1 << 32) if value >> 31 else value
