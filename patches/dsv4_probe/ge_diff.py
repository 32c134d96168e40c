"""GE_DIFF: the graph's logits against the same function run eagerly on what its inputs were when made.

While a graph is captured, each input is copied twice: by its producer, on the producing stream, and
after its reader, on the reading stream; both by one launch a stash point, into buffers that lie
outside the graph's pool. Nothing keeps a reference to a tensor of the graph, so its blocks are reused
exactly as without the instrument. After a replay the function is run again from the producers'
copies; whether logits agree decides corruption, and the two copies say why.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import layout, mail, verdict
from .report import Report
from .settings import Settings

NAME = "ge_diff"

DIGEST_SPLITS = 64
TOP_K = 512

COMPARE_BYTES = 16 << 20
"""Logits compared at a time: what comparing needs of memory besides is a few times this."""

COUNTS = ("k", "logits", "rows", "argmax", "top_k", "q_wrong", "tag")
"""Integers that one comparison sends besides the copies' differences; two floats follow: largest and mean."""


class Full(Exception):
    """There is no buffer for something that would have to be stashed."""


@dataclass
class Copy:
    """One copied tensor in a buffer: how to see it as it was."""

    buffer: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    stream: str

    @property
    def view(self) -> torch.Tensor:
        """The copy, shaped as the tensor was."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return self.buffer[:count].view(self.dtype).view(self.shape)


@dataclass
class Part:
    """One call of the logits function: a chunk of a layer's rows."""

    start: int
    rows: int
    function: Callable[..., torch.Tensor]
    pages: torch.Tensor
    longest: int
    clean: Any
    layout: layout.KLayout
    read: dict[str, Copy]
    index: int
    logits: torch.Tensor
    digests: torch.Tensor


@dataclass
class LayerPlan:
    """What one captured layer stashes. Keys of `read` are (input, reader)."""

    layer: int
    capturing: bool
    made: dict[str, Copy] = field(default_factory=dict)
    read: dict[tuple[str, str], Copy] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    indexer: Any = None
    q_is_tuple: bool = False
    reason: str | None = None


@dataclass
class BucketPlan:
    """What one captured graph stashes."""

    name: str
    tag: int
    tag_value: torch.Tensor | None = None
    layers: dict[int, LayerPlan] = field(default_factory=dict)
    shared: dict[str, Copy] = field(default_factory=dict)
    launches: int = 0
    copied: int = 0
    logits: int = 0


