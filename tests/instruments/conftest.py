"""The instruments on the CPU: the same code as on a GPU, with the plain form of its kernels."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "patches"))  # as in a release: dsv4_probe is on the path
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Random tensors are the same ones in every run."""
    torch.manual_seed(4)


@pytest.fixture
def report(tmp_path: Path) -> Any:
    """A report whose events a test can read back by `events()`."""
    from dsv4_probe.report import Report

    made = Report(str(tmp_path), {"pid": 1, "rank": 0})

    def events() -> list[dict[str, Any]]:
        return [
            json.loads(line) for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines()
        ]

    made.lines = events
    return made
