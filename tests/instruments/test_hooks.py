"""The hooks with the instruments behind them, called as the spliced lines call them."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dsv4_probe import hooks, passport, settings

from tests.instruments.fakes import Model, hooked

FLAGS = {"ge_diff": "SGLANG_DSV4_GE_DIFF", "canary": "SGLANG_DSV4_IDXK_CANARY", "alias_audit": "SGLANG_DSV4_ALIAS_AUDIT"}
Armed = Callable[..., Model]


@pytest.fixture
def armed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Armed:
    """Starts this process's instruments, as if it had a GPU; returns a model of which each hook is called."""

    def start(*instruments: str, **environment: str) -> Model:
        for name, value in {**{FLAGS[one]: "1" for one in instruments}, **environment}.items():
            monkeypatch.setenv(name, value)
        return hooked(hooks, None)

    for name in [name for name in os.environ if name.startswith(("SGLANG_DSV4", "DSV4_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DSV4_FLEET_EVENTS", str(tmp_path))
    monkeypatch.setattr(hooks, "_probe", None)
    monkeypatch.setattr(hooks, "_settled", False)
    monkeypatch.setattr(hooks, "_unfit", lambda: None)
    monkeypatch.setattr(passport, "release", lambda: "ab" * 32)
    monkeypatch.setattr(atexit, "register", lambda _: None)
    return start


def status(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / f"{os.getpid()}.json").read_text())
    return found


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in directory.glob("*.jsonl") for line in path.read_text().splitlines()]


HOOKS = ["compressor", "indexer_compressor", "kv", "logits", "made", "q"]


def test_the_status_file_tells_what_is_alive_and_what_it_costs(armed: Armed, tmp_path: Path) -> None:
    model = armed("ge_diff", "canary")
    model.capture()
    captured = status(tmp_path)
    assert captured["hooks_captured"] == {model.key: HOOKS} and captured["replays"] == 0
    for _ in range(3):
        model.replay()
    model.replay("q_lora")
    told = status(tmp_path)
    assert (told["format"], told["pid"], told["rank"], told["release"]) == (1, os.getpid(), 0, "ab" * 32)
    assert told["flags"] == {FLAGS["ge_diff"]: True, FLAGS["canary"]: True, FLAGS["alias_audit"]: False}
    assert (told["armed"], told["disarmed"], told["replays"]) == (["canary", "ge_diff"], {}, 4)
    assert told["live"] == [FLAGS["ge_diff"], FLAGS["canary"]]
    assert told["events"] == {"canary": {"clean": 4}, "ge_diff": {"clean": 3, "overwritten": 1}}
    assert told["suppressed"] == {}
    bucket = told["ge_diff"]["buckets"][model.key]
    assert bucket["layers"] == [2] and bucket["graph_nodes_added"] == 8
    assert min(bucket["bytes_copied_a_replay"], bucket["logits_bytes_a_replay_at_most"], told["ge_diff"]["bytes"]) > 0
    assert (told["ge_diff"]["replays_compared"], told["ge_diff"]["logits_coverage_a_replay"]) == (4, 1.0)
    assert (told["canary"]["replays"], told["canary"]["layers"], told["canary"]["layout"]) == (4, 2, "fp8")
    assert told["canary"]["bytes"] > 0 and told["canary"]["launches_a_replay"] == 3
    [event] = lines(tmp_path)
    assert (event["verdict"], event["inputs"], event["readers"]) == ("overwritten", ["q_lora"], ["q_lora@q"])
    assert (event["pid"], event["rank"], event["release"], event["step"]) == (os.getpid(), 0, "ab" * 32, 4)
    assert sorted(os.listdir(tmp_path)) == [f"{os.getpid()}.json", f"{os.getpid()}.jsonl"]


