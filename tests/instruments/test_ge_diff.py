"""GE_DIFF through its own hooks, with tensors of the real shapes: stash, recompute, judge."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dsv4_probe import ge_diff
from dsv4_probe.ge_diff import GeDiff
from dsv4_probe.settings import Settings

HEADS, DIM, PAGE_BYTES, PAGES, TABLE = 64, 128, 64 * 132, 12, 4


def logits_function(
    q: Any, pages: Any, weights: Any, lengths: Any, table: Any, schedule: Any, longest: int, clean: bool
) -> torch.Tensor:
    """A stand-in for the logits function with upstream's arguments and shapes: [rows, longest] float32."""
    q = q[0].to(torch.float32) if isinstance(q, tuple) else q.to(torch.float32)
    rows = q.shape[0]
    keys = pages.reshape(PAGES, -1)[table.long()].reshape(rows, -1).to(torch.float32)[:, :longest]
    # Sums in double: their order does not show in the result, as it would not in one kernel's.
    total = q.reshape(rows, -1).double().sum(1, keepdim=True) + weights.double().sum(1, keepdim=True)
    out = keys * total.float()
    place = torch.arange(longest)[None]
    return torch.where(place < lengths.reshape(-1, 1), out, torch.rand(rows, longest))  # the tail is garbage


