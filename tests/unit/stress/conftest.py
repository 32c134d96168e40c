"""Stand-in engines for the stress test, and the command line run against them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4_fleet.cli import main
from dsv4_fleet.judge import evidence
from tests.unit.standin.standin_process import StandIn

# What the stand-in needs of a tree: an environ.py that parses flags, and the file that the story is about.
ENVIRON = """
import os

class EnvBool:
    def __init__(self, default):
        self.default = default

    def get(self):
        return {"1": True, "0": False}.get(os.environ.get(self.name), self.default)

class envs:
    pass
"""
INDEXER = 'import os\n\nBF16 = os.environ.get("SGLANG_DSV4_BF16_INDEX_K")\n'


@pytest.fixture(scope="session")
def small_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("tree")
    for name, text in {
        "__init__.py": "",
        "launch_server.py": "",
        "version.py": '__version__ = "0.5.18"\n',
        "srt/__init__.py": "",
        "srt/environ.py": ENVIRON,
        "srt/layers/attention/dsv4/indexer.py": INDEXER,
        "srt/model_executor/runner/decode_cuda_graph_runner.py": "",
    }.items():
        path = tree / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tree


Start = Callable[..., StandIn]


@pytest.fixture
def start(tmp_path: Path, small_tree: Path) -> Iterator[Start]:
    """Starts stand-in engines that end with the test: arguments, `env`, `settings`, `faults`."""
    started: list[StandIn] = []

    def one(
        *arguments: str,
        env: dict[str, str] | None = None,
        settings: dict[str, Any] | None = None,
        faults: dict[str, Any] | None = None,
    ) -> StandIn:
        place = tmp_path / f"engine{len(started)}"
        place.mkdir()
        words = ["--model-path", "some/model", "--enable-metrics", *arguments]
        started.append(StandIn(place, small_tree, words, env or {}, settings or {}, faults or {}, None, None))
        return started[-1].wait_healthy()

    yield one
    for standin in started:
        standin.close()


Stress = Callable[..., dict[str, Any]]


@pytest.fixture
def stress(tmp_path: Path) -> Stress:
    """Runs `dsv4-fleet stress` with these options; its result, which its schema has been held against."""

    def one(*options: str, sessions: int = 100, code: int = 0) -> dict[str, Any]:
        path = tmp_path / "result.json"
        assert main(["stress", *options, "--sessions", str(sessions), "--output", str(path)]) == code
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        evidence.check()(result)
        return result

    return one
