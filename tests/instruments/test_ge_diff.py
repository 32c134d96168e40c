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
    assert event["streams"] == {reader: ["cpu", "cpu"] for reader in readers}  # made on, read on


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
    assert model.ge_diff.status()["skipped"] == {"no stash for this bucket": 1}


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
    assert list(model.ge_diff.status()["skipped"].values()) == [1]


def test_a_recapture_that_stashes_nothing_leaves_nothing_to_compare_with(model: Model) -> None:
    model.ge_diff.capture_begins(model.runner, model.key)
    model.ge_diff.capture_ends(model.runner, model.key)
    model.ge_diff.ends(model.runner, model.key, None)
    assert last(model)["verdict"] == "inconclusive" and "no stash" in last(model)["reason"]


def test_what_was_found_is_told_at_the_next_replay(model: Model, monkeypatch: Any, report: Any) -> None:
    poll = model.ge_diff.poll
    monkeypatch.setattr(model.ge_diff, "poll", lambda wait=False: None if wait else poll())
    model.replay("q")
    assert not report.events
    model.replay()
    assert report.events == {("ge_diff", "overwritten"): 1}


def test_tensors_with_gaps_are_copied_one_by_one(model: Model, report: Any, monkeypatch: Any) -> None:
    [bucket] = model.ge_diff.status()["buckets"].values()
    kernels = model.ge_diff.kernels
    copy_many = kernels.copy_many

    def checking(pairs: Any, *rest: Any) -> None:
        assert all(source.is_contiguous() for source, _ in pairs)  # the kernel takes words in a row
        copy_many(pairs, *rest)

    monkeypatch.setattr(kernels, "copy_many", checking)
    model.strided = True
    model.capture()
    model.replay()
    assert report.events == {("ge_diff", "clean"): 1}
    model.replay("qkv_a")
    assert last(model)["readers"] == ["qkv_a@kv"]
    [strided] = model.ge_diff.status()["buckets"].values()
    # qkv_a's second copy has a launch of its own and leaves its point with none; its first one shares its point with x.
    assert strided["graph_nodes_added"] == bucket["graph_nodes_added"] + 1
    assert strided["bytes_copied_a_replay"] == bucket["bytes_copied_a_replay"]


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


@pytest.mark.parametrize("name", ["weights", "lengths", "page_table"])
def test_every_input_of_the_logits_is_compared(model: Model, name: str) -> None:
    model.replay(name)
    event = last(model)
    assert (event["verdict"], event["inputs"], event["readers"]) == ("overwritten", [name], [f"{name}@logits"])


def test_the_scales_of_fp4_are_an_input_too(report: Any) -> None:
    model = Model(GeDiff(Settings(ge_diff=True), report), fp4=True)
    model.capture()
    model.replay("q_scale")
    assert (last(model)["verdict"], last(model)["inputs"]) == ("overwritten", ["q_scale"])


def test_each_chunk_of_rows_has_its_own_schedule(report: Any) -> None:
    model = Model(GeDiff(Settings(ge_diff=True), report), chunks=2)
    model.schedules = [torch.arange(8, dtype=torch.int32), torch.arange(8, 16, dtype=torch.int32)]
    model.capture()
    model.replay()
    assert report.events == {("ge_diff", "clean"): 1}, report.lines()
    model.replay("late_schedule")
    assert (last(model)["verdict"], last(model)["inputs"]) == ("late_overwrite", ["schedule"])


@pytest.mark.parametrize("name", ["late_lengths", "late_page_table"])
@pytest.mark.parametrize("with_metadata", [True, False])
def test_whatever_a_reader_left_behind_is_not_followed_out_of_the_pool(
    report: Any, name: str, with_metadata: bool
) -> None:
    model = Model(GeDiff(Settings(ge_diff=True), report))
    model.with_metadata = with_metadata  # without it, only the reader's own copy can be recomputed from
    model.capture()
    model.replay(name)  # the function itself refuses what lies outside
    if with_metadata:
        assert (last(model)["verdict"], last(model)["inputs"]) == ("late_overwrite", [name.removeprefix("late_")])


def test_rows_that_upstream_pads_are_compared_as_it_pads_them(model: Model, report: Any) -> None:
    model.metadata_rows = 6
    model.capture()
    for _ in range(5):
        model.replay()
    assert report.events == {("ge_diff", "clean"): 5}, report.lines()
    model.replay("q")  # in the last row, which is padding
    assert (last(model)["inputs"], last(model)["rows"]) == (["q"], 1)
    model.replay("lengths")
    assert last(model)["inputs"] == ["lengths"]


