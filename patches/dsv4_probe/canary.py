"""The canary: did anything but this replay's own rows write index-K while the graph ran?

Before and after a replay every page that the replay's rows use is digested, slot by slot, on every
layer. A slot that changed is legal when one of the replay's tokens may have been stored there: every
fourth token of a row, at its out location, and location 0. Anything else is `outside`. A change
between two replays is `external`: a transfer, a host cache, a step that ran without a graph.
Pages of other requests are never touched: they may be filled from outside at any time.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any

import torch

from . import layout, mail
from .report import Report

NAME = "canary"

MAX_BYTES = 512 << 20
"""Memory for kept digests; with more pages than fit, the layers take turns."""

MOST_TOKENS_PER_ROW = 16
ENTRIES = 1024
RAW = 1 << 16
PAGES_IN_EVENT = 64


@dataclass(frozen=True)
class Rows:
    """The rows of one replay, without padding.

    requests: [rows] int, their lines in req_to_token. positions, locations: [rows * per_row] int.
    """

    requests: torch.Tensor
    req_to_token: torch.Tensor
    positions: torch.Tensor
    locations: torch.Tensor
    per_row: int
    longest: int | None


@dataclass
class State:
    """Kept digests of the layers from `first_layer` on; see kernels.canary.

    counters, never set back: page changes, outside, external, entries noted, and three of the kernels' own.
    entries: what was noted last. raw: changes before they are judged.
    """

    first_layer: int
    rows: int
    width: int
    digests: torch.Tensor
    pages_seen: torch.Tensor
    counters: torch.Tensor
    entries: torch.Tensor
    raw: torch.Tensor


def new_state(first_layer: int, layers: int, rows: int, width: int, device: torch.device) -> State:
    """An empty state: no page seen yet."""
    shape = (layers, rows, width)
    return State(
        first_layer=first_layer,
        rows=rows,
        width=width,
        digests=torch.zeros((*shape, layout.PAGE_TOKENS), dtype=torch.int32, device=device),
        pages_seen=torch.full(shape, -1, dtype=torch.int32, device=device),
        counters=torch.zeros(8, dtype=torch.int32, device=device),
        entries=torch.zeros((ENTRIES, 9), dtype=torch.int32, device=device),
        raw=torch.zeros((RAW, 7), dtype=torch.int32, device=device),
    )


def rows_of(runner: Any, batch: Any) -> Rows | None:
    """The replay's rows, or None where tokens are not spread evenly over them (ragged verify)."""
    requests = batch.req_pool_indices
    locations, positions = batch.out_cache_loc, batch.positions
    rows = requests.shape[0]
    if rows == 0 or locations is None or positions is None:
        return None
    per_row, rest = divmod(locations.shape[0], rows)
    if rest or not 1 <= per_row <= MOST_TOKENS_PER_ROW or positions.shape[0] < locations.shape[0]:
        return None
    longest = None
    on_host = getattr(batch, "seq_lens_cpu", None)
    if on_host is not None and len(on_host):
        longest = int(max(on_host.tolist() if hasattr(on_host, "tolist") else on_host)) + per_row
    req_to_token = runner.model_runner.req_to_token_pool.req_to_token
    return Rows(requests, req_to_token, positions, locations, per_row, longest)


