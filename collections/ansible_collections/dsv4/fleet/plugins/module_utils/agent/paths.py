"""Every place that the agent keeps something. Tests move all of them at once with DSV4_ROOT."""

from __future__ import annotations

import os

ROOT = os.environ.get("DSV4_ROOT", "")

LIB = ROOT + "/var/lib/dsv4"
EMPTY = LIB + "/empty"
HOST_KEY = LIB + "/host.key"
PROGRAM = LIB + "/agent.pyz"
RELEASES = LIB + "/releases"
WORKERS = LIB + "/units"
TRANSACTIONS = LIB + "/tx"

RUN = ROOT + "/run/dsv4"
CACHE = RUN + "/cache"
SECRETS = RUN + "/tx"
LOCK = RUN + "/lock"

SYSTEM_UNITS = ROOT + "/etc/systemd/system"

AGENT_UNIT = "dsv4-agent.service"
RECOVER_UNIT = "dsv4-recover.service"


def passports(unit: str) -> str:
    """The unit's RuntimeDirectory: its processes' passports."""
    return f"{RUN}/{unit[: -len('.service')] if unit.endswith('.service') else unit}"


def release(digest: str) -> str:
    return f"{RELEASES}/{digest}"


def worker(unit: str) -> str:
    return f"{WORKERS}/{unit}"


def transaction(identity: str) -> str:
    return f"{TRANSACTIONS}/{identity}"


def secrets(identity: str) -> str:
    return f"{SECRETS}/{identity}.secrets"


def unit_file(unit: str) -> str:
    """Where the agent installs a unit; systemd prefers it to what a package ships."""
    return f"{SYSTEM_UNITS}/{unit}"
