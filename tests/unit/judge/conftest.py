"""What the tests of the judge share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.judge.cases import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)