class GeDiff:
    """GE_DIFF of one process."""

    def __init__(self, settings: Settings, report: Report) -> None:
        self.settings = settings
        self.report = report
        self.buffers: dict[tuple[Any, ...], torch.Tensor] = {}
        self.bytes = 0
        self.retired: list[torch.Tensor] = []
        self.plans: dict[Any, BucketPlan] = {}
        self.plan: BucketPlan | None = None
        self.tags = 0
        self.layers_expected = 1
        self.device: torch.device | None = None
        self.kernels: Any = None
        self.mail: mail.Mail | None = None
        self.window: torch.Tensor | None = None
        self.window_at = 0
        self.sliced: dict[int, tuple[int, int]] = {}
        self.step = 0
        self.compared = 0
        self.recompute_q = True
        self.skipped: collections.Counter[str] = collections.Counter()

    # Capture

    def capture_begins(self, runner: Any, key: Any) -> None:
        """A graph is about to be warmed up and captured; forgets what an earlier one of this key stashed."""
        self.tags += 1
        self.plan = BucketPlan(bucket_name(runner, key), self.tags)
        self.plans.pop((id(runner), key), None)
        pool = getattr(getattr(runner, "model_runner", None), "token_to_kv_pool", None)
        layers = getattr(getattr(pool, "c4_indexer_kv_pool", None), "index_k_with_scale_buffer", None)
        count = len(layers) if layers else 1
        if self.settings.layers is not None:
            count = min(count, len(self.settings.layers))
        self.layers_expected = max(1, count)

    def capture_ends(self, runner: Any, key: Any) -> None:
        """The graph is captured: from now on its replays are compared."""
        plan, self.plan = self.plan, None
        if plan is None:
            return
        if any(state.capturing for state in plan.layers.values()):
            self.plans[id(runner), key] = plan

    def made(self, layer: int, metadata: Any, **tensors: Any) -> None:
        """Right after these tensors were made, on the stream that made them."""
        with self._stashing(layer) as state:
            if state is not None:
                fresh = {name: t for name, t in tensors.items() if t is not None and name not in state.made}
                pairs = self._pairs("made", layer, fresh, state.made)
                self._copy(pairs + self._shared(metadata))

    def read(self, layer: int, reader: str, **tensors: Any) -> None:
        """Right after `reader` used these tensors, on its stream."""
        with self._stashing(layer) as state:
            if state is not None:
                self._copy(self._reading(state, reader, tensors))

    def q_made(self, layer: int, indexer: Any, metadata: Any, x: Any, q_lora: Any, **made: Any) -> None:
        """After compute_q, on its stream: x and q_lora were read; q, weights made; positions given."""
        with self._stashing(layer) as state:
            if state is None:
                return
            q = made.pop("q")
            state.indexer, state.q_is_tuple, state.parts = indexer, isinstance(q, tuple), []
            pairs = self._pairs("made", layer, {**_q_names(q), **made}, state.made)
            reading = {"q_lora": q_lora}
            if "q_lora" in state.made:
                reading["x"] = x
            else:
                # Without side streams this is the first point that sees x; its last reader comes later.
                pairs += self._pairs("made", layer, {"x": x}, state.made)
            self._copy(pairs + self._shared(metadata) + self._reading(state, "q", reading))

    def logits(self, layer: int, function: Any, logits: Any, arguments: Sequence[Any]) -> None:
        """After the logits function, on its stream: its inputs were read. `arguments` as it got them."""
        with self._stashing(layer) as state:
            if state is not None:
                self._logits(state, function, logits, *arguments)

    def _logits(
        self, state: LayerPlan, function: Any, logits: Any, q: Any, pages: Any, weights: Any, lengths: Any,
        table: Any, schedule: Any, longest: Any, clean: Any,
    ) -> None:  # fmt: skip
        layer, plan = state.layer, self.plan
        assert plan is not None
        if logits.dtype != torch.float32:
            raise Full(f"logits are {logits.dtype}, expected torch.float32")
        rows, index = logits.shape[0], len(state.parts)
        start = sum(part.rows for part in state.parts)
        tensors = {**_q_names(q), "weights": weights, "lengths": lengths, "page_table": table}
        if isinstance(schedule, torch.Tensor):
            tensors["schedule"] = schedule
        read: dict[str, Copy] = {}
        pairs = self._pairs(("logits", index), layer, tensors, read)
        kept = self._kept(layer, start, logits)
        pages_2d = pages.reshape(pages.shape[0], -1)
        k_layout = layout.layout_of(pages_2d.shape[1] * pages_2d.element_size())
        size = rows * DIGEST_SPLITS * 4
        digests = self._buffer(("digest", layer, index), size)[:size].view(torch.int32)
        digests = digests.view(rows, DIGEST_SPLITS)
        if index == 0:
            pairs.append((self._tag(plan.tag), self._buffer(("tag", layer), 4)[:4].view(torch.int32)))
        self._copy(pairs, logits, kept, lengths)
        self.kernels.digest_rows(pages_2d, table, lengths.reshape(-1), k_layout, digests)
        plan.launches += state.capturing
        state.parts.append(
            Part(start, rows, function, pages, int(longest), clean, k_layout, read, index, kept, digests)
        )

    # Replay

    def begins(self, runner: Any, key: Any, batch: Any) -> None:
        """Before a replay: move the window of logits that is kept, where not all of them are."""
        self.poll()
        if self.sliced and self.window is not None and (id(runner), key) in self.plans:
            widest = max(total for total, _ in self.sliced.values())
            self.window_at = 0 if self.window_at >= widest else self.window_at
            self.window.fill_(self.window_at)

    def ends(self, runner: Any, key: Any, batch: Any) -> None:
        """After a replay, on its stream: compare, if it is this replay's turn."""
        self.step += 1
        if self.step % self.settings.every:
            return
        plan = self.plans.get((id(runner), key))
        if plan is None:
            self.skipped["no stash for this bucket"] += 1
            self.report.event(
                NAME,
                "inconclusive",
                step=self.step,
                bucket=bucket_name(runner, key),
                reason="no stash for this bucket",
            )
            return
        self.compared += 1
        for state in plan.layers.values():
            self._compare(plan, state)
        if self.sliced:
            self.window_at += min(width for _, width in self.sliced.values())

    def poll(self, wait: bool = False) -> None:
        """Judge what has arrived."""
        if self.mail is not None:
            for (counts, sizes), note in self.mail.take(wait):
                self._judge(counts.tolist(), sizes.tolist(), *note)

    def status(self) -> dict[str, Any]:
        """For the status file."""
        coverage = 1.0
        if self.sliced:
            coverage = min(width / total for total, width in self.sliced.values())
        return {
            "buckets": {
                plan.name: {
                    "layers": sorted(layer for layer, state in plan.layers.items() if state.parts),
                    "graph_nodes_added": plan.launches,
                    "bytes_copied_a_replay": plan.copied,
                    "logits_bytes_a_replay_at_most": plan.logits,
                }
                for plan in self.plans.values()
            },
            "replays_compared": self.compared,
            "bytes": self.bytes,
            "logits_coverage_a_replay": round(coverage, 4),
            "skipped": dict(self.skipped),
            "every": self.settings.every,
        }

    # Stashing

    def _capturing(self) -> bool:
        return not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing()

    @contextlib.contextmanager
    def _stashing(self, layer: int) -> Iterator[LayerPlan | None]:
        """The layer's plan while one of its graphs is warmed up or captured, else None.

        A layer for which there is no room is left out, and each of its replays is inconclusive.
        """
        plan = self.plan
        if plan is None or (self.settings.layers is not None and layer not in self.settings.layers):
            yield None
            return
        capturing = self._capturing()
        state = plan.layers.get(layer)
        if state is None or state.capturing != capturing:
            # The warm-ups before a capture make the buffers; only what the capture does counts.
            reason = state.reason if state is not None else None
            state = plan.layers[layer] = LayerPlan(layer, capturing, reason=reason)
        try:
            yield None if state.reason is not None else state
        except (Full, ValueError) as error:
            state.reason = str(error)
            self.report.say(f"ge_diff: layer {layer} is left out: {error}")

    def _start(self, tensor: torch.Tensor) -> None:
        if self.kernels is not None:
            return
        self.device = tensor.device
        if tensor.is_cuda:
            from . import kernels

            self.kernels = kernels
        else:
            from . import plain

            self.kernels = plain
        self.mail = mail.Mail(tensor.device)
        self.window = torch.zeros(1, dtype=torch.int32, device=tensor.device)

    def _buffer(self, key: tuple[Any, ...], size: int) -> torch.Tensor:
        """A buffer of at least `size` bytes that all buckets share; made anew only outside a capture."""
        buffer = self.buffers.get(key)
        if buffer is not None and buffer.numel() >= size:
            return buffer
        if self.bytes + size > self.settings.max_bytes:
            raise Full(f"{key}: {size} bytes more than the {self.settings.max_bytes >> 20} MB allowed")
        if self.device is not None and self.device.type != "cpu" and self._capturing():
            raise Full(f"{key}: needed first while capturing; its warm-up did not come by here")
        if buffer is not None:
            self.retired.append(buffer)  # graphs captured earlier still write there
        self.bytes += size
        self.buffers[key] = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return self.buffers[key]

    def _tag(self, value: int) -> torch.Tensor:
        self._tags()
        return self.buffers[("tags",)][value * 4 : value * 4 + 4].view(torch.int32)

    def _tags(self) -> None:
        """Every graph copies its own number beside what it stashes."""
        if ("tags",) not in self.buffers:
            self._buffer(("tags",), 4 * 4096)
            numbers = torch.arange(4096, dtype=torch.int32, device=self.device)
            self.buffers[("tags",)].view(torch.int32).copy_(numbers)
        if self.tags >= 4096:
            raise Full("more than 4096 captures in one process")

    def _pairs(
        self, point: Any, layer: int, tensors: dict[str, Any], plan: dict[Any, Copy]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(tensor, buffer) for each tensor; takes note in `plan` how to see the copy."""
        pairs = []
        for name, tensor in tensors.items():
            self._start(tensor)
            size = tensor.numel() * tensor.element_size()
            if size == 0:
                continue
            buffer = self._buffer((point, layer, name), -(-size // 16) * 16)
            plan[name] = Copy(buffer, tuple(tensor.shape), tensor.dtype, _stream(tensor))
            pairs.append((tensor, buffer[:size]))
        return pairs

    def _reading(
        self, state: LayerPlan, reader: str, tensors: dict[str, Any]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        known = {
            name: tensor for name, tensor in tensors.items() if tensor is not None and name in state.made
        }
        copies: dict[str, Copy] = {}
        pairs = self._pairs(("read", reader), state.layer, known, copies)
        for name, copy in copies.items():
            state.read[name, reader] = copy
        return pairs

    def _shared(self, metadata: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The metadata that all layers share, at the first point of a graph that sees it."""
        plan = self.plan
        assert plan is not None
        indexer = getattr(metadata, "indexer_metadata", None)
        if indexer is None or plan.shared:
            return []
        lengths = getattr(indexer, "compressed_seq_lens", None)
        lengths = getattr(indexer, "c4_seq_lens", None) if lengths is None else lengths
        tensors = {"lengths": lengths, "page_table": indexer.page_table}
        schedules = getattr(indexer, "deep_gemm_metadata", None)
        chunks = schedules if isinstance(schedules, list) else [schedules]
        for index, schedule in enumerate(chunks[:2]):
            if isinstance(schedule, torch.Tensor):
                tensors[f"schedule{index}"] = schedule
        shared: dict[str, Copy] = {}
        pairs = self._pairs("shared", -1, {k: v for k, v in tensors.items() if v is not None}, shared)
        if self._capturing():
            plan.shared = shared
        return pairs

    def _copy(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        logits: torch.Tensor | None = None,
        kept: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
    ) -> None:
        """Copy while capturing; a warm-up only makes the buffers (and compiles the kernel, on nothing)."""
        plan = self.plan
        assert plan is not None
        if not pairs:
            return
        whole = [(source, target) for source, target in pairs if _fused(source)]
        odd = [(source, target) for source, target in pairs if not _fused(source)]
        if self._capturing():
            for source, target in odd:
                target.view(source.dtype).view(source.shape).copy_(source)
                plan.launches += 1
            plan.copied += sum(target.numel() * target.element_size() for _, target in pairs)
            plan.logits += 0 if kept is None else kept.numel() * kept.element_size()
        for at in range(0, len(whole), self.kernels.SLOTS):
            last = at + self.kernels.SLOTS >= len(whole)
            rest = (logits, kept, lengths, self.window) if last else (None, None, None, None)
            self.kernels.copy_many(whole[at : at + self.kernels.SLOTS], *rest)
            plan.launches += self._capturing()

    def _kept(self, layer: int, start: int, logits: torch.Tensor) -> torch.Tensor:
        """[rows, width]: where a part keeps its logits; all columns, or a window if room is short."""
        rows, columns = logits.shape
        key = ("logits", layer)
        width = self.sliced.get(layer, (columns, columns))[1]
        buffer = self.buffers.get(key)
        if buffer is None or buffer.numel() < (start + rows) * width * 4:
            width = min(columns, self._share(layer) // ((start + rows) * 4))
            if width < min(columns, 64):
                raise Full(f"not even 64 columns of its {rows} rows of logits fit")
            if width < columns:
                width -= width % 64
                self.sliced[layer] = (columns, width)
                self.report.say(f"ge_diff: layer {layer} keeps {width} of {columns} logits a row, by turns")
            buffer = self._buffer(key, (start + rows) * width * 4)
        lines = buffer[: buffer.numel() // (width * 4) * width * 4].view(torch.float32).view(-1, width)
        return lines[start : start + rows]

    def _share(self, layer: int) -> int:
        """Bytes that this layer's logits may take, so that the layers to come have as much."""
        left = max(1, self.layers_expected - sum(1 for key in self.buffers if key[0] == "logits"))
        mine = {key: b.numel() for key, b in self.buffers.items() if len(key) > 1 and key[1] == layer}
        # This layer's readers that are still to come copy what was made once more, or twice.
        later = 2 * sum(size for key, size in mine.items() if key[0] == "made")
        others = (sum(mine.values()) + later) * (left - 1)
        return max(0, self.settings.max_bytes - self.bytes - later - others) // left

    # Comparing

    def _compare(self, plan: BucketPlan, state: LayerPlan) -> None:
        """Enqueue everything that decides about one layer, and send the counts; waits for nothing."""
        assert self.mail is not None and self.device is not None
        if state.reason is not None:
            self._inconclusive(plan, state, state.reason)
            return
        keys: list[tuple[str, str]] = []
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for (name, reader), copy in state.read.items():
            keys.append((name, reader))
            pairs.append(_same_rows(state.made[name].view, copy.view))
        for part in state.parts:
            for name, copy in part.read.items():
                made = self._as_made(plan, state, part, name)
                if made is not None:
                    keys.append((name, "logits"))
                    pairs.append((_contiguous(made), copy.view))
        if not keys and not state.parts:
            self._inconclusive(plan, state, "nothing of this layer was stashed inside the graph")
            return
        different = torch.zeros(-(-max(1, len(pairs)) // 8) * 8, dtype=torch.int32, device=self.device)
        for at in range(0, len(pairs), self.kernels.SLOTS):
            self.kernels.differ_many(pairs[at : at + self.kernels.SLOTS], different[at : at + 8])
        counts = torch.zeros(len(COUNTS), dtype=torch.int32, device=self.device)
        sizes = torch.zeros(2, dtype=torch.float32, device=self.device)
        if state.parts:
            tag = self.buffers["tag", state.layer][:4].view(torch.int32)
            counts[6] = (tag[0] != plan.tag).to(torch.int32)
        for part in state.parts:
            self._compare_part(plan, state, part, counts, sizes)
        counts[5] = self._q_wrong(state)
        self.mail.post([torch.cat([different[: len(keys)], counts]), sizes], (keys, plan, state, self.step))

    def _as_made(self, plan: BucketPlan, state: LayerPlan, part: Part, name: str) -> torch.Tensor | None:
        """An input of the logits function from its producer's copy, for a part's rows; None: not stashed."""
        shared = {"lengths": ("lengths", 1), "page_table": ("page_table", 0)}
        if name in shared:
            copy = plan.shared.get(shared[name][0])
            if copy is None:
                return None
            tensor = copy.view
            tensor = tensor.reshape(tensor.shape[0], -1)
            lacking = part.start + part.rows - tensor.shape[0]
            if lacking > 0:  # upstream pads the metadata of fewer rows in just this way
                tensor = torch.nn.functional.pad(tensor, (0, 0, 0, lacking), value=shared[name][1])
            tensor = tensor[part.start : part.start + part.rows]
            return tensor.reshape(part.read[name].shape)
        if name == "schedule":
            copy = plan.shared.get(f"schedule{part.index}")
            return None if copy is None else copy.view
        copy = state.made.get(name)
        if copy is None:
            return None
        tensor, seen = copy.view, part.read[name]
        if tensor.dtype != seen.dtype:
            tensor = tensor.to(seen.dtype)
        return tensor[part.start : part.start + part.rows].reshape(seen.shape)

    def _compare_part(
        self, plan: BucketPlan, state: LayerPlan, part: Part, counts: torch.Tensor, sizes: torch.Tensor
    ) -> None:
        inputs: dict[str, Any] = {}
        for name, copy in part.read.items():
            made = self._as_made(plan, state, part, name)
            inputs[name] = copy.view if made is None else made
        lengths = inputs["lengths"].reshape(-1)
        # What a reader's copy holds may be anything by now: no page that is not there, no row too long.
        table = inputs["page_table"]
        inputs["page_table"] = table.clamp(0, part.pages.shape[0] - 1)
        inputs["lengths"] = inputs["lengths"].clamp(0, table.shape[1] * layout.PAGE_TOKENS)
        now = torch.empty_like(part.digests)
        pages = part.pages.reshape(part.pages.shape[0], -1)
        read_table, read_lengths = part.read["page_table"].view, part.read["lengths"].view.reshape(-1)
        self.kernels.digest_rows(pages, read_table, read_lengths, part.layout, now)
        counts[0] += (now != part.digests).any().to(torch.int32)
        q = (inputs["q"], inputs["q_scale"]) if state.q_is_tuple else inputs["q"]
        again = part.function(
            q, part.pages, inputs["weights"], inputs["lengths"], inputs["page_table"],
            inputs.get("schedule"), part.longest, part.clean,
        )  # fmt: skip
        start = self.window_at if state.layer in self.sliced else 0
        width = min(part.logits.shape[1], again.shape[1] - start)
        if width > 0:
            left, right = part.logits[:, :width], again[:, start : start + width]
            compare_logits(left, right, lengths - start, counts, sizes)

    def _q_wrong(self, state: LayerPlan) -> torch.Tensor | int:
        """1 where q as made is not what the producers' copies give; -1 where that cannot be said."""
        needed = ("x", "q_lora", "positions", "q")
        if not self.recompute_q or any(name not in state.made for name in needed):
            return -1
        try:
            x, q_lora, positions = (state.made[name].view for name in needed[:3])
            rows = state.made["q"].shape[0]
            weights = state.indexer.compute_weights(x[:rows], skip_scale=True)
            q, _ = state.indexer.compute_q(q_lora[:rows], positions[:rows], weights)
            again = q[0] if isinstance(q, tuple) else q
            left, right = (t.contiguous().view(torch.uint8) for t in (again, state.made["q"].view))
            return (left != right).any().to(torch.int32)
        except Exception as error:  # an indexer of another form: say so once, and go on without
            self.recompute_q = False
            self.report.say(
                f"ge_diff: q is not recomputed, late overwrites of q_lora stay unproved: {error!r}"
            )
            return -1

    def _inconclusive(self, plan: BucketPlan, state: LayerPlan, reason: str) -> None:
        self.skipped[reason] += 1
        self.report.event(
            NAME, "inconclusive", step=self.step, bucket=plan.name, layer=state.layer, reason=reason
        )

    def _judge(
        self, values: list[int], sizes: list[float], keys: list[tuple[str, str]], plan: BucketPlan,
        state: LayerPlan, step: int,
    ) -> None:  # fmt: skip
        copies: dict[tuple[str, str], int] = collections.defaultdict(int)
        for key, words in zip(keys, values, strict=False):
            copies[key] += words
        k, logits, rows, argmax, top_k, q_wrong, tag = values[len(keys) :]
        findings = verdict.Findings(
            copies=copies,
            logits=logits,
            rows=rows,
            k=bool(k),
            q_right=None if q_wrong < 0 else not q_wrong,
            reason="the stash is another bucket's" if tag else None,
        )
        found = verdict.judge(findings)
        if found.verdict == "clean":
            self.report.event(NAME, "clean")
            return
        self.report.event(
            NAME,
            found.verdict,
            step=step,
            bucket=plan.name,
            layer=state.layer,
            inputs=list(found.inputs),
            readers=list(found.readers),
            words_changed={f"{name}@{reader}": n for (name, reader), n in copies.items() if n},
            streams={f"{n}@{r}": _streams(plan, state, n, r) for (n, r), words in copies.items() if words},
            logits_words=logits,
            rows=rows,
            largest_difference=sizes[0],
            mean_difference=sizes[1] / logits if logits else 0.0,
            argmax_rows=argmax,
            top_k_elements=top_k,
            k_changed=bool(k),
            reason=findings.reason,
        )


def bucket_name(runner: Any, key: Any) -> str:
    """A captured graph's name: its key, and whether it is the draft model's."""
    draft = getattr(getattr(runner, "model_runner", None), "is_draft_worker", False) is True
    return f"{key} draft" if draft else str(key)


def compare_logits(
    kept: torch.Tensor, again: torch.Tensor, lengths: torch.Tensor, counts: torch.Tensor, sizes: torch.Tensor
) -> None:
    """Add to counts[1:5] and sizes what two [rows, width] float32 logits differ in, up to each row's length.

    Bits are compared, so two NaNs of the same bits agree and 0.0 differs from -0.0.
    """
    width = kept.shape[1]
    step = max(1, COMPARE_BYTES // (4 * max(1, width)))
    for start in range(0, kept.shape[0], step):
        part = slice(start, start + step)
        _compare_rows(kept[part], again[part], lengths[part], counts, sizes)


def _compare_rows(
    kept: torch.Tensor, again: torch.Tensor, lengths: torch.Tensor, counts: torch.Tensor, sizes: torch.Tensor
) -> None:
    width = kept.shape[1]
    place = torch.arange(width, device=kept.device)
    inside = place[None] < lengths.reshape(-1, 1)
    left, right = kept.contiguous(), again.contiguous()
    different = (left.view(torch.int32) != right.view(torch.int32)) & inside
    counts[1] += different.sum()
    counts[2] += different.any(dim=1).sum()
    gap = (left - right).abs().masked_fill(~different, 0.0).nan_to_num(posinf=3.4e38)
    sizes[0] = torch.maximum(sizes[0], gap.max())
    sizes[1] += gap.sum()
    lowest = torch.finfo(torch.float32).min
    left, right = (t.masked_fill(~inside, float("-inf")).nan_to_num(neginf=lowest) for t in (left, right))
    counts[3] += (left.argmax(dim=1) != right.argmax(dim=1)).sum()
    k = min(TOP_K, width)
    first, second = (t.topk(k, dim=1, sorted=False).indices.sort(dim=1).values for t in (left, right))
    found = torch.searchsorted(second, first).clamp(max=k - 1)
    missing = (second.gather(1, found) != first) & inside.gather(1, first)
    counts[4] += missing.sum()


def _q_names(q: Any) -> dict[str, Any]:
    """q by name; FP4's q is a pair of values and scales."""
    return {"q": q[0], "q_scale": q[1]} if isinstance(q, tuple) else {"q": q}


def _stream(tensor: torch.Tensor) -> str:
    return hex(torch.cuda.current_stream(tensor.device).cuda_stream) if tensor.is_cuda else "cpu"


def _streams(plan: BucketPlan, state: LayerPlan, name: str, reader: str) -> list[str]:
    """The stream on which an input was made and the one on which `reader` read it."""
    made = state.made.get(name) or plan.shared.get(f"{name}0") or plan.shared.get(name)
    read = state.read.get((name, reader))
    if read is None:
        read = next((part.read[name] for part in state.parts if name in part.read), None)
    return [made.stream if made else "?", read.stream if read else "?"]


def _fused(tensor: torch.Tensor) -> bool:
    """Whether the fused copy can take it: contiguous, whole aligned words."""
    size = tensor.numel() * tensor.element_size()
    aligned = tensor.data_ptr() % 4 == 0
    return tensor.is_contiguous() and size % 4 == 0 and aligned


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _same_rows(made: torch.Tensor, read: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Readers may take fewer rows than were made: both cut to the rows that both have."""
    rows = min(made.shape[0], read.shape[0])
    return _contiguous(made[:rows]), _contiguous(read[:rows])
