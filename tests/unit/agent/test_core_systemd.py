"""systemctl as it answers: what is read from it, and what is not believed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from agent import systemd
from agent.errors import AgentError

SHOWN = """Id=llm.service
LoadState=loaded
ActiveState=active
SubState=running
UnitFileState=@STATE@
FragmentPath=@DIR@/llm.service
DropInPaths=@DIR@/10-a.conf @DIR@/20-b.conf
NeedDaemonReload=no
MainPID=4711
InvocationID=abc
NRestarts=2
ExecStart={ path=/x/serve.sh ; argv[]=/x/serve.sh ; ignore_errors=no }
Environment=A=1 "B=two words" C=
EnvironmentFiles=/etc/one (ignore_errors=no)
EnvironmentFiles=/etc/two (ignore_errors=yes)
ControlGroup=/system.slice/llm.service
WorkingDirectory=!/root
"""


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A systemctl that logs its calls and does what the shell code in the file `does` says."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/systemctl"
    program.write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/log\n. {tmp_path}/does\n')
    program.chmod(0o755)
    for name, text in (("llm.service", "[Service]\n"), ("10-a.conf", "a\n"), ("20-b.conf", "b\n")):
        (tmp_path / name).write_text(text)
    (tmp_path / "does").write_text("")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(systemd, "BOOTED", str(tmp_path))
    return tmp_path


def shows(systemctl: Path, state: str = "enabled", before: str = "") -> None:
    text = SHOWN.replace("@DIR@", str(systemctl)).replace("@STATE@", state)
    (systemctl / "shown").write_text(text)
    (systemctl / "does").write_text(f'{before}\n[ "$1" = show ] && cat {systemctl}/shown\nexit 0\n')


def test_a_unit_is_read_whole(systemctl: Path) -> None:
    shows(systemctl)
    unit = systemd.Systemd().show("llm.service")
    assert (unit.main_pid, unit.restarts, unit.text) == (4711, 2, "[Service]\n")
    assert unit.environment == {"A": "1", "B": "two words", "C": ""}
    assert unit.environment_files == ["/etc/one", "/etc/two"] and unit.working_directory == "/root"
    drop_ins = [{"path": f"{systemctl}/10-a.conf", "text": "a\n"}, {"path": f"{systemctl}/20-b.conf", "text": "b\n"}]
    assert unit.drop_ins == drop_ins and unit.digest == systemd.unit_digest("[Service]\n", drop_ins)


def test_enabling_that_only_seems_to_work_is_an_error(systemctl: Path) -> None:
    shows(systemctl, state="masked")
    with pytest.raises(AgentError, match="'masked' after enabling"):
        systemd.Systemd().enable("llm.service")


def test_disabling_that_only_seems_to_work_is_an_error(systemctl: Path) -> None:
    shows(systemctl)
    with pytest.raises(AgentError, match="'enabled' after disabling"):
        systemd.Systemd().disable("llm.service")


def test_a_failing_call_says_what_systemd_said(systemctl: Path) -> None:
    (systemctl / "does").write_text("echo 'Unit is masked.' >&2\nexit 1\n")
    with pytest.raises(AgentError, match=r"exit status 1.*Unit is masked"):
        systemd.Systemd().daemon_reload()


def test_a_stop_that_takes_too_long_is_given_up(systemctl: Path) -> None:
    (systemctl / "does").write_text("exec sleep 60\n")
    started = time.monotonic()
    assert systemd.Systemd().stop("llm.service", 0.5, lambda: False) is False
    assert time.monotonic() - started < 30


def test_when_all_processes_are_gone_systemd_is_made_to_look_again(systemctl: Path) -> None:
    (systemctl / "does").write_text(
        f'[ "$1" = daemon-reload ] && touch {systemctl}/reloaded\n'
        f'[ "$1" = stop ] && until [ -e {systemctl}/reloaded ]; do sleep 0.1; done\nexit 0\n'
    )
    assert systemd.Systemd().stop("llm.service", 60, lambda: True) is True
    assert "daemon-reload" in (systemctl / "log").read_text()


def test_a_stop_that_takes_its_time_with_processes_left_is_left_alone(systemctl: Path) -> None:
    (systemctl / "does").write_text('[ "$1" = stop ] && sleep 2\nexit 0\n')
    assert systemd.Systemd().stop("llm.service", 60, lambda: False) is True
    assert (systemctl / "log").read_text() == "stop -- llm.service\n"


def test_a_host_without_systemd_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd, "BOOTED", "/nonexistent")
    with pytest.raises(AgentError, match="booted by systemd"):
        systemd.Systemd().show("llm.service")
