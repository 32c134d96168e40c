"""Clocks, aliases, verdicts, the report and the hooks: what needs no tensor, and so no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PATCHES = Path(__file__).parents[3] / "patches"
sys.path.insert(0, str(PATCHES))  # as in a release: dsv4_probe is on the path

from dsv4_probe import aliases, report, settings, verdict  # noqa: E402  # the path comes first
from dsv4_probe.aliases import Alloc, Free, Read, Record, Wait, Watch  # noqa: E402
from dsv4_probe.clocks import Clocks  # noqa: E402

MAIN, KV, INDEXER = 0, 7, 9


def test_waits_are_transitive() -> None:
    clocks = Clocks()
    point = clocks.tick("a")
    clocks.record("e1", "a")
    clocks.wait("b", "e1")
    assert clocks.reached("b", "a", point) and not clocks.reached("c", "a", point)
    clocks.record("e2", "b")
    clocks.wait("c", "e2")
    assert clocks.reached("c", "a", point)
    later = clocks.tick("a")
    assert not clocks.reached("c", "a", later) and clocks.reached("a", "a", later)
    clocks.wait("c", "never recorded")
    assert not clocks.reached("c", "a", later)


def story(join: bool, event_before_read: bool = False) -> list[Any]:
    """qkv_a is made on the main stream, read on kv's, dropped, and its block is given out again."""
    read = [Read(3, "qkv_a", "kv", KV)]
    record = [Record("done", KV)]
    return [
        Alloc(1000, 3000, MAIN, "made here"),
        Watch(3, "qkv_a", 1000, 3000, MAIN),
        Record("ready", MAIN),
        Wait(KV, "ready"),
        *(record + read if event_before_read else read + record),
        *([Wait(MAIN, "done")] if join else []),
        Free(1000, 3000),
        Alloc(500, 2000, MAIN, "reused here"),
    ]


def test_reuse_before_the_join_is_named_with_both_frames() -> None:
    [found] = aliases.audit(story(join=False))
    assert (found.name, found.reader, found.reading_stream, found.allocating_stream) == (
        "qkv_a",
        "kv",
        KV,
        MAIN,
    )
    assert (found.layer, found.start, found.size) == (3, 1000, 1000)
    assert (found.made, found.reused) == ("made here", "reused here")


def test_reuse_after_the_join_is_fine() -> None:
    assert aliases.audit(story(join=True)) == []


def test_a_wait_for_what_came_before_the_read_does_not_count() -> None:
    assert len(aliases.audit(story(join=True, event_before_read=True))) == 1


def test_reuse_on_the_reading_stream_itself_is_fine() -> None:
    happened = [*story(join=False)[:-1], Alloc(1000, 3000, KV)]
    assert aliases.audit(happened) == []


def test_a_join_through_a_third_stream_counts() -> None:
    happened = [
        *story(join=False)[:-2],
        Wait(INDEXER, "done"),
        Record("indexer", INDEXER),
        Wait(MAIN, "indexer"),
        *story(join=False)[-2:],
    ]
    assert aliases.audit(happened) == []


def test_memory_beside_it_or_not_freed_is_fine() -> None:
    assert aliases.audit([*story(join=False)[:-1], Alloc(3000, 4000, MAIN)]) == []
    assert aliases.audit([*story(join=False)[:-2], Alloc(1000, 3000, MAIN)]) == []


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        ({}, ("clean", ())),
        ({"copies": {("q", "logits"): 0}}, ("clean", ())),
        ({"copies": {("q", "logits"): 3}, "logits": 1}, ("overwritten", ("q",))),
        ({"copies": {("q", "logits"): 3}}, ("late_overwrite", ("q",))),
        ({"copies": {("q_lora", "q"): 3}, "q_right": True}, ("late_overwrite", ("q_lora",))),
        ({"copies": {("q_lora", "q"): 3}, "q_right": False}, ("overwritten", ("q_lora",))),
        ({"copies": {("q_lora", "q"): 3}}, ("overwritten", ("q_lora",))),
        ({"copies": {("qkv_a", "kv"): 1}, "q_right": True}, ("overwritten", ("qkv_a",))),
        ({"copies": {("x", "q"): 1, ("q", "logits"): 1}, "logits": 2}, ("overwritten", ("q", "x"))),
        ({"copies": {("q", "logits"): 3}, "k": True}, ("overwritten", ("q",))),
        ({"k": True, "logits": 9}, ("k_changed", ())),
        ({"logits": 9}, ("kernel", ())),
        ({"logits": 9, "reason": "no stash"}, ("inconclusive", ())),
    ],
)
def test_verdicts(findings: dict[str, Any], expected: tuple[str, tuple[str, ...]]) -> None:
    found = verdict.judge(verdict.Findings(**findings))
    assert (found.verdict, found.inputs) == expected


