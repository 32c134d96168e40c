"""The program and its loader: nothing runs unless all of it arrived."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import zipfile
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from agent import cache, files, pack, paths

REQUEST = {"format": 1, "op": "compile", "python": "python3", "sources": {}, "marker": "x" * 50}


def run(argv: list[str], stdin: bytes) -> tuple[int, dict[str, Any]]:
    done = subprocess.run([sys.executable, *argv[1:]], input=stdin, capture_output=True, timeout=60, check=False)
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_same_source_gives_the_same_bytes() -> None:
    first = pack.program()
    pack.program.cache_clear()
    assert pack.program() == first
    names = zipfile.ZipFile(BytesIO(first)).namelist()
    assert "__main__.py" in names and "agent/transaction.py" in names and not [name for name in names if "pyc" in name]


def test_a_whole_request_is_answered() -> None:
    code, answer = run(*pack.command(REQUEST))
    assert (code, answer["ok"], answer["errors"]) == (0, True, [])


def test_compile_names_file_line_and_error() -> None:
    packed = base64.b64encode(zlib.compress(b"x = 1\ndef f(:\n")).decode()
    code, answer = run(*pack.command({**REQUEST, "sources": {"sglang/a.py": packed}}))
    assert code == 0 and answer["errors"] == [{"file": "sglang/a.py", "line": 2, "error": "invalid syntax"}]


@pytest.mark.parametrize("kept", [0, 1, 1000, -1, -60])
def test_a_cut_program_or_request_runs_nothing(kept: int) -> None:
    argv, stdin = pack.command(REQUEST)
    code, answer = run(argv, stdin[:kept])
    assert code == 65 and not answer["ok"] and "bytes on standard input" in answer["error"]


@pytest.mark.parametrize("where", [100, -10])
def test_a_damaged_program_or_request_runs_nothing(where: int) -> None:
    argv, stdin = pack.command(REQUEST)
    damaged = bytearray(stdin)
    damaged[where] ^= 1
    code, answer = run(argv, bytes(damaged))
    assert code == 65 and "damaged" in answer["error"]


def test_no_secret_is_in_the_arguments() -> None:
    argv, stdin = pack.command({**REQUEST, "secrets": {"api_key": "sk-secret-value"}})
    assert not any("sk-secret-value" in word for word in argv) and b"sk-secret-value" in stdin


def test_an_error_never_repeats_a_secret() -> None:
    request = {"format": 1, "op": "sk-secret-value", "secrets": {"api_key": "sk-secret-value"}}
    code, answer = run(*pack.command(request))
    assert code == 1 and "sk-secret-value" not in json.dumps(answer)


def test_another_format_is_refused() -> None:
    code, answer = run(*pack.command({**REQUEST, "format": 2}))
    assert code == 1 and "found format 2, expected 1" in answer["error"]


def test_the_compiled_form_is_used_once_it_is_kept_and_says_the_same(root: Path) -> None:
    argv, stdin = pack.command(REQUEST)
    loader = argv[3].replace("/run/dsv4/cache", paths.CACHE)
    told = f"{loader[: loader.rindex('sys.exit')]}print(sys.modules['agent'].__file__)\nsys.exit(answer(request, program))"
    cache.remember(pack.program())
    kept = cache.path(argv[5])
    assert os.stat(kept).st_mode & 0o777 == 0o600 and os.stat(paths.CACHE).st_mode & 0o777 == 0o700
    done = subprocess.run([sys.executable, *argv[1:3], told, *argv[4:]], input=stdin, capture_output=True, timeout=60)
    where, answered = done.stdout.decode().splitlines()
    assert where == f"{kept}/agent/__init__.pyc" and json.loads(answered)["ok"] is True


def test_only_the_newest_compiled_form_is_kept(root: Path) -> None:
    cache.remember(pack.program())
    other = BytesIO(pack.program())
    with zipfile.ZipFile(other, "a") as archive:
        archive.writestr("agent/another.py", "X = 1\n")
    cache.remember(other.getvalue())
    assert os.listdir(paths.CACHE) == [os.path.basename(cache.path(files.sha256(other.getvalue())))]


def test_the_stored_program_can_be_run_by_its_path(root: Path) -> None:
    stored = root / "agent.pyz"
    stored.write_bytes(pack.program())
    done = subprocess.run([sys.executable, "-I", str(stored), "nonsense"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 64 and "usage: agent.pyz run ID" in done.stderr
