"""Make requirements/*.txt from requirements/*.in: every file of every pinned release, by hash.

pip's own settings (constraints, local directories) must not leak into a file that others install from, so
they are all left out but for the certificate and proxy. Only torch's one file may come from where pip's own
settings have it, where PyTorch's index cannot be reached: then the lock says so.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

from tests.local.process import run
from tests.local.settings import CACHE, ROOT, LocalError
from tests.local.setup import LOCK, TORCH_INDEX, TORCH_LOCK

PIP_TOOLS = "pip-tools==7.6.2"
KEPT_SETTINGS = ("PIP_CERT", "PIP_PROXY", "PIP_DEFAULT_TIMEOUT")


def compiled(bin_: Path, lock: Path, *options: str, **settings: str) -> str:
    """The text of a lock, made from the `.in` file beside it. LocalError where pip-compile fails."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_") or name in KEPT_SETTINGS}
    env |= {"PIP_CONFIG_FILE": os.devnull, **settings}
    fresh = lock.with_suffix(".new")
    try:
        run(
            [
                "env",
                "-i",
                *(f"{name}={value}" for name, value in env.items()),
                str(bin_ / "pip-compile"),
                "--quiet",
                "--generate-hashes",
                "--no-header",
                "--no-emit-index-url",
                "--no-emit-find-links",
                "--no-emit-trusted-host",
                "--no-emit-options",
                "--allow-unsafe",
                "--strip-extras",
                *options,
                f"--output-file={fresh}",
                str(lock.with_suffix(".in").relative_to(ROOT)),
            ],
            timeout=1200,
        )
        return fresh.read_text(encoding="utf-8")
    finally:
        fresh.unlink(missing_ok=True)


def torch_compiled(bin_: Path) -> str:
    """The torch lock's text: with all of its releases' files, or with the one that pip gets here."""
    try:
        return compiled(bin_, TORCH_LOCK, f"--extra-index-url={TORCH_INDEX}", PIP_RETRIES="1")
    except LocalError as error:
        last = str(error).strip().splitlines()[-1]
        print(f"lock: could not use {TORCH_INDEX}: {last}\nlock: taking the file that pip gets here", flush=True)
    pin = re.search(r"^torch==\S+", TORCH_LOCK.with_suffix(".in").read_text(encoding="utf-8"), re.MULTILINE)
    if pin is None:
        raise LocalError(f"found no torch==VERSION in {TORCH_LOCK.with_suffix('.in')}, expected one")
    with tempfile.TemporaryDirectory() as place:
        run([str(bin_ / "pip"), "download", "--quiet", "--no-deps", f"--dest={place}", pin[0]], timeout=1200)
        [wheel] = Path(place).iterdir()
        text = compiled(bin_, TORCH_LOCK, f"--find-links={place}")
        return (
            "# PyTorch's index of builds for the CPU could not be reached: torch's hash is that of the one file\n"
            f"# {wheel.name}, which pip got by its own settings.\n"
            f"# Other Pythons and processors need their files' hashes too: `make lock` where that index is reached.\n{text}"
        )


def write(lock: Path, text: str) -> None:
    """Write a lock, unless it names a place."""
    leaks = re.findall(r"^.*(?:://|^-|/opt/|/home/|/root/|/tmp/).*$", text, re.MULTILINE)
    if leaks:
        raise LocalError(f"found something of this machine in the lock: {leaks[:3]}, expected none")
    head = f"# Made by `make lock` from {lock.with_suffix('.in').name}; do not edit.\n"
    lock.write_text(head + text, encoding="utf-8")


def main() -> int:
    """Write the lock files; LocalError's message and status 2 where something of this machine would be in them."""
    venv = CACHE / "lock-venv"
    if sys.version_info[:2] != (3, 11):
        print(f"lock: found Python {sys.version.split()[0]}, expected 3.11, the oldest supported", file=sys.stderr)
        return 2
    try:
        run([sys.executable, "-m", "venv", "--clear", str(venv)])
        run([str(venv / "bin" / "pip"), "install", "--quiet", PIP_TOOLS], timeout=300)
        write(LOCK, compiled(venv / "bin", LOCK))
        write(TORCH_LOCK, torch_compiled(venv / "bin"))  # constrained by the lock just written
    except LocalError as error:
        print(f"lock: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
