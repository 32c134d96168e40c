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
from dsv4_probe import canary, ge_diff, kernels, layout, plain  # noqa: E402

LAYOUTS = {one.name: one for one in layout.LAYOUTS.values()}


def row(what: str, figure: str, met: bool = True, version: str = "") -> dict[str, Any]:
    """One line of the table."""
    return {"bar": "4", "version": version, "what": what, "figure": figure, "met": met}


def microseconds(work: Callable[[int], object], calls: int = 20, repeats: int = 30) -> float:
    """Median time of one call: `calls` of them in a graph, each with its own index, replayed."""
    work(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            work(index)
    times = [timed(graph.replay) / calls for _ in range(repeats + 3)]
    return sorted(times[3:])[repeats // 2]


def timed(work: Callable[[], object]) -> float:
    """Microseconds on the device of one call; waits for it."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end) * 1000)


def bandwidth() -> float:
    """Bytes read and written a microsecond, by a large copy on the device; the better of two ways."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    ways = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    return 2 * source.nbytes / min(timed(way) for way in ways for _ in range(12))


def stash(rate: float, rows: int, columns: int) -> list[dict[str, Any]]:
    """Stash points of the shapes that a decode step has, each call on buffers of its own."""
    sets = 20
    sizes = (rows * 64 * 128, rows * 64 * 4, rows * 4, rows * columns // 64 * 4)
    made = []
    for _ in range(sets):
        parts = [torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda") for size in sizes]
        logits = torch.randn(rows, columns, device="cuda")
        made.append(([(part, torch.empty_like(part)) for part in parts], logits, torch.empty_like(logits)))
    lengths = torch.full((rows,), columns, dtype=torch.int32, device="cuda")
    window = torch.zeros(1, dtype=torch.int32, device="cuda")

    def by_tensors(index: int, logits: bool) -> None:
        for source, target in made[index][0]:
            target.copy_(source)
        if logits:
            made[index][2].copy_(made[index][1])

    found = []
    for logits in (False, True):
        size = 2 * (sum(sizes) + (rows * columns * 4 if logits else 0))
        ours = microseconds(
            lambda i, on=logits: kernels.copy_many(
                made[i][0], *((*made[i][1:], lengths, window) if on else ())
            )
        )
        theirs = microseconds(lambda i, on=logits: by_tensors(i, on))
        floor = size / rate
        limit = 1.5 * floor + 3
        what = f"stash of inputs{' and logits' if logits else ''}, {rows} rows, {columns} columns"
        figure = f"{ours:.1f} us; limit {limit:.1f}; floor {floor:.1f}; by copy_ {theirs:.1f}"
        found.append(row(what, figure, ours <= limit))
    return found


def digest(rate: float, kind: str, rows: int, pages_a_row: int) -> dict[str, Any]:
    """The digest of the index-K that rows read, which the stash point of the logits takes besides."""
    one, pages = LAYOUTS[kind], rows * pages_a_row
    pools = [
        torch.randint(0, 255, (pages, one.page_bytes), dtype=torch.uint8, device="cuda") for _ in range(4)
    ]
    table = torch.randperm(pages, device="cuda").view(rows, pages_a_row).to(torch.int32)
    lengths = torch.full((rows,), pages_a_row * 64, dtype=torch.int32, device="cuda")
    out = torch.zeros((rows, ge_diff.DIGEST_SPLITS), dtype=torch.int32, device="cuda")
    took = microseconds(lambda i: kernels.digest_rows(pools[i % 4], table, lengths, one, out))
    size = pages * one.page_bytes
    limit = 1.5 * size / rate + 3
    figure = f"{took:.1f} us; limit {limit:.1f}; floor {size / rate:.1f}"
    return row(f"stash of a digest of {size / (1 << 20):.1f} MB of {kind} pages", figure, took <= limit)


def canary_cost(rate: float, kind: str, rows: int, pages_a_row: int, layers: int) -> dict[str, Any]:
    """Before and after, over all pages of a replay's rows, on several layers."""
    one, pages = LAYOUTS[kind], rows * pages_a_row + 1
    pool = [
        torch.randint(0, 255, (pages, one.page_bytes), dtype=torch.uint8, device="cuda")
        for _ in range(layers)
    ]
    order = torch.randperm(pages - 1)[: rows * pages_a_row].view(rows, pages_a_row) + 1
    table = (order[:, :, None] * 256 + torch.arange(256)).view(rows, -1).to(device="cuda", dtype=torch.int32)
    ends = torch.full((rows,), pages_a_row * 256 - 1, device="cuda")
    which = canary.Rows(
        torch.arange(rows, device="cuda"), table, ends, table[:, -1].long(), 1, pages_a_row * 256
    )
    state = canary.new_state(0, layers, rows, pages_a_row, torch.device("cuda"))
    bases = torch.tensor([item.data_ptr() for item in pool], dtype=torch.int64, device="cuda")

    def both(index: int) -> None:
        for after in (False, True):
            kernels.canary(bases, one.page_bytes // 4, one, which, state, pages_a_row, after)

    took = microseconds(both, 5)
    size = layers * rows * pages_a_row * one.page_bytes
    floor = 2 * size / rate
    limit = 1.3 * floor + 3
    figure = f"{took:.0f} us; limit {limit:.0f}; floor {floor:.0f}"
    if size < 400 << 20:
        used = order.view(-1).cuda()
        plainly = microseconds(
            lambda i: [plain.token_digests(item[used].view(torch.int32), one) for item in pool], 1, 5
        )
        figure += f"; by tensors {2 * plainly:.0f}"
    return row(f"canary {kind}, {layers} layers, {size >> 20} MB of pages", figure, took <= limit)


def shares() -> list[dict[str, Any]]:
    """Time of a replay of upstream's functions with and without the instruments."""
    import bars

    bench = bars.Bars("0.5.18", TREES, 1.0)
    times: dict[str, float] = {}
    for name, flags in (("off", ()), ("ge_diff", (bars.GE_DIFF,)), ("canary", (bars.CANARY,))):
        with bench.armed(*flags):
            s = bench.make(buckets=(32,), layers=2, pages_a_row=64)
            batch = s.batch(32, 32, [64 * 256 - 3] * 32)
            s.step(batch)
            graph = s.runner.backend.graphs[bars.upstream.ShapeKey(32)][0]
            runs = [timed(graph.replay) for _ in range(41)]
            times[name] = sorted(runs)[20]
            if name == "canary":
                instrument = bench.hooks._probe.instruments["canary"]

                def own(i: Any = instrument, s: Any = s, b: Any = batch) -> None:
                    i.begins(s.runner, "k", b)
                    i.ends(s.runner, "k", b)

                times["own"] = sorted(timed(own) for _ in range(41))[20]
    added = times["ge_diff"] / times["off"] - 1
    return [
        row(
            "share of the replay: stash (32 rows, 4096 index tokens)",
            f"{times['off']:.0f} us off, {times['ge_diff']:.0f} us on: +{added:.1%}", version="0.5.18",
        ),
        row(
            "share of the replay: canary, its launches included",
            f"{times['own']:.0f} us beside {times['canary']:.0f} us: +{times['own'] / times['canary']:.1%}",
            version="0.5.18",
        ),
    ]  # fmt: skip


def main() -> None:
    rate = bandwidth()
    rows = [row("copy bandwidth, read and written", f"{rate / 1e6:.2f} TB/s")]
    for shape in ((32, 32768), (64, 8192), (8, 2048)):
        rows += stash(rate, *shape)
    for case in (("fp8", 32, 512), ("fp8", 8, 32), ("bf16", 32, 256)):
        rows.append(digest(rate, *case))
    for pool in (("bf16", 32, 512, 1), ("fp8", 32, 512, 2), ("fp8", 64, 128, 20), ("fp4", 32, 512, 4)):
        rows.append(canary_cost(rate, *pool))
    rows += shares()
    Path(sys.argv[2]).write_text(json.dumps(rows))
    for one in rows:
        print(
            f"{one['bar']:4} {one['what']:58} {one['figure']:70} {'met' if one['met'] else 'NOT MET'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
