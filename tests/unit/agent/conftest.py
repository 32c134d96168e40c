"""The agent's package on the path, all its places below a temporary root, and a host that is made up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "collections/ansible_collections/dsv4/fleet/plugins/module_utils"))

from agent import paths, release

from tests.unit.agent.made_up import MadeUpHost


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that takes the place of / for everything that the agent keeps."""
    for name, value in vars(paths).items():
        if name.isupper() and isinstance(value, str) and value.startswith("/"):
            monkeypatch.setattr(paths, name, f"{tmp_path}{value}")
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    return tmp_path


@pytest.fixture
def host(root: Path, monkeypatch: pytest.MonkeyPatch) -> MadeUpHost:
    """A worker that was set up by hand and serves, with a tree and a router that lists it. Nothing is compiled."""
    monkeypatch.setattr(release, "_compile", lambda *arguments: None)
    return MadeUpHost(root)
