"""A host without systemd, processes or routers: files are real, the rest is made up and counts what is done to it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from agent import files, gate, paths, python_env, release, router, start, states, systemd
from agent.journal import Transaction
from agent.proc import Process
from agent.transaction import Change, Tools

UNIT = "sglang-dsv4-decode.service"
LIMITS: dict[str, Any] = {
    "drain_s": 5,
    "stop_s": 5,
    "gone_s": 0.2,
    "gate_s": 5,
    "soak_s": 0,
    "consecutive": 1,
    "probe_s": 1,
    "router_s": 5,
    "min_admitted": 1,
    "keep_releases": 2,
}
GENERATION = {"prompt": "Say yes.", "expect": "yes", "max_tokens": 4}


class Killed(BaseException):
    """The agent ends here, as by kill -9: nothing of it runs any more."""


@dataclass
class Entry:
    """A worker as the made-up router lists it."""

    url: str


class MadeUpRouter:
    """Lists workers; may be out of reach."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.listed: list[Entry] = []
        self.reachable = True

    def workers(self, timeout_s: float = 0) -> list[Entry]:
        if not self.reachable:
            raise router.RouterError(f"router {self.url}: out of reach")
        return list(self.listed)

    def remove(self, url: str) -> None:
        self.workers()
        self.listed = [one for one in self.listed if one.url != url]

    def add(self, url: str) -> None:
        self.workers()
        if not any(one.url == url for one in self.listed):
            self.listed.append(Entry(url))


