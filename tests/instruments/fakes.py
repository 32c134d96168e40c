"""What the instruments look at, on the CPU and in the real shapes: a server's pool and rows, a model's layers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from dsv4_probe import ge_diff, layout
from dsv4_probe.canary import Canary

POOL_PAGES = 40


class Server:
    """A pool of several layers, requests in req_to_token, and one step at a time."""

    def __init__(self, report: Any, kind: str = "fp8", layers: int = 2) -> None:
        self.layout = next(one for one in layout.LAYOUTS.values() if one.name == kind)
        self.buffers = [
            torch.randint(0, 255, (POOL_PAGES, self.layout.page_bytes), dtype=torch.uint8) for _ in range(layers)
        ]
        mapping = [None, *(SimpleNamespace(compress_ratio=4, compress_layer_id=i) for i in range(layers))]
        pool = SimpleNamespace(
            c4_indexer_kv_pool=SimpleNamespace(index_k_with_scale_buffer=self.buffers), layer_mapping=mapping
        )
        self.req_to_token = torch.zeros((8, 2048), dtype=torch.int32)
        self.runner = SimpleNamespace(
            model_runner=SimpleNamespace(
                token_to_kv_pool=pool, req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token)
            )
        )
        self.free = list(range(1, POOL_PAGES))
        self.canary = Canary(report)

    def request(self, line: int, length: int) -> None:
        """Give a request of `length` tokens its pages."""
        for start in range(0, length, 256):
            page = self.free.pop(0)
            self.req_to_token[line, start : start + 256] = torch.arange(page * 256, page * 256 + 256)

    def batch(self, lines: list[int], lengths: list[int], per_row: int = 1) -> Any:
        """A batch in which each request's newest `per_row` tokens are computed."""
        positions, locations = [], []
        for line, length in zip(lines, lengths, strict=True):
            for position in range(length - per_row, length):
                positions.append(position)
                locations.append(int(self.req_to_token[line, position]))
        return SimpleNamespace(
            req_pool_indices=torch.tensor(lines),
            positions=torch.tensor(positions),
            out_cache_loc=torch.tensor(locations),
            seq_lens_cpu=torch.tensor(lengths),
        )

    def write(self, layer: int, page: int, slot: int) -> None:
        """Store something else in a slot: its values and its scale."""
        words = self.buffers[layer][page].view(torch.int32)
        start = slot * self.layout.value_words
        words[start + 3] += 1
        if self.layout.scale_words:
            words[64 * self.layout.value_words + slot] += 1

    def step(self, batch: Any, *writes: tuple[int, int, int]) -> None:
        self.canary.begins(self.runner, "key", batch)
        for write in writes:
            self.write(*write)
        self.canary.ends(self.runner, "key", batch)
        self.canary.poll(wait=True)


HEADS, DIM, PAGE_BYTES, PAGES, TABLE = 64, 128, 64 * 132, 12, 4


def logits_function(
    q: Any, pages: Any, weights: Any, lengths: Any, table: Any, schedule: Any, longest: int, clean: bool
) -> torch.Tensor:
    """A stand-in for the logits function with upstream's arguments and shapes: [rows, longest] float32."""
    q = q[0].to(torch.float32) * q[1][..., None] if isinstance(q, tuple) else q.to(torch.float32)
    rows = q.shape[0]
    keys = pages.reshape(PAGES, -1)[table.long()].reshape(rows, -1).to(torch.float32)[:, :longest]
    # Sums in double: their order does not show in the result, as it would not in one kernel's.
    total = q.reshape(rows, -1).double().sum(1, keepdim=True) + weights.double().sum(1, keepdim=True)
    out = keys * total.float()
    # A real one would read past its page table, or outside of the pool.
    assert 0 <= int(lengths.min()) <= int(lengths.max()) <= table.shape[1] * 64
    assert 0 <= int(table.min()) <= int(table.max()) < PAGES
    place = torch.arange(longest)[None]
    return torch.where(place < lengths.reshape(-1, 1), out, torch.rand(rows, longest))  # the tail is garbage


