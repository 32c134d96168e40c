"""Which tree it runs, that environ.py really runs in both processes, and how it starts and fails to."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from patches.hooks import HOOKS
from tests.unit.standin.standin_process import StandIn, free_port, overlay_tree, until

Start = Callable[..., StandIn]
ENVIRON = "sglang/srt/environ.py"
INDEXER = "sglang/srt/layers/attention/dsv4/indexer.py"
PROBE = Path(__file__).parents[3] / "patches" / "dsv4_probe"


@pytest.fixture
def release(tmp_path: Path, sglang_tree: Path) -> Path:
    """A release's `python` directory: the tree with the passport line, and dsv4_probe beside it."""
    python = overlay_tree(sglang_tree, tmp_path / "release" / "python", {ENVIRON: lambda text: f"{text}\n{HOOKS[0].code}\n"})
    shutil.copytree(PROBE, python / "dsv4_probe")
    return python


def test_both_processes_write_the_real_passport(start: Start, release: Path, tmp_path: Path) -> None:
    passports = tmp_path / "passports"
    passports.mkdir()
    flags = "SGLANG_DSV4_GE_DIFF SGLANG_OPT_USE_MULTI_STREAM_OVERLAP"
    env = {"DSV4_FLEET_PASSPORTS": str(passports), "DSV4_FLEET_FLAGS": flags, "SGLANG_DSV4_GE_DIFF": "1"}
    engine = start(tree=release, env={**env, "SGLANG_OPT_USE_MULTI_STREAM_OVERLAP": "off"}).wait_healthy()
    found = {int(path.stem): json.loads(path.read_text()) for path in passports.iterdir()}
    assert set(found) == {engine.process.pid, engine.scheduler()}
    for passport in found.values():
        assert passport["sglang"] == str(release / "sglang/__init__.py")
        # "off" is no boolean to SGLang: the default holds.
        assert passport["flags"] == {"SGLANG_DSV4_GE_DIFF": True, "SGLANG_OPT_USE_MULTI_STREAM_OVERLAP": True}


@pytest.mark.parametrize(("spt_noenv", "kept"), [("1", True), (None, False)])
def test_the_scheduler_keeps_its_environment_only_with_spt_noenv(start: Start, spt_noenv: str | None, kept: bool) -> None:
    env = {"DSV4_MARK": "here"} | ({"SPT_NOENV": spt_noenv} if spt_noenv else {})
    engine = start(env=env).wait_healthy()
    assert (b"DSV4_MARK=here" in Path(f"/proc/{engine.scheduler()}/environ").read_bytes()) is kept
    assert b"DSV4_MARK=here" in Path(f"/proc/{engine.process.pid}/environ").read_bytes()


def test_without_a_tree_it_ends_as_the_interpreter_does(start: Start) -> None:
    engine = start(tree=None)
    assert engine.exit_code() == 1
    assert "ModuleNotFoundError: No module named 'sglang'" in engine.text


def test_a_tree_in_the_working_directory_wins_over_pythonpath(start: Start, tmp_path: Path, sglang_tree: Path) -> None:
    stray = tmp_path / "stray"
    stray.mkdir()
    (stray / "sglang").symlink_to(sglang_tree / "sglang")
    engine = start(cwd=stray).wait_healthy()
    assert engine.text.count(f"from {stray}/sglang") == 2  # both processes


def test_an_empty_folder_does_not_hide_the_tree_on_pythonpath(start: Start, tmp_path: Path, sglang_tree: Path) -> None:
    (tmp_path / "work" / "sglang").mkdir(parents=True)
    engine = start(cwd=tmp_path / "work").wait_healthy()
    assert engine.text.count(f"from {sglang_tree}/sglang") == 2


def test_an_environ_that_does_not_run_ends_it_before_the_port_opens(start: Start, tmp_path: Path, sglang_tree: Path) -> None:
    tree = overlay_tree(sglang_tree, tmp_path / "broken", {ENVIRON: lambda text: text + "\nno_such_name\n"})
    engine = start(tree=tree)
    assert engine.exit_code() == 1
    assert "NameError" in engine.text
    assert engine.status() is None


def test_a_patched_file_that_does_not_compile_ends_the_whole_server(start: Start, tmp_path: Path, sglang_tree: Path) -> None:
    tree = overlay_tree(sglang_tree, tmp_path / "broken", {INDEXER: lambda text: text + "\ndef (:\n"})
    engine = start(tree=tree)
    assert engine.exit_code() == -signal.SIGKILL
    assert "SyntaxError" in engine.text


def test_the_port_stays_closed_while_it_loads(start: Start) -> None:
    engine = start(settings={"start_s": 7200.0, "listen_s": None})
    until("the scheduler", lambda: "scheduler" in engine.text)
    time.sleep(0.5)
    assert engine.status() is None


def test_a_taken_port_ends_it_with_1(start: Start) -> None:
    port = free_port()
    start(port=port).wait_healthy()
    second = start(port=port)
    assert second.exit_code() == 1
    assert "address already in use" in second.text.lower()


def test_a_command_line_without_a_model_is_an_error_of_usage(start: Start) -> None:
    engine = start(model=False)
    assert engine.exit_code() == 2
    assert "--model-path" in engine.text


def test_unknown_settings_and_faults_are_refused(start: Start) -> None:
    settings = start(settings={"start_seconds": 1})
    faults = start(faults={"helth_503": {"seconds": 1}})
    assert settings.exit_code() == 78
    assert "start_seconds" in settings.text
    assert faults.exit_code() == 78
    assert "helth_503" in faults.text
