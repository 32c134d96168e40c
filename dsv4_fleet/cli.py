"""The command line `dsv4-fleet`: one subcommand per part, each of which adds and runs itself."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Protocol

from dsv4_fleet import __version__
from dsv4_fleet.judge import command as judge
from dsv4_fleet.stress import command as stress


class Command(Protocol):
    """A subcommand: it declares its arguments, and sets `run` to a function that returns the exit code."""

    def add_parser(self, commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None: ...


COMMANDS: tuple[Command, ...] = (stress, judge)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code; a wrong command line exits with 2, as argparse does."""
    parser = argparse.ArgumentParser(prog="dsv4-fleet", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    arguments = parser.parse_args(argv)
    code: int = arguments.run(arguments)
    return code
