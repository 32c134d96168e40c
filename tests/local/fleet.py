"""The fleet itself: containers with systemd, one network, and the state that tests reset them to."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import json
import re
import secrets
import shutil
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.local import handmade, image, overlays, ssh
from tests.local.handmade import File
from tests.local.podman import podman, podman_json, wait_for_others
from tests.local.process import Done, run
from tests.local.settings import HOSTS, ROOT, ROUTER_PORT, STANDIN, WORKER_PORTS, FleetSettings, LocalError, role_of

FAULTS_FILE = "/run/dsv4-standin-faults.json"
BOOT_S = 60.0
READY_S = 90.0
LOCK_S = 300.0
#: inotify instances: systemd's in one container, and what the rest of the machine may hold.
INOTIFY_EACH, INOTIFY_RESERVE = 6, 32
INOTIFY = {"fs.inotify.max_user_instances": 8192, "fs.inotify.max_user_watches": 1048576}


class LeaseError(LocalError):
    """podman's address book has an entry that no container holds."""


@dataclass(frozen=True)
class Node:
    """One container as podman has it: what it was made from is in its labels."""

    host: str
    state: str
    address: str
    digest: str
    checkout: str


class Fleet:
    """One fleet by its settings. All state is podman's: the object holds none."""

    def __init__(self, settings: FleetSettings | None = None) -> None:
        self.settings = settings or FleetSettings()

    # -- what is there -----------------------------------------------------------------------------------

    def nodes(self) -> dict[str, Node]:
        """The containers of this fleet by host, in any state."""
        found = {}
        for row in podman_json("ps", "--all", "--filter", f"label=dsv4.fleet={self.settings.name}"):
            labels = row["Labels"]
            node = Node(
                labels["dsv4.host"],
                row["State"],
                labels["dsv4.address"],
                labels["dsv4.digest"],
                labels["dsv4.checkout"],
            )
            found[node.host] = node
        return {host: found[host] for host in sorted(found, key=_order)}

    def address(self, host: str) -> str:
        """A host's address. The six usual ones have fixed places; LocalError if it is not in the fleet."""
        return self._node(host).address

    def _node(self, host: str) -> Node:
        nodes = self.nodes()
        if host not in nodes:
            raise LocalError(f"found no host {host} in fleet {self.settings.name}, expected one of {', '.join(nodes)}")
        return nodes[host]

    # -- up, down, reset ---------------------------------------------------------------------------------

    def up(self, hosts: Sequence[str] = HOSTS, *, take_over: bool = False, ready: bool = True) -> None:
        """Bring these hosts up beside those that are there: makes what is missing, mends what is half made.

        take_over: also replace a fleet of the same name that another checkout made. ready: also wait until
        the router lists every worker as healthy.
        """
        for host in hosts:
            role_of(host)
        name = image.ensure()
        overlays.make()
        with self._lock():
            self._refuse_foreign(take_over)
            try:
                self._bring_up(name, hosts, ready)
            except LeaseError:
                # podman was killed while it started one of our containers, and keeps the address for it for ever.
                print(f"fleet {self.settings.name}: podman holds an address of a container that is gone; all are made anew")
                hosts = list(dict.fromkeys([*self.nodes(), *hosts]))
                self._remove_all()
                self._bring_up(name, hosts, ready)

    def _bring_up(self, image_name: str, hosts: Sequence[str], ready: bool) -> None:
        network = self._network()
        nodes = self.nodes()
        wanted = sorted({*hosts, *nodes}, key=_order)
        _raise_inotify(len(wanted))
        addresses = self._addresses(wanted, nodes)
        digests = {host: self._digest(image_name, host, addresses) for host in wanted}
        usable = {node.host for node in nodes.values() if node.state in ("running", "exited")}
        stale = [host for host in wanted if host not in usable or nodes[host].digest != digests[host]]
        kept = [host for host in wanted if host not in stale]
        self._make(image_name, network, stale, addresses, digests)
        stopped = [host for host in kept if nodes[host].state == "exited"]
        _parallel(self._start, stopped)
        ssh.write_config(self.settings, addresses)
        # What runs in a kept container is its user's: a unit that failed there keeps no fleet from being up.
        _parallel(lambda host: self._boot(host, degraded=host in kept), wanted)
        _parallel(lambda host: self._write_hosts(host, addresses), kept)
        if ready:
            self._settle(wanted, anew=[*stale, *stopped])

    def down(self, *, take_over: bool = False) -> None:
        """Remove this fleet: its containers, its network, its keys. Nothing happens where there is none."""
        with self._lock():
            self._refuse_foreign(take_over)
            self._remove_all()
            for directory in (self.settings.directory, self.settings.control_directory):
                if directory.exists():
                    shutil.rmtree(directory)

    def reset(self, *hosts: str, ready: bool = True) -> None:
        """Make hosts (all, if none is named) anew, in the hand-made state; routers list their workers again.

        A new container is the only reset that no left-over can fool, and costs about as much as stopping
        a worker would.
        """
        with self._lock():
            self._refuse_foreign(take_over=False)
            nodes = self.nodes()
            chosen = list(hosts or nodes)
            for host in chosen:
                self._node(host)
            name = image.ensure()
            addresses = {host: node.address for host, node in nodes.items()}
            digests = {host: self._digest(name, host, addresses) for host in chosen}
            self._make(name, self._network(), chosen, addresses, digests)
            _parallel(self._boot, chosen)
            if ready:
                self._settle(list(nodes), anew=chosen)

    # -- use ---------------------------------------------------------------------------------------------

    def run(self, host: str, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 60, check: bool = True) -> Done:
        """Run a program on a host as root. It does not go through ssh, so it works when ssh is what is broken."""
        interactive = ["--interactive"] if stdin else []
        return podman("exec", *interactive, self.settings.container(host), *argv, stdin=stdin, timeout=timeout, check=check)

    def read(self, host: str, path: str) -> str:
        """The text of a file on a host; LocalError where there is none."""
        return self.run(host, ["cat", "--", path]).out

    def write(self, host: str, path: str, text: str, mode: int = 0o644) -> None:
        """Replace a file on a host, by rename, with its directories."""
        script = 'mkdir -p -- "${1%/*}" && cat > "$1.new" && chmod "$2" "$1.new" && mv -T -- "$1.new" "$1"'
        self.run(host, ["sh", "-ec", script, "write", path, f"{mode:o}"], stdin=text.encode())

    def fault(self, host: str, faults: Mapping[str, object]) -> None:
        """Put the stand-in's faults on a host in force; an empty mapping takes them all back."""
        if faults:
            self.write(host, FAULTS_FILE, json.dumps(faults))
        else:
            self.run(host, ["rm", "-f", FAULTS_FILE])

    def get(self, host: str, port: int, path: str, timeout: float = 5.0) -> tuple[int, bytes]:
        """One HTTP GET to a host, past any proxy; status 0 where no answer came."""
        return _get(f"http://{self.address(host)}:{port}{path}", timeout)

    def router_workers(self, router: str = "router1") -> dict[str, dict[str, Any]]:
        """The router's workers by host, as its /workers tells; LocalError if it does not answer."""
        status, body = self.get(router, ROUTER_PORT, "/workers")
        if status != 200:
            raise LocalError(f"found status {status} from {router}'s /workers, expected 200")
        return {_host_of(worker["url"]): worker for worker in json.loads(body)["workers"]}

    def wait_ready(self, hosts: Iterable[str], seconds: float = READY_S) -> None:
        """Wait until every router lists all workers of ``hosts`` as healthy; LocalError says what is missing."""
        names = list(hosts)
        workers = {host for host in names if role_of(host) in WORKER_PORTS}
        deadline = time.monotonic() + seconds
        for router in (host for host in names if role_of(host) == "router"):
            url = f"http://{self.address(router)}:{ROUTER_PORT}/workers"
            while True:
                status, body = _get(url)
                listed = json.loads(body)["workers"] if status == 200 else []
                missing = workers - {_host_of(worker["url"]) for worker in listed if worker["is_healthy"]}
                if not missing:
                    break
                if time.monotonic() > deadline:
                    raise LocalError(self._unready(router, sorted(missing), seconds))
                time.sleep(0.2)

    def _settle(self, hosts: Sequence[str], anew: Sequence[str]) -> None:
        """Wait until the fleet serves; routers start again once workers made anew are healthy.

        A router that looked too early comes back only every few seconds, and one that was told to forget a
        worker does not list it again by itself.
        """
        deadline = time.monotonic() + READY_S
        for host in anew:
            while role_of(host) in WORKER_PORTS and self.get(host, WORKER_PORTS[role_of(host)], "/health")[0] != 200:
                if time.monotonic() > deadline:
                    raise LocalError(self._unready(host, [host], READY_S))
                time.sleep(0.2)
        if anew:
            for host in hosts:
                if role_of(host) == "router":
                    self.run(host, ["systemctl", "restart", handmade.ROUTER_UNIT])
        self.wait_ready(hosts)

    def _unready(self, router: str, missing: Sequence[str], seconds: float) -> str:
        lines = [f"found {router} without a healthy {', '.join(missing)} after {seconds:.0f} s. Their last words:"]
        for host in dict.fromkeys((router, *missing)):
            said = self.run(host, ["journalctl", "-n", "8", "-o", "cat", "-u", str(handmade.unit_of(host))], check=False)
            lines.append(f"--- {host}\n{said.out.strip()}")
        return "\n".join(lines)

    # -- inside ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """One change of a fleet at a time on this machine."""
        self.settings.control_directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(f"{self.settings.control_directory}.lock", "w", encoding="utf-8") as file:
            deadline = time.monotonic() + LOCK_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        raise LocalError(
                            f"found fleet {self.settings.name} being changed by another process for {LOCK_S:.0f} s, "
                            f"expected it to end: look for it with `fuser {file.name}`"
                        ) from error
                    time.sleep(0.2)
            wait_for_others(f"{self.settings.network}-")
            yield

    def _refuse_foreign(self, take_over: bool) -> None:
        for node in self.nodes().values():
            if node.checkout == str(ROOT):
                continue
            if take_over or not Path(node.checkout, "tests", "local").is_dir():
                self._remove(self.nodes().values())
                return
            raise LocalError(
                f"found fleet {self.settings.name} made by the checkout {node.checkout}, expected none or this "
                f"checkout's: run `python -m tests.local down` there, or set DSV4_LOCAL_FLEET (and "
                "DSV4_LOCAL_SUBNET) to another name here, or add --take-over"
            )

    def _networks(self) -> list[dict[str, Any]]:
        """This fleet's networks as podman lists them: one, or none."""
        rows = podman_json("network", "ls")
        return [row for row in rows if (row.get("labels") or {}).get("dsv4.fleet") == self.settings.name]

    def _network(self) -> str:
        """The name of the fleet's network; made anew if it has another range, after a look whether that is free.

        A network made anew has a name that was never used: podman keeps addresses by it, even when both a
        container and its network are gone, if it was killed while it started one.
        """
        subnet = self.settings.subnet
        rows = self._networks()
        ranges = [item["subnet"] for row in rows for item in row.get("subnets", [])]
        if ranges == [str(subnet)]:
            return str(rows[0]["name"])
        if rows:
            print(f"fleet {self.settings.name} moves from {', '.join(ranges)} to {subnet}", flush=True)
            self._remove_all()
        _require_free(subnet)
        name = f"{self.settings.network}-{secrets.token_hex(3)}"
        label = f"dsv4.fleet={self.settings.name}"
        podman("network", "create", "--disable-dns", "--subnet", str(subnet), "--label", label, name)
        return name

    def _addresses(self, wanted: Sequence[str], nodes: Mapping[str, Node]) -> dict[str, str]:
        """Fixed places for the usual hosts, the lowest free ones for others; a node keeps what it has."""
        subnet = self.settings.subnet
        addresses = {host: str(subnet[2 + HOSTS.index(host)]) for host in wanted if host in HOSTS}
        addresses |= {host: nodes[host].address for host in wanted if host in nodes and host not in HOSTS}
        free = (str(subnet[place]) for place in range(2 + len(HOSTS), subnet.num_addresses - 1))
        taken = set(addresses.values())
        unused = (address for address in free if address not in taken)
        for host in wanted:
            if host not in addresses:
                address = next(unused, None)
                if address is None:
                    raise LocalError(f"found no free address in {subnet} for {host}: set a larger DSV4_LOCAL_SUBNET")
                addresses[host] = address
        return {host: addresses[host] for host in wanted}

    def _contents(self, host: str, addresses: Mapping[str, str]) -> dict[str, File]:
        workers = [name for name in addresses if role_of(name) in WORKER_PORTS]
        return {**ssh.node_files(self.settings, host), **handmade.files(host, workers)}

    def _digest(self, image_name: str, host: str, addresses: Mapping[str, str]) -> str:
        """What a container was made from; a container with another digest is made anew.

        /etc/hosts is not in it: a host more does not make all others anew.
        """
        inputs = (
            image_name,
            host,
            addresses[host],
            _mac(addresses[host]),
            str(STANDIN),
            self._contents(host, addresses),
        )
        return hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]

    def _make(
        self,
        image_name: str,
        network: str,
        hosts: Sequence[str],
        addresses: Mapping[str, str],
        digests: Mapping[str, str],
    ) -> None:
        """Replace the containers of these hosts. State goes in before the first boot."""
        if not hosts:
            return
        self._remove(node for node in self.nodes().values() if node.host in hosts)

        def make(host: str) -> None:
            name = self.settings.container(host)
            labels = {
                "dsv4.fleet": self.settings.name,
                "dsv4.host": host,
                "dsv4.address": addresses[host],
                "dsv4.digest": digests[host],
                "dsv4.checkout": str(ROOT),
            }
            create = [
                "create",
                f"--name={name}",
                f"--hostname={host}",
                f"--network={network}",
                f"--ip={addresses[host]}",
                f"--mac-address={_mac(addresses[host])}",
                "--no-hosts",
                "--systemd=always",
                f"--volume={STANDIN}:/opt/standin:ro",
                *(f"--label={key}={value}" for key, value in labels.items()),
                image_name,
                "/lib/systemd/systemd",
            ]
            done = podman(*create, check=False)
            if done.rc != 0:
                if "already in use" in done.err:  # storage of a container that podman was killed over, and does not list
                    podman("rm", "--force", "--storage", name)
                podman(*create)
            contents = {**self._contents(host, addresses), "/etc/hosts": File(_hosts_text(addresses))}
            podman("cp", "-", f"{name}:/", stdin=handmade.archive(contents))
            self._start(host)

        _parallel(make, hosts)

    def _start(self, host: str) -> None:
        """Start a container; LeaseError where podman has given its address to one that is gone."""
        done = podman("start", self.settings.container(host), check=False)
        if done.rc != 0:
            raise (LeaseError if "already allocated" in done.err else LocalError)(
                f"could not start {self.settings.container(host)}: {done.err.strip()}"
            )

    def _remove_all(self) -> None:
        """Remove all containers and the network."""
        self._remove(self.nodes().values())
        for row in self._networks():
            podman("network", "rm", "--force", row["name"])

    def _remove(self, nodes: Iterable[Node]) -> None:
        """Remove these containers, and this machine's ssh connections to them."""
        gone = list(nodes)
        if gone:
            names = [self.settings.container(node.host) for node in gone]
            podman("rm", "--force", "--time=0", "--volumes", "--ignore", *names, timeout=300)
            ssh.close_connections(node.address for node in gone)

    def _write_hosts(self, host: str, addresses: Mapping[str, str]) -> None:
        """Bring a kept host's names up to date, in place."""
        if self.read(host, "/etc/hosts") != _hosts_text(addresses):
            self.run(host, ["sh", "-ec", "cat > /etc/hosts"], stdin=_hosts_text(addresses).encode())

    def _boot(self, host: str, degraded: bool = False) -> None:
        """Wait until systemd has started everything and sshd greets; failed units are an error unless ``degraded``."""
        deadline = time.monotonic() + BOOT_S
        done = {"running", "degraded"} if degraded else {"running"}
        state = ""
        while state not in done:
            state = self.run(host, ["systemctl", "is-system-running"], check=False).out.strip()
            if state == "degraded" and not degraded:
                failed = self.run(host, ["systemctl", "--failed", "--plain", "--no-legend"]).out
                raise LocalError(f"found failed units on {host}, expected none:\n{failed}")
            if state not in done:
                if time.monotonic() > deadline:
                    raise LocalError(f"found {host} {state or 'without systemd'} after {BOOT_S:.0f} s, expected running")
                time.sleep(0.1)
        address = self.address(host)
        while True:
            try:
                with socket.create_connection((address, 22), timeout=5) as connection:
                    if connection.recv(4) == b"SSH-":
                        return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise LocalError(f"found no sshd on {host} ({address}) after {BOOT_S:.0f} s: {error}") from error
            time.sleep(0.1)


