"""The agent's package on the path, and what these tests share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "collections/ansible_collections/dsv4/fleet/plugins/module_utils"))

from tests.unit.agent_observation.loopback import FakeRouter, Server, free_port
from tests.unit.agent_observation.units import ControlGroup


@pytest.fixture
def server() -> Iterator[Callable[..., Server]]:
    """Starts loopback HTTP servers that end with the test."""
    started: list[Server] = []

    def start(*arguments: Any, **options: Any) -> Server:
        one = Server(*arguments, **options)
        started.append(one)
        return one

    yield start
    for one in started:
        one.close()


@pytest.fixture
def fake_router() -> Iterator[Callable[[], FakeRouter]]:
    """Starts stand-ins of sglang-router's control interface."""
    started: list[FakeRouter] = []

    def start() -> FakeRouter:
        one = FakeRouter()
        started.append(one)
        return one

    yield start
    for one in started:
        one.close()


@pytest.fixture
def dead_port() -> int:
    """A loopback port on which nothing listens."""
    return free_port()


@pytest.fixture
def group() -> Iterator[ControlGroup]:
    """A control group of its own, as systemd makes one for a unit."""
    one = ControlGroup()
    yield one
    one.remove()