class Indexer:
    """compute_weights and compute_q with upstream's shapes."""

    def __init__(self, layer_id: int, fp4: bool = False) -> None:
        self.layer_id, self.fp4 = layer_id, fp4

    def compute_weights(self, x: torch.Tensor, skip_scale: bool = False) -> torch.Tensor:
        return x[:, :HEADS] * 0.5

    def compute_q(self, q_lora: torch.Tensor, positions: Any, weights: Any) -> tuple[Any, torch.Tensor]:
        q = q_lora.repeat(1, HEADS * DIM // q_lora.shape[1]).view(-1, HEADS, DIM)
        q = q + positions[:, None, None].to(q.dtype)
        weights = weights.to(torch.float32).unsqueeze(-1)
        if self.fp4:
            values = q.to(torch.float8_e4m3fn).view(torch.uint8)[..., :64].contiguous()
            return (values, q[:, :, 0].float()), weights
        return q.to(torch.float8_e4m3fn), weights


class Model:
    """Layers, their graph's inputs and pool, and a capture and replay that call the hooks in upstream's order.

    `see` has GE_DIFF's methods: GE_DIFF itself, or what calls the hooks. `fault` names what goes wrong in the
    next replay, on the last layer. `rows` are the graph's, of which metadata has but `metadata_rows`.
    """

    def __init__(
        self, see: Any, rows: int = 8, fp4: bool = False, chunks: int = 1, layers: tuple[int, ...] = (2,)
    ) -> None:
        self.see, self.rows, self.fp4, self.chunks, self.layers = see, rows, fp4, chunks, layers
        self.metadata_rows: int | None = None
        self.pages = torch.randint(1, 200, (PAGES, PAGE_BYTES), dtype=torch.uint8)
        self.runner = SimpleNamespace(model_runner=SimpleNamespace(token_to_kv_pool=None))
        self.batch: Any = None
        self.function: Callable[..., torch.Tensor] = logits_function
        self.fault: set[str] = set()
        self.overlap = True
        self.with_metadata = True
        self.strided = False
        self.schedules: list[torch.Tensor] | None = None
        self.key = f"ShapeKey(size={rows})"
        self.dropped: list[weakref.ref[torch.Tensor]] = []

    @property
    def ge_diff(self) -> ge_diff.GeDiff:
        """GE_DIFF, wherever the hooks lead to."""
        found = getattr(self.see, "ge_diff", self.see)
        assert isinstance(found, ge_diff.GeDiff)
        return found

    def run(self) -> None:
        """What the captured graph does: new values each time, at every hook as upstream has it."""
        rows = self.rows
        lengths = torch.randint(2, TABLE * 64, (rows, 1), dtype=torch.int32)
        lengths[0] = 0
        table = torch.randint(0, PAGES, (rows, TABLE), dtype=torch.int32)
        indexer = SimpleNamespace(
            c4_seq_lens=lengths[: self.metadata_rows, 0].contiguous(),
            page_table=table[: self.metadata_rows],
            deep_gemm_metadata=self.schedules,
        )
        if self.metadata_rows is not None:  # as upstream pads
            lengths[self.metadata_rows :] = 1
            table[self.metadata_rows :] = 0
        metadata = SimpleNamespace(indexer_metadata=indexer) if self.with_metadata else None
        for layer in self.layers:
            self._layer(layer, self.fault if layer == self.layers[-1] else set(), metadata, lengths, table)

    def _layer(self, layer: int, fault: set[str], metadata: Any, lengths: torch.Tensor, table: torch.Tensor) -> None:
        rows, see, indexer = self.rows, self.see, Indexer(layer, self.fp4)

        def strike(name: str, tensor: torch.Tensor) -> None:
            if name in fault:
                tensor[-1:].view(torch.uint8).reshape(-1)[-4:] ^= 85

        x = torch.randn(rows, 256, dtype=torch.bfloat16)
        qkv_a = x.clone()[:, :192] if self.strided else x[:, :192].clone()
        q_lora = qkv_a[:, :128].contiguous()
        positions = torch.arange(rows)
        if self.overlap:
            see.made(layer, metadata, x=x, qkv_a=qkv_a)
            see.made(layer, metadata, x=x, q_lora=q_lora)
            strike("x", x)
            see.read(layer, "indexer_compressor", x=x)
        strike("q_lora", q_lora)
        weights = indexer.compute_weights(x)
        q, weights = indexer.compute_q(q_lora, positions, weights)
        strike("late_q_lora", q_lora)
        see.q_made(layer, indexer, metadata, x, q_lora, q=q, weights=weights, positions=positions)
        if not self.overlap:
            strike("x", x)
            see.read(layer, "indexer_compressor", x=x)
        q_in = tuple(t.unsqueeze(1) for t in q) if isinstance(q, tuple) else q.unsqueeze(1)
        weights = weights.squeeze(2)
        first_q = q[0] if isinstance(q, tuple) else q
        strike("q", first_q)
        strike("weights", weights)
        if isinstance(q, tuple):
            strike("q_scale", q[1])
        if "lengths" in fault:
            lengths[-1] -= 1
        if "page_table" in fault:
            table[-1, 0] = (table[-1, 0] + 1) % PAGES
        pages = self.pages.view(PAGES, 64, 1, 132)
        step = -(-rows // self.chunks)
        for index, start in enumerate(range(0, rows, step)):
            part = slice(start, start + step)
            row_q = tuple(t[part] for t in q_in) if isinstance(q_in, tuple) else q_in[part]
            schedule = self.schedules[index] if self.schedules is not None else None
            arguments = (row_q, pages, weights[part], lengths[part], table[part], schedule, TABLE * 64, False)
            logits = self.function(*arguments)
            if "kernel" in fault:
                logits[int(lengths[part].argmax()), 0] = 1e30
            strike("late_q", first_q)
            strike("late_lengths", lengths)
            strike("late_page_table", table)
            if schedule is not None and index == self.chunks - 1:
                strike("late_schedule", schedule)
            see.logits(layer, logits_function, logits, arguments)
            self.dropped.append(weakref.ref(logits))
        if self.overlap:
            strike("qkv_a", qkv_a)
            see.read(layer, "kv", qkv_a=qkv_a)
            see.read(layer, "compressor", x=x)
        if "k" in fault:
            self.pages[table[int(lengths.argmax()), 0], 0] ^= 1
        self.dropped += [weakref.ref(tensor) for tensor in (x, qkv_a, q_lora, first_q, weights)]

    def capture(self) -> None:
        self.see.capture_begins(self.runner, self.key)
        for capturing in (False, True):  # the warm-up, which makes the buffers; and the capture
            # What CUDA tells on a GPU; here, nobody else does.
            self.ge_diff._capturing = lambda on=capturing: on
            self.run()
        self.see.capture_ends(self.runner, self.key)

    def replay(self, *fault: str, key: Any = None) -> None:
        """One replay; `key` to have another bucket's looked at than is replayed."""
        self.see.begins(self.runner, self.key, self.batch)
        self._replayed(set(fault))
        self.see.ends(self.runner, key or self.key, self.batch)
        self.see.poll(wait=True)

    def _replayed(self, fault: set[str]) -> None:
        """On the CPU nothing is recorded: the hooks' copies are done again, as a graph's nodes would."""
        plan = self.ge_diff.plans[id(self.runner), self.key]
        self.ge_diff.plan = ge_diff.BucketPlan(self.key, plan.tag)
        self.fault = fault
        self.run()
        self.fault = set()
        self.ge_diff.plan = None


class Hooked:
    """GE_DIFF's methods, by the calls that are spliced into upstream's files; arguments as they stand there."""

    def __init__(self, hooks: Any) -> None:
        self.hooks = hooks

    @property
    def ge_diff(self) -> ge_diff.GeDiff:
        """GE_DIFF of this process."""
        found = self.hooks.probe().instruments["ge_diff"]
        assert isinstance(found, ge_diff.GeDiff)
        return found

    def made(self, layer: int, metadata: Any, **tensors: Any) -> None:
        self.hooks.prepare_made(SimpleNamespace(layer_id=layer), SimpleNamespace(forward_metadata=metadata), **tensors)

    def read(self, layer: int, reader: str, **tensors: Any) -> None:
        if reader == "indexer_compressor":
            self.hooks.indexer_compressed(None, SimpleNamespace(layer_id=layer), tensors["x"])
        else:
            self.hooks.prepare_read(SimpleNamespace(layer_id=layer), reader, **tensors)

    def q_made(
        self, layer: int, indexer: Any, metadata: Any, x: Any, q_lora: Any, q: Any, weights: Any, positions: Any
    ) -> None:
        backend = SimpleNamespace(forward_metadata=metadata)
        self.hooks.indexer_q_made(backend, indexer, x, q_lora, positions, q, weights)

    def logits(self, layer: int, function: Any, logits: Any, arguments: Any) -> None:
        self.hooks.logits_read(None, SimpleNamespace(layer_id=layer), function, logits, *arguments)

    def capture_begins(self, runner: Any, key: Any) -> None:
        self.hooks.capture_begins(runner, key)

    def capture_ends(self, runner: Any, key: Any) -> None:
        self.hooks.capture_ends(runner, key)

    def begins(self, runner: Any, key: Any, batch: Any) -> None:
        self.hooks.replay_begins(runner, key, batch)

    def ends(self, runner: Any, key: Any, batch: Any) -> None:
        self.hooks.replay_ends(runner, key, batch)

    def poll(self, wait: bool) -> None:
        self.hooks.probe().flush()


def hooked(hooks: Any, report: Any, **arguments: Any) -> Model:
    """A model of which each hook is called, with a pool and a batch for the canary; by `hooks`, dsv4_probe's."""
    server = Server(report)
    server.request(1, 600)
    model = Model(Hooked(hooks), **arguments)
    model.runner, model.batch = server.runner, server.batch([1], [512])
    return model