def _order(host: str) -> tuple[int, str, int]:
    """Usual hosts first, in their order; then by name and number."""
    place = HOSTS.index(host) if host in HOSTS else len(HOSTS)
    role = role_of(host)
    return place, role, int(host[len(role) :])


def _hosts_text(addresses: Mapping[str, str]) -> str:
    return "127.0.0.1 localhost\n::1 localhost ip6-localhost\n" + "".join(
        f"{address} {host}\n" for host, address in addresses.items()
    )


def _mac(address: str) -> str:
    """A locally administered MAC for an address: neighbours of a container made anew need not forget it."""
    return "92:d5:" + ipaddress.IPv4Address(address).packed.hex(":")


def _host_of(url: str) -> str:
    """The host of a worker's URL, as the router knows it."""
    return urllib.parse.urlsplit(url).hostname or url


def _get(url: str, timeout: float = 5.0) -> tuple[int, bytes]:
    """One GET, past any proxy; status 0 where no answer came."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout) as answer:
            return int(answer.status), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except (OSError, ValueError):
        return 0, b""


def _parallel(action: Any, hosts: Sequence[str]) -> None:
    """Do it for all hosts at once; the first error is raised when all have ended."""
    if not hosts:
        return
    with ThreadPoolExecutor(max_workers=min(16, len(hosts))) as pool:
        for future in [pool.submit(action, host) for host in hosts]:
            future.result()


def _require_free(subnet: ipaddress.IPv4Network) -> None:
    """LocalError if a route of this machine, or another network of podman's, overlaps the range."""
    used: list[tuple[str, ipaddress.IPv4Network]] = []
    networks = podman_json("network", "ls")
    bridges = {row["network_interface"] for row in networks}
    for row in json.loads(run(["ip", "-json", "-4", "route", "show"]).out or "[]"):
        if row["dst"] == "default":
            continue
        route, device = ipaddress.IPv4Network(row["dst"], strict=False), str(row.get("dev", "?"))
        if route == subnet and device not in bridges and re.fullmatch(r"podman\d+", device):
            # A bridge of podman's making, of just this range, and of none of its networks.
            print(f"removing {device}, which a killed podman left on {subnet}", flush=True)
            _remove_bridge(device)
        else:
            used.append((f"the route to {route} on {device}", route))
    for row in networks:  # one that is down has no route
        ranges = [ipaddress.ip_network(item["subnet"]) for item in row.get("subnets", [])]
        used += [(f"podman's network {row['name']}", item) for item in ranges if isinstance(item, ipaddress.IPv4Network)]
    for user, taken in used:
        if taken.overlaps(subnet):
            raise LocalError(
                f"found {subnet} in use by {user}, expected a free range: set DSV4_LOCAL_SUBNET to a free one, "
                "such as 198.18.0.0/26"
            )


def _remove_bridge(device: str) -> None:
    """Remove a bridge and what is left at its ports."""
    for port in Path("/sys/class/net", device, "brif").iterdir():
        run(["ip", "link", "delete", port.name])
    run(["ip", "link", "delete", device])


def _raise_inotify(containers: int) -> None:
    """systemd needs inotify instances in each container; the default limit is enough for a few."""
    running = len(podman("ps", "--quiet").out.split())
    needed = max(running, containers) * INOTIFY_EACH + INOTIFY_RESERVE
    for name, value in INOTIFY.items():
        path = Path("/proc/sys", *name.split("."))
        now = int(path.read_text(encoding="utf-8"))
        if name.endswith("instances") and now >= needed:
            return
        if now < value:
            print(f"raising {name} from {now} to {value}: {containers} containers with systemd need it", flush=True)
            try:
                path.write_text(str(value), encoding="utf-8")
            except OSError as error:
                raise LocalError(f"could not raise {name}: run `sysctl -w {name}={value}` as root ({error})") from error