def expected_pages(locations: list[int], positions: list[int]) -> dict[int, set[int]]:
    """Slots that a replay's tokens may write, by page; location 0 is legal besides, always."""
    pages: dict[int, set[int]] = {}
    for location, position in zip(locations, positions, strict=False):
        if (position + 1) % layout.TOKENS_PER_SLOT == 0:
            slot = location // layout.TOKENS_PER_SLOT
            pages.setdefault(slot // layout.PAGE_TOKENS, set()).add(slot % layout.PAGE_TOKENS)
    return pages


def slots_of(low: int, high: int) -> list[int]:
    """Slots that two signed 32-bit masks name."""
    mask = (low & 0xFFFFFFFF) | (high & 0xFFFFFFFF) << 32
    return [slot for slot in range(64) if mask >> slot & 1]


class Canary:
    """The canary of one process."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.state: State | None = None
        self.layers: list[torch.Tensor] = []
        self.layer_ids: list[int] = []
        self.bases: Any = None
        self.layout: layout.KLayout | None = None
        self.step = 0
        self.checked = 0
        self.per_turn = 0
        self.totals = [0, 0, 0]
        self._last = [0, 0, 0, 0]
        self.mail: mail.Mail | None = None
        self.rows: Rows | None = None
        self.width = 0
        self.kernels: Any = None
        self.largest = 0
        self.skipped: collections.Counter[str] = collections.Counter()

    def capture_begins(self, runner: Any, key: Any) -> None:
        """Take note of the largest bucket: buffers are made for it."""
        self.largest = max(self.largest, int(getattr(key, "size", 0) or 0))

    def begins(self, runner: Any, key: Any, batch: Any) -> None:
        """Right before a replay, on its stream: digest, and see what changed since the last one."""
        self.poll()
        self.rows = rows_of(runner, batch)
        if self.rows is None:
            self.skipped["no even rows"] += 1
            return
        if self.kernels is None:
            self._prepare(runner)
        state = self._room(self.rows)
        needed = -(-self.rows.longest // layout.PAGE_LOCATIONS) if self.rows.longest else state.width
        self.width = min(needed, state.width)
        if needed > state.width:
            self.skipped["pages past the kept width"] += 1
        self._digest(after=False)

    def ends(self, runner: Any, key: Any, batch: Any) -> None:
        """Right after the replay, on its stream: digest again, compare, and send what was found."""
        self.step += 1
        if self.rows is None or self.state is None or self.mail is None:
            return
        self._digest(after=True)
        self.checked += 1
        sent = [self.state.counters, self.rows.locations, self.rows.positions]
        self.mail.post(sent, (self.step, str(key), self.state))
        self.rows = None

    def poll(self, wait: bool = False) -> None:
        """Judge what has arrived."""
        if self.mail is not None:
            for (counters, locations, positions), (step, key, state) in self.mail.take(wait):
                self._judge(counters.tolist(), locations.tolist(), positions.tolist(), step, key, state)

    def status(self) -> dict[str, Any]:
        """For the status file."""
        state = self.state
        size = (
            0
            if state is None
            else sum(t.nbytes for t in (state.digests, state.pages_seen, state.entries, state.raw))
        )
        return {
            "layout": self.layout.name if self.layout else None,
            "layers": len(self.layers),
            "layers_a_replay": self.per_turn,
            "replays": self.checked,
            "page_changes": self.totals[0],
            "outside": self.totals[1],
            "external": self.totals[2],
            "bytes": size,
            "launches_a_replay": 3,
            "skipped": dict(self.skipped),
        }

    def _prepare(self, runner: Any) -> None:
        self.layers, self.layer_ids = index_k_layers(pool_of(runner))
        self.layout = layout.layout_of(self.layers[0][0].nbytes)
        if self.layers[0].is_cuda:
            from . import kernels

            self.kernels = kernels
            addresses = [layer.data_ptr() for layer in self.layers]
            self.bases = torch.tensor(addresses, dtype=torch.int64, device=self.layers[0].device)
        else:
            from . import plain

            self.kernels, self.bases = plain, self.layers
        self.mail = mail.Mail(self.layers[0].device)

    def _room(self, rows: Rows) -> State:
        """The kept digests, made larger if need be, and turned to the next layers if not all fit."""
        count, width = rows.requests.shape[0], -(-rows.req_to_token.shape[1] // layout.PAGE_LOCATIONS)
        state = self.state
        if state is None or state.rows < count:
            count = max(count, self.largest)
            a_layer = count * width * (layout.PAGE_TOKENS + 1) * 4
            if a_layer > MAX_BYTES:
                width = max(1, MAX_BYTES // (count * (layout.PAGE_TOKENS + 1) * 4))
                a_layer = count * width * (layout.PAGE_TOKENS + 1) * 4
            self.per_turn = min(len(self.layers), max(1, MAX_BYTES // a_layer))
            self.poll(wait=True)
            state = self.state = new_state(0, self.per_turn, count, width, self.layers[0].device)
            self._last = [0, 0, 0, 0]
            if self.per_turn < len(self.layers):
                self.report.say(
                    f"canary: digests of {len(self.layers)} layers do not fit {MAX_BYTES >> 20} MB; "
                    f"{self.per_turn} layers a replay, by turns"
                )
        elif self.per_turn < len(self.layers):
            state.first_layer = (state.first_layer + self.per_turn) % len(self.layers)
            state.pages_seen.fill_(-1)
        return state

    def _digest(self, after: bool) -> None:
        assert self.state is not None and self.rows is not None and self.layout is not None
        first = self.state.first_layer
        bases = self.bases[first : first + self.per_turn]
        words = self.layout.page_bytes // 4
        self.kernels.canary(bases, words, self.layout, self.rows, self.state, self.width, after)

    def _judge(
        self,
        counters: list[int],
        locations: list[int],
        positions: list[int],
        step: int,
        key: str,
        state: State,
    ) -> None:
        changed, outside, external, noted = (
            (now - then) & 0xFFFFFFFF for now, then in zip(counters[:4], self._last, strict=True)
        )
        first_entry, self._last = self._last[3], counters[:4]
        for index, count in enumerate((changed, outside, external)):
            self.totals[index] += count
        if not outside and not external:
            self.report.event(NAME, "clean")
            return
        entries = self._entries(state, first_entry, noted)
        expected = expected_pages(locations, positions)
        for kind, verdict, count in ((1, "outside", outside), (0, "external", external)):
            if not count:
                self.report.event(NAME, "clean") if kind else None
                continue
            found = {(entry[1], entry[4]): entry for entry in entries if entry[0] == kind}
            self.report.event(
                NAME,
                verdict,
                step=step,
                bucket=key,
                changed=changed if kind else count,
                expected=len(expected),
                outside=count if kind else 0,
                pages=[
                    {
                        "layer": self.layer_ids[entry[1]],
                        "page": entry[4],
                        "row": entry[2],
                        "slots": slots_of(entry[7], entry[8]),
                        "changed_slots": slots_of(entry[5], entry[6]),
                    }
                    for _, entry in sorted(found.items())[:PAGES_IN_EVENT]
                ],
                page_numbers=sorted({entry[4] for entry in found.values()}),
                truncated=noted > ENTRIES or len(found) > PAGES_IN_EVENT,
            )

    def _entries(self, state: State, first: int, noted: int) -> list[list[int]]:
        """The entries that came with one replay; waits for the device, which only an event costs."""
        table = state.entries.cpu().tolist()
        count = min(noted, ENTRIES)
        start = first + noted - count
        return [table[(start + index) % ENTRIES] for index in range(count)]


def pool_of(runner: Any) -> Any:
    """The token pool that holds index-K, of whatever of the runner's objects has it."""
    for owner in (runner.model_runner, getattr(runner.model_runner, "attn_backend", None)):
        for name in ("token_to_kv_pool", "kv_pool"):
            pool = getattr(owner, name, None)
            if pool is not None and getattr(pool, "c4_indexer_kv_pool", None) is not None:
                return pool
    raise ValueError("no token pool with c4_indexer_kv_pool: this is not a DeepSeek-V4 server")


def index_k_layers(pool: Any) -> tuple[list[torch.Tensor], list[int]]:
    """Page tensors [pages, bytes] of each layer with index-K, and the model's number of each layer."""
    layers = pool.c4_indexer_kv_pool.index_k_with_scale_buffer
    if not layers:
        raise ValueError("the pool keeps index-K in another form than pages of values and scales")
    ids = list(range(len(layers)))
    for number, item in enumerate(getattr(pool, "layer_mapping", None) or ()):
        if item is not None and item.compress_ratio == 4 and item.compress_layer_id < len(ids):
            ids[item.compress_layer_id] = number
    return list(layers), ids
