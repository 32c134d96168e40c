"""A unit without systemd: a real control group, a real serve script, real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from agent import proc, systemd

ENGINE = Path(__file__).with_name("sglang_engine.py")
STATE = "a" * 64
RELEASE = "b" * 64
FLAG = "SGLANG_DSV4_GE_DIFF"


def wait_for(what: Any, seconds: float = 20.0) -> None:
    """Until `what()` is true; an upper bound, not a measurement."""
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


class ControlGroup:
    """A group in the hierarchy that systemd uses: `name=systemd` where it is mounted, else the unified one."""

    def __init__(self) -> None:
        with open("/proc/self/mountinfo", encoding="ascii") as file:
            mounts = [line.split() for line in file]
        named = [line[4] for line in mounts if line[line.index("-") + 1] == "cgroup" and "name=systemd" in line[-1]]
        unified = [line[4] for line in mounts if line[line.index("-") + 1] == "cgroup2"]
        self.name = f"/dsv4-test-{uuid.uuid4().hex[:12]}"
        self.path = Path((named or unified)[0] + self.name)
        self.path.mkdir()

    def join(self) -> None:
        """For a child between fork and exec."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def pids(self) -> list[int]:
        return [int(pid) for one in self.path.rglob("cgroup.procs") for pid in one.read_text().split()]

    def kill(self) -> None:
        until = time.monotonic() + 20
        while (pids := self.pids()) and time.monotonic() < until:
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)

    def remove(self) -> None:
        self.kill()
        for one in sorted((path for path in self.path.rglob("*") if path.is_dir()), reverse=True):
            one.rmdir()
        self.path.rmdir()


class FakeUnit:
    """What systemd would say of the unit, with processes that are really there."""

    def __init__(self, directory: Path, group: ControlGroup, port: int) -> None:
        self.directory, self.group, self.port = directory, group, port
        self.name = "sglang-dsv4-test.service"
        self.script = directory / "serve.sh"
        self.config = directory / "engine.json"
        self.release = directory / "releases" / RELEASE
        package = self.release / "python" / "sglang"
        (package / "srt").mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "srt" / "environ.py").write_text("")
        (directory / "run" / "sglang-dsv4-test").mkdir(parents=True)
        self.environment = {"DSV4_FLEET_STATE": STATE, FLAG: "1", "SPT_NOENV": "1"}
        self.settings: dict[str, Any] = {
            "port": port,
            "passports": str(directory / "run" / "sglang-dsv4-test"),
            "passport": self.passport(),
        }
        self.exec = "exec "
        self.tail = ""  # what follows the last command
        self.restart = True
        self.restarts = 0
        self.invocation = ""
        self.exec_start: str | None = None
        self.load = "loaded"
        self.need_daemon_reload = False
        self.process: subprocess.Popen[bytes] | None = None
        self.old: list[subprocess.Popen[bytes]] = []

    def passport(self, **changed: Any) -> dict[str, Any]:
        """What a right process writes; pid and start time are its own."""
        package = self.release / "python" / "sglang"
        return {
            "format": 1,
            "state": STATE,
            "release": RELEASE,
            "sglang": str(package / "__init__.py"),
            "environ": str(package / "srt" / "environ.py"),
            "flags": {FLAG: True},
            "armed": [],
            "python": "3.11.2",
            **changed,
        }

    def expect(self, **changed: Any) -> dict[str, Any]:
        return {
            "state": STATE,
            "release": RELEASE,
            "flags": {FLAG: True},
            "environment": {FLAG: "1"},
            "arguments": [sys.executable, str(ENGINE), str(self.config)],
            **changed,
        }

    def worker(self, **changed: Any) -> dict[str, Any]:
        return {
            "name": "test",
            "role": "unified",
            "unit": self.name,
            "script": str(self.script),
            "tree": "/nowhere",
            "python": "python3",
            "host": "127.0.0.1",
            "port": self.port,
            "url": f"http://127.0.0.1:{self.port}",
            "bootstrap_port": None,
            "routers": [],
            **changed,
        }

    def set(self, **settings: Any) -> None:
        """Change how the running engine behaves: it reads its file at each request."""
        self.settings.update(settings)
        new = self.config.with_suffix(".new")
        new.write_text(json.dumps(self.settings))
        new.replace(self.config)

    def start(self) -> None:
        self.set()
        exports = "".join(f"export {name}={value}\n" for name, value in self.environment.items())
        self.script.write_text(f"#!/bin/bash\n{exports}{self.exec}{sys.executable} {ENGINE} {self.config}\n{self.tail}")
        self.script.chmod(0o755)
        self.invocation = uuid.uuid4().hex
        clean = {"PATH": os.environ["PATH"], "HOME": "/"}
        self.process = subprocess.Popen(["/bin/bash", str(self.script)], env=clean, preexec_fn=self.group.join)

    def start_and_listen(self) -> None:
        """For tests in which the gate's time must not go to the start."""
        self.start()
        wait_for(lambda: proc.listener(self.port))

    def show(self, unit: str) -> systemd.Unit:
        assert unit == self.name
        assert self.process is not None
        code = self.process.poll()
        active, sub = ("active", "running") if code is None else ("failed", "failed")
        if code is not None and self.restart:
            self.old.append(self.process)
            self.restarts += 1
            self.start()
            active, sub = "active", "running"
        return systemd.Unit(
            name=unit,
            identity=unit,
            load=self.load,
            active=active,
            sub=sub,
            file_state="enabled",
            fragment="/etc/systemd/system/" + unit,
            text=None,
            drop_ins=[],
            need_daemon_reload=self.need_daemon_reload,
            main_pid=self.process.pid if active == "active" else 0,
            invocation=self.invocation,
            restarts=self.restarts,
            exec_start=self.exec_start
            or f"{{ path=/bin/bash ; argv[]=/bin/bash {self.script} ; ignore_errors=no ; pid=0 ; status=0/0 }}",
            user="",
            cgroup=self.group.name,
            result="success" if active == "active" else "exit-code",
            main_code="1",
            main_status=str(code or 0),
        )

    def main(self) -> proc.Process:
        assert self.process is not None
        found = proc.process(self.process.pid)
        assert found is not None
        return found

    def close(self) -> None:
        self.restart = False
        self.group.kill()
        for one in [*self.old, self.process]:
            if one is not None:
                one.wait(20)
