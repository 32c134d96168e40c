"""A small server around upstream's functions: layers, an index-K pool, requests, graphs of several buckets.

Everything but the functions under test is elementwise, so that what a reader should have got can be
computed again to the bit. Faults are planted by writing to a tensor's memory from the main stream
while a reader on a side stream is held back, or by dropping a tensor early (`qkv_a`), as upstream did.
"""

from __future__ import annotations

import collections
import ctypes
from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
import upstream

HEADS, DIM, RANK, HIDDEN, TOP_K = 64, 128, 1024, 2048, 512
WIDTH = RANK + 512
"""qkv_a's columns; q_b's output has as many, so that it gets qkv_a's block when that is free."""


@triton.jit
def _spin(count, out):
    value = tl.load(count)
    for _ in range(value):
        value = value * 1664525 + 1013904223
    tl.store(out, value)


class Spinner:
    """Holds a stream back for a time that can be set before each replay."""

    def __init__(self) -> None:
        self.count = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.sink = torch.zeros(1, dtype=torch.int32, device="cuda")

    def __call__(self) -> None:
        _spin[(1,)](self.count, self.sink, num_warps=1)


class KernelNode(ctypes.Structure):
    """The driver's CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p), ("sizes", ctypes.c_uint * 7), ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p), ("kernel", ctypes.c_void_p), ("context", ctypes.c_void_p),
    )  # fmt: skip


@dataclass
class Faults:
    """victim: which input is overwritten. kernel, k, stray: other faults. rogue: from a stream of its own."""

    victim: str | None = None
    kernel: bool = False
    k: bool = False
    stray: bool = False


class Indexer:
    """c4_indexer: compute_weights and compute_q, elementwise."""

    use_fp4_indexer = False
    compressor = object()

    def __init__(self, server: Server, layer: int) -> None:
        self.server, self.layer_id = server, layer

    def compute_weights(self, x: torch.Tensor, skip_scale: bool = False) -> torch.Tensor:
        return x[:, :HEADS] * 0.125

    def compute_q(self, q_lora: torch.Tensor, positions: Any, weights: Any, *rest: Any) -> Any:
        server = self.server
        if server.capturing and server.faults.victim == "q_lora":
            server.reader_delay()
            server.truth[self.layer_id]["q_lora"][: q_lora.shape[0]].copy_(q_lora)
        q = (q_lora.repeat(1, HEADS * DIM // RANK) * 0.25).view(-1, HEADS, DIM).to(torch.float8_e4m3fn)
        if server.capturing:
            server.victims["q"] = q
        return q, weights.float().unsqueeze(-1)


class Layer:
    """MQALayer, as much of it as `_forward_prepare_multi_stream` touches."""

    fuse_wqa_wkv = True
    compressor = object()

    def __init__(self, server: Server, layer: int) -> None:
        self.server, self.layer_id = server, layer
        self.alt_streams = [torch.cuda.Stream() for _ in range(3)]
        self.indexer_module = Indexer(server, layer)
        self.indexer_streams = [torch.cuda.Stream() for _ in range(2)]

    def wqkv_a(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x[:, :WIDTH] * 2.0, None

    def _compute_q_a(self, x: torch.Tensor, qkv_a: torch.Tensor) -> Any:
        q = qkv_a[..., :RANK] * 0.5
        if self.server.capturing:
            self.server.victims["q_lora"] = q
        return (q, q) if self.server.version == "0.5.23" else q

    def indexer(self, *, enable_multi_stream: bool, **arguments: Any) -> None:
        self.server.backend.forward_c4_indexer(
            c4_indexer=self.indexer_module,
            alt_streams=self.indexer_streams,
            enable_multi_stream=enable_multi_stream,
            **{k: v for k, v in arguments.items() if k != "attn_backend"},
        )

    def _compute_kv_to_cache(self, x: Any, positions: Any, batch: Any, backend: Any, qkv_a: Any) -> None:
        server = self.server
        if server.capturing and server.faults.victim == "qkv_a":
            server.reader_delay()
        if server.capturing:
            server.truth[self.layer_id]["qkv_a"][: qkv_a.shape[0]].copy_(qkv_a)
        server.kv[self.layer_id][: qkv_a.shape[0]].copy_(qkv_a[:, RANK:])

    def _compute_q_b(self, q_lora: torch.Tensor, positions: Any, q_out: Any) -> torch.Tensor:
        """On the main stream, before it joins the others: this is where their memory gets overwritten."""
        server, victim = self.server, self.server.faults.victim
        if server.capturing and victim:
            server.writer_delay()
        out = torch.empty((q_lora.shape[0], WIDTH), dtype=q_lora.dtype, device="cuda")
        torch.mul(q_lora[:, :1], 0.25, out=out[:, :1])
        out[:, 1:] = 7.0
        if server.capturing and victim in ("x", "q_lora", "q"):
            target = server.victims[victim]
            target.view(torch.uint8).bitwise_xor_(0x15)
        return out


class Server:
    """Two layers (or more), a pool, requests, and a runner with upstream's capture_one_shape and execute."""

    def __init__(
        self, version: str, tree: Any, hooked: bool, layers: int = 2, buckets: tuple[int, ...] = (32, 8),
        pages_a_row: int = 8, overlap: bool = True, faults: Faults | None = None, plant_drop: bool = False,
        per_row: int = 1, name: str = "patched",
    ) -> None:  # fmt: skip
        self.version, self.tree, self.overlap, self.per_row = version, tree, overlap, per_row
        self.faults = faults or Faults()
        self.capturing = False
        self.module = upstream.indexer(tree, f"{name}_indexer")
        self.reader_delay, self.writer_delay = Spinner(), Spinner()
        self.most = max(buckets) * per_row
        self.pages_a_row = pages_a_row
        self.victims: dict[str, torch.Tensor] = {}
        device = "cuda"
        rows = max(buckets)
        self.pages = rows * pages_a_row + 16
        self.pool_layers = [
            torch.randint(0, 120, (self.pages, 64 * 132), dtype=torch.uint8, device=device)
            for _ in range(layers)
        ]
        for pages in self.pool_layers:  # scales must be sane numbers
            pages.view(torch.float32)[:, 64 * 32 :] = 0.01
        self.kv = [
            torch.zeros(self.most, WIDTH - RANK, dtype=torch.bfloat16, device=device) for _ in range(layers)
        ]
        self.core = torch.zeros(self.most, HIDDEN, dtype=torch.bfloat16, device=device)
        shapes = {"qkv_a": WIDTH, "q_lora": RANK, "x": HIDDEN}
        self.truth = [
            {n: torch.zeros(self.most, w, dtype=torch.bfloat16, device=device) for n, w in shapes.items()}
            for _ in range(layers)
        ]
        self.truth_q = torch.zeros(self.most, HEADS, DIM, dtype=torch.uint8, device=device)
        self.x_in = torch.zeros(self.most, HIDDEN, dtype=torch.bfloat16, device=device)
        self.req_to_token = torch.zeros((rows + 1, pages_a_row * 256), dtype=torch.int32, device=device)
        order = torch.randperm(self.pages - 16)[: rows * pages_a_row].view(rows, pages_a_row) + 8
        tokens = order[:, :, None] * 256 + torch.arange(256)
        self.req_to_token[1:] = tokens.view(rows, -1).to(device=device, dtype=torch.int32)
        self.static = SimpleNamespace(
            requests=torch.zeros(rows, dtype=torch.int64, device=device),
            positions=torch.zeros(self.most, dtype=torch.int64, device=device),
            locations=torch.zeros(self.most, dtype=torch.int64, device=device),
        )
        self.outputs: dict[int, dict[str, torch.Tensor]] = {}
        self.layers = [Layer(self, number) for number in range(layers)]
        prepare = upstream.method(
            tree, upstream.MODEL, "MQALayer", "_forward_prepare_multi_stream",
            upstream.drop_before_join if plant_drop else None,
        )  # fmt: skip
        for layer in self.layers:
            layer.prepare = MethodType(prepare, layer)
        self.backend = self._backend()
        self.runner = self._runner(hooked)
        self.logits: dict[tuple[int, int], torch.Tensor] = {}
        self.indices: dict[tuple[int, int], torch.Tensor] = {}
        self._wrap_logits()
        for size in buckets:
            self.capture(size)

    # Upstream's surroundings

    def _backend(self) -> Any:
        server, module = self, self.module

        class Backend(module.C4IndexerBackendMixin):
            hisparse_coordinator = None

            def __init__(self) -> None:
                super().__init__()
                backends = getattr(module, "DSATopKBackend", None)
                if backends is not None:
                    self.dsa_topk_backend = backends.TORCH
                self.token_to_kv_pool = server.pool()
                self.forward_metadata: Any = None

            def init_forward_metadata_out_graph(self, *args: Any, **kwargs: Any) -> None: ...
            def init_forward_metadata_in_graph(self, *args: Any, **kwargs: Any) -> None: ...

            def forward_indexer_compressor(
                self, x: Any, forward_batch: Any, layer_id: int, compressor: Any
            ) -> None:
                if server.capturing and server.faults.victim == "x":
                    if server.overlap:
                        server.reader_delay()
                    else:
                        server.rogue(x)
                server.truth[layer_id]["x"][: x.shape[0]].copy_(x)
                server.store_k(layer_id, x)

            def forward_core_compressor(self, x: Any, batch: Any, layer_id: int, compressor: Any) -> None:
                server.core[: x.shape[0]].copy_(x)

        return Backend()

    def pool(self) -> Any:
        layers = self.pool_layers
        return SimpleNamespace(
            c4_indexer_kv_pool=SimpleNamespace(index_k_with_scale_buffer=layers),
            layer_mapping=[
                SimpleNamespace(compress_ratio=4, compress_layer_id=i) for i in range(len(layers))
            ],
            get_index_k_with_scale_buffer=lambda layer_id: layers[layer_id],
        )

    def store_k(self, layer: int, x: torch.Tensor) -> None:
        """The compressor's store: every fourth token at its location, everything else at location 0."""
        rows = x.shape[0]
        positions, locations = self.static.positions[:rows], self.static.locations[:rows]
        slots = torch.where((positions + 1) % 4 == 0, locations // 4, 0)
        flat = self.pool_layers[layer].view(-1)
        at = (slots // 64 * (64 * 132) + slots % 64 * 128)[:, None] + torch.arange(128, device="cuda")
        flat[at] = x[:, :128].to(torch.float8_e4m3fn).view(torch.uint8)

    def _wrap_logits(self) -> None:
        """Around the logits function that upstream picks: delays and faults while capturing, nothing else."""
        server = self
        old = self.version in ("0.5.14", "0.5.18")
        name = "fp8_paged_mqa_logits_torch_sm120" if old else "fp8_paged_mqa_logits_torch"
        real = getattr(self.module, name)

        def function(q: Any, *rest: Any, **named: Any) -> torch.Tensor:
            if server.capturing and server.faults.victim == "q":
                if server.overlap:
                    server.reader_delay()
                else:
                    server.rogue(q)
                server.truth_q[: q.shape[0]].copy_(q.view(torch.uint8)[:, 0])
            logits = real(q, *rest, **named)
            if server.capturing:
                if server.faults.kernel:
                    logits[:, 0] += 1.0
                server.logits[server.size, server.current] = logits
            return logits

        setattr(self.module, name, function)

    def rogue(self, tensor: torch.Tensor) -> None:
        """Without side streams: a stream of someone else writes to the tensor before it is read."""
        current, other = torch.cuda.current_stream(), self.layers[0].alt_streams[0]
        other.wait_stream(current)
        with torch.cuda.stream(other):
            tensor.view(torch.uint8).bitwise_xor_(0x15)
        current.wait_stream(other)

    # The forward that is captured

    def forward(self, *args: Any, **kwargs: Any) -> upstream.PPProxyTensors:
        size = self.size
        rows = size * self.per_row
        positions = self.static.positions[:rows]
        requests = self.static.requests[:size].repeat_interleave(self.per_row)
        table = (self.req_to_token[requests][:, ::256] // 256).to(torch.int32).contiguous()
        lengths = ((positions + 1) // 4).to(torch.int32)
        indices = torch.full((rows, TOP_K), -1, dtype=torch.int32, device="cuda")
        core = SimpleNamespace(
            positions=positions, page_table=table, c4_sparse_page_indices=indices, c4_sparse_raw_indices=None
        )
        self.backend.forward_metadata = SimpleNamespace(
            indexer_metadata=self.indexer_metadata(table, lengths), core_metadata=core
        )
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(
                is_idle=lambda: False, is_decode=lambda: True, is_target_verify=lambda: False
            )
        )
        x = self.x_in[:rows] * 1.0
        out = {}
        for number, layer in enumerate(self.layers):
            self.current = number
            if self.capturing:
                self.victims["x"] = x
            if self.overlap:
                q = layer.prepare(x, positions, batch, self.backend)
            else:
                q_a = layer.wqkv_a(x)[0]
                q_lora = q_a[..., :RANK] * 0.5
                layer.indexer(x=x, q_lora=q_lora, forward_batch=batch, enable_multi_stream=False)
                q = layer._compute_q_b(q_lora, positions, None)
            if self.capturing:
                self.indices[size, number] = torch.empty_like(indices)
                self.indices[size, number].copy_(indices)
            x = x + q[:, :1]
            out[f"q{number}"] = q
        if self.capturing and self.faults.k:
            # The last page of row 1 changes after it was read.
            self.pool_layers[0].view(-1)[
                table[1, 0].long() * (64 * 132) + torch.arange(4, device="cuda")
            ] ^= 3
        if self.capturing and self.faults.stray:
            slot = 5
            at = table[1, 0].long() * (64 * 132) + slot * 128 + torch.arange(4, device="cuda")
            self.pool_layers[1].view(-1)[at] ^= 3
        return upstream.PPProxyTensors(out)

    def indexer_metadata(self, table: torch.Tensor, lengths: torch.Tensor) -> Any:
        cls = self.module.PagedIndexerMetadata
        # Names and fields as the versions have them.
        offered = {
            "page_size": 256, "compressed_page_size": 64, "page_table": table, "c4_seq_lens": lengths,
            "compressed_seq_lens": lengths, "use_topk_v2": False,
        }  # fmt: skip
        return cls(**{name: value for name, value in offered.items() if name in cls.__dataclass_fields__})

    # Upstream's runner

    def _runner(self, hooked: bool) -> Any:
        server = self

        class GraphBackend:
            def __init__(self) -> None:
                self.graphs: dict[Any, Any] = {}
                self.pool = torch.cuda.graph_pool_handle()
                self.stream = torch.cuda.Stream()

            def capture_one(self, key: Any, run_once: Any, **kwargs: Any) -> None:
                """As upstream's full backend: two warm-ups, then the capture, all on one stream."""
                with torch.cuda.stream(self.stream):
                    for _ in range(2):
                        torch.cuda.synchronize()
                        run_once()
                    graph = torch.cuda.CUDAGraph(keep_graph=True)
                    server.capturing = True
                    with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                        out = run_once()
                    server.capturing = False
                graph.instantiate()
                self.graphs[key] = (graph, out)

            def replay_session(self) -> upstream.Nothing:
                return upstream.NOTHING

            def replay(self, key: Any, batch: Any) -> Any:
                graph, out = self.graphs[key]
                graph.replay()
                return out

        class Runner:
            pp_size = 1
            device_module = torch.cuda
            ragged_verify_mode = False
            captured_req_width = num_tokens_per_bs = 1
            capture_one_shape = upstream.method(
                server.tree, upstream.RUNNER, "DecodeCudaGraphRunner", "capture_one_shape"
            )
            execute = upstream.method(server.tree, upstream.RUNNER, "DecodeCudaGraphRunner", "execute")

            def __init__(self) -> None:
                self.backend = GraphBackend()
                self.model_runner = SimpleNamespace(
                    server_args=upstream.NOTHING, lora_manager=None, attn_backend=server.backend,
                    spec_algorithm=upstream.NOTHING,
                    is_draft_worker=False, canary_manager=None, capture_tail_hooks=[], capture_head_hooks=[],
                    device_timer=None, req_to_token_pool=SimpleNamespace(req_to_token=server.req_to_token),
                    token_to_kv_pool=server.pool(),
                )  # fmt: skip

            def __getattr__(self, name: str) -> Any:
                return upstream.NOTHING

            def capture_prepare(self, size: int, **kwargs: Any) -> Any:
                batch = SimpleNamespace(
                    lora_ids=None, input_ids=None, positions=None, global_dp_buffer_len=0,
                    dp_padding_mode=upstream.NOTHING, global_num_tokens_cpu=None,
                )  # fmt: skip
                return batch, server.backend, None

            def _make_graph_key(self, size: int, *rest: Any) -> upstream.ShapeKey:
                return upstream.ShapeKey(size)

            def _capture_graph_size(self, *, bs: int, num_tokens: int) -> int:
                return bs

            def _process_output_after_replay(self, output: Any, batch: Any) -> Any:
                return output

            def load_batch(self, batch: Any, proxy: Any = None) -> None:
                server.load(batch)
                self.bs = batch.bucket
                self._replay_graph_key = upstream.ShapeKey(batch.bucket)

        return Runner()

    def capture(self, size: int) -> None:
        self.size = size
        self.runner.capture_one_shape(size, self.forward)
        torch.cuda.synchronize()

    # Requests

    def batch(self, bucket: int, rows: int, lengths: list[int]) -> Any:
        """`rows` requests of these lengths (their newest token included) in a bucket of `bucket` rows."""
        requests = torch.arange(1, rows + 1, device="cuda")
        ends = torch.tensor(lengths, device="cuda")
        steps = torch.arange(self.per_row, device="cuda") - (self.per_row - 1)
        positions = (ends[:, None] - 1 + steps).clamp(min=0).view(-1)
        owner = requests.repeat_interleave(self.per_row)
        return SimpleNamespace(
            bucket=bucket, req_pool_indices=requests, positions=positions,
            out_cache_loc=self.req_to_token[owner, positions].long(), seq_lens_cpu=torch.tensor(lengths),
            forward_mode=SimpleNamespace(name="DECODE", is_decode=lambda: False), batch_size=rows,
        )  # fmt: skip

    def load(self, batch: Any) -> None:
        """Fill the graph's static buffers; padded rows have length 1 and location 0."""
        rows = batch.req_pool_indices.shape[0]
        tokens = rows * self.per_row
        self.static.requests.zero_()
        self.static.requests[:rows].copy_(batch.req_pool_indices)
        self.static.positions.zero_()
        self.static.positions[:tokens].copy_(batch.positions)
        self.static.locations.zero_()
        self.static.locations[:tokens].copy_(batch.out_cache_loc)

    def step(self, batch: Any, fresh: bool = True) -> None:
        if fresh:
            self.x_in.normal_()
        self.runner.execute(batch)

    def corrupted(self, batch: Any) -> bool:
        """Whether the victim's reader really got other bytes than were made; waits for the device."""
        torch.cuda.synchronize()
        rows = batch.bucket * self.per_row
        x = self.x_in[:rows] * 1.0
        victim = self.faults.victim
        for number in range(len(self.layers)):
            qkv_a = x[:, :WIDTH] * 2.0
            q_lora = qkv_a[..., :RANK] * 0.5
            made = {"x": x, "qkv_a": qkv_a, "q_lora": q_lora}
            if victim in made:
                if not torch.equal(self.truth[number][victim][:rows], made[victim]):
                    return True
            elif number == len(self.layers) - 1:
                q = (
                    (q_lora.repeat(1, HEADS * DIM // RANK) * 0.25)
                    .view(-1, HEADS, DIM)
                    .to(torch.float8_e4m3fn)
                )
                return not torch.equal(self.truth_q[:rows], q.view(torch.uint8))
            # The main stream's result is not touched by any of these faults.
            x = x + q_lora[:, :1] * 0.25
        return False

    def nodes(self, size: int) -> collections.Counter[tuple[int, ...]]:
        """A captured graph's nodes, by type, and for a kernel by function, grid and block."""
        cuda = ctypes.CDLL("libcuda.so.1")
        graph = ctypes.c_void_p(self.runner.backend.graphs[upstream.ShapeKey(size)][0].raw_cuda_graph())
        count = ctypes.c_size_t()
        assert cuda.cuGraphGetNodes(graph, None, ctypes.byref(count)) == 0
        handles = (ctypes.c_void_p * count.value)()
        assert cuda.cuGraphGetNodes(graph, handles, ctypes.byref(count)) == 0
        found: collections.Counter[tuple[int, ...]] = collections.Counter()
        for handle in handles:
            kind = ctypes.c_int()
            assert cuda.cuGraphNodeGetType(ctypes.c_void_p(handle), ctypes.byref(kind)) == 0
            node: tuple[int, ...] = (kind.value,)
            if kind.value == 0:
                kernel = KernelNode()
                get = cuda.cuGraphKernelNodeGetParams_v2
                assert get(ctypes.c_void_p(handle), ctypes.byref(kernel)) == 0
                node += (kernel.function or kernel.kernel or 0, *kernel.sizes)
            found[node] += 1
        return found

    def pool_bytes(self) -> int:
        """Bytes of the graphs' memory pool."""
        pool = tuple(self.runner.backend.pool)
        return sum(
            s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == pool
        )
