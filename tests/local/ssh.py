"""ssh to the fleet: a key made for it, the nodes' real host keys, and one ssh_config that names both."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.local.handmade import File
from tests.local.process import run
from tests.local.settings import FleetSettings


def _key(path: Path, comment: str) -> None:
    """An ed25519 key pair at ``path``, unless there is a whole one."""
    public = path.with_name(path.name + ".pub")
    if path.exists() and public.exists():
        path.chmod(0o600)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    public.unlink(missing_ok=True)
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)])


def node_files(settings: FleetSettings, host: str) -> dict[str, File]:
    """What a node needs for ssh: its own host key and the fleet's public key. Keys are made where missing."""
    own, login = settings.directory / "hostkeys" / host, settings.directory / "id_ed25519"
    _key(login, f"{settings.network} login")
    _key(own, f"{settings.network} {host}")

    def text(path: Path) -> str:
        return path.read_text(encoding="utf-8")

    return {
        "/etc/ssh/ssh_host_ed25519_key": File(text(own), 0o600),
        "/etc/ssh/ssh_host_ed25519_key.pub": File(text(own.with_name(own.name + ".pub"))),
        "/root/.ssh/authorized_keys": File(text(login.with_name(login.name + ".pub")), 0o600),
    }


def write_config(settings: FleetSettings, addresses: Mapping[str, str]) -> None:
    """known_hosts and ssh_config for hosts by name; both are replaced whole."""
    directory = settings.directory
    known, config = [], []
    for host, address in addresses.items():
        key = (directory / "hostkeys" / f"{host}.pub").read_text(encoding="utf-8").split()
        known.append(f"{host} {key[0]} {key[1]}\n")
        config.append(f"Host {host}\n    HostName {address}\n    HostKeyAlias {host}\n")
    settings.control_directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    config.append(
        "Host *\n"
        "    User root\n"
        f'    IdentityFile "{directory / "id_ed25519"}"\n'
        "    IdentitiesOnly yes\n"
        f'    UserKnownHostsFile "{directory / "known_hosts"}"\n'
        "    StrictHostKeyChecking yes\n"
        "    BatchMode yes\n"
        "    ConnectTimeout 10\n"
        "    ServerAliveInterval 2\n"
        "    ServerAliveCountMax 5\n"
        "    ControlMaster auto\n"
        "    ControlPersist 60s\n"
        f'    ControlPath "{settings.control_directory}/%C"\n'
    )
    for name, lines in (("known_hosts", known), ("ssh_config", config)):
        temporary = directory / f"{name}.new"
        temporary.write_text("".join(lines), encoding="utf-8")
        temporary.replace(directory / name)


def close_connections(addresses: Iterable[str]) -> None:
    """End this machine's ssh connections to nodes that go away.

    A shared connection (ControlPersist), wherever its socket is, would otherwise be taken by the next command
    and break it.
    """
    for address in addresses:
        found = run(["ss", "--no-header", "--tcp", "--numeric", "--processes", "dst", f"{address}:22"]).out
        for pid in set(re.findall(r'\("ssh",pid=(\d+),', found)):
            with contextlib.suppress(ProcessLookupError):  # it ended by itself in the meantime
                os.kill(int(pid), signal.SIGTERM)
