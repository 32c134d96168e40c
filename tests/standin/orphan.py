"""The left-over of the `orphan` fault: ignores SIGTERM, outlives its parent, answers 200 on its port.

Called as `orphan.py FD SECONDS [escape]`; `escape` moves it out of the unit's control group, without
which systemd ends it with the unit.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"


def escape() -> None:
    """Into a control group of its own, beside the units', in every hierarchy that systemd kills by."""
    moved = []
    with open("/proc/self/cgroup", encoding="ascii") as stream:
        lines = stream.read().splitlines()
    for line in lines:
        _, controller, _ = line.split(":", 2)
        if controller not in ("", "name=systemd"):
            continue
        roots = ["/sys/fs/cgroup/systemd"] if controller else ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"]
        for root in roots:
            if os.path.exists(os.path.join(root, "cgroup.procs")):
                group = os.path.join(root, "dsv4-standin-orphan")
                os.makedirs(group, exist_ok=True)
                with open(os.path.join(group, "cgroup.procs"), "w", encoding="ascii") as procs:
                    procs.write(str(os.getpid()))
                moved.append(group)
                break
    print(f"stand-in: orphan {os.getpid()} moved to {moved}", file=sys.stderr, flush=True)


def main(fd: int, seconds: float, wants_escape: bool) -> None:
    """Wait until the parent has gone, then answer until the time is up."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if wants_escape:
        escape()
    end, parent = time.monotonic() + seconds, os.getppid()
    print("ready", flush=True)
    listener = socket.socket(fileno=fd)
    while os.getppid() == parent and time.monotonic() < end:
        time.sleep(0.05)
    listener.settimeout(1.0)
    while time.monotonic() < end:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        with connection:
            connection.settimeout(1.0)
            try:
                connection.recv(65536)
                connection.sendall(ANSWER)
            except OSError:
                continue  # a client that went away is none of its business


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), "escape" in sys.argv[3:])
