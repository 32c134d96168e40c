"""What the local fleet is made of: names, addresses, ports, pinned downloads and paths."""

from __future__ import annotations

import ipaddress
import os
import platform
import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"
STANDIN = ROOT / "tests" / "standin"

DEBIAN = "bookworm"
PYTHON = "3.11"  # Debian bookworm's: the interpreter that runs engine and router on the nodes

#: Every name that this package gives to containers, networks and images begins with this.
PREFIX = "dsv4"
IMAGE_NAME = "localhost/dsv4-node"

HOSTS = ("router1", "prefill1", "prefill2", "decode1", "decode2", "decode3")
#: The part of a host's name before its number. A "light" host has systemd and sshd, and no worker.
ROLES = ("router", "prefill", "decode", "light")

ROUTER_PORT = 8000
ROUTER_METRICS_PORT = 29000
WORKER_PORTS = {"prefill": 30000, "decode": 30002}
BOOTSTRAP_PORT = 8998
MODEL = "nvidia/DeepSeek-V4-Flash-NVFP4"

#: Each fleet's default range, all of one documentation range: demo, tests and molecule may be up at once.
SUBNETS = {
    "local": "198.51.100.0/26", "test": "198.51.100.64/26", "molecule": "198.51.100.128/26", "workers": "198.51.100.192/26",
}  # fmt: skip

#: The last SGLang version whose overlap is not fixed, and the router; digests of the wheels by machine.
SGLANG_VERSION = "0.5.18"
SGLANG_SHA256 = {
    "x86_64": "e97b585dd2d5db2802599feba47c84cce972f5e1231a6816fef996200207b5cf",
    "aarch64": "fae5e92a9f3b880974ac731eb570e3d164886291807473bd95d2458f5b28957e",
}
ORJSON_VERSION = "3.13.0"  # the router's launcher imports it, and Debian bookworm has no package of it
ORJSON_SHA256 = {
    "x86_64": "89bcf2d4bc6c9a7e1763c8cf534f38712e66b76a0fefda7fb7785462f0d635e4",
    "aarch64": "dd9d9a101bd8dbfad112170f009cd155e52bb8c936468821a0d03cbb96c0e426",
}
ROUTER_VERSION = "0.3.2"
ROUTER_SHA256 = {
    "x86_64": "ba5a24951e5e0357fe390782fcd1abd861448a87216832dbf2e501a1dd1548eb",
    "aarch64": "40a10f3817b80377c2ceb326b625f24bd06eb97426e5044de722295ec7fa79c0",
}


class LocalError(Exception):
    """Something the local fleet needs is missing or went wrong; the text says what, and what to do."""


@dataclass(frozen=True)
class Wheel:
    """One pinned wheel: project, version and the sha256 of the file for this machine."""

    project: str
    version: str
    sha256: str


def machine() -> str:
    """The processor architecture as wheels name it."""
    name = platform.machine()
    if name not in ROUTER_SHA256:
        raise LocalError(f"found a {name} machine, expected one of {', '.join(ROUTER_SHA256)}: there is no router wheel for it")
    return name


def sglang_wheel() -> Wheel:
    """The pinned SGLang, or the one that DSV4_SGLANG_VERSION and DSV4_SGLANG_SHA256 name."""
    version = os.environ.get("DSV4_SGLANG_VERSION", SGLANG_VERSION)
    sha256 = os.environ.get("DSV4_SGLANG_SHA256", "")
    if not sha256:
        if version != SGLANG_VERSION:
            raise LocalError(
                f"found DSV4_SGLANG_VERSION={version} without DSV4_SGLANG_SHA256, expected both: "
                f"set the sha256 of that version's wheel for {machine()}"
            )
        sha256 = SGLANG_SHA256[machine()]
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise LocalError(f"found DSV4_SGLANG_SHA256={sha256!r}, expected 64 hexadecimal digits")
    return Wheel("sglang", version, sha256)


def router_wheels() -> dict[str, Wheel]:
    """The pinned router, and what it needs that Debian has not, by the package each holds."""
    return {
        "sglang_router": Wheel("sglang-router", ROUTER_VERSION, ROUTER_SHA256[machine()]),
        "orjson": Wheel("orjson", ORJSON_VERSION, ORJSON_SHA256[machine()]),
    }


def role_of(host: str) -> str:
    """The role of a host by its name; an error for a name that follows no rule."""
    match = re.fullmatch(r"([a-z]+)([1-9][0-9]{0,2})", host)
    if not match or match[1] not in ROLES:
        raise LocalError(f"found host name {host!r}, expected one of {', '.join(ROLES)} followed by a number, such as decode1")
    return match[1]


def worker_url(host: str) -> str:
    """A worker's URL as its router knows it."""
    return f"http://{host}:{WORKER_PORTS[role_of(host)]}"


@dataclass(frozen=True)
class FleetSettings:
    """Name and address range of one fleet; both may be set by the environment."""

    name: str = field(default_factory=lambda: os.environ.get("DSV4_LOCAL_FLEET", "local"))
    subnet_text: str = field(default_factory=lambda: os.environ.get("DSV4_LOCAL_SUBNET", ""))

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9]{0,19}", self.name):
            raise LocalError(
                f"found fleet name {self.name!r} (DSV4_LOCAL_FLEET), expected a letter and then at most "
                "19 letters or digits, all lower case"
            )
        self.subnet  # noqa: B018 - evaluated for its error: a wrong range is refused here, not at first use

    @property
    def subnet(self) -> ipaddress.IPv4Network:
        """The fleet's own network; the first address in it is the gateway's, this machine."""
        text = self.subnet_text or SUBNETS.get(self.name, SUBNETS["local"])
        try:
            network = ipaddress.IPv4Network(text)
        except ValueError as error:
            raise LocalError(f"found subnet {text!r} (DSV4_LOCAL_SUBNET), expected such as 198.51.100.0/26: {error}") from error
        if network.num_addresses < 16:
            raise LocalError(f"found subnet {network} (DSV4_LOCAL_SUBNET), expected a /28 or a larger one")
        return network

    @property
    def network(self) -> str:
        """What the name of the podman network begins with."""
        return f"{PREFIX}-{self.name}"

    def container(self, host: str) -> str:
        """A host's container name."""
        return f"{PREFIX}-{self.name}-{host}"

    @property
    def directory(self) -> Path:
        """Keys, known_hosts and ssh_config of this fleet."""
        return CACHE / "fleet" / self.name

    @property
    def control_directory(self) -> Path:
        """ssh's control sockets: short, since a socket's path may have no more than 108 bytes."""
        return Path("/run/dsv4-local") / self.name
