"""Files that are whole or not there, on file systems that refuse; digests that no change escapes."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent import files, paths
from agent.errors import AgentError

from tests.unit.agent.made_up import MadeUpHost


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "dsv4-test", str(path)], check=True)
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_replacing_makes_a_new_file_and_leaves_readers_of_the_old_one_alone(tmp_path: Path) -> None:
    target = tmp_path / "serve.sh"
    target.write_text("old\n")
    with target.open() as reader:
        inode = os.stat(target).st_ino
        files.replace(str(target), b"new, and longer\n", 0o755)
        assert reader.read() == "old\n" and os.stat(target).st_ino != inode
    assert target.read_text() == "new, and longer\n" and os.stat(target).st_mode & 0o7777 == 0o755


def test_a_shell_goes_on_with_the_script_it_began(tmp_path: Path) -> None:
    script = tmp_path / "serve.sh"
    script.write_text("#!/bin/bash\necho begun\nread line\necho first $line\n" + "# fill\n" * 2000 + "echo end of the old one\n")
    with subprocess.Popen(["bash", str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout and shell.stdout.readline() == "begun\n"
        files.replace(str(script), b"#!/bin/bash\necho another\n", 0o755)
        said, _ = shell.communicate("go\n", timeout=30)
    assert said == "first go\nend of the old one\n"


def test_no_space_leaves_the_target_and_no_temporary_file(small: Path) -> None:
    target = small / "serve.sh"
    target.write_text("old\n")
    with pytest.raises(AgentError, match="no space left"):
        files.prepare(str(target), b"x" * 100_000, 0o755)
    assert target.read_text() == "old\n" and os.listdir(small) == ["serve.sh"]


def test_a_read_only_file_system_leaves_the_target(small: Path) -> None:
    target = small / "serve.sh"
    target.write_text("old\n")
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    with pytest.raises(AgentError, match="read-only"):
        files.prepare(str(target), b"new\n", 0o755)
    assert target.read_text() == "old\n" and os.listdir(small) == ["serve.sh"]


def test_a_bind_mounted_target_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    target, source = tmp_path / "serve.sh", tmp_path / "source.sh"
    for path in (target, source):
        path.write_text("old\n")
    subprocess.run(["mount", "--bind", str(source), str(target)], check=True)
    try:
        assert files.kind(str(target)) == "mount"
        with pytest.raises(AgentError, match="mount point"):
            files.prepare(str(target), b"new\n", 0o755)
    finally:
        subprocess.run(["umount", str(target)], check=True)
    assert sorted(os.listdir(tmp_path)) == ["serve.sh", "source.sh"] and source.read_text() == "old\n"


def test_a_full_script_directory_ends_unchanged_without_a_restart(host: MadeUpHost) -> None:
    content = host.script.read_bytes()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "dsv4-test", str(host.directory)], check=True)
    try:
        host.script.write_bytes(content)
        (host.directory / "python").mkdir()
        (host.directory / "python/one.py").write_text("1\n")
        target = host.target("a")
        filler = host.directory / "filler"
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 8192)
        pid = host.pid
        result = host.change(target)
        assert (result["end_state"], result["failed"]) == ("unchanged", True) and "no space left" in result["error"]
        assert host.script.read_bytes() == content and host.pid == pid and host.listed()
        assert sorted(os.listdir(host.directory)) == ["filler", "python", "serve.sh"]
    finally:
        subprocess.run(["umount", "-l", str(host.directory)], check=True)


def test_a_bind_mounted_script_ends_unchanged_without_a_drain(host: MadeUpHost) -> None:
    target = host.target("a")
    subprocess.run(["mount", "--bind", str(host.script), str(host.script)], check=True)
    try:
        result = host.change(target)
    finally:
        subprocess.run(["umount", str(host.script)], check=True)
    assert result["end_state"] == "unchanged" and "mount point" in result["error"] and "drain" not in host.log


# --- trees ---


def tree(root: Path) -> Path:
    base = root / "tree"
    (base / "sglang/__pycache__").mkdir(parents=True)
    (base / "sglang/__init__.py").write_text("A = 'SGLANG_ONE'\n")
    (base / "sglang/__pycache__/__init__.cpython-311.pyc").write_bytes(b"old")
    (base / "sglang/_version.py").write_text("__version__ = version = '0.5.18'\n")
    (base / "sglang/kernel.cuh").write_text("// SGL_TWO and NOT_SGLANG_THREE SGLANG_lower\n")
    (base / "sglang/notes.txt").write_text("SGLANG_NOT_CODE\n")
    return base


def test_the_digest_is_that_of_the_sorted_lines(root: Path) -> None:
    base = tree(root)
    command = "find . -type f -not -path '*/__pycache__/*' -printf '%P\\n' | xargs sha256sum | LC_ALL=C sort | sha256sum"
    expected = subprocess.run(command, shell=True, cwd=base, capture_output=True, text=True, check=True).stdout.split()[0]
    found = files.index(str(base))
    assert (found.digest, found.files, found.version) == (expected, 4, "0.5.18")
    assert found.names == ["SGLANG_ONE", "SGLANG_lower", "SGL_TWO"]


def test_a_change_of_equal_size_and_time_is_seen_through_the_cache(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tree(root)
    monkeypatch.setattr(files, "_SETTLED_S", -1.0)
    before = files.index(str(base)).digest
    assert list(Path(paths.CACHE).glob("*.json")), "it is cached"
    target = base / "sglang/__init__.py"
    status = os.stat(target)
    target.write_text("A = 'SGLANG_TWO'\n")
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert os.stat(target).st_size == status.st_size and files.index(str(base)).digest != before


def test_the_cache_is_used_and_not_written_for_files_that_changed_just_now(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tree(root)
    files.index(str(base))
    assert not list(Path(paths.CACHE).glob("*.json")), "its time stamps cannot be trusted yet"
    now = time.time
    monkeypatch.setattr("agent.files.time.time", lambda: now() + 10)
    first = files.index(str(base))
    monkeypatch.setattr(files, "read", None)  # nothing is read again
    monkeypatch.setattr(files, "read_json", lambda path: json.loads(Path(path).read_text()))
    assert files.index(str(base)) == first


def test_links_are_read_through_and_loops_are_refused(root: Path) -> None:
    base = tree(root)
    (root / "elsewhere.py").write_text("B = 1\n")
    (base / "sglang/linked.py").symlink_to(root / "elsewhere.py")
    before = files.index(str(base)).digest
    (root / "elsewhere.py").write_text("B = 2\n")
    assert files.index(str(base)).digest != before
    (base / "sglang/loop").symlink_to("..")
    with pytest.raises(AgentError, match="without loops"):
        files.index(str(base))


def test_a_copy_shares_nothing_with_its_base(root: Path) -> None:
    base = tree(root)
    os.link(base / "sglang/__init__.py", root / "other_environment.py")
    copy = root / "copy"
    assert files.copy_tree(str(base), str(copy)) == files.index(str(base)).digest
    assert not (copy / "sglang/__pycache__").exists()
    (base / "sglang/__init__.py").write_text("changed\n")
    assert (copy / "sglang/__init__.py").read_text() == "A = 'SGLANG_ONE'\n"
    assert os.stat(copy / "sglang/__init__.py").st_nlink == 1
    assert os.stat(copy / "sglang/__init__.py").st_mode & 0o777 == 0o444
