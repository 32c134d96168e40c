"""podman gets only the settings that this machine needs."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.local.podman import cgroup_kind, containers_conf, may_raise_limits

ORDINARY: dict[str, Any] = {
    "cgroup": "v2", "systemd": True, "limits": True, "backend": "netavark", "netavark": True,
}  # fmt: skip


def conf(**changes: Any) -> dict[str, Any]:
    return tomllib.loads(containers_conf(**{**ORDINARY, **changes}))


def test_an_ordinary_machine_needs_none() -> None:
    assert containers_conf(**ORDINARY) == ""


def test_hybrid_cgroups_take_runc() -> None:
    assert conf(cgroup="hybrid") == {"engine": {"runtime": "runc"}}
    assert conf(cgroup="v1") == {}


def test_without_systemd_podman_does_not_ask_for_it() -> None:
    assert conf(systemd=False) == {"engine": {"cgroup_manager": "cgroupfs", "events_logger": "file"}}


def test_limits_that_may_not_be_raised_are_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.local.podman.resource.getrlimit", lambda _kind: (64, 4096))
    assert conf(limits=False) == {"containers": {"default_ulimits": ["nofile=4096:4096", "nproc=4096:4096"]}}


def test_cni_is_left_only_for_a_netavark_that_is_there() -> None:
    assert conf(backend="cni") == {"network": {"network_backend": "netavark"}}
    assert conf(backend="cni", netavark=False) == {}


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (["cgroup.controllers"], "v2"),
        (["unified/cgroup.controllers", "memory/tasks"], "hybrid"),
        (["memory/tasks"], "v1"),
    ],
)
def test_cgroup_kinds(tmp_path: Path, files: list[str], kind: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert cgroup_kind(tmp_path) == kind


def test_the_capability_to_raise_limits_is_one_bit() -> None:
    assert may_raise_limits("Name:\tx\nCapEff:\t0000000001000000\n")
    assert not may_raise_limits("Name:\tx\nCapEff:\t000001fffeffffff\nCapPrm:\t0000000001000000\n")
    assert not may_raise_limits("")
