"""What the playbook tests share: quick settings, copies of the inventory, and what a worker shows of itself."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tests.local import handmade
from tests.local.fleet import Fleet
from tests.local.playbook import INVENTORY, Event, Outcome, environment, playbook_path
from tests.local.settings import CACHE, HOSTS, ROOT, WORKER_PORTS, role_of
from tests.local.ssh import close_connections

DECODES = ("decode1", "decode2", "decode3")
WORKERS = (*DECODES, "prefill1", "prefill2")
OVERLAP = "SGLANG_OPT_USE_MULTI_STREAM_OVERLAP"
GE_DIFF = "SGLANG_DSV4_GE_DIFF"
CANARY = "SGLANG_DSV4_IDXK_CANARY"
ALL_DECODES_AT_ONCE = {"dsv4_waves": ["100%"], "dsv4_at_once": 3, "sglang_worker_min_admitted": 0}
#: Deadlines that a test can wait for.
QUICK: dict[str, object] = {
    "sglang_worker_soak_s": 1,
    "sglang_worker_consecutive": 2,
    "sglang_worker_gate_timeout_s": 60,
    "sglang_worker_drain_timeout_s": 60,
    "sglang_worker_router_timeout_s": 40,
    "sglang_worker_gone_timeout_s": 15,
    "sglang_worker_probe_timeout_s": 10,
    "sglang_serve_restart_delay_s": 1,
}
QUICK_STANDIN = {**handmade.STANDIN_SETTINGS, "start_s": 0.6, "sigterm_poll_s": 0.2, "health_min_s": 0.1, "token_ms": 5.0}


def hand_made(fleet: Fleet, hosts: Sequence[str] = WORKERS) -> None:
    """Bring workers into the hand-made state, with quick engines; only the releases on them are kept.

    A container made anew would have to compile its release again, which takes longer than all else here.
    """

    def make(host: str) -> None:
        files = {
            **handmade.files(host, WORKERS),
            "/etc/dsv4-standin.json": handmade.File(json.dumps(QUICK_STANDIN)),
        }
        unit = unit_of(host)
        disable(fleet, host, unit)
        listening = fleet.run(host, ["ss", "-Hltnp", f"sport = :{WORKER_PORTS[role_of(host)]}"]).out
        assert not listening, f"{host}: found another process on the worker's port, a test left it: {listening}"
        script = "rm -rf /var/lib/dsv4/units /var/lib/dsv4/tx /run/dsv4-standin-faults.json /run/dsv4; tar -x -C /"
        fleet.run(host, ["sh", "-ec", script], stdin=handmade.archive(files))
        fleet.run(host, ["sh", "-ec", f"systemctl daemon-reload; systemctl enable --now {unit}"])
        wait_until(partial(_healthy, fleet, host, WORKER_PORTS[role_of(host)]), f"{host} healthy")

    with ThreadPoolExecutor(len(hosts)) as pool:
        list(pool.map(make, hosts))
    fleet.run("router1", ["systemctl", "restart", handmade.ROUTER_UNIT])
    fleet.wait_ready(["router1", *WORKERS])


def disable(fleet: Fleet, host: str, unit: str) -> None:
    """Stop and disable a unit, within seconds: systemd can miss that all processes went (cgroup v1), and waits."""
    drop_in = f"/run/systemd/system/{unit}.d"
    script = (
        f"mkdir -p {drop_in}; echo '[Service]\nTimeoutStopSec=2' > {drop_in}/stop.conf; systemctl daemon-reload; "
        f"systemctl disable --now {unit}; systemctl reset-failed; rm -r {drop_in}; systemctl daemon-reload"
    )
    fleet.run(host, ["sh", "-c", script])


def _healthy(fleet: Fleet, host: str, port: int) -> bool:
    return fleet.get(host, port, "/health")[0] == 200


def unit_of(host: str) -> str:
    """The name of a worker's unit."""
    return str(handmade.unit_of(host))


@dataclass(frozen=True)
class Mark:
    """What any restart of a worker, or any write to its script or unit, would change."""

    main_pid: str
    invocation: str
    script: str
    unit: str


