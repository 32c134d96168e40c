"""Run one playbook on a fleet through ansible-runner, and say what came of it."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ansible_runner

from tests.local.settings import CACHE, ROOT, FleetSettings, LocalError

#: The action that changes a worker; its result's key `dsv4` is the `result` object of docs/agent.md.
CHANGE = "dsv4.fleet.change"
INVENTORY = ROOT / "inventory" / "local"
Event = dict[str, Any]
_ENDED = ("runner_on_ok", "runner_on_failed", "runner_on_unreachable")


@dataclass(frozen=True)
class Outcome:
    """What one run of a playbook came to."""

    rc: int
    status: str
    stats: dict[str, dict[str, int]]
    stdout: str
    events: list[Event] = field(repr=False)

    @property
    def ok(self) -> bool:
        """Exit status 0, at least one host done, and none failed or unreachable: rc 0 alone is not success."""
        done = self.stats.get("ok", {})
        return self.rc == 0 and bool(done) and not self.stats.get("failures") and not self.stats.get("dark")

    def results(self, action: str = CHANGE, host: str | None = None) -> list[tuple[str, dict[str, Any]]]:
        """(host, result) of every ended task of this action, in order; loops give one result for the whole."""
        found = []
        for event in self.events:
            data = event.get("event_data", {})
            if event["event"] in _ENDED and data.get("task_action") == action and host in (None, data.get("host")):
                found.append((data["host"], data.get("res") or {}))
        return found

    @property
    def dsv4(self) -> dict[str, dict[str, Any]]:
        """The last `dsv4` result of each worker that was changed, or tried."""
        return {host: result["dsv4"] for host, result in self.results() if result.get("dsv4")}

    @property
    def errors(self) -> dict[str, str]:
        """The last message of each host that failed or could not be reached."""
        return {
            event["event_data"]["host"]: str((event["event_data"].get("res") or {}).get("msg", ""))
            for event in self.events
            if event["event"] in _ENDED[1:] and not event["event_data"].get("ignore_errors")
        }

    def changed(self, host: str) -> int:
        """How many tasks changed something on a host."""
        return self.stats.get("changed", {}).get(host, 0)


def _stats(events: list[Event]) -> dict[str, dict[str, int]]:
    """Ansible's counts of hosts (ok, failures, dark, …); empty if the run ended without them."""
    for event in reversed(events):
        if event["event"] == "playbook_on_stats":
            return {key: value for key, value in event["event_data"].items() if isinstance(value, dict)}
    return {}


def environment(settings: FleetSettings) -> dict[str, str]:
    """The environment in which any Ansible program works on this fleet."""
    return {
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        # Ansible names shared connections by host name alone, and every fleet has a decode1.
        "ANSIBLE_SSH_CONTROL_PATH_DIR": str(settings.control_directory),
        "ANSIBLE_FORCE_COLOR": "0",
        "ANSIBLE_NOCOLOR": "1",
        "DSV4_LOCAL_FLEET": settings.name,
        "LC_ALL": "C.UTF-8",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }


def playbook_path(name: str) -> Path:
    """The file of an entry play by its name, such as ``enable-gediff``; a path is taken as it is."""
    path = Path(name) if name.endswith((".yml", ".yaml")) else ROOT / "playbooks" / f"{name}.yml"
    if not path.is_file():
        raise LocalError(f"found no playbook {path}, expected the name of one in playbooks/ or a path")
    return path


def run_playbook(
    settings: FleetSettings,
    name: str,
    *,
    extra_vars: Mapping[str, object] | None = None,
    limit: str | None = None,
    check: bool = False,
    diff: bool = False,
    arguments: tuple[str, ...] = (),
    inventory: Path = INVENTORY,
    env: Mapping[str, str] | None = None,
    timeout: int = 900,
    on_event: Callable[[Event], None] | None = None,
) -> Outcome:
    """Run a playbook on the fleet, at most ``timeout`` seconds; on_event sees each event as it comes.

    ``arguments`` go to ansible-playbook as they are. Whether it went well is the outcome's to say.
    """
    runs = CACHE / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    events: list[Event] = []

    def keep(event: Event) -> bool:
        events.append(event)
        if on_event is not None:
            on_event(event)
        return False  # no file for each event

    command_line = [*(["--check"] if check else []), *(["--diff"] if diff else []), *arguments]
    folder = tempfile.mkdtemp(dir=runs)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        runner = ansible_runner.run(
            private_data_dir=folder,
            project_dir=str(ROOT),
            playbook=str(playbook_path(name)),
            inventory=str(inventory),
            extravars=dict(extra_vars or {}),
            limit=limit,
            cmdline=shlex.join(command_line) or None,
            envvars={**environment(settings), **(env or {})},
            event_handler=keep,
            quiet=True,
            settings={"runner_mode": "subprocess"},
            timeout=timeout,
        )
        if runner.status == "canceled":  # ansible-runner took the signal for its own
            raise KeyboardInterrupt
        stdout = runner.stdout.read()
        return Outcome(int(runner.rc), runner.status, _stats(events), stdout, events)
    finally:
        shutil.rmtree(folder)
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():  # ansible-runner leaves its own, which swallow Ctrl-C
                signal.signal(number, handler)
