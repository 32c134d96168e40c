"""What is kept of a failed gate: enough to see why, bounded, and no secret in it."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest
from agent import evidence, paths, redaction

from tests.unit.agent_observation.loopback import free_port
from tests.unit.agent_observation.units import ControlGroup, FakeUnit, wait_for

SECRETS = {"HF_TOKEN": "hush-1", "OPENAI_API_KEY": "hush-2", "DB_PASSWORD": "hush-3", "MY_SECRET_VALUE": "hush-4"}


@pytest.fixture
def programs(tmp_path: Path, group: ControlGroup, monkeypatch: pytest.MonkeyPatch) -> Path:
    """systemctl and journalctl that answer for the group and keep their arguments."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for name, text in {
        "systemctl": f"ControlGroup={group.name}\nEnvironment=HF_TOKEN=hush-5 A=1",
        "journalctl": "server_args=ServerArgs(api_key='hush-6', port=1)\nRuntimeError: out of memory",
    }.items():
        program = directory / name
        program.write_text(f"#!/bin/sh\necho \"$@\" >> {directory}/{name}.calls\ncat <<'END'\n{text}\nEND\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
    monkeypatch.setattr(paths, "RUN", str(tmp_path / "run"))
    return directory


def test_evidence_is_whole_and_holds_no_secret(programs: Path, group: ControlGroup, tmp_path: Path) -> None:
    unit = FakeUnit(tmp_path, group, free_port())
    unit.environment.update(SECRETS)
    unit.set(children=[{"argv": [sys.executable, "-c", "import time; time.sleep(60)", "--api-key", "hush-7", "--tokens", "9"]}])
    unit.start()
    try:
        wait_for(lambda: len(group.pids()) == 2 and list((tmp_path / "run").rglob("*.json")))
        wait_for(lambda: all("python" in Path(f"/proc/{pid}/exe").resolve().name for pid in group.pids()))
        into = tmp_path / "evidence"
        names = evidence.collect(unit.worker(), str(into), 1790000000.0)
    finally:
        unit.close()
    assert names == sorted(path.name for path in into.iterdir())
    whole = "".join((into / name).read_text() for name in names)
    assert "hush" not in whole
    assert "RuntimeError: out of memory" in (into / "journal.txt").read_text()
    assert "--since=@1790000000" in (programs / "journalctl.calls").read_text()
    processes = json.loads((into / "processes.json").read_text())
    main, child = sorted(processes, key=lambda one: len(one["cmdline"]))
    assert main["environ"]["DSV4_FLEET_STATE"] == unit.environment["DSV4_FLEET_STATE"]
    assert main["environ"]["HF_TOKEN"] == "(secret)"
    assert child["cmdline"][-4:] == ["--api-key", "(secret)", "--tokens", "9"]
    assert json.loads((into / "passports.json").read_text())[0]["pid"] == main["pid"]
    assert f"exec {sys.executable}" in (into / "script.sh").read_text()
    assert stat.S_IMODE(into.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in into.iterdir()} == {0o600}


def test_evidence_is_bounded_and_keeps_the_end(programs: Path, group: ControlGroup, tmp_path: Path) -> None:
    (programs / "journalctl").write_text("#!/bin/sh\nhead -c 9000000 /dev/zero | tr '\\0' x\necho\necho the end\n")
    unit = FakeUnit(tmp_path, group, free_port())
    into = tmp_path / "evidence"
    evidence.collect(unit.worker(), str(into), 0)
    journal = (into / "journal.txt").read_text()
    assert len(journal) <= evidence.MAX_BYTES + 100
    assert journal.endswith("the end\n")


def test_what_cannot_be_had_says_why(group: ControlGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    unit = FakeUnit(tmp_path, group, free_port())
    into = tmp_path / "evidence"
    evidence.collect(unit.worker(), str(into), 0)
    assert "No such file" in (into / "script.sh").read_text()
    assert "journalctl" in (into / "journal.txt").read_text()


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("export HF_TOKEN=abc next", "export HF_TOKEN=(secret) next"),
        ("--api-key sk-1 --port 2", "--api-key (secret) --port 2"),
        ("--api-key=sk-1", "--api-key=(secret)"),
        ("ServerArgs(api_key='a b', port=1)", "ServerArgs(api_key=(secret), port=1)"),
        ('{"admin_api_key": "a, b", "x": 1}', '{"admin_api_key": (secret), "x": 1}'),
        ("Authorization: Bearer abc", "Authorization: Bearer (secret)"),
        ("db_password: abc", "db_password: (secret)"),
        ("tokens=5 max_total_tokens=8192 --tokenizer-path /m", "tokens=5 max_total_tokens=8192 --tokenizer-path /m"),
        ("SGLANG_MAX_DISPATCH_TOKENS_PER_RANK=1024", "SGLANG_MAX_DISPATCH_TOKENS_PER_RANK=1024"),
        ("export DSV4_FLEET_SECRETS=none", "export DSV4_FLEET_SECRETS=none"),
        ("KeyError: 'x'", "KeyError: 'x'"),
    ],
)
def test_redaction(text: str, redacted: str) -> None:
    assert redaction.text(text) == redacted