def mark(fleet: Fleet, host: str, unit: str = "") -> Mark:
    """MainPID and InvocationID of a worker's unit; inode and times of its script and its unit file."""
    unit = unit or unit_of(host)
    script = (
        f"systemctl show --value --property=MainPID {unit}; systemctl show --value --property=InvocationID {unit}; "
        f"stat --format='%i %Y %Z' {handmade.script_of(host)} /etc/systemd/system/{unit}"
    )
    return Mark(*fleet.run(host, ["sh", "-ec", script]).out.splitlines())


def marks(fleet: Fleet, hosts: Sequence[str] = WORKERS) -> dict[str, Mark]:
    """The mark of each of these workers."""
    return {host: mark(fleet, host) for host in hosts}


def unit_state(fleet: Fleet, host: str) -> tuple[str, str]:
    """ActiveState and UnitFileState of a worker's unit."""
    shown = fleet.run(host, ["systemctl", "show", "--property=ActiveState,UnitFileState", unit_of(host)]).out
    found = dict(line.split("=", 1) for line in shown.splitlines())
    return found["ActiveState"], found["UnitFileState"]


def live(fleet: Fleet, host: str, unit: str = "") -> dict[str, str]:
    """The environment of a worker's main process."""
    script = f"tr '\\0' '\\n' < /proc/$(systemctl show --value --property=MainPID {unit or unit_of(host)})/environ"
    lines = fleet.run(host, ["sh", "-ec", script]).out.splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def ledger(fleet: Fleet, host: str, unit: str = "") -> dict[str, Any]:
    """What a worker keeps of itself: proved and refused states, overrides, the last end."""
    return dict(json.loads(fleet.read(host, f"/var/lib/dsv4/units/{unit or unit_of(host)}/ledger.json")))


def admitted(fleet: Fleet) -> set[str]:
    """The workers that router1 lists as healthy."""
    return {host for host, worker in fleet.router_workers().items() if worker["is_healthy"]}


def last_lines(text: str) -> dict[str, str]:
    """The last lines of a run, by worker; they follow Ansible's own summary."""
    tail = re.sub(r"\x1b\[[0-9;]*m", "", text).rpartition("PLAY RECAP")[2].partition("\nWORKERS ")[2]
    lines = (line.partition(": ") for line in tail.splitlines()[1:])
    return {host: told for host, _, told in lines if re.fullmatch(r"[a-z]+[0-9]+", host)}


def waves(outcome: Outcome) -> list[list[str]]:
    """The workers of each wave that began, in order."""
    found: list[list[str]] = []
    for event in outcome.events:
        data = event.get("event_data", {})
        if event["event"] == "playbook_on_play_start" and "wave" in data.get("play", ""):
            found.append([])
        if event["event"] == "runner_on_start" and data.get("task_action") == "dsv4.fleet.change":
            found[-1].append(data["host"])
    return found


def count(outcome: Outcome, action: str) -> int:
    """How often an action was carried out."""
    return len(outcome.results(action))


def wait_until(true: Callable[[], bool], what: str, seconds: float = 90.0) -> None:
    """Wait until something is so; an AssertionError says what was waited for."""
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, f"found nothing of this after {seconds:.0f} s: {what}"
        time.sleep(0.1)


# -- inventories ---------------------------------------------------------------------------------------------


def inventory(
    directory: Path,
    hosts: Sequence[str] = HOSTS,
    *,
    every: Mapping[str, object] | None = None,
    host_vars: Mapping[str, Mapping[str, object]] | None = None,
    raw: str = "",
) -> Path:
    """A copy of inventory/local under ``directory``, with these hosts alone.

    every: variables of all hosts, over those of the copy. host_vars: of one host. raw: YAML text, as it is, over both.
    """
    place = directory / "inventory" / "copy"
    shutil.copytree(INVENTORY / "group_vars", place / "group_vars")
    (directory / ".cache").symlink_to(CACHE)
    whole = place / "group_vars" / "all"
    whole.mkdir()
    (place / "group_vars" / "all.yml").rename(whole / "0.yml")
    if every:
        (whole / "1.yml").write_text(yaml.safe_dump(dict(every)))
    if raw:
        (whole / "2.yml").write_text(raw)
    groups: dict[str, dict[str, Any]] = {}
    for host in hosts:
        group = groups.setdefault(role_of(host), {"hosts": {}})
        group["hosts"][host] = dict((host_vars or {}).get(host, {})) or None
    (place / "hosts.yml").write_text(yaml.safe_dump({"all": {"children": groups}}, sort_keys=False))
    return place


