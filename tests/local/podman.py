"""podman, with the few settings that this machine needs and no others."""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from tests.local.process import Done, run
from tests.local.settings import CACHE, LocalError

CAP_SYS_RESOURCE = 24
#: Lower than podman's own defaults: a machine that may not raise limits refuses those.
OPEN_FILES = PROCESSES = 20000
#: Where distributions put podman's network program.
NETAVARK = ("/usr/lib/podman/netavark", "/usr/libexec/podman/netavark")


def cgroup_kind(root: Path = Path("/sys/fs/cgroup")) -> str:
    """``v2``, ``hybrid`` or ``v1``."""
    if (root / "cgroup.controllers").exists():
        return "v2"
    return "hybrid" if (root / "unified" / "cgroup.controllers").exists() else "v1"


def may_raise_limits(status: str) -> bool:
    """Whether /proc/<pid>/status shows CAP_SYS_RESOURCE among the effective capabilities."""
    for line in status.splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_SYS_RESOURCE & 1)
    return False


def containers_conf(*, cgroup: str, systemd: bool, limits: bool, backend: str, netavark: bool) -> str:
    """The containers.conf for such a machine; empty where podman's own defaults work.

    cgroup: of cgroup_kind. systemd: whether this machine runs it. limits: whether limits may be raised.
    backend: the network backend that podman would take. netavark: whether that one is installed.
    """
    containers: list[str] = []
    engine: list[str] = []
    network: list[str] = []
    if not limits:

        def ceiling(kind: int, wanted: int) -> int:
            hard = resource.getrlimit(kind)[1]
            return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)

        files = ceiling(resource.RLIMIT_NOFILE, OPEN_FILES)
        processes = ceiling(resource.RLIMIT_NPROC, PROCESSES)
        containers.append(f'default_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]')
    if cgroup == "hybrid":  # crun refuses it
        engine.append('runtime = "runc"')
    if not systemd:  # podman's defaults ask systemd for cgroups and write events to its journal
        engine += ['cgroup_manager = "cgroupfs"', 'events_logger = "file"']
    if backend == "cni" and netavark:  # a CNI file left by Debian's package makes podman take CNI, without its plugins
        network.append('network_backend = "netavark"')
    sections = {"containers": containers, "engine": engine, "network": network}
    return "".join(f"[{name}]\n" + "\n".join(lines) + "\n" for name, lines in sections.items() if lines)


@cache
def environment() -> dict[str, str]:
    """What podman's environment needs on this machine: CONTAINERS_CONF, or nothing.

    A CONTAINERS_CONF of the user's own is left alone.
    """
    if shutil.which("podman") is None:
        raise LocalError(
            "found no podman on PATH: `make setup` installs it with apt; elsewhere install podman 4.3 or newer "
            "with netavark and runc or crun"
        )
    if os.environ.get("CONTAINERS_CONF"):
        return {}
    wanted = partial(
        containers_conf,
        cgroup=cgroup_kind(),
        systemd=Path("/run/systemd/system").is_dir(),
        limits=may_raise_limits(Path("/proc/self/status").read_text(encoding="utf-8")),
        netavark=any(Path(path).exists() for path in NETAVARK),
    )
    path = CACHE / "containers.conf"
    # podman cannot even say its network backend where its runtime fails, so ask with the rest in place.
    env = _write(path, wanted(backend=""))
    backend = run(["podman", "info", "--format", "{{.Host.NetworkBackend}}"], env=env).out.strip()
    return _write(path, wanted(backend=backend))


def _write(path: Path, text: str) -> dict[str, str]:
    """Put the file there if it has anything to say; the environment that makes podman read it."""
    if not text:
        return {}
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    return {"CONTAINERS_CONF": str(path)}


def podman(*argv: str, stdin: bytes = b"", timeout: float = 120, check: bool = True) -> Done:
    """One podman command. It is not cut short: podman loses count of its own things when it is."""
    return run(["podman", *argv], stdin=stdin, env=environment(), timeout=timeout, check=check, finish=True)


def wait_for_others(name: str, seconds: float = 120.0) -> None:
    """Wait for podman commands of an interrupted run that still make or remove things named ``name``…

    LocalError if they do not end.
    """
    deadline = time.monotonic() + seconds
    while busy := [pid for pid, argv in _podman_commands() if any(name in word for word in argv)]:
        if time.monotonic() > deadline:
            raise LocalError(f"found podman still busy with {name} after {seconds:.0f} s (pid {busy[0]}), expected an end")
        time.sleep(0.2)


def _podman_commands() -> Iterator[tuple[int, list[str]]]:
    """Running podman commands that change containers or networks."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            argv = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has just ended
            continue
        if Path(argv[0]).name == "podman" and len(argv) > 1 and argv[1] in ("create", "cp", "start", "rm", "network"):
            yield int(path.parent.name), argv


def podman_json(*argv: str) -> Any:
    """One podman command whose output is JSON."""
    return json.loads(podman(*argv, "--format", "json").out or "null") or []
