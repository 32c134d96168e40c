"""Installation: what is missing is named, and an interrupted one is begun again."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Protocol

import pytest

from tests.local import setup
from tests.local.settings import LocalError


def test_nothing_is_missing_where_all_is_there() -> None:
    assert setup.missing_packages(lambda _: "/x", lambda _: True, lambda _: True) == {}


def test_packages_are_named_with_what_was_not_found() -> None:
    missing = setup.missing_packages(
        lambda name: None if name in ("ssh", "ssh-keygen", "podman") else "/x", lambda _: False, lambda _: False
    )
    assert missing == {
        "podman": ["program podman"],
        "openssh-client": ["program ssh", "program ssh-keygen"],
        "netavark": ["podman's network program netavark"],
        "python3-venv": ["Python module ensurepip"],
    }


def test_programs_that_only_root_finds_count() -> None:
    found = setup.missing_packages(
        lambda name: None if name == "runc" else "/x", lambda path: path != "/sbin/runc", lambda _: True
    )
    assert found == {}


def test_without_apt_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "missing_packages", lambda: {"mmdebstrap": ["program mmdebstrap"]})
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(LocalError, match="mmdebstrap: found no program mmdebstrap\nThere is no apt-get here"):
        setup.install_packages()


def test_apt_that_fails_is_told_with_its_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    apt = tmp_path / "apt-get"
    apt.write_text("#!/bin/sh\necho 'E: Unable to locate package mmdebstrap'\nexit 100\n", encoding="utf-8")
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(setup, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(setup, "missing_packages", lambda: {"mmdebstrap": ["program mmdebstrap"]})
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(LocalError, match="Unable to locate package mmdebstrap"):
        setup.install_packages()


class Place(Protocol):
    """Prepares a checkout; returns the programs that will have been started in it."""

    def __call__(self, lock: str, torch: str = "torch") -> list[list[str]]: ...


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Place:
    """A checkout whose locks have the given texts; setup's programs are recorded, and make what they would."""

    def prepare(lock: str, torch: str = "torch") -> list[list[str]]:
        (tmp_path / "lock.txt").write_text(lock, encoding="utf-8")
        (tmp_path / "torch.txt").write_text(torch, encoding="utf-8")
        started: list[list[str]] = []

        def run(argv: list[str], _log: Path) -> int:
            started.append(argv)
            if "venv" in argv:
                (tmp_path / ".venv" / "bin").mkdir(parents=True)
                (tmp_path / ".venv" / "bin" / "python").touch()
            if torch == "interrupted" and argv[-1].endswith("torch.txt"):
                raise KeyboardInterrupt
            return 1 if "broken" in (lock, torch) and "pip" in argv else 0

        monkeypatch.setattr(setup, "_logged", run)
        return started

    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.setattr(setup, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(setup, "LOCK", tmp_path / "lock.txt")
    monkeypatch.setattr(setup, "TORCH_LOCK", tmp_path / "torch.txt")
    monkeypatch.setattr(setup, "CACHE", tmp_path / "cache")
    (tmp_path / "cache").mkdir()
    for log in ("pip.log", "pip-torch.log"):
        (tmp_path / "cache" / log).write_text("no matching distribution\n", encoding="utf-8")
    return prepare


def test_the_same_lock_is_installed_once(place: Place) -> None:
    started = place("one")
    setup.make_venv()
    setup.make_venv()
    assert len(started) == 2 and "--require-hashes" in started[1]


def test_another_lock_is_installed_anew(place: Place) -> None:
    place("one")
    setup.make_venv()
    started = place("two")
    setup.make_venv()
    assert len(started) == 2


def test_an_interrupted_installation_is_begun_again(place: Place) -> None:
    place("broken")
    with pytest.raises(LocalError, match="no matching distribution"):
        setup.make_venv()
    started = place("broken")
    with pytest.raises(LocalError):
        setup.make_venv()
    assert started[0][1:3] == ["-m", "venv"]


def test_another_interpreter_is_another_installation(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place("one")
    setup.make_venv()
    monkeypatch.setattr(sys, "version", "3.99")
    started = place("one")
    setup.make_venv()
    assert len(started) == 2


def test_torch_is_installed_when_asked_for_once_and_never_by_the_rest(place: Place) -> None:
    started = place("one")
    setup.make_venv()
    assert not any(word.endswith("torch.txt") for argv in started for word in argv)
    setup.make_torch()
    setup.make_torch()
    setup.make_venv()
    assert len(started) == 3 and {"--require-hashes", f"--extra-index-url={setup.TORCH_INDEX}"} < set(started[2])


@pytest.mark.parametrize(("lock", "torch"), [("two", "torch"), ("one", "another")])
def test_with_another_lock_all_is_installed_anew(place: Place, lock: str, torch: str) -> None:
    place("one")
    setup.make_venv()
    setup.make_torch()
    started = place(lock, torch)
    setup.make_venv()
    setup.make_torch()
    assert [argv[2] for argv in started] == ["venv", "pip", "pip"]


def test_another_lock_of_torch_is_nothing_to_those_who_have_none(place: Place) -> None:
    place("one")
    setup.make_venv()
    started = place("one", "another")
    setup.make_venv()
    assert started == []


def test_after_an_interrupted_installation_of_torch_all_is_begun_again(place: Place) -> None:
    place("one", "interrupted")
    setup.make_venv()
    with pytest.raises(KeyboardInterrupt):
        setup.make_torch()
    started = place("one", "torch")
    with pytest.raises(LocalError, match=r"half or otherwise installed.*`make setup`"):
        setup.make_torch()
    assert started == []
    setup.make_venv()
    setup.make_torch()
    assert [argv[2] for argv in started] == ["venv", "pip", "pip"]


def test_where_torch_cannot_be_had_the_message_says_which_and_how_to_get_it(place: Place, tmp_path: Path) -> None:
    place("one")
    setup.make_venv()
    place("one", "broken")
    with pytest.raises(LocalError) as error:
        setup.make_torch()
    words = ("torch.txt pins", "no matching distribution", f"pip reach {setup.TORCH_INDEX}", "PIP_FIND_LINKS")
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(("path", "least"), [(setup.LOCK, 40), (setup.TORCH_LOCK, 8)])
def test_the_lock_pins_every_package_by_hash_and_names_no_place(path: Path, least: int) -> None:
    text = path.read_text(encoding="utf-8")
    packages = re.findall(r"^([a-z0-9-]+)==\S+ \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.MULTILINE)
    assert len(packages) == len(re.findall(r"^[a-z0-9]", text, re.MULTILINE)) > least
    assert not re.search(r"://|^-|find-links|/opt/|/root/", text, re.MULTILINE)


def test_both_locks_pin_the_same_versions() -> None:
    first, second = (
        dict(re.findall(r"^([a-z0-9-]+)==(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE))
        for path in (setup.LOCK, setup.TORCH_LOCK)
    )
    shared = first.keys() & second.keys()
    assert shared and {name: first[name] for name in shared} == {name: second[name] for name in shared}


@pytest.mark.parametrize("path", [setup.LOCK, setup.TORCH_LOCK])
def test_every_direct_dependency_is_pinned_and_has_its_reason(path: Path) -> None:
    lock = path.read_text(encoding="utf-8")
    lines = path.with_suffix(".in").read_text(encoding="utf-8").splitlines()
    direct = [line for line in lines if line and not line.startswith(("#", "-c requirements.txt"))]
    assert direct
    for line in direct:
        match = re.fullmatch(r"([a-z0-9-]+==[0-9.]+(?:\+cpu)?)\s+# .{5,}", line)
        assert match, line
        assert f"\n{match[1]} \\" in lock
