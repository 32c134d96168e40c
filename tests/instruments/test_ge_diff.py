"""GE_DIFF through its own hooks, with tensors of the real shapes: stash, recompute, judge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dsv4_probe import ge_diff
from dsv4_probe.ge_diff import GeDiff
from dsv4_probe.settings import Settings

from tests.instruments.fakes import TABLE, Model

@pytest.fixture
def model(report: Any) -> Model:
    made = Model(GeDiff(Settings(ge_diff=True), report))
    made.capture()
    return made


def last(model: Model) -> dict[str, Any]:
    return model.ge_diff.report.lines()[-1]


def test_without_a_fault_every_replay_is_clean(model: Model) -> None:
    for _ in range(20):
        model.replay()
    assert model.ge_diff.report.events == {("ge_diff", "clean"): 20}
    assert model.ge_diff.report.lines() == []


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
    model.replay(fault)
    event = last(model)
    assert (event["verdict"], event["inputs"], event["readers"]) == ("overwritten", [name], readers)
    assert event["alarm"] is True and event["layer"] == 2 and event["bucket"] == model.key
    assert set(event["streams"]) == set(readers)


def test_overwritten_only_after_every_reader_is_late(model: Model) -> None:
    model.replay("late_q")
    assert (last(model)["verdict"], last(model)["inputs"]) == ("late_overwrite", ["q"])
    model.replay("late_q_lora")
    assert (last(model)["verdict"], last(model)["inputs"]) == ("late_overwrite", ["q_lora"])
    assert last(model)["alarm"] is False


def test_a_wrong_kernel_is_the_kernels(model: Model) -> None:
    model.replay("kernel")
    event = last(model)
    assert (event["verdict"], event["inputs"], event["logits_words"], event["rows"]) == ("kernel", [], 1, 1)
    assert event["largest_difference"] == pytest.approx(1e30)
    assert event["mean_difference"] == pytest.approx(1e30)


def test_a_changed_page_says_nothing_of_the_kernel(model: Model) -> None:
    model.replay("k")
    assert last(model)["verdict"] == "k_changed" and last(model)["alarm"] is False


def test_a_bucket_without_a_stash_is_never_compared(model: Model) -> None:
    model.replay("q", key="ShapeKey(size=99)")
    assert last(model)["verdict"] == "inconclusive" and "no stash" in last(model)["reason"]
    assert model.ge_diff.compared == 0


def test_the_stash_of_another_bucket_is_never_compared(model: Model, report: Any) -> None:
    other = Model(model.see, rows=4)
    other.runner = model.runner
    other.capture()
    model.replay()
    model.ge_diff.ends(model.runner, other.key, None)  # nothing of that bucket was replayed
    model.ge_diff.poll(wait=True)
    assert last(model)["verdict"] == "inconclusive" and "another bucket" in last(model)["reason"]
    other.replay()
    model.replay()
    assert report.events["ge_diff", "clean"] == 3


def test_recapture_arms_again_with_other_rows(model: Model, report: Any) -> None:
    model.rows = 6
    model.capture()
    model.replay()
    model.replay("q")
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
        model.replay(fault)
        assert (last(model)["verdict"], last(model)["inputs"]) == ("overwritten", [fault])
    model.replay("kernel")
    assert last(model)["verdict"] == "kernel"


def test_only_each_nth_replay_and_only_wanted_layers(report: Any) -> None:
    model = Model(GeDiff(Settings(ge_diff=True, every=3), report))
    model.capture()
    for _ in range(7):
        model.replay()
    assert report.events == {("ge_diff", "clean"): 2}
    other = Model(GeDiff(Settings(ge_diff=True, layers=frozenset({5})), report))
    other.capture()
    assert other.ge_diff.plans == {} and other.ge_diff.bytes == 0


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
        model.replay("kernel")  # the fault is in the first column: one window in four sees it
        seen.append(last(model)["verdict"] if report.lines() else "clean")
    assert report.events["ge_diff", "kernel"] == 2


def test_no_room_at_all_leaves_the_layer_out_and_says_so(report: Any, capsys: Any) -> None:
    model = Model(GeDiff(Settings(ge_diff=True, max_bytes=4096), report))
    model.capture()
    assert "is left out" in capsys.readouterr().err
    model.ge_diff.ends(model.runner, model.key, None)
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
