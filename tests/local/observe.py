"""What the molecule scenarios ask of a worker, through testinfra alone."""

from __future__ import annotations

import json
from typing import Any

from testinfra.host import Host

UNIT = "sglang-dsv4-decode.service"
SCRIPT = "/root/sglang-dsv4/serve_dsv4_decode.sh"


def main_pid(host: Host) -> int:
    """systemd's MainPID of the worker."""
    return int(host.check_output("systemctl show --value --property=MainPID %s", UNIT))


def environment(host: Host) -> dict[str, str]:
    """The environment of the worker's main process."""
    text = host.check_output("cat /proc/%s/environ", str(main_pid(host)))
    pairs = (entry.partition("=") for entry in text.split("\0") if entry)
    return {name: value for name, _, value in pairs}


def passports(host: Host) -> list[dict[str, Any]]:
    """The passports of the worker's processes."""
    names = host.check_output("ls /run/dsv4/sglang-dsv4-decode").split()
    return [
        json.loads(host.file(f"/run/dsv4/sglang-dsv4-decode/{name}").content_string) for name in names if name.endswith(".json")
    ]


def router_workers(host: Host) -> dict[str, bool]:
    """Each worker that the router lists, and whether it is healthy there."""
    listed = json.loads(host.check_output("curl -s --noproxy '*' http://router1:8000/workers"))["workers"]
    return {row["url"]: row["is_healthy"] for row in listed}
