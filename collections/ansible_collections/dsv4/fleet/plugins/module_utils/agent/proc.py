"""What runs on this host, from /proc: a unit's processes, who listens on a port, who holds GPU memory."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from . import redaction
from .errors import AgentError

_LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp
_PYTHON = re.compile(r"^python[0-9.]*$")
_SHELLS = frozenset({"sh", "bash", "dash", "ash", "ksh", "zsh", "busybox"})


class GpuUnknown(AgentError):
    """nvidia-smi exists but does not say who holds GPU memory."""


@dataclass(frozen=True)
class Process:
    """One process. `start_time` is in clock ticks since boot: with the PID it names a process for ever."""

    pid: int
    start_time: int
    ppid: int
    cmdline: list[str]
    exe: str
    environ: dict[str, str]
    state: str
    uid: int

    @property
    def is_python(self) -> bool:
        return bool(_PYTHON.match(os.path.basename(self.exe.replace(" (deleted)", ""))))

    @property
    def is_shell(self) -> bool:
        return os.path.basename(self.exe.replace(" (deleted)", "")) in _SHELLS

    @property
    def is_engine(self) -> bool:
        """A process of the server: the launched module, a spawned child, or one that took a title of its own.

        Only the first word's base name counts, because a virtual environment's path may well hold
        "sglang"; compilers and multiprocessing's resource tracker are no engine processes.
        """
        if not self.cmdline or not self.is_python:
            return False
        title, arguments = os.path.basename(self.cmdline[0]), self.cmdline[1:]
        if title.startswith(("sglang", "sgl_")):
            return True
        if any("multiprocessing.spawn" in argument and "spawn_main" in argument for argument in arguments):
            return True
        program = arguments[arguments.index("-m") + 1 :][:1] if "-m" in arguments else arguments[:1]
        return any("sglang" in name.rpartition("/")[2] for name in program)

    def __str__(self) -> str:
        command = " ".join(redaction.arguments(self.cmdline)) or f"[{os.path.basename(self.exe)}]"
        return f"process {self.pid} ({command if len(command) <= 160 else command[:157] + '...'})"


def process(pid: int) -> Process | None:
    """The process, or None if there is none (any more). Fields that we may not read are empty."""
    root = f"/proc/{pid}"
    try:
        with open(f"{root}/stat", "rb") as file:
            stat = file.read()
        uid = os.stat(root).st_uid
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(b")")[2].split()  # the name in field 2 may hold blanks and brackets
    try:
        exe = os.readlink(f"{root}/exe")
    except OSError:
        exe = ""
    return Process(
        pid=pid,
        start_time=int(fields[19]),
        ppid=int(fields[1]),
        cmdline=_words(f"{root}/cmdline"),
        exe=exe,
        environ=dict(word.split("=", 1) for word in _words(f"{root}/environ") if "=" in word),
        state=fields[0].decode(),
        uid=uid,
    )


def start_time(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat in clock ticks, None for a process that is gone or is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def processes_of(unit_cgroup: str) -> list[Process]:
    """Every process in the unit's control group or below it, by PID.

    `unit_cgroup` is systemd's property ControlGroup. /proc/PID/cgroup holds the same path in the line
    of the hierarchy that systemd uses: `name=systemd` (v1, hybrid) or the unified one (v2, hybrid). So
    no mount of a cgroup file system is needed.
    """
    if unit_cgroup in ("", "/"):  # a unit that is not running has none; "/" would mean every process
        return []
    found = (process(pid) for pid in _pids() if _within(cgroup(pid), unit_cgroup))
    return [one for one in found if one is not None]


def cgroup(pid: int) -> str:
    """The control group that systemd put the process into; empty if the process is gone."""
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            return group_in(file.read())
    except (FileNotFoundError, ProcessLookupError):
        return ""


def in_group(pid: int, unit_cgroup: str) -> bool:
    """Is the process in the unit's control group, or below it, now?"""
    return unit_cgroup not in ("", "/") and _within(cgroup(pid), unit_cgroup)


