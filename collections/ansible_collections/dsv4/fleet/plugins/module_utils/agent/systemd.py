"""systemd, by systemctl: one class, so that tests can put another in its place."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from . import files
from .errors import AgentError

CALL_S = 90.0  # a call that only asks, or that changes files: far beyond what a busy host needs
BOOTED = "/run/systemd/system"
POLL_S = 0.2
STUCK_S = 1.0
_PROPERTIES = (
    "Id", "LoadState", "ActiveState", "SubState", "UnitFileState", "FragmentPath", "DropInPaths", "NeedDaemonReload",
    "MainPID", "InvocationID", "NRestarts", "ExecStart", "User", "Environment", "EnvironmentFiles", "ControlGroup",
    "Result", "ExecMainCode", "ExecMainStatus", "WorkingDirectory", "Description",
)  # fmt: skip


@dataclass(frozen=True)
class Unit:
    """A unit as systemd knows it; `text` and `drop_ins` as they lie on disk now."""

    name: str
    identity: str
    load: str
    active: str
    sub: str
    file_state: str
    fragment: str
    text: str | None
    drop_ins: list[dict[str, str]]
    need_daemon_reload: bool
    main_pid: int
    invocation: str
    restarts: int
    exec_start: str
    user: str
    environment: dict[str, str] = field(default_factory=dict)
    environment_files: list[str] = field(default_factory=list)
    cgroup: str = ""
    result: str = ""
    main_code: str = ""
    main_status: str = ""
    working_directory: str = ""
    description: str = ""

    @property
    def digest(self) -> str | None:
        return None if self.text is None else unit_digest(self.text, self.drop_ins)


def unit_digest(text: str, drop_ins: Sequence[Mapping[str, str]]) -> str:
    """sha256 of the canonical JSON of [text, [[path, text] of each drop-in in systemd's order]]."""
    return files.sha256(files.canonical([text, [[one["path"], one["text"]] for one in drop_ins]]))


class Systemd:
    """systemctl on this host. Every method raises AgentError."""

    def show(self, unit: str) -> Unit:
        """What systemd knows about the unit; a unit that it does not know has load `not-found`."""
        answer = self._call(["show", "--no-pager", f"--property={','.join(_PROPERTIES)}", "--", unit])
        found: dict[str, str] = {}
        for line in answer.splitlines():
            name, _, value = line.partition("=")
            # One EnvironmentFiles line for each file, and one ExecStart line for each command.
            found[name] = f"{found[name]}\n{value}" if found.get(name) else value
        fragment = found.get("FragmentPath", "")
        return Unit(
            name=unit,
            identity=found.get("Id", ""),
            load=found.get("LoadState", ""),
            active=found.get("ActiveState", ""),
            sub=found.get("SubState", ""),
            file_state=found.get("UnitFileState", ""),
            fragment=fragment,
            text=_text(fragment) if fragment else None,
            drop_ins=[{"path": path, "text": _text(path) or ""} for path in found.get("DropInPaths", "").split()],
            need_daemon_reload=found.get("NeedDaemonReload") == "yes",
            main_pid=int(found.get("MainPID") or 0),
            invocation=found.get("InvocationID", ""),
            restarts=int(found.get("NRestarts") or 0),
            exec_start=found.get("ExecStart", ""),
            user=found.get("User", ""),
            environment=_environment(found.get("Environment", "")),
            environment_files=[line.rpartition(" (")[0] or line for line in found.get("EnvironmentFiles", "").splitlines()],
            cgroup=found.get("ControlGroup", ""),
            result=found.get("Result", ""),
            main_code=found.get("ExecMainCode", ""),
            main_status=found.get("ExecMainStatus", ""),
            working_directory=found.get("WorkingDirectory", "").lstrip("!-"),
            description=found.get("Description", ""),
        )

    def daemon_reload(self) -> None:
        self._call(["daemon-reload"])

    def enable(self, unit: str) -> None:
        """Enable, and see that systemd says so: a refusal that only shows in the state is a refusal."""
        self._call(["enable", "--quiet", "--", unit])
        state = self.show(unit).file_state
        if state not in ("enabled", "static", "indirect", "alias", "generated"):
            raise AgentError(
                f"{unit}: found unit file state {state!r} after enabling it, expected 'enabled'. Unmask it or mend its [Install]."
            )

    def disable(self, unit: str) -> None:
        """Disable, and see that systemd says so."""
        self._call(["disable", "--quiet", "--", unit])
        state = self.show(unit).file_state
        if state in ("enabled", "enabled-runtime"):
            raise AgentError(
                f"{unit}: found unit file state {state!r} after disabling it, expected 'disabled'. Disable it by hand."
            )

    def start(self, unit: str, timeout_s: float) -> None:
        """Start the unit after forgetting earlier failures, so that a start limit does not stand in the way."""
        self._call(["reset-failed", "--", unit], allow=(0, 1))  # 1: it is not loaded yet
        self._call(["start", "--", unit], timeout_s=timeout_s)

    def stop(self, unit: str, timeout_s: float, gone: Callable[[], bool]) -> bool:
        """Stop the unit and wait; False when it was not done in time (systemd's job goes on then).

        gone: whether no process of the unit is left. On cgroup v1 systemd can miss that the last one went, and
        then waits out the unit's whole stop timeout for nothing; daemon-reload makes it look again.
        """
        deadline, empty_since = time.monotonic() + timeout_s, None
        with subprocess.Popen(
            ["systemctl", "stop", "--", unit],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=_environ(),
        ) as client:  # fmt: skip
            while client.poll() is None:
                now = time.monotonic()
                if now >= deadline:
                    client.kill()
                    return False
                if not gone():
                    empty_since = None
                elif empty_since is None:
                    empty_since = now
                elif now - empty_since >= STUCK_S:
                    self.daemon_reload()
                    empty_since = None
                time.sleep(POLL_S)
            said = client.stderr.read().decode(errors="replace") if client.stderr else ""
        if client.returncode not in (0, 5):  # 5: there is no such unit, so nothing of it runs
            raise AgentError(f"systemctl stop {unit}: found exit status {client.returncode}, expected 0; it said: {said[:2000]}")
        return True

    def kill(self, unit: str) -> None:
        """SIGKILL to every process of the unit's control group."""
        self._call(["kill", "--kill-whom=all", "--signal=SIGKILL", "--", unit])

    def stopping(self) -> bool:
        """Whether the whole system is going down."""
        return self._call(["is-system-running"], allow=(0, 1)).strip() == "stopping"

    def run(self, unit: str, description: str, command: list[str], properties: list[str]) -> None:
        """Start a transient unit; returns when its program was executed. One of that name that failed is forgotten."""
        self._call(["reset-failed", "--", unit], allow=(0, 1))  # 1: there is none
        call = ["systemd-run", "--quiet", "--collect", f"--unit={unit}", f"--description={description}"]
        _execute([*call, *(f"--property={one}" for one in properties), "--", *command], CALL_S, (0,))

    def _call(self, arguments: list[str], timeout_s: float = CALL_S, allow: tuple[int, ...] = (0,)) -> str:
        return _execute(["systemctl", *arguments], timeout_s, allow)


class _Late(AgentError):
    """A call that did not end in time."""


def _execute(command: list[str], timeout_s: float, allow: tuple[int, ...]) -> str:
    if not os.path.isdir(BOOTED):
        raise AgentError(
            "systemd: found no /run/systemd/system, expected a host that was booted by systemd. Run the worker on one."
        )
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout_s,
            env=_environ(), check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise _Late(
            f"{shlex.join(command[:6])}: found no end after {timeout_s:.0f} s. Look at 'systemctl list-jobs' on the host."
        ) from error
    except OSError as error:
        raise AgentError(f"{command[0]}: {error}; expected systemd's own programs on PATH.") from error
    if done.returncode not in allow:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing")[:2000]
        raise AgentError(f"{shlex.join(command[:6])}: found exit status {done.returncode}, expected {allow[0]}; it said: {said}")
    return done.stdout


def _environ() -> dict[str, str]:
    return {**os.environ, "LC_ALL": "C.UTF-8", "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": ""}


def wait_for(condition: Callable[[], bool], timeout_s: float, poll_s: float = 0.1) -> bool:
    """Poll until the condition holds; False when the time is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        if condition():
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(poll_s)


def _text(path: str) -> str | None:
    data = files.read(path)
    return None if data is None else data.decode(errors="replace")


def _environment(text: str) -> dict[str, str]:
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    return dict(word.split("=", 1) for word in words if "=" in word)
