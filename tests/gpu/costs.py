"""Bar 4: what a stash point and the canary cost, beside the floor of their bytes and a plain-tensor version.

Usage: python costs.py TREES OUT.json. Times are medians of graph replays, in one process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", "1")
TREES = Path(sys.argv[1])
sys.path.insert(0, str(TREES / "0.5.18" / "patched"))

import torch  # noqa: E402  # the path comes first
from dsv4_probe import canary, kernels, layout, plain  # noqa: E402


def microseconds(work: Callable[[int], None], calls: int = 20, repeats: int = 30) -> float:
    """Median time of one call: `calls` of them in a graph, each with its own index, replayed."""
    work(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            work(index)
    times = []
    for _ in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return sorted(times[3:])[repeats // 2]


def bandwidth() -> float:
    """Bytes read and written a microsecond, by a large copy on the device."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    ways: tuple[Callable[[], object], ...] = (
        lambda: target.copy_(source),
        lambda: torch.neg(source, out=target),
    )
    times = []
    for way in ways:
        for _ in range(12):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            way()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000)
    return 2 * source.nbytes / min(times)


def stash(rate: float) -> list[dict[str, Any]]:
    """Stash points of the shapes that a decode step has, each call on other buffers, so that no cache helps."""
    rows_list = []
    for rows, columns in ((32, 32768), (64, 8192), (8, 2048)):
        sets = 20
        made = []
        for _ in range(sets):
            parts = [
                torch.randint(0, 255, size, dtype=torch.uint8, device="cuda")
                for size in ((rows * 64 * 128,), (rows * 64 * 4,), (rows * 4,), (rows * columns // 64 * 4,))
            ]
            pairs = [(part, torch.empty_like(part)) for part in parts]
            logits = torch.randn(rows, columns, device="cuda")
            made.append((pairs, logits, torch.empty_like(logits)))
        lengths = torch.full((rows,), columns, dtype=torch.int32, device="cuda")
        window = torch.zeros(1, dtype=torch.int32, device="cuda")
        inputs = sum(source.numel() for source, _ in made[0][0])
        cases = {
            "inputs": (2 * inputs, lambda i: kernels.copy_many(made[i][0]), lambda i: copies(made[i][0])),
            "inputs and logits": (
                2 * (inputs + rows * columns * 4),
                lambda i: kernels.copy_many(made[i][0], made[i][1], made[i][2], lengths, window),
                lambda i: (copies(made[i][0]), made[i][2].copy_(made[i][1])),
            ),
        }
        for name, (size, ours, theirs) in cases.items():
            took, by_tensors = microseconds(ours, sets), microseconds(theirs, sets)
            floor = size / rate
            limit = 1.5 * floor + 3
            rows_list.append(
                {
                    "bar": "4",
                    "version": "",
                    "what": f"stash of {name}, {rows} rows, {columns} columns",
                    "figure": f"{took:.1f} us; limit {limit:.1f}; floor {floor:.1f}; by copy_ {by_tensors:.1f}",
                    "met": took <= limit,
                }  # fmt: skip
            )
    return rows_list


def copies(pairs: Any) -> None:
    for source, target in pairs:
        target.copy_(source)


def canary_costs(rate: float) -> list[dict[str, Any]]:
    """Before and after, over all pages of a replay's rows, on several layers."""
    found = []
    for kind, rows, pages_a_row, layers in (
        ("bf16", 32, 512, 1),
        ("fp8", 32, 512, 2),
        ("fp8", 64, 128, 20),
        ("fp4", 32, 512, 4),
    ):
        one = next(item for item in layout.LAYOUTS.values() if item.name == kind)
        pages = rows * pages_a_row + 1
        pool = [
            torch.randint(0, 255, (pages, one.page_bytes), dtype=torch.uint8, device="cuda")
            for _ in range(layers)
        ]
        order = torch.randperm(pages - 1)[: rows * pages_a_row].view(rows, pages_a_row) + 1
        table = (
            (order[:, :, None] * 256 + torch.arange(256)).view(rows, -1).to(device="cuda", dtype=torch.int32)
        )
        ends = torch.full((rows,), pages_a_row * 256 - 1, device="cuda")
        which = canary.Rows(
            torch.arange(rows, device="cuda"), table, ends, table[:, -1].long(), 1, pages_a_row * 256
        )
        shape = (layers, rows, pages_a_row)
        state = canary.State(
            0, rows, pages_a_row, torch.zeros((*shape, 64), dtype=torch.int32, device="cuda"),
            torch.full(shape, -1, dtype=torch.int32, device="cuda"),
            torch.zeros(8, dtype=torch.int32, device="cuda"),
            torch.zeros((canary.ENTRIES, 9), dtype=torch.int32, device="cuda"),
            torch.zeros((canary.RAW, 7), dtype=torch.int32, device="cuda"),
        )  # fmt: skip
        bases = torch.tensor([item.data_ptr() for item in pool], dtype=torch.int64, device="cuda")
        words = one.page_bytes // 4

        def both(index: int) -> None:
            kernels.canary(bases, words, one, which, state, pages_a_row, False)
            kernels.canary(bases, words, one, which, state, pages_a_row, True)

        took = microseconds(both, 5)
        size = layers * rows * pages_a_row * one.page_bytes
        floor = 2 * size / rate
        limit = 1.3 * floor + 3
        used = order.view(-1).cuda()
        sums = (
            microseconds(
                lambda i: [plain.token_digests(item[used].view(torch.int32), one) for item in pool], 1, 5
            )
            if size < 400 << 20
            else float("nan")
        )
        found.append(
            {
                "bar": "4",
                "version": "",
                "what": f"canary {kind}, {layers} layers, {size >> 20} MB of pages",
                "figure": f"{took:.0f} us; limit {limit:.0f}; floor {floor:.0f}; by tensors {2 * sums:.0f}",
                "met": took <= limit,
            }  # fmt: skip
        )
    return found


def shares() -> list[dict[str, Any]]:
    """Time of a step of upstream's functions with and without the instruments."""
    import bars
    import server  # noqa: F401  # bars finds it by name

    bench = bars.Bars("0.5.18", TREES, 1.0)
    times: dict[str, float] = {}
    for name, flags in (("off", ()), ("ge_diff", (bars.GE_DIFF,)), ("canary", (bars.CANARY,))):
        with bench.armed(*flags):
            s = bench.make(buckets=(32,), layers=2, pages_a_row=64)
            batch = s.batch(32, 32, [64 * 256 - 3] * 32)
            s.step(batch)
            runs = []
            for _ in range(40):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda.synchronize()
                start.record()
                s.runner.backend.replay(bars.upstream.ShapeKey(32), batch)
                end.record()
                end.synchronize()
                runs.append(start.elapsed_time(end) * 1000)
            times[name] = sorted(runs)[20]
            if name == "canary":
                instrument = bench.hooks._probe.instruments["canary"]
                runs = []
                for _ in range(40):
                    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    start.record()
                    instrument.begins(s.runner, "k", batch)
                    instrument.ends(s.runner, "k", batch)
                    end.record()
                    end.synchronize()
                    runs.append(start.elapsed_time(end) * 1000)
                times["canary's own"] = sorted(runs)[20]
    share = times["ge_diff"] / times["off"] - 1
    return [
        {
            "bar": "4", "version": "0.5.18", "what": "stash as a share of the replay (32 rows, 4096 index tokens)",
            "figure": f"{times['off']:.0f} us off, {times['ge_diff']:.0f} us on: +{share:.1%}", "met": True,
        },
        {
            "bar": "4", "version": "0.5.18", "what": "canary beside the replay (same step)",
            "figure": f"{times['canary']:.0f} us replay, {times['canary' + chr(39) + 's own']:.0f} us canary with launches",
            "met": True,
        },
    ]  # fmt: skip


def main() -> None:
    rate = bandwidth()
    rows = [
        {
            "bar": "4",
            "version": "",
            "what": "copy bandwidth, read and written",
            "figure": f"{rate / 1e6:.2f} TB/s",
            "met": True,
        }
    ]
    rows += stash(rate) + canary_costs(rate)
    Path(sys.argv[2]).write_text(json.dumps(rows))
    rows += shares()
    Path(sys.argv[2]).write_text(json.dumps(rows))
    for row in rows:
        print(
            f"{row['bar']:4} {row['what']:58} {row['figure']:70} {'met' if row['met'] else 'NOT MET'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
