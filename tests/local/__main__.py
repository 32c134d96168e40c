"""The command line of the local fleet."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

from tests.local import handmade
from tests.local.fleet import Fleet
from tests.local.podman import environment
from tests.local.settings import HOSTS, LocalError, role_of


def _hosts(text: str) -> list[str]:
    hosts = [host for host in text.split(",") if host]
    if not hosts:
        raise argparse.ArgumentTypeError(f"found no host in {text!r}, expected such as decode1,router1")
    try:
        for host in hosts:
            role_of(host)
    except LocalError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return hosts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.local",
        description="The local fleet. DSV4_LOCAL_FLEET names it (default: local); DSV4_LOCAL_SUBNET is its range.",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    up = commands.add_parser("up", help="bring the fleet up; what is there stays, what is half made is mended")
    up.add_argument("--hosts", type=_hosts, default=list(HOSTS), help=f"names by comma (default: {','.join(HOSTS)})")
    up.add_argument("--light", type=int, default=0, metavar="N", help="also N hosts with sshd alone, light1 to lightN")
    up.add_argument("--take-over", action="store_true", help="replace a fleet of this name of another checkout")
    up.add_argument("--no-wait", action="store_true", help="do not wait until the router lists all workers as healthy")

    down = commands.add_parser("down", help="remove the fleet")
    down.add_argument("--take-over", action="store_true", help="also one that another checkout made")

    reset = commands.add_parser("reset", help="make hosts anew, in the hand-made state")
    reset.add_argument("--hosts", type=_hosts, default=[], help="names by comma (default: all)")

    commands.add_parser("status", help="one line per host; exit status 1 unless all of them serve")
    commands.add_parser("env", help="the environment that podman needs on this machine, for the shell to evaluate")
    commands.add_parser("clean", help="remove every fleet of this checkout, and the node images")
    commands.add_parser("demo", help="what `make demo` runs")

    inside = commands.add_parser("exec", help="run a program on a host: exec HOST PROGRAM …")
    inside.add_argument("host")
    inside.add_argument("argv", nargs=argparse.REMAINDER)
    return parser


def _status(fleet: Fleet) -> int:
    nodes = fleet.nodes()
    if not nodes:
        print(f"fleet {fleet.settings.name}: none is up")
        return 1
    try:
        listed = fleet.router_workers() if "router1" in nodes else {}
    except LocalError as error:
        print(error)
        listed = {}
    well = True
    for host, node in nodes.items():
        unit = handmade.unit_of(host)
        active = "-"
        if node.state == "running" and unit:
            active = fleet.run(host, ["systemctl", "is-active", unit], check=False).out.strip()
        worker = listed.get(host)
        routed = "-" if role_of(host) in ("router", "light") else "not listed"
        if worker:
            routed = "healthy" if worker["is_healthy"] else "unhealthy"
        print(f"{host:10} {node.address:15} {node.state:9} {unit or '-':30} {active:9} {routed}")
        well = well and node.state == "running" and active in ("active", "-") and routed in ("healthy", "-")
    return 0 if well else 1


def _exec(fleet: Fleet, host: str, argv: list[str]) -> int:
    """Become the program; returns only when there is none."""
    fleet.address(host)
    argv = argv[1:] if argv[:1] == ["--"] else argv
    if not argv:
        raise LocalError("found no program after the host, expected such as: exec decode1 systemctl status")
    terminal = ["--tty"] if sys.stdin.isatty() and sys.stdout.isatty() else []
    command = ["podman", "exec", "--interactive", *terminal, fleet.settings.container(host), *argv]
    os.execvpe(command[0], command, {**os.environ, **environment()})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit status. Errors are one message on standard error and status 2."""
    options = _parser().parse_args(arguments)
    try:
        fleet = Fleet()
        if options.command == "up":
            hosts = [*options.hosts, *(f"light{number}" for number in range(1, options.light + 1))]
            fleet.up(hosts, take_over=options.take_over, ready=not options.no_wait)
            print(f"fleet {fleet.settings.name} is up: ssh -F {fleet.settings.directory / 'ssh_config'} {hosts[0]}")
        elif options.command == "down":
            fleet.down(take_over=options.take_over)
        elif options.command == "reset":
            fleet.reset(*options.hosts)
        elif options.command == "status":
            return _status(fleet)
        elif options.command == "env":
            for name, value in environment().items():
                print(f"export {name}={shlex.quote(value)}")
        elif options.command == "clean":
            from tests.local.clean import clean

            clean()
        elif options.command == "demo":
            from tests.local.demo import demo

            return demo(fleet)
        else:
            return _exec(fleet, options.host, options.argv)
    except LocalError as error:
        print(f"local fleet: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("local fleet: interrupted; the same command goes on from here, `make down` removes what is there", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
