"""The passport, as a process of a server writes it: a release in a directory, a fresh interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from patches import build
from tests.unit.patches.sources import ENVIRON, REST

# In our own words: a declared field, the tree's boolean type, and the renaming call.
SOURCE = b"""import os


class EnvField:
    def __init__(self, default):
        self.default = default

    def __set_name__(self, owner, name):
        self.name = name

    def get(self):
        value = os.getenv(self.name)
        return self.default if value is None else self.parse(value)


class EnvBool(EnvField):
    def parse(self, value):
        return {"1": True, "0": False}.get(value, self.default)


class EnvInt(EnvField):
    def parse(self, value):
        if not value.isdigit():
            raise ValueError("no number\\non two lines")
        return int(value)


class Envs:
    SGLANG_DECLARED = EnvBool(True)
    SGLANG_NUMBER = EnvInt(3)


envs = Envs()


def _handle_deprecated_envs():
    if "SGLANG_OLD" in os.environ:
        os.environ["SGLANG_NEW"] = os.environ["SGLANG_OLD"]


_handle_deprecated_envs()
"""
DIGEST = "0f" * 32


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A release in its place; returns the directory that goes on PYTHONPATH."""
    python = tmp_path / "releases" / DIGEST / "python"
    for rel, content in build({**REST, ENVIRON: SOURCE}, "ab" * 32, "0.5.18").files.items():
        path = python.parent / rel
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for package in ("sglang", "sglang/srt"):
        (python / package / "__init__.py").write_bytes(b"")
    return python


def start(python: Path, code: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    code = f"import sglang.srt.environ\n{code}"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DSV4_", "SGLANG_"))}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "PYTHONPATH": str(python), **environment},
        cwd="/", capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


STAT = "print(open('/proc/self/stat').read().rpartition(')')[2].split()[19])"


def test_it_says_what_this_process_imported_and_parsed(release: Path, tmp_path: Path) -> None:
    passports = tmp_path / "passports"
    passports.mkdir()
    result = start(
        release,
        f"import os; print(os.getpid()); {STAT}",
        DSV4_FLEET_PASSPORTS=str(passports),
        DSV4_FLEET_STATE="the state",
        DSV4_FLEET_FLAGS="SGLANG_DECLARED SGLANG_NUMBER SGLANG_UNDECLARED SGLANG_UNSET SGLANG_NEW "
        "SGLANG_DSV4_GE_DIFF SGLANG_DSV4_IDXK_CANARY",
        SGLANG_DSV4_GE_DIFF="1",
        SGLANG_DSV4_IDXK_CANARY="0",
        SGLANG_DECLARED="off",
        SGLANG_NUMBER="7",
        SGLANG_UNDECLARED="1",
        SGLANG_OLD="1",
    )
    assert result.returncode == 0 and result.stderr == ""
    pid, started = map(int, result.stdout.split())
    assert os.listdir(passports) == [f"{pid}.json"]
    assert (
        json.loads((passports / f"{pid}.json").read_text())
        == {
            "format": 1,
            "pid": pid,
            "start_time": started,
            "state": "the state",
            "release": DIGEST,
            "sglang": str(release / "sglang" / "__init__.py"),
            "environ": str(release / ENVIRON),
            "flags": {
                "SGLANG_DECLARED": True,  # "off" is not understood: the default, as the server sees it
                "SGLANG_NUMBER": 7,
                "SGLANG_UNDECLARED": True,
                "SGLANG_UNSET": False,
                "SGLANG_NEW": True,  # renamed before the passport looks
                "SGLANG_DSV4_GE_DIFF": True,
                "SGLANG_DSV4_IDXK_CANARY": False,
            },
            "armed": ["SGLANG_DSV4_GE_DIFF"],  # on, and its instrument is in the release
            "python": ".".join(map(str, sys.version_info[:3])),
        }
    )


def test_every_process_has_its_own(release: Path, tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, os\n"
        "if 'CHILD' not in os.environ:\n"
        "    subprocess.run([sys.executable, '-c', 'import sglang.srt.environ'], check=True,"
        " env={**os.environ, 'CHILD': '1'})"
    )
    assert start(release, code, DSV4_FLEET_PASSPORTS=str(tmp_path)).returncode == 0
    written = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len({passport["pid"] for passport in written}) == 2
    assert {passport["release"] for passport in written} == {DIGEST}


def test_it_names_the_tree_that_would_be_imported_when_only_environ_was_run(
    release: Path, tmp_path: Path
) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DSV4_", "SGLANG_"))}
    code = f"import runpy; runpy.run_path({str(release / ENVIRON)!r})"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "PYTHONPATH": str(release), "DSV4_FLEET_PASSPORTS": str(tmp_path)},
        cwd="/", capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert result.stderr == ""
    [path] = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["sglang"] == str(release / "sglang" / "__init__.py")


def test_without_the_variable_it_does_nothing(release: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DSV4_", "SGLANG_"))}
    code = (
        "import sys\n"
        "def watch(event, arguments):\n"
        "    written = event == 'open' and 'w' in str(arguments[1])\n"
        "    if written or event == 'os.rename': print(event, arguments)\n"
        "sys.addaudithook(watch)\n"
        "import sglang.srt.environ\n"
    )
    for passports, lines in (({}, 0), ({"DSV4_FLEET_PASSPORTS": str(release)}, 2)):
        result = subprocess.run(
            [sys.executable, "-B", "-c", code],
            env={**clean, "PYTHONPATH": str(release), "DSV4_FLEET_FLAGS": "SGLANG_DECLARED", **passports},
            cwd="/", capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert (len(result.stdout.splitlines()), result.stderr) == (lines, ""), result.stdout


@pytest.mark.parametrize("flags", ["SGLANG_NUMBER", ""])
def test_a_failure_is_one_line_and_the_server_goes_on(release: Path, tmp_path: Path, flags: str) -> None:
    directory = tmp_path if flags else tmp_path / "missing"
    result = start(
        release,
        "print('up')",
        DSV4_FLEET_PASSPORTS=str(directory),
        DSV4_FLEET_FLAGS=flags,
        SGLANG_NUMBER="x",
    )
    assert (result.returncode, result.stdout) == (0, "up\n")
    assert len(result.stderr.splitlines()) == 1 and "no passport" in result.stderr
    assert not list(tmp_path.glob("*.json")) and not list(tmp_path.glob(".*"))
