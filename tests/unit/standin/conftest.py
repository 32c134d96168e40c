"""What the tests of the stand-in engine share."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.local import downloads
from tests.unit.standin.standin_process import PYTHON, StandIn


@pytest.fixture(scope="session")
def sglang_tree() -> Path:
    """A real SGLang tree: $DSV4_SGLANG_TREE (the directory that holds `sglang/`), else the fleet's pinned one."""
    tree = Path(os.environ.get("DSV4_SGLANG_TREE") or downloads.sglang_tree())
    assert (tree / "sglang/srt/environ.py").is_file(), (
        f"found no sglang/srt/environ.py in {tree}, expected an unpacked SGLang wheel: set DSV4_SGLANG_TREE"
    )
    return tree


@pytest.fixture(scope="session", autouse=True)
def libraries() -> None:
    """The interpreter that runs the engine has what it needs."""
    found = subprocess.run(
        [PYTHON, "-c", "import aiohttp, setproctitle, yaml"], capture_output=True, text=True, timeout=60, check=False
    )
    assert found.returncode == 0, (
        f"{PYTHON} cannot run the stand-in engine: {found.stderr.strip().splitlines()[-1]}. Install aiohttp, "
        "setproctitle and PyYAML there, or name another interpreter in DSV4_STANDIN_PYTHON."
    )


def _starter(place: Path, default_tree: Path) -> Iterator[Callable[..., StandIn]]:
    started: list[StandIn] = []

    def one(
        *arguments: str,
        tree: Path | None = default_tree,
        env: dict[str, str] | None = None,
        settings: dict[str, Any] | None = None,
        faults: dict[str, Any] | None = None,
        cwd: Path | None = None,
        port: int | None = None,
        model: bool = True,
    ) -> StandIn:
        own = place / f"engine{len(started)}"
        own.mkdir()
        words = [*(["--model-path", "some/model"] if model else []), *arguments]
        started.append(StandIn(own, tree, words, env or {}, settings or {}, faults or {}, cwd, port))
        return started[-1]

    yield one
    for standin in started:
        standin.close()


@pytest.fixture
def start(tmp_path: Path, sglang_tree: Path) -> Iterator[Callable[..., StandIn]]:
    """Starts stand-in engines that end with the test; `tree=None` starts one without a tree."""
    yield from _starter(tmp_path, sglang_tree)


@pytest.fixture(scope="module")
def start_for_module(tmp_path_factory: pytest.TempPathFactory, sglang_tree: Path) -> Iterator[Callable[..., StandIn]]:
    """Likewise, for engines that end with the module."""
    yield from _starter(tmp_path_factory.mktemp("engines"), sglang_tree)