def group_in(text: str) -> str:
    """systemd's path in /proc/PID/cgroup. In the hybrid layout either hierarchy may be the one it uses."""
    paths = {line.split(":", 2)[1]: line.split(":", 2)[2] for line in text.splitlines() if line.count(":") >= 2}
    named, unified = paths.get("name=systemd", ""), paths.get("", "")
    return unified if named in ("", "/") and unified else named


def listener(port: int, host: str | None = None) -> list[int]:
    """PIDs that hold a listening TCP socket on the port (IPv4 and IPv6), sorted.

    With `host`, a literal address, only sockets that would accept a connection to it: a tunnel on
    another address of this host is nobody's rival.
    """
    inodes = {inode for inode, address in _listening(port) if host is None or _accepts(address, host)}
    if not inodes:
        return []
    wanted = {f"socket:[{inode}]" for inode in inodes}
    return sorted(pid for pid in _pids() if _holds(pid, wanted))


def gpu_holders() -> list[tuple[int, int]]:
    """(PID, MiB) of every process that holds GPU memory, [] on a host without nvidia-smi.

    Raises GpuUnknown where nvidia-smi exists but fails: nobody may take that for free memory.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GpuUnknown(f"found {error}, expected {' '.join(query)} to list processes; look at the driver") from error
    if done.returncode != 0:
        text = (done.stderr.strip() or done.stdout.strip())[:300]
        raise GpuUnknown(f"found exit code {done.returncode} of {' '.join(query)}: {text}; expected 0; look at the driver")
    holders: dict[int, int] = {}
    for line in done.stdout.splitlines():
        pid, _, memory = (word.strip() for word in line.partition(","))
        if pid.isdigit():  # a driver that cannot tell the amount says [N/A]; the holder counts all the same
            holders[int(pid)] = holders.get(int(pid), 0) + (int(memory) if memory.isdigit() else 0)
    return sorted(holders.items())


def _pids() -> list[int]:
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())


def _within(path: str, group: str) -> bool:
    group = group.rstrip("/")
    return path == group or path.startswith(group + "/")


def _words(path: str) -> list[str]:
    """The NUL-terminated words of a /proc file; [] if it is gone or not ours to read."""
    try:
        with open(path, "rb") as file:
            text = file.read()
    except OSError:
        return []
    # A title written over the command line leaves NULs behind it: only those at the end are padding,
    # an empty argument in the middle is an argument.
    return [os.fsdecode(word) for word in text.rstrip(b"\0").split(b"\0")] if text.strip(b"\0") else []


def _listening(port: int) -> Iterator[tuple[int, str]]:
    """(inode, local address) of each socket in state LISTEN on the port."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as file:
                rows = [line.split() for line in file][1:]
        except FileNotFoundError:  # a kernel without IPv6
            continue
        for row in rows:
            address, _, number = row[1].partition(":")
            if row[3] == _LISTEN and int(number, 16) == port:
                yield int(row[9]), _address(address)


def _address(text: str) -> str:
    """An address of /proc/net/tcp{,6}: 32-bit words in the machine's byte order."""
    packed = b"".join(struct.pack("=I", int(text[at : at + 8], 16)) for at in range(0, len(text), 8))
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


def _accepts(bound: str, host: str) -> bool:
    """Would a socket bound to `bound` take a connection to `host`? A wildcard of IPv6 takes IPv4 too."""
    here, there = ipaddress.ip_address(bound), ipaddress.ip_address(host.partition("%")[0])
    if isinstance(here, ipaddress.IPv6Address) and here.ipv4_mapped is not None:
        here = here.ipv4_mapped
    if here.is_unspecified or there.is_unspecified:
        return here.version == there.version or here.version == 6 or there.version == 6
    return here == there


def _holds(pid: int, sockets: set[str]) -> bool:
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            return any(_target(entry.path) in sockets for entry in entries)
    except OSError:  # gone, or a process that even root may not look into
        return False


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