class Clock:
    """A clock that a test moves."""

    now = 1000.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


def test_events_are_lines_counted_and_limited(tmp_path: Path) -> None:
    clock = Clock()
    made = report.Report(str(tmp_path), {"pid": 5, "rank": 1}, clock)
    for _ in range(report.BURST + 30):
        made.event("canary", "outside", step=1)
    path = tmp_path / f"{os.getpid()}.jsonl"
    assert len(path.read_text().splitlines()) == report.BURST
    clock.now += 1.0
    made.event("canary", "outside", step=2)
    line = json.loads(path.read_text().splitlines()[-1])
    assert line["suppressed"] == 30 and line["step"] == 2 and line["rank"] == 1 and line["alarm"] is True
    made.event("ge_diff", "clean")
    assert len(path.read_text().splitlines()) == report.BURST + 1
    assert made.events == {("canary", "outside"): report.BURST + 31, ("ge_diff", "clean"): 1}


def test_the_event_file_is_bounded(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(report, "EVENT_FILE_BYTES", 2000)
    monkeypatch.setattr(report, "BURST", 10_000)
    made = report.Report(str(tmp_path), {})
    for number in range(300):
        made.event("ge_diff", "kernel", number=number)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2 and sum(sizes) < 5000


def test_the_status_file_is_whole_and_renewed_seldom(tmp_path: Path) -> None:
    clock = Clock()
    made = report.Report(str(tmp_path), {"pid": 5}, clock)
    made.write_status(armed=["canary"])
    path = tmp_path / f"{os.getpid()}.json"
    assert json.loads(path.read_text())["armed"] == ["canary"]
    made.write_status(armed=[])
    assert json.loads(path.read_text())["armed"] == ["canary"]
    clock.now += report.STATUS_SECONDS
    made.write_status()
    assert json.loads(path.read_text())["armed"] == [] and os.listdir(tmp_path) == [path.name]


def test_a_full_disk_is_said_once_and_raises_nothing(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("")
    made = report.Report(str(tmp_path / "file"), {})
    for _ in range(3):
        made.event("canary", "outside")
        made.write_status(force=True)
    assert capsys.readouterr().err.count("cannot write events") == 1


@pytest.mark.parametrize(
    ("name", "value", "field", "expected"),
    [
        ("SGLANG_DSV4_GE_DIFF", "1", "ge_diff", True),
        ("SGLANG_DSV4_IDXK_CANARY", "0", "canary", False),
        ("SGLANG_DSV4_GE_DIFF_EVERY", "7", "every", 7),
        ("SGLANG_DSV4_GE_DIFF_MAX_MB", "64", "max_bytes", 64 << 20),
        ("SGLANG_DSV4_GE_DIFF_LAYERS", "0-2, 9", "layers", frozenset({0, 1, 2, 9})),
    ],
)
def test_settings(monkeypatch: Any, name: str, value: str, field: str, expected: Any) -> None:
    monkeypatch.setenv(name, value)
    assert getattr(settings.read(), field) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SGLANG_DSV4_GE_DIFF", "on"),
        ("SGLANG_DSV4_GE_DIFF_EVERY", "0"),
        ("SGLANG_DSV4_GE_DIFF_MAX_MB", "1e3"),
        ("SGLANG_DSV4_GE_DIFF_LAYERS", "1-"),
    ],
)
def test_wrong_settings_are_named(monkeypatch: Any, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(settings.SettingError, match=name):
        settings.read()


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DSV4_", "SGLANG_"))}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "PYTHONPATH": f"{PATCHES}{os.pathsep}{environment.pop('path', '')}", **environment},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


CALLS = """
from dsv4_probe import hooks
class L: layer_id = 1
hooks.capture_begins(None, "k")
hooks.prepare_made(L, None, x=None)
hooks.prepare_read(L, "kv")
hooks.indexer_compressed(None, L, None)
hooks.indexer_q_made(None, L, *[None] * 5)
hooks.logits_read(None, L, *[None] * 10)
hooks.capture_ends(None, "k")
hooks.replay_begins(None, "k", None)
hooks.replay_ends(None, "k", None)
"""


def test_with_no_flag_the_hooks_do_nothing_at_all() -> None:
    result = run(CALLS + "import sys; print('torch' in sys.modules, 'triton' in sys.modules)")
    assert (result.returncode, result.stdout.strip(), result.stderr) == (0, "False False", "")


def fake_torch(directory: Path, hip: str | None = None) -> str:
    """A torch that has no device, as far as the hooks look at one; returns what goes on the path."""
    directory.mkdir()
    (directory / "torch.py").write_text(
        "class version:\n"
        f"    hip = {hip!r}\n"
        "class cuda:\n"
        "    is_available = staticmethod(lambda: False)\n"
        "class distributed:\n"
        "    is_available = is_initialized = staticmethod(lambda: True)\n"
        "    get_rank = staticmethod(lambda: 3)\n"
    )
    return str(directory)


@pytest.mark.parametrize(
    ("hip", "reason"), [(None, "torch sees no CUDA device"), ("6.2", "a ROCm build of torch")]
)
def test_where_no_instrument_can_run_each_disarms_itself_and_the_server_goes_on(
    tmp_path: Path, hip: str | None, reason: str
) -> None:
    flags = {"SGLANG_DSV4_GE_DIFF": "1", "SGLANG_DSV4_IDXK_CANARY": "1", "SGLANG_DSV4_ALIAS_AUDIT": "1"}
    events = tmp_path / "events"
    torch = fake_torch(tmp_path / "torch", hip)
    result = run(CALLS + "print('up')", path=torch, DSV4_FLEET_EVENTS=str(events), **flags)
    assert (result.returncode, result.stdout.strip()) == (0, "up"), result.stderr
    assert result.stderr.count("is disarmed") == result.stderr.count(reason) == 3
    [status] = [json.loads(path.read_text()) for path in events.glob("*.json")]
    assert set(status["disarmed"]) == {"canary", "ge_diff", "alias_audit"} and status["rank"] == 3
    assert status["flags"]["SGLANG_DSV4_GE_DIFF"] and status["armed"] == []


def test_a_wrong_setting_arms_nothing_and_says_so() -> None:
    result = run(CALLS + "print('up')", SGLANG_DSV4_GE_DIFF="1", SGLANG_DSV4_GE_DIFF_EVERY="x")
    assert result.returncode == 0 and "SGLANG_DSV4_GE_DIFF_EVERY is 'x'" in result.stdout


def test_a_hook_that_fails_itself_ends_nothing_but_the_instruments(tmp_path: Path) -> None:
    broken = CALLS.replace("class L: layer_id = 1", "class L: pass\nhooks._unfit = lambda: 'no reason'\n")
    torch = fake_torch(tmp_path / "torch")
    result = run(broken + "print('up')", path=torch, SGLANG_DSV4_ALIAS_AUDIT="1")
    assert result.returncode == 0 and result.stdout.splitlines()[-1] == "up", result.stderr
    assert result.stdout.count("no instrument is armed any more") == 1


def test_counters_for_prometheus_where_the_server_exports_metrics(tmp_path: Path) -> None:
    (tmp_path / "prometheus_client.py").write_text(
        "class Counter:\n"
        "    def __init__(self, name, text, labels): self.name, self.of = name, labels\n"
        "    def labels(self, *values): self.now = values; return self\n"
        "    def inc(self): print(self.name, *zip(self.of, self.now))\n"
    )
    code = (
        f"import sys; sys.path.append({str(tmp_path)!r})\n"
        "from dsv4_probe.report import Report\n"
        "Report(None, {}).event('canary', 'clean')\n"
    )
    result = run(code, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    assert result.stdout.strip() == "dsv4_probe_events ('instrument', 'canary') ('verdict', 'clean')", (
        result.stderr
    )
    assert run(code).stdout == ""


def test_a_tensor_and_reader_are_reported_once() -> None:
    happened = [*story(join=False), Free(500, 2000), Alloc(1000, 3000, MAIN)]
    assert len(aliases.audit(happened)) == 1
