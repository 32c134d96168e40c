"""Pinned wheels: fetched once by pip as it is set up on this machine, checked, and unpacked."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.local.process import run
from tests.local.settings import CACHE, PYTHON, LocalError, Wheel, machine, sglang_wheel

DOWNLOADS = CACHE / "downloads"
#: The platforms whose wheels Debian bookworm (glibc 2.36) can load.
GLIBC = ("manylinux_2_34", "manylinux_2_28", "manylinux_2_17", "manylinux2014")


def fetch(wheel: Wheel) -> Path:
    """The wheel's file: from the cache, or by pip from the index it is set up with.

    LocalError if it cannot be had, or if its sha256 is not the pinned one.
    """
    DOWNLOADS.mkdir(parents=True, exist_ok=True)
    for path in DOWNLOADS.glob(f"{wheel.project.replace('-', '_')}-{wheel.version}-*.whl"):
        if _sha256(path) == wheel.sha256:
            return path
        path.unlink()  # half written, or of another pin
    print(f"downloading {wheel.project} {wheel.version}", flush=True)
    with tempfile.TemporaryDirectory(dir=DOWNLOADS) as scratch:
        pin = Path(scratch, "pin.txt")
        pin.write_text(f"{wheel.project}=={wheel.version} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
        platforms = [f"--platform={glibc}_{machine()}" for glibc in GLIBC]
        try:
            run(
                [
                    sys.executable,
                    "-m",
                    "pip",
                    "download",
                    "--quiet",
                    "--no-deps",
                    "--only-binary=:all:",
                    "--require-hashes",
                    "--implementation=cp",
                    f"--python-version={PYTHON}",
                    *platforms,
                    f"--dest={scratch}",
                    f"--requirement={pin}",
                ],
                timeout=600,
            )
        except LocalError as error:
            raise LocalError(
                f"could not download {wheel.project}=={wheel.version} (sha256 {wheel.sha256}). Either let pip reach "
                f"a package index that has it, or put the wheel into {DOWNLOADS}.\n{error}"
            ) from error
        (found,) = Path(scratch).glob("*.whl")
        return found.rename(DOWNLOADS / found.name)


def unpack(wheel: Wheel, package: str) -> Path:
    """The directory that holds ``package`` (and nothing else) of the wheel, unpacked once."""
    place = CACHE / "unpacked" / f"{wheel.project}-{wheel.version}-{wheel.sha256[:12]}"
    if not place.is_dir():
        path = fetch(wheel)
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
            with zipfile.ZipFile(path) as archive:
                archive.extractall(scratch, [name for name in archive.namelist() if name.startswith(f"{package}/")])
            Path(scratch).chmod(0o755)
            complete = Path(scratch).rename(place.parent / f"{place.name}.{os.getpid()}")
            Path(scratch).mkdir()  # for the context manager to remove
        try:
            complete.rename(place)
        except OSError:  # another process was first; its content is the same
            shutil.rmtree(complete)
    return place


def sglang_tree() -> Path:
    """The pinned SGLang source tree: a directory that holds ``sglang/``. Do not change it: copy it."""
    return unpack(sglang_wheel(), "sglang")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
