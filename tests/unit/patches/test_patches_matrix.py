"""The matrix over versions, against wheels of our own making."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from patches import PatchError, matrix
from patches.hooks import HOOKS
from tests.unit.patches.sources import ENVIRON, INDEXER, REST

SOURCE = b"class Envs:\n    SGLANG_EXAMPLE = None\n\n\n_handle_deprecated_envs()\n"
FILES = {**REST, ENVIRON: SOURCE, "sglang/other.py": b"other = 1\n"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the wheels of two versions: one as upstream's, one in which an anchor is gone."""
    pins = {}
    for version, files in (("0.5.18", FILES), ("0.5.19", {**FILES, INDEXER: b"nothing = 1\n"})):
        wheel = tmp_path / f"sglang-{version}-cp311-cp311-manylinux_2_34_x86_64.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for rel, content in files.items():
                archive.writestr(rel, content)
        pins[version] = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(matrix, "WHEELS", pins)
    return tmp_path


def test_each_call_of_each_version_is_told_and_a_failed_version_fails_all(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert matrix.run(["0.5.18"], cache) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:-1]] == [["0.5.18", hook.name] for hook in HOOKS]
    assert lines[-1] == "1 of 1 versions patched, 0 failed"
    assert matrix.run(["0.5.18", "0.5.19"], cache) == 1
    out = capsys.readouterr().out
    assert "0.5.19       FAILED: hook" in out and out.endswith("1 of 2 versions patched, 1 failed\n")


def test_a_call_stands_in_the_line_that_is_told(cache: Path) -> None:
    base = matrix.read("0.5.18", cache, [hook.file for hook in HOOKS])
    assert set(base) == {ENVIRON, *REST}
    [told] = [line for line in matrix.check("0.5.18", base) if " passport " in line]
    assert told.endswith(f"{ENVIRON}:{SOURCE.decode().splitlines().index('_handle_deprecated_envs()') + 2}")


def test_a_wheel_of_other_bytes_is_refused(cache: Path) -> None:
    wheel = next(cache.glob("sglang-0.5.18-*"))
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(PatchError, match=r"has sha256 [0-9a-f]{64}, expected [0-9a-f]{64}"):
        matrix.fetch("0.5.18", cache)


def test_a_wheel_that_is_not_there_is_downloaded_by_version_for_the_hosts_platform(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = next(cache.glob("sglang-0.5.18-*"))
    content, asked = wheel.read_bytes(), []
    wheel.unlink()

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        (Path(command[command.index("--dest") + 1]) / wheel.name).write_bytes(content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    assert matrix.fetch("0.5.18", cache) == matrix.fetch("0.5.18", cache) == wheel
    assert len(asked) == 1 and {"sglang==0.5.18", "--no-deps", "--platform=manylinux_2_34_x86_64"} < set(asked[0])


def test_a_download_that_fails_is_told_with_pips_words(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    next(cache.glob("sglang-0.5.18-*")).unlink()
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: no route\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(PatchError, match=r"could not download sglang==0\.5\.18: ERROR: no route"):
        matrix.fetch("0.5.18", cache)