class Indexer:
    """compute_weights and compute_q with upstream's shapes."""

    layer_id = 2

    def __init__(self, fp4: bool = False) -> None:
        self.fp4 = fp4

    def compute_weights(self, x: torch.Tensor, skip_scale: bool = False) -> torch.Tensor:
        return x[:, :HEADS] * 0.5

    def compute_q(self, q_lora: torch.Tensor, positions: Any, weights: Any) -> tuple[Any, torch.Tensor]:
        q = q_lora.repeat(1, HEADS * DIM // q_lora.shape[1]).view(-1, HEADS, DIM)
        q = q + positions[:, None, None].to(q.dtype)
        weights = weights.to(torch.float32).unsqueeze(-1)
        if self.fp4:
            return (
                q.to(torch.float8_e4m3fn).view(torch.uint8)[..., :64].contiguous(),
                q[:, :, 0].float(),
            ), weights
        return q.to(torch.float8_e4m3fn), weights


class Model:
    """One layer, its graph's inputs and pool, and a capture and replay that call the hooks in order."""

    def __init__(self, instrument: GeDiff, rows: int = 8, fp4: bool = False, chunks: int = 1) -> None:
        self.instrument, self.rows, self.chunks = instrument, rows, chunks
        self.indexer = Indexer(fp4)
        self.pages = torch.randint(0, 200, (PAGES, PAGE_BYTES), dtype=torch.uint8)
        self.runner = SimpleNamespace(model_runner=SimpleNamespace(token_to_kv_pool=None))
        self.positions = torch.arange(rows)
        self.function = logits_function
        self.fault: dict[str, Any] = {}
        self.overlap = True
        self.key = f"ShapeKey(size={rows})"

    def run(self) -> None:
        """What the captured graph does: new values each time, at every hook as upstream has it."""
        rows, see = self.rows, self.instrument
        x = torch.randn(rows, 256, dtype=torch.bfloat16)
        qkv_a = x[:, :192].clone()
        q_lora = qkv_a[:, :128].contiguous()
        lengths = torch.randint(1, TABLE * 64, (rows, 1), dtype=torch.int32)
        lengths[0] = 0
        table = torch.randint(0, PAGES, (rows, TABLE), dtype=torch.int32)
        metadata = SimpleNamespace(
            indexer_metadata=SimpleNamespace(
                c4_seq_lens=lengths[:, 0].contiguous(), page_table=table, deep_gemm_metadata=None
            )
        )
        if self.overlap:
            see.made(2, metadata, x=x, qkv_a=qkv_a)
            see.made(2, metadata, x=x, q_lora=q_lora)
            self._strike("x", x)
            see.read(2, "indexer_compressor", x=x)
        self._strike("q_lora", q_lora)
        weights = self.indexer.compute_weights(x)
        q, weights = self.indexer.compute_q(q_lora, self.positions, weights)
        self._strike("late_q_lora", q_lora)
        see.q_made(2, self.indexer, metadata, x, q_lora, q=q, weights=weights, positions=self.positions)
        if not self.overlap:
            self._strike("x", x)
            see.read(2, "indexer_compressor", x=x)
        q_in = tuple(t.unsqueeze(1) for t in q) if isinstance(q, tuple) else q.unsqueeze(1)
        weights = weights.squeeze(2)
        self._strike("q", q[0] if isinstance(q, tuple) else q)
        pages = self.pages.view(PAGES, 64, 1, 132)
        step = -(-rows // self.chunks)
        for start in range(0, rows, step):
            part = slice(start, start + step)
            row_q = tuple(t[part] for t in q_in) if isinstance(q_in, tuple) else q_in[part]
            arguments = (row_q, pages, weights[part], lengths[part], table[part], None, TABLE * 64, False)
            logits = self.function(*arguments)
            if "kernel" in self.fault:
                logits[int(lengths[part].argmax()), 0] = 1e30
            self._strike("late_q", q[0] if isinstance(q, tuple) else q)
            self._strike("lengths", lengths)
            see.logits(2, logits_function, logits, arguments)
        if self.overlap:
            self._strike("qkv_a", qkv_a)
            see.read(2, "kv", qkv_a=qkv_a)
            see.read(2, "compressor", x=x)
        if "k" in self.fault:
            self.pages[table[int(lengths.argmax()), 0], 0] ^= 1

    def _strike(self, name: str, tensor: torch.Tensor) -> None:
        if name in self.fault:
            tensor.view(torch.uint8).reshape(-1)[-4:] ^= 85

    def capture(self) -> None:
        self.instrument.capture_begins(self.runner, self.key)
        self.run()  # the warm-up, which makes the buffers
        self.run()
        self.instrument.capture_ends(self.runner, self.key)

    def replay(self, key: Any = None, **fault: Any) -> None:
        self.fault = fault
        self.instrument.begins(self.runner, self.key, None)
        self._replayed()
        self.instrument.ends(self.runner, key or self.key, None)
        self.instrument.poll(wait=True)

    def _replayed(self) -> None:
        """On the CPU nothing is recorded: the hooks' copies are done again, as a graph's nodes would."""
        plan = self.instrument.plans[id(self.runner), self.key]
        tags = plan.tag
        self.instrument.plan = ge_diff.BucketPlan(self.key, tags)
        self.run()
        self.instrument.plan = None


@pytest.fixture
def model(report: Any) -> Model:
    made = Model(GeDiff(Settings(ge_diff=True), report))
    made.capture()
    return made


def last(model: Model) -> dict[str, Any]:
    return model.instrument.report.lines()[-1]


def test_without_a_fault_every_replay_is_clean(model: Model) -> None:
    for _ in range(20):
        model.replay()
    assert model.instrument.report.events == {("ge_diff", "clean"): 20}
    assert model.instrument.report.lines() == []


@pytest.mark.parametrize(
    ("fault", "name", "readers"),
    [
        ("x", "x", ["x@compressor", "x@indexer_compressor", "x@q"]),
        ("q_lora", "q_lora", ["q_lora@q"]),
        ("qkv_a", "qkv_a", ["qkv_a@kv"]),
        ("q", "q", ["q@logits"]),
    ],
)
def test_an_input_overwritten_in_flight_is_named(
    model: Model, fault: str, name: str, readers: list[str]
) -> None:
    model.replay(**{fault: True})
    event = last(model)
    assert (event["verdict"], event["inputs"], event["readers"]) == ("overwritten", [name], readers)
    assert event["alarm"] is True and event["layer"] == 2 and event["bucket"] == model.key
    assert set(event["streams"]) == set(readers)


def test_overwritten_only_after_every_reader_is_late(model: Model) -> None:
    model.replay(late_q=True)
    assert (last(model)["verdict"], last(model)["inputs"]) == ("late_overwrite", ["q"])
    model.replay(late_q_lora=True)
    assert (last(model)["verdict"], last(model)["inputs"]) == ("late_overwrite", ["q_lora"])
    assert last(model)["alarm"] is False


def test_a_wrong_kernel_is_the_kernels(model: Model) -> None:
    model.replay(kernel=True)
    event = last(model)
    assert (event["verdict"], event["inputs"], event["logits_words"], event["rows"]) == ("kernel", [], 1, 1)
    assert event["largest_difference"] == pytest.approx(1e30)
    assert event["mean_difference"] == pytest.approx(1e30)


def test_a_changed_page_says_nothing_of_the_kernel(model: Model) -> None:
    model.replay(k=True)
    assert last(model)["verdict"] == "k_changed" and last(model)["alarm"] is False


def test_a_bucket_without_a_stash_is_never_compared(model: Model) -> None:
    model.replay(key="ShapeKey(size=99)", q=True)
    assert last(model)["verdict"] == "inconclusive" and "no stash" in last(model)["reason"]
    assert model.instrument.compared == 0


def test_the_stash_of_another_bucket_is_never_compared(model: Model, report: Any) -> None:
    other = Model(model.instrument, rows=4)
    other.runner = model.runner
    other.capture()
    model.replay()
    model.instrument.ends(model.runner, other.key, None)  # nothing of that bucket was replayed
    model.instrument.poll(wait=True)
    assert last(model)["verdict"] == "inconclusive" and "another bucket" in last(model)["reason"]
    other.replay()
    model.replay()
    assert report.events["ge_diff", "clean"] == 3


def test_recapture_arms_again_with_other_rows(model: Model, report: Any) -> None:
    model.rows, model.positions = 6, torch.arange(6)
    model.capture()
    model.replay()
    model.replay(q=True)
    assert report.events == {("ge_diff", "clean"): 1, ("ge_diff", "overwritten"): 1}


@pytest.mark.parametrize("fp4", [False, True])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_forms_of_q_row_chunks_and_paths(report: Any, fp4: bool, chunks: int, overlap: bool) -> None:
    model = Model(GeDiff(Settings(ge_diff=True), report), fp4=fp4, chunks=chunks)
    model.overlap = overlap
    model.capture()
    model.replay()
    assert report.events == {("ge_diff", "clean"): 1}, report.lines()
    for fault in ("q", "x"):
        model.replay(**{fault: True})
        assert (last(model)["verdict"], last(model)["inputs"]) == ("overwritten", [fault])
    model.replay(kernel=True)
    assert last(model)["verdict"] == "kernel"


def test_only_each_nth_replay_and_only_wanted_layers(report: Any) -> None:
    model = Model(GeDiff(Settings(ge_diff=True, every=3), report))
    model.capture()
    for _ in range(7):
        model.replay()
    assert report.events == {("ge_diff", "clean"): 2}
    other = Model(GeDiff(Settings(ge_diff=True, layers=frozenset({5})), report))
    other.capture()
    assert other.instrument.plans == {} and other.instrument.bytes == 0


def test_past_the_allowed_memory_logits_are_kept_in_slices(report: Any, capsys: Any) -> None:
    instrument = GeDiff(Settings(ge_diff=True), report)
    model = Model(instrument)
    model.capture()
    made = sum(buffer.numel() for key, buffer in instrument.buffers.items() if key[0] == "made")
    # Room is left for twice what was made; what comes after the logits is counted in the first sum already.
    after = 8 * (256 + 192) * 2 + 4 * 4096 + 8 * ge_diff.DIGEST_SPLITS * 4 + 4
    room = instrument.bytes - after + 2 * made - 8 * TABLE * 64 * 4 + 8 * 100 * 4
    instrument = GeDiff(Settings(ge_diff=True, max_bytes=room), report)
    model = Model(instrument)
    model.capture()
    assert "keeps 64 of 256 logits a row" in capsys.readouterr().err
    assert instrument.status()["logits_coverage_a_replay"] == 0.25
    assert instrument.bytes <= room
    for _ in range(8):
        model.replay()
    assert report.events == {("ge_diff", "clean"): 8}, report.lines()
    seen = []
    for _ in range(8):
        model.replay(kernel=True)  # the fault is in the first column: one window in four sees it
        seen.append(last(model)["verdict"] if report.lines() else "clean")
    assert report.events["ge_diff", "kernel"] == 2


def test_no_room_at_all_leaves_the_layer_out_and_says_so(report: Any, capsys: Any) -> None:
    model = Model(GeDiff(Settings(ge_diff=True, max_bytes=4096), report))
    model.capture()
    assert "is left out" in capsys.readouterr().err
    model.instrument.ends(model.runner, model.key, None)
    assert report.events == {("ge_diff", "inconclusive"): 1}


def test_logits_are_compared_bit_for_bit_up_to_each_length() -> None:
    kept = torch.zeros(4, 600)
    again = kept.clone()
    again[0, 0] = -0.0  # other bits
    kept[1, 5] = again[1, 5] = float("nan")  # the same bits
    again[2, 300] = 2.0  # past its length
    again[3, 599], kept[3, 0] = 5.0, 1.0
    counts, sizes = torch.zeros(7, dtype=torch.int32), torch.zeros(2)
    ge_diff.compare_logits(kept, again, torch.tensor([600, 600, 300, 600]), counts, sizes)
    assert counts.tolist()[1:4] == [3, 2, 1]
    assert sizes[0] == 5.0 and sizes[1] == 6.0
    assert counts[4] > 0


def test_rows_of_length_zero_are_legal() -> None:
    counts, sizes = torch.zeros(7, dtype=torch.int32), torch.zeros(2)
    ge_diff.compare_logits(torch.rand(3, 64), torch.rand(3, 64), torch.zeros(3), counts, sizes)
    assert counts.tolist() == [0] * 7


def test_top_k_is_compared_as_sets() -> None:
    kept = torch.arange(1024, dtype=torch.float32)[None].repeat(2, 1)
    again = kept.clone()
    again[0, [1000, 1001]] = again[0, [1001, 1000]]  # same set, other order
    again[1, 3] = 5000.0  # one element comes in, one goes
    counts, sizes = torch.zeros(7, dtype=torch.int32), torch.zeros(2)
    ge_diff.compare_logits(kept, again, torch.tensor([1024, 1024]), counts, sizes)
    assert counts[4] == 1
