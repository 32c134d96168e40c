"""The fleet that these tests break: one for the whole session, made anew where a module needs it.

Without podman they fail; they are never skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.local.fleet import Fleet
from tests.local.load import Load
from tests.local.playbook import INVENTORY, Event, Outcome, run_playbook
from tests.local.settings import HOSTS, ROUTER_PORT, FleetSettings


class FaultFleet(Fleet):
    """The fleet with what tests do to it; see tests.local.fleet.Fleet for run, read, write, fault, reset and get."""

    def playbook(
        self,
        name: str,
        extra_vars: Mapping[str, object] | None = None,
        limit: str | None = None,
        check: bool = False,
        diff: bool = False,
        env: Mapping[str, str] | None = None,
        *,
        arguments: tuple[str, ...] = (),
        inventory: Path = INVENTORY,
        timeout: int = 600,
        on_event: Callable[[Event], None] | None = None,
    ) -> Outcome:
        """Run an entry play (``enable-gediff``) or a playbook by path, through ansible-runner."""
        return run_playbook(
            self.settings, name, extra_vars=extra_vars, limit=limit, check=check, diff=diff, env=env,
            arguments=arguments, inventory=inventory, timeout=timeout, on_event=on_event,
        )  # fmt: skip

    def load(self, clients: int = 4, seconds: float = 600.0) -> Load:
        """Streaming clients through router1: ``with fleet.load() as load: …`` and then ``load.tally``."""
        return Load(f"http://{self.address('router1')}:{ROUTER_PORT}", clients=clients, seconds=seconds)

    def main_pid(self, host: str, unit: str) -> int:
        """systemd's MainPID of a unit; 0 where it does not run."""
        return int(self.run(host, ["systemctl", "show", "--value", "--property=MainPID", unit]).out)


@pytest.fixture(scope="session")
def fleet() -> Iterator[FaultFleet]:
    """The fleet DSV4_LOCAL_FLEET (default: test), up. It is removed at the end unless DSV4_KEEP_FLEET is set."""
    one = FaultFleet(FleetSettings(name=os.environ.get("DSV4_LOCAL_FLEET", "test")))
    one.up(HOSTS)
    yield one
    if not os.environ.get("DSV4_KEEP_FLEET"):
        one.down()


@pytest.fixture(scope="module")
def fresh_fleet(fleet: FaultFleet) -> FaultFleet:
    """The fleet with every host in the hand-made state when the module begins."""
    fleet.reset()
    return fleet
