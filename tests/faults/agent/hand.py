"""The agent in a container, driven by hand: requests as the plugins make them, without Ansible between."""

from __future__ import annotations

import base64
import json
import subprocess
import time
import zlib
from dataclasses import dataclass
from typing import Any

from ansible_collections.dsv4.fleet.plugins.module_utils.agent import pack, states, systemd

from patches.release import build, needed_files
from tests.local import handmade
from tests.local.fleet import Fleet
from tests.local.podman import environment
from tests.local.settings import BOOTSTRAP_PORT, WORKER_PORTS, role_of, worker_url

FLAGS = ("SGLANG_DSV4_GE_DIFF", "SGLANG_DSV4_IDXK_CANARY")
LIMITS: dict[str, Any] = {
    "drain_s": 30,
    "stop_s": 30,
    "gone_s": 10,
    "gate_s": 60,
    "soak_s": 0,
    "consecutive": 1,
    "probe_s": 10,
    "router_s": 30,
    "min_admitted": 1,
    "keep_releases": 2,
}
GENERATION = {"prompt": "Repeat this word and nothing else: dsv4fleet", "expect": "", "max_tokens": 16}


@dataclass
class Hand:
    """One worker of a fleet, and the agent on it."""

    fleet: Fleet
    host: str
    unit: str = ""

    def __post_init__(self) -> None:
        self.unit = self.unit or str(handmade.unit_of(self.host))

    # --- the host ---

    def sh(self, script: str, check: bool = True) -> str:
        """What a shell in the container prints."""
        return self.fleet.run(self.host, ["sh", "-c", script], check=check).out

    def exec(self, argv: list[str], stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """A program in the container, with bytes on its standard input."""
        name = self.fleet.settings.container(self.host)
        return subprocess.run(
            ["podman", "exec", "-i", name, *argv],
            input=stdin,
            capture_output=True,
            env=environment(),
            timeout=120,
            check=False,
        )

    def main_pid(self) -> int:
        return int(self.sh(f"systemctl show -P MainPID {self.unit}"))

    def live(self) -> str | None:
        """The state in the main process's environment."""
        text = self.sh(f"tr '\\0' '\\n' < /proc/{self.main_pid()}/environ", check=False)
        return next((line.partition("=")[2] for line in text.splitlines() if line.startswith("DSV4_FLEET_STATE=")), None)

    def script(self) -> bytes:
        return self.exec(["cat", self.worker()["script"]]).stdout

    # --- requests ---

    def worker(self) -> dict[str, Any]:
        role = role_of(self.host)
        port = WORKER_PORTS[role]
        return {
            "name": self.host,
            "role": role,
            "unit": self.unit,
            "script": handmade.script_of(self.host),
            "tree": handmade.TREE,
            "python": "python3",
            "host": "127.0.0.1",
            "port": port,
            "url": worker_url(self.host),
            "bootstrap_port": BOOTSTRAP_PORT if role == "prefill" else None,
            "routers": [{"url": "http://router1:8000", "metrics_url": None}],
        }

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request by the loader; the answer, whether it is ok or not."""
        argv, stdin = pack.command(request)
        done = self.exec(argv, stdin)
        assert done.stdout, done.stderr.decode()
        return dict(json.loads(done.stdout.splitlines()[-1]))

    def inspect(self, fast: bool = False) -> dict[str, Any]:
        answer = self.call(
            {
                "format": 1,
                "op": "inspect",
                "worker": self.worker(),
                "secrets": {},
                "tree_files": needed_files(),
                "known_trees": [],
                "fast": fast,
            }
        )
        assert answer["ok"], answer
        return answer

    def target(self, seen: dict[str, Any], flags: dict[str, bool]) -> dict[str, Any]:
        """A target with these flags, on the host's own tree with our line in it."""
        base = {name: zlib.decompress(base64.b64decode(text)) for name, text in seen["tree"]["content"].items()}
        release = build(base, seen["tree"]["digest"], seen["tree"]["version"])
        script_path, stem = self.worker()["script"], self.unit.removesuffix(".service")
        unit = (
            f"[Unit]\nDescription=worker\n\n[Service]\nType=exec\nExecStart={script_path}\nKillMode=mixed\nTimeoutStopSec=20\n"
            f"Restart=on-failure\nRuntimeDirectory=dsv4/{stem}\n\n[Install]\nWantedBy=multi-user.target\n"
        )
        values = {name: "1" if flags.get(name) else "0" for name in FLAGS}
        digest = systemd.unit_digest(unit, seen["unit"]["drop_ins"])
        environment = {
            "DSV4_FLEET_RELEASE": release.digest,
            "DSV4_FLEET_UNIT": digest,
            "DSV4_FLEET_SECRETS": "none",
            "DSV4_FLEET_PYTHON": seen["python"]["fingerprint"],
            "DSV4_FLEET_FLAGS": " ".join(FLAGS),
            "DSV4_FLEET_PASSPORTS": f"/run/dsv4/{stem}",
            "SPT_NOENV": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": f"/var/lib/dsv4/releases/{release.digest}/python",
            **values,
        }
        command = [*handmade.ENGINE, *handmade.engine_arguments(self.host)]
        lines = "".join(f"export {name}='{value}'\n" for name, value in environment.items())
        text = f"#!/bin/bash\nset -eu\nexport DSV4_FLEET_STATE=\n{lines}cd /var/lib/dsv4/empty\nexec {' '.join(command)}\n"
        state = states.state_of(text.encode())
        packed = {name: base64.b64encode(zlib.compress(data)).decode() for name, data in release.files.items()}
        return {
            "state": state,
            "script": text.replace("DSV4_FLEET_STATE=\n", f"DSV4_FLEET_STATE={state}\n"),
            "unit": unit,
            "unit_digest": digest,
            "secrets": "none",
            "release": {
                "digest": release.digest,
                "tree": seen["tree"]["digest"],
                "manifest": release.manifest,
                "files": packed,
            },
            "expect": {
                "state": state,
                "release": release.digest,
                "flags": {name: bool(flags.get(name)) for name in FLAGS},
                "environment": {**environment, "DSV4_FLEET_STATE": state},
                "arguments": command,
            },
        }

    def request(self, seen: dict[str, Any], target: dict[str, Any], **fields: Any) -> dict[str, Any]:
        at = time.time()
        return {
            "format": 1,
            "op": "start",
            "worker": self.worker(),
            "secrets": {},
            "id": f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(at))}-{int(at * 1e6) & 0xFFFFFFFF:08x}",
            "seen": {"script": seen["script"]["sha256"], "process": seen["process"] and seen["process"]["state"]},
            "target": target,
            "overrides": {},
            "limits": {**LIMITS, **fields.pop("limits", {})},
            "generation": GENERATION,
            "acknowledge": True,
            "retry_refused": False,
            "preserve": False,
            "restart": False,
            **fields,
        }

    def start(self, request: dict[str, Any]) -> str:
        """Start a transaction; its id."""
        answer = self.call(request)
        assert answer["ok"], answer
        return str(answer["id"])

    def follow(self, identity: str, line: int = 0, seconds: float = 5) -> dict[str, Any]:
        """One read of a transaction, by the program that the worker keeps."""
        done = self.exec(["python3", "-I", f"/var/lib/dsv4/tx/{identity}/agent.pyz", "follow", identity, str(line), str(seconds)])
        assert done.stdout, done.stderr.decode()
        return dict(json.loads(done.stdout.splitlines()[-1]))

    def end(self, identity: str, seconds: float = 400) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Follow a transaction to its end: its result, and its journal."""
        deadline = time.monotonic() + seconds
        lines: list[dict[str, Any]] = []
        while time.monotonic() < deadline:
            answer = self.follow(identity, len(lines))
            assert answer["ok"], answer
            lines += answer["lines"]
            if answer["result"] is not None:
                return answer["result"], lines
            assert answer["running"], f"its unit is gone without a result: {lines[-3:]}"
        raise AssertionError(f"no end within {seconds} s: {lines[-3:]}")

    def change(self, target: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """Inspect, start and follow to the end."""
        return self.end(self.start(self.request(self.inspect(), target, **fields)))[0]
