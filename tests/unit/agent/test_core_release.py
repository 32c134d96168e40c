"""Releases: what was asked for is what gets imported, and nothing that is needed is ever removed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agent import files, paths, python_env, release
from agent.errors import AgentError

ENVIRON = "python/sglang/srt/environ.py"


def base(root: Path) -> Path:
    tree = root / "base"
    (tree / "sglang/srt").mkdir(parents=True)
    for name in ("sglang/__init__.py", "sglang/srt/__init__.py"):
        (tree / name).write_text("")
    (tree / "sglang/srt/environ.py").write_text("WHO = 'base'\n")
    return tree


def spec(tree: Path, content: dict[str, bytes]) -> dict[str, Any]:
    digest = files.index(str(tree)).digest
    manifest = {
        "format": 1, "tree": digest, "files": {path: {"result": files.sha256(data)} for path, data in content.items()},
    }  # fmt: skip
    packed = {path: python_env.pack(data) for path, data in content.items()}
    return {"digest": release.digest_of(manifest), "tree": digest, "manifest": manifest, "files": packed}


def stage(tree: Path, content: dict[str, bytes]) -> str:
    wanted = spec(tree, content)
    release.stage(wanted, str(tree), sys.executable, lambda *a, **k: None)
    return str(wanted["digest"])


def imported(path: str, **environment: str) -> str:
    """What a server that has this release on its path finds in environ.py."""
    done = subprocess.run(
        [sys.executable, "-c", "import sglang.srt.environ as e; print(e.WHO)"],
        env={"PYTHONPATH": f"{path}/python", **environment}, cwd="/", capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


def test_a_release_is_the_tree_with_the_files_in_it_read_only_and_compiled(root: Path) -> None:
    tree = base(root)
    name = stage(tree, {ENVIRON: b"WHO = 'patched'\n", "python/dsv4_probe/__init__.py": b"X = 1\n"})
    path = Path(paths.release(name))
    assert imported(str(path)) == "patched"
    assert files.read(f"{path}/manifest.json") is not None and files.sha256((path / "manifest.json").read_bytes()) == name
    for one in (path / "python").rglob("*"):
        assert os.stat(one).st_uid == 0 and not os.stat(one).st_mode & 0o222, one
    assert list((path / "python/sglang/srt/__pycache__").glob("environ.*.pyc"))
    assert (tree / "sglang/srt/environ.py").read_text() == "WHO = 'base'\n" and not list(tree.rglob("__pycache__"))
    assert sorted(os.listdir(paths.RELEASES)) == [name]


@pytest.mark.parametrize("prefix", [False, True], ids=["in the tree", "in a cache outside"])
def test_a_patch_of_equal_size_and_time_is_what_runs(root: Path, prefix: bool) -> None:
    tree = base(root)
    source = tree / "sglang/srt/environ.py"
    os.utime(source, (1_700_000_000, 1_700_000_000))
    cache = {"PYTHONPYCACHEPREFIX": str(root / "pycache")} if prefix else {}
    first = stage(tree, {ENVIRON: b"WHO = 'one'\n"})
    second = stage(tree, {ENVIRON: b"WHO = 'two'\n"})
    for name in (first, second):
        os.utime(f"{paths.release(name)}/{ENVIRON}", (1_700_000_000, 1_700_000_000))
    assert imported(paths.release(first), **cache) == "one"
    assert imported(paths.release(second), **cache) == "two"
    assert imported(paths.release(first), **cache) == "one"


def test_bytecode_that_does_not_fit_its_source_is_not_run(root: Path) -> None:
    tree = base(root)
    one, two = stage(tree, {ENVIRON: b"WHO = 'one'\n"}), stage(tree, {ENVIRON: b"WHO = 'two'\n"})
    code = f"python/sglang/srt/__pycache__/environ.{sys.implementation.cache_tag}.pyc"
    os.chmod(f"{paths.release(two)}/{code}", 0o644)
    Path(f"{paths.release(two)}/{code}").write_bytes(Path(f"{paths.release(one)}/{code}").read_bytes())
    assert imported(paths.release(two)) == "two"


def test_a_release_that_is_there_is_kept_and_checked(root: Path) -> None:
    tree = base(root)
    content = {ENVIRON: b"WHO = 'patched'\n"}
    name = stage(tree, content)
    inode = os.stat(paths.release(name)).st_ino
    wanted = {**spec(tree, content), "files": {}}
    assert release.stage(wanted, str(tree), sys.executable, lambda *a, **k: None) is False
    assert os.stat(paths.release(name)).st_ino == inode
    (Path(paths.release(name)) / "python/sglang/extra.py").write_text("x\n")
    with pytest.raises(AgentError, match="Somebody wrote into"):
        release.stage(wanted, str(tree), sys.executable, lambda *a, **k: None)


def test_a_put_in_file_that_does_not_compile_is_refused_and_leaves_nothing(root: Path) -> None:
    tree = base(root)
    with pytest.raises(AgentError, match="do not compile"):
        stage(tree, {ENVIRON: b"def broken(:\n"})
    assert os.listdir(paths.RELEASES) == []


@pytest.mark.parametrize("path", ["python/../../etc/x.py", "/etc/x.py", "etc/x.py", "python//x.py", "python"])
def test_files_outside_of_the_release_are_refused(root: Path, path: str) -> None:
    with pytest.raises(AgentError, match="below python/"):
        stage(base(root), {path: b"x\n"})


def test_a_file_that_was_damaged_on_its_way_is_refused(root: Path) -> None:
    tree = base(root)
    wanted = spec(tree, {ENVIRON: b"WHO = 'patched'\n"})
    wanted["files"][ENVIRON] = python_env.pack(b"WHO = 'damaged'\n")
    with pytest.raises(AgentError, match="found sha256"):
        release.stage(wanted, str(tree), sys.executable, lambda *a, **k: None)


def test_too_little_space_is_said_before_anything_is_copied(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = base(root)
    monkeypatch.setattr(release, "free_bytes", lambda path: 1000)
    with pytest.raises(AgentError, match="1000 bytes free"):
        stage(tree, {ENVIRON: b"WHO = 'patched'\n"})
    assert os.listdir(paths.RELEASES) == []


def test_garbage_is_what_is_neither_needed_nor_in_use_nor_new(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "_compile", lambda *arguments: None)
    tree = base(root)
    names = [stage(tree, {ENVIRON: f"WHO = {number}\n".encode()}) for number in range(5)]
    with subprocess.Popen(
        [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"],
        env={"PYTHONPATH": f"/var/lib/dsv4/releases/{names[0]}/python"}, stdout=subprocess.PIPE,
    ) as server:  # fmt: skip
        assert server.stdout is not None and server.stdout.readline()
        removed = release.collect_garbage({names[1]}, 1)
        server.kill()
    assert removed == [names[2], names[3]] and sorted(release.listed()) == sorted([names[0], names[1], names[4]])


def test_leftovers_of_a_staging_that_died_are_removed(root: Path) -> None:
    os.makedirs(f"{paths.RELEASES}/.staging-{'a' * 64}/python")
    release.collect_garbage(set(), 2)
    assert os.listdir(paths.RELEASES) == []
