"""What /proc says about units, ports and processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent import proc

from tests.unit.agent_observation.units import ControlGroup, wait_for

SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    one = subprocess.Popen([sys.executable, "-c", SLEEP, "", "last"], env={"A": "1=2", "EMPTY": ""})
    wait_for(lambda: Path(f"/proc/{one.pid}/cmdline").read_bytes().endswith(b"last\0"))
    yield one
    one.kill()
    one.wait(20)


def test_process_has_all_its_fields(child: subprocess.Popen[bytes]) -> None:
    found = proc.process(child.pid)
    assert found is not None
    assert found.cmdline == [sys.executable, "-c", SLEEP, "", "last"]
    assert found.environ == {"A": "1=2", "EMPTY": ""}
    assert (found.ppid, found.uid) == (os.getpid(), os.getuid())
    assert found.exe == os.path.realpath(sys.executable)
    assert found.is_python
    assert found.start_time == proc.start_time(child.pid)


def test_dead_process_is_none_and_a_zombie_has_no_start_time() -> None:
    one = subprocess.Popen([sys.executable, "-c", ""])
    wait_for(lambda: b") Z " in Path(f"/proc/{one.pid}/stat").read_bytes())
    assert proc.start_time(one.pid) is None
    one.wait(20)
    assert proc.process(one.pid) is None
    assert proc.start_time(one.pid) is None


def test_name_with_blanks_and_brackets(tmp_path: Path) -> None:
    program = tmp_path / "a) R 1 (b"
    program.symlink_to("/bin/sleep")
    one = subprocess.Popen([str(program), "60"])
    try:
        wait_for(lambda: b"a) R" in Path(f"/proc/{one.pid}/stat").read_bytes())
        found = proc.process(one.pid)
        assert found is not None
        assert (found.ppid, found.state in "SR") == (os.getpid(), True)
    finally:
        one.kill()
        one.wait(20)


@pytest.mark.parametrize(
    ("cmdline", "exe", "engine"),
    [
        (["python3", "-m", "sglang.launch_server", "--port", "1"], "/usr/bin/python3.11", True),
        (["python3", "-X", "dev", "-m", "sglang.launch_server"], "/usr/bin/python3.11", True),
        (["sglang::scheduler_TP0"], "/usr/bin/python3.11", True),
        (["sglang::detokenizer"], "/usr/bin/python3", True),
        (["/opt/v/bin/python3", "-c", "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)"],
         "/usr/bin/python3.11", True),
        (["python3", "-c", "from multiprocessing.resource_tracker import main;main(4)"], "/usr/bin/python3", False),
        (["/opt/sglang/bin/python3", "-c", "from multiprocessing.resource_tracker import main;main(4)"],
         "/usr/bin/python3", False),
        (["/opt/sglang/bin/python3", "/opt/v/torch/_inductor/compile_worker/__main__.py"], "/usr/bin/python3", False),
        (["nvcc", "-I/root/sglang/include", "x.cu"], "/usr/local/cuda/bin/nvcc", False),
        (["/bin/bash", "/root/sglang-dsv4/serve.sh"], "/usr/bin/bash", False),
        (["/bin/bash", "/root/serve_sglang.sh"], "/usr/bin/bash", False),
        (["python3", "/opt/tool.py", "/root/sglang"], "/usr/bin/python3", False),
        ([], "/usr/bin/python3", False),
    ],
)  # fmt: skip
def test_engine_processes_by_command_line(cmdline: list[str], exe: str, engine: bool) -> None:
    one = proc.Process(1, 1, 1, cmdline, exe, {}, "S", 0)
    assert one.is_engine is engine


def test_processes_of_a_unit_and_of_groups_below_it(group: ControlGroup) -> None:
    below = group.path / "below"
    below.mkdir()
    sibling = ControlGroup()
    try:
        one = subprocess.Popen(["/bin/sleep", "60"], preexec_fn=group.join)
        two = subprocess.Popen(["/bin/sleep", "60"])
        (below / "cgroup.procs").write_text(str(two.pid))
        other = subprocess.Popen(["/bin/sleep", "60"], preexec_fn=sibling.join)
        assert {found.pid for found in proc.processes_of(group.name)} == {one.pid, two.pid}
        assert {found.pid for found in proc.processes_of(group.name + "/below")} == {two.pid}
        assert proc.processes_of(group.name[:-1]) == []  # a prefix of a name is no group
        assert [found.pid for found in proc.processes_of(sibling.name)] == [other.pid]
    finally:
        group.kill()
        sibling.remove()
        for process in (one, two, other):
            process.wait(20)


@pytest.mark.parametrize("nothing", ["", "/"])
def test_a_unit_without_a_group_has_no_processes(nothing: str) -> None:
    assert proc.processes_of(nothing) == []


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("12:pids:/x\n1:name=systemd:/system.slice/a.service\n", "/system.slice/a.service"),
        ("12:pids:/x\n1:name=systemd:/system.slice/a.service\n0::/system.slice/a.service\n", "/system.slice/a.service"),
        ("1:name=systemd:/system.slice/a.service\n0::/\n", "/system.slice/a.service"),
        ("1:name=systemd:/\n0::/system.slice/a.service\n", "/system.slice/a.service"),
        ("0::/system.slice/a:b.service\n", "/system.slice/a:b.service"),
        ("4:memory:/x\n0::/\n", "/"),
    ],
    ids=["v1", "hybrid", "hybrid, v1 used", "hybrid, v2 used", "v2", "none"],
)
def test_group_of_a_process_in_each_layout(text: str, path: str) -> None:
    assert proc.group_in(text) == path


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0", "::"])
def test_listener_owns_its_port(host: str) -> None:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
        port = one.getsockname()[1]
        assert proc.listener(port) == [os.getpid()]
    assert proc.listener(port) == []


def test_only_listening_sockets_that_take_the_address_count() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.socket() as bound:
        port = one.getsockname()[1]
        assert proc.listener(port, "127.0.0.1") == [os.getpid()]
        assert proc.listener(port, "127.0.0.2") == []
        assert proc.listener(port, "::1") == []
        bound.bind(("127.0.0.1", 0))  # bound and connected is not listening
        bound.connect(("127.0.0.1", port))
        assert proc.listener(bound.getsockname()[1]) == []
    for wildcard, family in (("0.0.0.0", socket.AF_INET), ("::", socket.AF_INET6)):
        with socket.create_server((wildcard, 0), family=family) as one:
            assert proc.listener(one.getsockname()[1], "127.0.0.1") == [os.getpid()]


def test_every_holder_of_a_listening_socket_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        held = subprocess.Popen(["/bin/sleep", "60"], pass_fds=[one.fileno()])
        try:
            assert proc.listener(one.getsockname()[1]) == sorted([os.getpid(), held.pid])
        finally:
            held.kill()
            held.wait(20)


def stub(directory: Path, body: str) -> str:
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    return str(directory)


def test_gpu_holders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert proc.gpu_holders() == []
    stub(tmp_path, "/bin/cat <<'END'\n4711, 102400\n4711, 10\n12, [N/A]\nEND")
    assert proc.gpu_holders() == [(12, 0), (4711, 102410)]


def test_gpu_that_does_not_say_is_not_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", stub(tmp_path, "echo 'driver/library version mismatch'; exit 18"))
    with pytest.raises(proc.GpuUnknown, match=r"exit code 18 .*driver/library version mismatch"):
        proc.gpu_holders()


def test_a_process_in_a_message_shows_no_secret() -> None:
    one = proc.Process(7, 1, 1, ["python3", "-m", "sglang.launch_server", "--api-key", "hush"], "", {}, "S", 0)
    assert str(one) == "process 7 (python3 -m sglang.launch_server --api-key (secret))"
