"""Remove what this checkout made, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.local.fleet import Fleet
from tests.local.image import LABEL
from tests.local.podman import podman, podman_json
from tests.local.settings import CACHE, ROOT, FleetSettings


def clean() -> None:
    """Remove every fleet of this checkout, node images that nothing uses, .venv, .cache and bytecode.

    What stays, because others may use it by now: Debian packages, and raised inotify limits until the next boot.
    """
    if shutil.which("podman"):
        _fleets()
        _images()
    paths = [CACHE, ROOT / ".venv", ROOT / ".ansible"]
    if not shutil.which("podman") or not podman_json("ps", "--all", "--filter", "label=dsv4.fleet"):
        paths.append(FleetSettings().control_directory.parent)  # no other checkout has a fleet that locks there
    for path in paths:
        if path.exists():
            print(f"removing {path}", flush=True)
            shutil.rmtree(path)
    for path in _bytecode():
        shutil.rmtree(path)


def _fleets() -> None:
    rows = podman_json("ps", "--all", "--filter", f"label=dsv4.checkout={ROOT}")
    names = {row["Labels"]["dsv4.fleet"] for row in rows}
    # A network without containers is left where a first `up` was interrupted; the directory then names the fleet.
    networks = {(row.get("labels") or {}).get("dsv4.fleet") for row in podman_json("network", "ls")}
    empty = {name for name in networks if name and (CACHE / "fleet" / name).is_dir()}
    for name in sorted(names | empty):
        print(f"removing fleet {name}", flush=True)
        Fleet(FleetSettings(name=name)).down()


def _images() -> None:
    used = {row["ImageID"] for row in podman_json("ps", "--all")}
    for row in podman_json("images", "--filter", f"label={LABEL}"):
        if row["Id"] in used:
            print(f"image {row['Names'][0]} stays: another checkout's fleet uses it", flush=True)
        else:
            print(f"removing image {', '.join(row.get('Names') or [row['Id'][:12]])}", flush=True)
            podman("rmi", row["Id"])


def _bytecode() -> list[Path]:
    """__pycache__ directories beside tracked files: only where this repository has Python files."""
    tracked = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "*.py"], capture_output=True, check=True, text=True
    ).stdout.split("\0")
    folders = {(ROOT / name).parent / "__pycache__" for name in tracked if name}
    return sorted(folder for folder in folders if folder.is_dir())