#: ssh to a port that nobody listens on.
CLOSED = {"ansible_host": "127.0.0.1", "ansible_port": 9}


def cut(fleet: Fleet, host: str) -> None:
    """Take ssh to a host away, with the connections that are open; what runs on the host goes on."""
    fleet.run(host, ["systemctl", "stop", "ssh.service"])
    close_connections([fleet.address(host)])


def mend(fleet: Fleet, host: str) -> None:
    """Give ssh to a host back."""
    fleet.run(host, ["systemctl", "start", "ssh.service"])


@dataclass
class Moment:
    """One moment of a run, after an action's result on a host, at which a test does something while the run waits."""

    directory: Path
    do: Callable[[], None]
    action: str = "dsv4.fleet.preflight"
    host: str = "-"
    reached: bool = False

    @property
    def _file(self) -> Path:
        return self.directory / "go"

    def __call__(self, event: Event) -> None:
        data = event.get("event_data", {})
        if self.reached or event["event"] != "runner_on_ok" or data.get("task_action") != self.action:
            return
        if self.host in ("-", data["host"]):
            self.reached = True
            self.do()
            self._file.touch()

    def playbook(self, run: Callable[..., Outcome], *args: Any, **more: Any) -> Outcome:
        """Run a playbook with this moment in it."""
        env = {
            "ANSIBLE_CALLBACK_PLUGINS": str(Path(__file__).with_name("callbacks")),
            "ANSIBLE_CALLBACKS_ENABLED": "dsv4.fleet.report,hold",
            "DSV4_HOLD": f"{self.action} {self.host} {self._file}",
        }
        outcome = run(*args, env=env, on_event=self, **more)
        assert self.reached, outcome.stdout
        return outcome


# -- a controller that can be killed --------------------------------------------------------------------------


@dataclass
class Controller:
    """ansible-playbook as an operator starts it, in a process group of its own."""

    process: subprocess.Popen[bytes]
    output: Path

    def text(self) -> str:
        """What it has printed."""
        return self.output.read_text(errors="replace")

    def wait_for(self, text: str, seconds: float = 180.0) -> None:
        """Wait until it has printed a text."""
        wait_until(lambda: text in self.text(), f"{text!r} in what it prints", seconds)

    def end(self, sign: signal.Signals) -> int:
        """Send it a signal as a terminal or a service manager does (SIGINT: to the group), and wait for its end."""
        if sign == signal.SIGTERM:
            self.process.terminate()
        else:
            os.killpg(self.process.pid, sign)
        return self.process.wait(60)


@contextmanager
def controller(
    fleet: Fleet, play: str, extra_vars: Mapping[str, object], limit: str | None = None, *more: str
) -> Iterator[Controller]:
    """ansible-playbook, running; it is ended at the end of the block if it still runs."""
    argv = ["ansible-playbook", str(playbook_path(play)), "-e", json.dumps(extra_vars), *more]
    argv += ["--limit", limit] if limit else []
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "output"
        with open(output, "wb") as file:
            process = subprocess.Popen(
                argv, cwd=ROOT, env={**os.environ, **environment(fleet.settings)}, stdin=subprocess.DEVNULL,
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            yield Controller(process, output)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def transaction(fleet: Fleet, host: str) -> str:
    """The id of the transaction that runs on a host; empty where none does."""
    active = fleet.run(host, ["systemctl", "is-active", "dsv4-agent.service"], check=False).out.strip()
    if active not in ("active", "activating"):
        return ""
    return fleet.run(host, ["sh", "-c", "ls -t /var/lib/dsv4/tx | head -n 1"]).out.strip()


def journal(fleet: Fleet, host: str) -> str:
    """The journal of the last transaction on a host, as text."""
    return fleet.run(host, ["sh", "-c", 'cat "/var/lib/dsv4/tx/$(ls -t /var/lib/dsv4/tx | head -n 1)/journal.jsonl"']).out


def result(fleet: Fleet, host: str) -> dict[str, Any]:
    """The result of the last transaction on a host; empty while it runs."""
    script = 'cat "/var/lib/dsv4/tx/$(ls -t /var/lib/dsv4/tx | head -n 1)/result.json"'
    done = fleet.run(host, ["sh", "-c", script], check=False)
    return dict(json.loads(done.out)) if done.rc == 0 else {}
