"""Clients that ask the molecule fleet's router until they are told to stop: ``python -m tests.local.molecule_load DIRECTORY``.

They stop when DIRECTORY/load-stop appears, and then write DIRECTORY/load.json: ``{"served": 12, "lost": {}}``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from tests.local.fleet import Fleet
from tests.local.load import Load
from tests.local.settings import ROUTER_PORT, FleetSettings

LIMIT_S = 880.0


def main(directory: Path) -> None:
    """Load until told to stop, at most LIMIT_S seconds."""
    stop, out = directory / "load-stop", directory / "load.json"
    for old in (stop, out):
        old.unlink(missing_ok=True)
    fleet = Fleet(FleetSettings(name="molecule"))
    with Load(f"http://{fleet.address('router1')}:{ROUTER_PORT}", clients=4, seconds=LIMIT_S) as load:
        until = time.monotonic() + LIMIT_S
        while not stop.exists() and time.monotonic() < until:
            time.sleep(0.2)
    fresh = out.with_suffix(".new")
    fresh.write_text(json.dumps({"served": load.tally.served, "lost": dict(load.tally.lost)}))
    fresh.rename(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