def test_a_capture_without_side_streams_tells_fewer_hooks(armed: Armed, tmp_path: Path) -> None:
    model = armed("ge_diff")
    model.capture()
    model.overlap, model.key = False, "without"
    model.capture()
    assert status(tmp_path)["hooks_captured"]["without"] == ["indexer_compressor", "logits", "q"]
    model.replay("x")
    assert [(event["verdict"], event["inputs"]) for event in lines(tmp_path)] == [("overwritten", ["x"])]


@pytest.mark.parametrize("fault", ["x", "q_lora", "qkv_a", "q", "weights", "kernel", "k"])
def test_each_hook_hands_on_what_it_was_given(armed: Armed, tmp_path: Path, fault: str) -> None:
    model = armed("ge_diff")
    model.capture()
    model.replay(fault)
    [event] = lines(tmp_path)
    expected = {"kernel": ("kernel", []), "k": ("k_changed", [])}.get(fault, ("overwritten", [fault]))
    assert (event["verdict"], event["inputs"]) == expected


def test_an_instrument_that_fails_disarms_itself_says_so_once_and_the_others_go_on(
    armed: Armed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = armed("ge_diff", "canary")
    model.capture()
    model.runner.model_runner.token_to_kv_pool = None  # the canary finds no pool
    for _ in range(3):
        model.replay()
    told = status(tmp_path)
    assert told["armed"] == ["ge_diff"] and told["live"] == [FLAGS["ge_diff"]] and list(told["disarmed"]) == ["canary"]
    assert "this is not a DeepSeek-V4 server" in told["disarmed"]["canary"]
    assert told["events"] == {"canary": {"disarmed": 1}, "ge_diff": {"clean": 3}}
    [event] = lines(tmp_path)
    assert (event["instrument"], event["verdict"], event["alarm"]) == ("canary", "disarmed", True)
    assert capsys.readouterr().err.count("canary is disarmed") == 1


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each time that the settings are read."""
    asked: list[int] = []
    read = settings.read

    def counting() -> settings.Settings:
        asked.append(1)
        return read()

    monkeypatch.setattr(settings, "read", counting)
    return asked


def test_settings_are_read_once_and_a_wrong_one_is_said_once(
    armed: Armed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = counted(monkeypatch)
    armed("ge_diff", SGLANG_DSV4_GE_DIFF_EVERY="0")
    for _ in range(3):
        hooks.capture_begins(None, "key")
        hooks.replay_ends(None, "key", None)
    assert len(asked) == 1 and capsys.readouterr().out.count("no instrument is armed") == 1
    assert not list(tmp_path.iterdir())


def test_with_no_flag_the_settings_are_read_once(armed: Armed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = counted(monkeypatch)
    armed()
    for _ in range(3):
        hooks.replay_begins(None, "key", None)
    assert len(asked) == 1 and not list(tmp_path.iterdir())


def test_ranks_watch_each_their_own_and_wait_for_nobody(tmp_path: Path) -> None:
    events = tmp_path / "events"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DSV4_", "SGLANG_", "RANK"))}
    environment = {**clean, FLAGS["ge_diff"]: "1", FLAGS["canary"]: "1", "DSV4_FLEET_EVENTS": str(events)}
    program = str(Path(__file__).with_name("rank.py"))
    ranks = [
        subprocess.Popen(
            [sys.executable, program, str(rank), "2", str(tmp_path / "meeting"), fault],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank, fault in enumerate(("", "qkv_a"))
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    told = {one["rank"]: one for one in (json.loads(path.read_text()) for path in events.glob("*.json"))}
    assert told[0]["events"]["ge_diff"] == {"clean": 4}
    assert told[1]["events"]["ge_diff"] == {"clean": 6, "overwritten": 1}
    assert {rank: one["pid"] for rank, one in told.items()} == {n: rank.pid for n, rank in enumerate(ranks)}
    [event] = lines(events)
    assert (event["rank"], event["pid"], event["inputs"]) == (1, ranks[1].pid, ["qkv_a"])
