"""Installation: what is missing is named, and an interrupted one is begun again."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

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


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], list[list[str]]]:
    """A checkout whose lock has the given text; make_venv's programs are recorded, and make what they would."""

    def prepare(lock: str) -> list[list[str]]:
        (tmp_path / "lock.txt").write_text(lock, encoding="utf-8")
        started: list[list[str]] = []

        def run(argv: list[str], _log: Path) -> int:
            started.append(argv)
            if "venv" in argv:
                (tmp_path / ".venv" / "bin").mkdir(parents=True)
                (tmp_path / ".venv" / "bin" / "python").touch()
            return 1 if lock == "broken" and "pip" in argv else 0

        monkeypatch.setattr(setup, "_logged", run)
        return started

    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.setattr(setup, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(setup, "LOCK", tmp_path / "lock.txt")
    monkeypatch.setattr(setup, "CACHE", tmp_path / "cache")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "pip.log").write_text("no matching distribution\n", encoding="utf-8")
    return prepare


def test_the_same_lock_is_installed_once(place: Callable[[str], list[list[str]]]) -> None:
    started = place("one")
    setup.make_venv()
    setup.make_venv()
    assert len(started) == 2 and "--require-hashes" in started[1]


def test_another_lock_is_installed_anew(place: Callable[[str], list[list[str]]]) -> None:
    place("one")
    setup.make_venv()
    started = place("two")
    setup.make_venv()
    assert len(started) == 2


def test_an_interrupted_installation_is_begun_again(place: Callable[[str], list[list[str]]]) -> None:
    place("broken")
    with pytest.raises(LocalError, match="no matching distribution"):
        setup.make_venv()
    started = place("broken")
    with pytest.raises(LocalError):
        setup.make_venv()
    assert started[0][1:3] == ["-m", "venv"]


def test_another_interpreter_is_another_installation(
    place: Callable[[str], list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    place("one")
    setup.make_venv()
    monkeypatch.setattr(sys, "version", "3.99")
    started = place("one")
    setup.make_venv()
    assert len(started) == 2


def test_the_lock_pins_every_package_by_hash_and_names_no_place() -> None:
    text = setup.LOCK.read_text(encoding="utf-8")
    packages = re.findall(r"^([a-z0-9-]+)==\S+ \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.MULTILINE)
    assert len(packages) == len(re.findall(r"^[a-z0-9]", text, re.MULTILINE)) > 40
    assert not re.search(r"://|^-|find-links|/opt/|/root/", text, re.MULTILINE)


def test_every_direct_dependency_is_pinned_and_has_its_reason() -> None:
    lock = setup.LOCK.read_text(encoding="utf-8")
    lines = (setup.LOCK.parent / "requirements.in").read_text(encoding="utf-8").splitlines()
    direct = [line for line in lines if line and not line.startswith("#")]
    assert direct
    for line in direct:
        match = re.fullmatch(r"([a-z0-9-]+==[0-9.]+)\s+# .{5,}", line)
        assert match, line
        assert f"\n{match[1]} \\" in lock
