"""The instruments' own Triton kernels. `plain` has the same functions in torch operations.

All of them only read what they watch, allocate nothing and never wait for the host, so that they
may be captured into a graph and change nothing about the memory of what runs beside them.
"""

# Triton compiles what is decorated; its functions have tensors for arguments, not Python's types.
# mypy: allow-untyped-defs, disable-error-code=attr-defined

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from .layout import PAGE_TOKENS, TOKENS_PER_SLOT, KLayout

SLOTS = 8
"""Tensors that one launch copies or compares."""

BLOCK = 4096
"""32-bit words a program copies."""

COLUMNS = 1024


@triton.jit
def _copy_block(source, target, words, block, BLOCK: tl.constexpr):
    at = block * BLOCK + tl.arange(0, BLOCK)
    mask = at < words
    tl.store(target + at, tl.load(source + at, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7",
                               "e0", "e1", "e2", "e3", "e4", "e5", "e6", "e7", "row_blocks"])  # fmt: skip
def _copy_many(
    s0, d0, n0, e0, s1, d1, n1, e1, s2, d2, n2, e2, s3, d3, n3, e3,
    s4, d4, n4, e4, s5, d5, n5, e5, s6, d6, n6, e6, s7, d7, n7, e7,
    logits, kept, lengths, window, logits_stride, kept_stride, width, row_blocks,
    RAGGED: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid < e0:
        _copy_block(s0, d0, n0, pid, BLOCK)
    elif pid < e1:
        _copy_block(s1, d1, n1, pid - e0, BLOCK)
    elif pid < e2:
        _copy_block(s2, d2, n2, pid - e1, BLOCK)
    elif pid < e3:
        _copy_block(s3, d3, n3, pid - e2, BLOCK)
    elif pid < e4:
        _copy_block(s4, d4, n4, pid - e3, BLOCK)
    elif pid < e5:
        _copy_block(s5, d5, n5, pid - e4, BLOCK)
    elif pid < e6:
        _copy_block(s6, d6, n6, pid - e5, BLOCK)
    elif pid < e7:
        _copy_block(s7, d7, n7, pid - e6, BLOCK)
    else:
        if RAGGED:
            # A row of logits is right only up to its length; the rest is not even read.
            row = (pid - e7) // row_blocks
            at = (pid - e7) % row_blocks * COLUMNS + tl.arange(0, COLUMNS)
            start = tl.load(window)
            until = tl.minimum(tl.load(lengths + row) - start, width)
            mask = (at < until) & (at + start < logits_stride)
            row64 = row.to(tl.int64)
            values = tl.load(logits + row64 * logits_stride + start + at, mask=mask)
            tl.store(kept + row64 * kept_stride + at, values, mask=mask)


@triton.jit
def _differ_block(left, right, words, block, counter, BLOCK: tl.constexpr):
    at = block * BLOCK + tl.arange(0, BLOCK)
    mask = at < words
    a = tl.load(left + at, mask=mask, other=0)
    b = tl.load(right + at, mask=mask, other=0)
    count = tl.sum((a != b).to(tl.int32), axis=0)
    if count > 0:
        tl.atomic_add(counter, count)


@triton.jit(do_not_specialize=["n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7",
                               "e0", "e1", "e2", "e3", "e4", "e5", "e6", "e7"])  # fmt: skip
def _differ_many(
    s0, d0, n0, e0, s1, d1, n1, e1, s2, d2, n2, e2, s3, d3, n3, e3,
    s4, d4, n4, e4, s5, d5, n5, e5, s6, d6, n6, e6, s7, d7, n7, e7,
    counters, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid < e0:
        _differ_block(s0, d0, n0, pid, counters, BLOCK)
    elif pid < e1:
        _differ_block(s1, d1, n1, pid - e0, counters + 1, BLOCK)
    elif pid < e2:
        _differ_block(s2, d2, n2, pid - e1, counters + 2, BLOCK)
    elif pid < e3:
        _differ_block(s3, d3, n3, pid - e2, counters + 3, BLOCK)
    elif pid < e4:
        _differ_block(s4, d4, n4, pid - e3, counters + 4, BLOCK)
    elif pid < e5:
        _differ_block(s5, d5, n5, pid - e4, counters + 5, BLOCK)
    elif pid < e6:
        _differ_block(s6, d6, n6, pid - e5, counters + 6, BLOCK)
    else:
        _differ_block(s7, d7, n7, pid - e6, counters + 7, BLOCK)


@triton.jit
def _mix(word, position, salt):
    """A 32-bit hash of a word at its place; for one place, different words give different hashes."""
    h = (word.to(tl.uint32, bitcast=True) ^ salt) * 0x9E3779B1
    h = h ^ (h >> 15)
    return h * (position * 2 + 1).to(tl.uint32)


@triton.jit
def _page_words(page, WORDS: tl.constexpr, SCALE: tl.constexpr, TOKENS: tl.constexpr, valid, salt):
    """Digests of the page's tokens, [TOKENS] uint32; 0 for tokens from `valid` on."""
    token = tl.arange(0, TOKENS)
    word = tl.arange(0, WORDS)
    keep = token < valid
    values = tl.load(page + token[:, None] * WORDS + word[None, :], mask=keep[:, None], other=0)
    digest = tl.sum(_mix(values, word[None, :], salt), axis=1)
    if SCALE:
        scale = tl.load(page + TOKENS * WORDS + token, mask=keep, other=0)
        digest += _mix(scale, WORDS + token * 0, salt)
    digest = digest ^ (digest >> 16)
    return tl.where(keep, digest * 0x85EBCA6B, 0)


@triton.jit
def _digest_rows(
    pages, page_table, lengths, out, table_stride, table_width, page_stride, page_count,
    SPLITS: tl.constexpr, WORDS: tl.constexpr, SCALE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0), tl.program_id(1)
    # Whatever lengths and page table hold by now, nothing outside of the pool is read.
    length = tl.minimum(tl.load(lengths + row).to(tl.int32), table_width * TOKENS)
    total = tl.zeros([TOKENS], dtype=tl.uint32)
    for index in range(split, tl.cdiv(length, TOKENS), SPLITS):
        page = tl.load(page_table + row * table_stride + index).to(tl.int64)
        page = tl.minimum(tl.maximum(page, 0), page_count - 1)
        digest = _page_words(
            pages + page * page_stride, WORDS, SCALE, TOKENS, length - index * TOKENS,
            (index * 0x27D4EB2F).to(tl.uint32),
        )  # fmt: skip
        total += digest * (tl.arange(0, TOKENS) * 2 + 1).to(tl.uint32)
    tl.store(out + row * SPLITS + split, tl.sum(total, axis=0).to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["rows", "width", "kind"])
def _canary(
    bases, req_to_token, table_stride, requests, positions, per_row,
    digests, pages_seen, rows, width, kind, raw, counters,
    WORDS: tl.constexpr, SCALE: tl.constexpr, TOKENS: tl.constexpr, PER_SLOT: tl.constexpr,
    PAGE: tl.constexpr, MOST: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Digest GROUP pages, compare with what is kept, keep the new; whatever changed is put into `raw`.

    Judging is another kernel's: this one reads all pages twice a replay and must be nothing but fast.
    """
    row, layer = tl.program_id(1), tl.program_id(2)
    # A row's length is where its last token stands: rows hold one token, or a chain of draft tokens.
    mine = tl.arange(0, MOST)
    last = tl.load(positions + row * per_row + mine, mask=mine < per_row, other=-1)
    length = tl.max(last.to(tl.int32), axis=0) + 1
    index = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    first = index * TOKENS * PER_SLOT
    valid = (first < length) & (index < width)
    if tl.program_id(0) * GROUP * TOKENS * PER_SLOT < length:
        request = tl.load(requests + row).to(tl.int64)
        location = tl.load(req_to_token + request * table_stride + first, mask=valid, other=0)
        page = location // (TOKENS * PER_SLOT)
        base = tl.multiple_of(tl.load(bases + layer).to(tl.pointer_type(tl.int32)), 16)
        token = tl.arange(0, TOKENS)
        start = base + page.to(tl.int64) * PAGE
        digest = tl.zeros([GROUP, TOKENS], dtype=tl.uint32)
        for chunk in tl.static_range(0, WORDS, CHUNK):
            word = chunk + tl.arange(0, CHUNK)
            values = tl.load(
                start[:, None, None] + (token[:, None] * WORDS + word[None, :])[None, :, :],
                mask=valid[:, None, None], other=0,
            )  # fmt: skip
            digest += tl.sum(_mix(values, word[None, None, :], 0), axis=2)
        if SCALE:
            scale = tl.load(start[:, None] + TOKENS * WORDS + token[None, :], mask=valid[:, None], other=0)
            digest += _mix(scale, WORDS + token[None, :] * 0, 0)
        digest = (digest ^ (digest >> 16)).to(tl.int32, bitcast=True)
        at = (layer.to(tl.int64) * rows + row) * width + index
        kept = digests + at[:, None] * TOKENS + token[None, :]
        before = tl.load(kept, mask=valid[:, None], other=0)
        seen = tl.load(pages_seen + at, mask=valid, other=-1)
        # Where nothing changed there is nothing to write: a step's digests are mostly those of the last.
        differs = (digest != before) & valid[:, None]
        tl.store(kept, digest, mask=differs)
        tl.store(pages_seen + at, page, mask=valid & (seen != page))
        changed = differs & (seen == page)[:, None]
        found = tl.max(changed.to(tl.int32), axis=1)
        count = tl.sum(found, axis=0)
        if count > 0:
            bit = changed.to(tl.uint32) << (token % 32).to(tl.uint32)[None, :]
            low = tl.sum(tl.where(token[None, :] < 32, bit, 0), axis=1)
            high = tl.sum(tl.where(token[None, :] < 32, 0, bit), axis=1)
            place = tl.atomic_add(counters + 4, count) + tl.cumsum(found, axis=0) - 1
            entry = raw + (place & (CAPACITY - 1)) * 7
            here = found > 0
            tl.store(entry, kind + index * 0, mask=here)
            tl.store(entry + 1, layer + index * 0, mask=here)
            tl.store(entry + 2, row + index * 0, mask=here)
            tl.store(entry + 3, index, mask=here)
            tl.store(entry + 4, page, mask=here)
            tl.store(entry + 5, low.to(tl.int32, bitcast=True), mask=here)
            tl.store(entry + 6, high.to(tl.int32, bitcast=True), mask=here)


@triton.jit(do_not_specialize=["first_layer", "tokens"])
def _judge(
    raw, counters, entries, locations, positions, tokens, first_layer,
    TOKENS: tl.constexpr, PER_SLOT: tl.constexpr, LEGAL: tl.constexpr, CAPACITY: tl.constexpr,
    NOTES: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Which changes were legal: slots that this replay's tokens may write, and location 0."""
    total, judged = tl.load(counters + 4), tl.load(counters + 5)
    token = tl.arange(0, TOKENS)
    # The counters go round after days: only differences and powers of two are used of them.
    for number in range(tl.program_id(0), total - judged, PROGRAMS):
        entry = raw + ((judged + number) & (CAPACITY - 1)) * 7
        kind = tl.load(entry)
        page = tl.load(entry + 4).to(tl.int64)
        low = tl.load(entry + 5).to(tl.uint32, bitcast=True)
        high = tl.load(entry + 6).to(tl.uint32, bitcast=True)
        mask = tl.where(token < 32, low, high) >> (token % 32).to(tl.uint32)
        changed = (mask & 1) > 0
        wrong = changed
        if kind == 1:
            tl.atomic_add(counters, 1)
            legal = (token == 0) & (page == 0)
            for start in range(0, tokens, LEGAL):
                which = start + tl.arange(0, LEGAL)
                inside = which < tokens
                location = tl.load(locations + which, mask=inside, other=-1).to(tl.int64)
                position = tl.load(positions + which, mask=inside, other=0).to(tl.int64)
                slot = location // PER_SLOT
                writes = inside & ((position + 1) % PER_SLOT == 0) & (slot // TOKENS == page)
                hit = (slot[None, :] % TOKENS == token[:, None]) & writes[None, :]
                legal = legal | (tl.max(hit.to(tl.int32), axis=1) > 0)
            wrong = changed & (legal == 0)
        if tl.max(wrong.to(tl.int32), axis=0) > 0:
            tl.atomic_add(counters + 2 - kind, 1)
            bit = wrong.to(tl.uint32) << (token % 32).to(tl.uint32)
            wrong_low = tl.sum(tl.where(token < 32, bit, 0), axis=0)
            wrong_high = tl.sum(tl.where(token < 32, 0, bit), axis=0)
            note = entries + (tl.atomic_add(counters + 3, 1) & (NOTES - 1)) * 9
            tl.store(note, kind)
            tl.store(note + 1, tl.load(entry + 1) + first_layer)
            tl.store(note + 2, tl.load(entry + 2))
            tl.store(note + 3, tl.load(entry + 3))
            tl.store(note + 4, tl.load(entry + 4))
            tl.store(note + 5, tl.load(entry + 5))
            tl.store(note + 6, tl.load(entry + 6))
            tl.store(note + 7, wrong_low.to(tl.int32, bitcast=True))
            tl.store(note + 8, wrong_high.to(tl.int32, bitcast=True))
    # The last of the programs says how far judging has come; each read that before it got here.
    if tl.atomic_add(counters + 6, 1) & (PROGRAMS - 1) == PROGRAMS - 1:
        tl.store(counters + 5, total)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8).view(torch.int32)


def _slots(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[list[Any], int]:
    arguments: list[Any] = []
    end = 0
    for left, right in pairs:
        source, target = _words(left), _words(right)
        words = source.numel()
        end += triton.cdiv(words, BLOCK)
        arguments += [source, target, words, end]
    for _ in range(SLOTS - len(pairs)):
        arguments += [arguments[0], arguments[1], 0, end]
    return arguments, end


def copy_many(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    logits: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    window: torch.Tensor | None = None,
) -> None:
    """Copy each (source, target) of up to SLOTS pairs, and logits' rows up to their lengths, in one launch.

    Sources and targets: contiguous, the same number of bytes, a multiple of 4.
    logits: [rows, columns] float32 -> kept: [rows, width], from column window[0] on.
    """
    arguments, blocks = _slots(pairs)
    ragged = logits is not None
    row_blocks = 1
    if logits is not None and kept is not None:
        row_blocks = triton.cdiv(kept.shape[1], COLUMNS)
        blocks += logits.shape[0] * row_blocks
        tail = [logits, kept, lengths, window, logits.stride(0), kept.stride(0), kept.shape[1], row_blocks]
    else:
        tail = [arguments[0]] * 4 + [0, 0, 0, row_blocks]
    _copy_many[(blocks,)](*arguments, *tail, RAGGED=ragged, BLOCK=BLOCK, COLUMNS=COLUMNS, num_warps=4)


def differ_many(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], counters: torch.Tensor) -> None:
    """Add to counters[i] the number of 32-bit words in which pair i differs; up to SLOTS pairs."""
    arguments, blocks = _slots(pairs)
    _differ_many[(blocks,)](*arguments, counters, BLOCK=BLOCK, num_warps=4)


def digest_rows(
    pages: torch.Tensor, page_table: torch.Tensor, lengths: torch.Tensor, layout: KLayout, out: torch.Tensor
) -> None:
    """Digests of the index-K tokens that each row reads: out is [rows, splits] int32."""
    words = pages.reshape(pages.shape[0], -1).view(torch.int32)
    _digest_rows[(out.shape[0], out.shape[1])](
        words, page_table, lengths, out, page_table.stride(0), page_table.shape[1],
        words.stride(0), words.shape[0],
        SPLITS=out.shape[1], WORDS=layout.value_words, SCALE=layout.scale_words > 0, TOKENS=PAGE_TOKENS,
        num_warps=4,
    )  # fmt: skip


GROUP, WARPS = {"fp4": 4, "fp8": 2, "bf16": 2}, 4
"""Pages that one program digests, and its warps: the fastest of those tried on an H200."""

JUDGES = 32


def canary(
    bases: torch.Tensor, page_words: int, layout: KLayout, rows: Any, state: Any, width: int, after: bool
) -> None:
    """Digest the pages of a replay's rows, on all layers of `bases`, and compare with what is kept.

    bases: [layers] int64 addresses. rows: canary.Rows. state: canary.State. `after` also judges.
    """
    group = GROUP[layout.name]
    _canary[(triton.cdiv(width, group), rows.requests.shape[0], bases.shape[0])](
        bases, rows.req_to_token, rows.req_to_token.stride(0), rows.requests, rows.positions,
        rows.per_row, state.digests, state.pages_seen, state.rows, state.width, int(after), state.raw,
        state.counters, WORDS=layout.value_words, SCALE=layout.scale_words > 0, TOKENS=PAGE_TOKENS,
        PER_SLOT=TOKENS_PER_SLOT, PAGE=page_words, MOST=triton.next_power_of_2(rows.per_row), GROUP=group,
        CHUNK=min(32, layout.value_words), CAPACITY=state.raw.shape[0], num_warps=WARPS,
    )  # fmt: skip
    if after:
        _judge[(JUDGES,)](
            state.raw, state.counters, state.entries, rows.locations, rows.positions,
            rows.locations.shape[0], state.first_layer, TOKENS=PAGE_TOKENS, PER_SLOT=TOKENS_PER_SLOT,
            LEGAL=32, CAPACITY=state.raw.shape[0], NOTES=state.entries.shape[0], PROGRAMS=JUDGES,
            num_warps=4,
        )  # fmt: skip