@dataclass
class MadeUpHost:
    """Everything around a worker. `log` is what was done, in order; the attributes below it are the faults."""

    root: Path
    log: list[str] = field(default_factory=list)
    bad_states: set[str] = field(default_factory=set)  # they fail their gate
    sick: bool = False  # the live process fails every gate until it is restarted
    stubborn: bool = False  # the old process survives its stop
    slow_stop: bool = False
    masked: bool = False
    drain_fails: bool = False
    gpu: list[tuple[int, int]] = field(default_factory=list)
    kill_at: str = ""
    drop_ins: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.directory = self.root / "root/sglang-dsv4"
        self.tree = self.directory / "python"
        (self.tree / "sglang/srt").mkdir(parents=True)
        (self.tree / "sglang/__init__.py").write_text("")
        (self.tree / "sglang/_version.py").write_text("__version__ = version = '0.5.18'\n")
        (self.tree / "sglang/srt/environ.py").write_text("WHO = 'base'\n")
        self.script = self.directory / "serve.sh"
        self.script.write_text("#!/bin/bash\nexport SGLANG_X=1\nexec python3 -m hand_made\n")
        self.script.chmod(0o750)
        self.unit_path = self.root / "etc/systemd/system" / UNIT
        self.unit_path.write_text(f"[Service]\nExecStart={self.script}\n\n[Install]\nWantedBy=multi-user.target\n")
        self.enabled = {UNIT}
        self.active = False
        self.loaded_unit = ""
        self.main: Process | None = None
        self.orphans: list[Process] = []
        self.invocation = ""
        self.agent: tuple[str, str] | None = None
        self.going_down = False
        self._pids = itertools.count(5000)
        self.router = MadeUpRouter("http://router1:8000")
        self.router.add("http://decode1:30002")
        self.daemon_reload()
        self.start(UNIT, 1)
        self.log.clear()

    # --- what systemd does ---

    def show(self, unit: str) -> systemd.Unit:
        path = self.root / "etc/systemd/system" / unit
        text = path.read_text() if path.exists() else None
        if unit == paths.AGENT_UNIT:
            return self._unit(
                unit, None, "inactive" if self.agent is None else self.agent[0], 0, self.agent[1] if self.agent else ""
            )
        mine = unit == UNIT
        active = "active" if mine and self.active else "inactive"
        return self._unit(unit, text, active, self.main.pid if mine and self.main else 0, "")

    def _unit(self, unit: str, text: str | None, active: str, pid: int, description: str) -> systemd.Unit:
        load = "masked" if self.masked and unit == UNIT else "not-found" if text is None else "loaded"
        command = re.search(r"ExecStart=(\S+)", text or "")
        return systemd.Unit(
            name=unit,
            identity=unit,
            load=load,
            active=active,
            sub="running" if active == "active" else "dead",
            file_state="enabled" if unit in self.enabled else "disabled",
            fragment=f"/etc/systemd/system/{unit}",
            text=text,
            drop_ins=self.drop_ins if unit == UNIT else [],
            need_daemon_reload=unit == UNIT and (text or "") != self.loaded_unit,
            main_pid=pid,
            invocation=self.invocation if unit == UNIT else "",
            restarts=0,
            exec_start=f"path={command[1]}" if command else "",
            user="",
            cgroup="/system.slice/" + unit if pid else "",
            description=description,
        )

    def daemon_reload(self) -> None:
        self.loaded_unit = self.unit_path.read_text() if self.unit_path.exists() else ""

    def enable(self, unit: str) -> None:
        self.log.append(f"enable {unit}")
        self.enabled.add(unit)

    def disable(self, unit: str) -> None:
        self.log.append(f"disable {unit}")
        self.enabled.discard(unit)

    def start(self, unit: str, timeout_s: float) -> None:
        self._maybe_killed("start")
        script = Path(re.findall(r"ExecStart=(\S+)", self.loaded_unit)[0])
        text = script.read_text()
        environ = {name: value.strip("'\"") for name, value in re.findall(r"^export (\w+)=(.*)$", text, re.MULTILINE)}
        command = text.strip().splitlines()[-1].removeprefix("exec ").split()
        pid = next(self._pids)
        self.main = Process(pid, pid * 10, 1, command, "/usr/bin/python3", environ, "S", 0)
        self.invocation, self.active, self.sick = f"invocation{pid}", True, False
        self.log.append(f"start {environ.get('DSV4_FLEET_STATE', 'baseline')[:8]}")

    def stop(self, unit: str, timeout_s: float, gone: Callable[[], bool]) -> bool:
        self._maybe_killed("stop")
        self.log.append("stop")
        if self.stubborn and self.main:
            self.orphans.append(self.main)
        self.active, self.main = False, None
        return not self.slow_stop

    def kill(self, unit: str) -> None:
        self.log.append("kill")

    def stopping(self) -> bool:
        return self.going_down

    def run(self, unit: str, description: str, command: list[str], properties: list[str]) -> None:
        self.log.append(f"run {description}")
        self.agent = ("active", description)
        self.launched = (command, properties)

    # --- the tools ---

    def tools(self) -> Tools:
        return Tools(
            systemd=self,
            drain=self._drain,
            admit=self._admit,
            gate=self._gate,
            collect=self._collect,
            routers=lambda worker, secrets: [self.router],
            processes_of=lambda cgroup: [self.main] if self.main and cgroup else [],
            process=self._process,
            listener=lambda port, host: [one.pid for one in self.orphans],
            gpu_holders=lambda: self.gpu,
            health=lambda worker, key, s: (503, None) if self.sick or not self.active else (200, None),
        )

    def _maybe_killed(self, where: str) -> None:
        if self.kill_at == where:
            self.kill_at = ""
            raise Killed

    def _process(self, pid: int) -> Process | None:
        return next((one for one in [*self.orphans, *([self.main] if self.main else [])] if one.pid == pid), None)

    def _drain(self, worker: dict[str, Any], secrets: dict[str, Any], limits: dict[str, Any], say: Callable[..., None]) -> None:
        self._maybe_killed("drain")
        self.log.append("drain")
        self.router.remove(worker["url"])
        self._maybe_killed("drained")
        if self.drain_fails:
            if not self.sick:
                self.router.add(worker["url"])
            raise router.DrainRefused("the worker was not idle", restored=not self.sick)

    def _admit(
        self,
        worker: dict[str, Any],
        secrets: dict[str, Any],
        limits: dict[str, Any],
        say: Callable[..., None],
        generation: Any,
    ) -> list[str]:
        self._maybe_killed("admit")
        self.router.add(worker["url"])
        self.log.append("admit")
        return []

    def _gate(
        self,
        worker: dict[str, Any],
        expect: dict[str, Any],
        before: dict[str, Any] | None,
        limits: dict[str, Any],
        generation: dict[str, Any],
        secrets: dict[str, Any],
        say: Callable[..., None],
    ) -> dict[str, Any]:
        self._maybe_killed("gate")
        if self.main is None:
            raise gate.GateRefused("the server died")
        state = self.main.environ.get("DSV4_FLEET_STATE", "baseline")
        if before is not None and before["main_pid"] == self.main.pid:
            raise gate.GateRefused("not restarted")
        if state != expect["state"] or state in self.bad_states or self.sick:
            raise gate.GateRefused(f"found state {state[:8]}, token {secrets.get('api_key')}")
        self.log.append(f"gate {state[:8]}")
        return {"main_pid": self.main.pid, "passports": 2, "notes": []}

    def _collect(self, worker: dict[str, Any], directory: str, since: float) -> list[str]:
        self.log.append("evidence")
        Path(directory).mkdir()
        (Path(directory) / "journal.txt").write_text("found")
        return ["journal.txt"]

    # --- requests ---

    def worker(self) -> dict[str, Any]:
        return {
            "name": "decode1",
            "role": "decode",
            "unit": UNIT,
            "script": str(self.script),
            "tree": str(self.tree),
            "python": "python3",
            "host": "127.0.0.1",
            "port": 30002,
            "url": "http://decode1:30002",
            "bootstrap_port": None,
            "routers": [{"url": "http://router1:8000", "metrics_url": None}],
        }

    def target(self, word: str, secret: dict[str, Any] | None = None, digest: str = "none") -> dict[str, Any]:
        """A target whose release has an environ.py that says `word`."""
        content = {"python/sglang/srt/environ.py": f"WHO = '{word}'\n".encode()}
        tree = files.index(str(self.tree)).digest
        manifest = {
            "format": 1,
            "fleet": "0",
            "version": "0.5.18",
            "tree": tree,
            "files": {path: {"result": files.sha256(data)} for path, data in content.items()},
        }
        name = release.digest_of(manifest)
        unit = f"[Service]\nExecStart={self.script}\nKillMode=mixed\n\n[Install]\nWantedBy=multi-user.target\n"
        unit_digest = systemd.unit_digest(unit, self.drop_ins)
        lines = f"#!/bin/bash\nexport DSV4_FLEET_RELEASE={name}\nexport DSV4_FLEET_UNIT={unit_digest}\n"
        lines += f"export DSV4_FLEET_SECRETS={digest}\n"
        lines += f"export PYTHONPATH={paths.release(name)}/python\nexport WORD={word}\n"
        state = states.state_of((lines + "exec python3 -m server\n").encode())
        script = lines + f"export DSV4_FLEET_STATE={state}\nexec python3 -m server\n"
        return {
            "state": state,
            "script": script,
            "unit": unit,
            "unit_digest": unit_digest,
            "secrets": digest,
            "release": {
                "digest": name,
                "tree": tree,
                "manifest": manifest,
                "files": {path: python_env.pack(data) for path, data in content.items()},
            },
            "expect": {
                "state": state,
                "release": name,
                "flags": {},
                "environment": {},
                "arguments": ["python3", "-m", "server"],
            },
        }

    def request(self, target: dict[str, Any], **fields: Any) -> dict[str, Any]:
        data = files.read(str(self.script))
        return {
            "format": 1,
            "op": "start",
            "id": f"20260921T101500-{next(self._pids):08x}",
            "worker": self.worker(),
            "secrets": {},
            "seen": {"script": None if data is None else files.sha256(data), "process": None},
            "target": target,
            "limits": LIMITS,
            "generation": GENERATION,
            **fields,
        }

    def begin(self, request: dict[str, Any]) -> Change:
        """What `start` does and the transient unit then begins with."""
        answer = start.start(request, b"program", cast(systemd.Systemd, self))
        self.agent = None
        secrets = json.loads(Path(paths.secrets(answer["id"])).read_text())
        return Change(Transaction(answer["id"]), secrets, self.tools())

    def change(self, target: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """One whole transaction; its result."""
        return self.begin(self.request(target, **fields)).run()

    def die(self, target: dict[str, Any], where: str, **fields: Any) -> str:
        """A transaction whose agent is killed at a point; its id."""
        change = self.begin(self.request(target, **fields))
        self.kill_at = where
        try:
            change.run()
        except Killed:
            return change.transaction.id
        raise AssertionError(f"nothing was killed at {where}")

    def reboot(self) -> None:
        """Everything that lives in memory is gone."""
        self.active, self.main, self.orphans = False, None, []
        for one in Path(paths.SECRETS).glob("*"):
            one.unlink()

    @property
    def pid(self) -> int:
        """The main process; it must be running."""
        assert self.main is not None
        return self.main.pid

    def live(self) -> str | None:
        return None if self.main is None else self.main.environ.get("DSV4_FLEET_STATE", "baseline")

    def ledger(self) -> dict[str, Any]:
        return dict(json.loads(Path(paths.worker(UNIT), "ledger.json").read_text()))

    def listed(self) -> bool:
        return bool(self.router.listed)

    def leftovers(self) -> list[str]:
        """Temporary files beside the targets, and secrets in memory."""
        found = [str(path) for path in [*self.directory.glob(".*"), *self.unit_path.parent.glob(".*")]]
        return found + [str(path) for path in Path(paths.SECRETS).glob("*")]