@pytest.mark.parametrize("chunks", [1, 2])
def test_layers_and_calls_are_told_apart(report: Any, chunks: int) -> None:
    model = Model(GeDiff(Settings(ge_diff=True), report), chunks=chunks, layers=(2, 4, 6))
    model.capture()
    model.replay()
    assert report.events == {("ge_diff", "clean"): 3}, report.lines()
    model.replay("q")
    assert report.events == {("ge_diff", "clean"): 5, ("ge_diff", "overwritten"): 1}
    assert last(model)["layer"] == 6
    [bucket] = model.ge_diff.status()["buckets"].values()
    assert bucket["layers"] == [2, 4, 6]


def test_a_draft_models_graph_of_the_same_key_is_another(model: Model, report: Any) -> None:
    draft = Model(model.see)
    draft.runner.model_runner.is_draft_worker = True
    draft.capture()
    model.replay("q")
    assert last(model)["bucket"] == model.key
    draft.replay("q")
    assert last(model)["bucket"] == f"{model.key} draft"
    assert set(model.ge_diff.status()["buckets"]) == {model.key, f"{model.key} draft"}
    model.replay()
    assert report.events["ge_diff", "clean"] == 1


def test_nothing_of_the_graph_is_kept_alive(model: Model) -> None:
    assert len(model.dropped) == 12 and not any(tensor() is not None for tensor in model.dropped)
    model.replay("q")
    assert not any(tensor() is not None for tensor in model.dropped)


def test_smaller_buckets_use_the_largest_ones_buffers(model: Model, report: Any) -> None:
    taken, buffers = model.ge_diff.bytes, dict(model.ge_diff.buffers)
    other = Model(model.see, rows=3)
    other.capture()
    assert model.ge_diff.bytes == taken and list(model.ge_diff.buffers) == list(buffers)
    assert all(model.ge_diff.buffers[key] is buffer for key, buffer in buffers.items())
    for _ in range(2):
        other.replay()
        model.replay()
    assert report.events == {("ge_diff", "clean"): 4}, report.lines()


def test_buffers_that_a_captured_graph_writes_to_outlive_larger_ones(report: Any) -> None:
    small = Model(GeDiff(Settings(ge_diff=True), report), rows=3)
    small.capture()
    before = {key: buffer.data_ptr() for key, buffer in small.ge_diff.buffers.items()}
    Model(small.see, rows=8).capture()
    grown = {key for key, buffer in small.ge_diff.buffers.items() if buffer.data_ptr() != before[key]}
    assert ("made", 2, "x") in grown
    # What a graph was captured with is known by its address alone: the allocator must not give it out again.
    assert {before[key] for key in grown} == {buffer.data_ptr() for buffer in small.ge_diff.retired}
    small.replay()
    assert report.events == {("ge_diff", "clean"): 1}


def test_the_ledger_tells_launches_and_bytes(model: Model, monkeypatch: Any) -> None:
    [bucket] = model.ge_diff.status()["buckets"].values()
    launches, copied = [], [0]
    kernels = model.ge_diff.kernels
    copy_many, digest_rows = kernels.copy_many, kernels.digest_rows

    def copying(pairs: Any, *rest: Any) -> None:
        launches.append("copy")
        copied[0] += sum(target.numel() * target.element_size() for _, target in pairs)
        copy_many(pairs, *rest)

    def digesting(*arguments: Any) -> None:
        launches.append("digest")
        digest_rows(*arguments)

    monkeypatch.setattr(kernels, "copy_many", copying)
    monkeypatch.setattr(kernels, "digest_rows", digesting)
    monkeypatch.setattr(model.ge_diff, "ends", lambda *_: None)  # what comes after the graph is not in it
    model.replay()
    # One launch a stash point: twice made, then the compressor's, q's, the logits', kv's and the core compressor's.
    assert launches == ["copy"] * 5 + ["digest"] + ["copy"] * 2
    assert (bucket["graph_nodes_added"], bucket["bytes_copied_a_replay"]) == (len(launches), copied[0])
    assert bucket["logits_bytes_a_replay_at_most"] == 8 * TABLE * 64 * 4


def test_logits_of_another_type_leave_the_layer_out_and_say_so(report: Any, capsys: Any) -> None:
    model = Model(GeDiff(Settings(ge_diff=True), report))
    function = model.function
    model.function = lambda *arguments: function(*arguments).half()
    model.capture()
    assert "logits are torch.float16, expected torch.float32" in capsys.readouterr().err
    model.replay()
    assert report.events == {("ge_diff", "inconclusive"): 1}
