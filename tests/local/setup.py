"""Install what demo and tests need: Debian packages where they are missing, and .venv from the lock file.

Standard library only: it runs before anything is installed. ``python3 -m tests.local.setup``

torch, which only the instruments' tests need, is installed when those are about to run: ``make_torch``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.local.podman import NETAVARK
from tests.local.settings import CACHE, ROOT, LocalError

VENV = ROOT / ".venv"
LOCK = ROOT / "requirements" / "requirements.txt"
TORCH_LOCK = ROOT / "requirements" / "torch.txt"
#: Where builds of torch for the CPU are; the package index has only those for a GPU, of several gigabytes.
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
OLDEST_PYTHON = (3, 11)

#: What is needed, and the Debian package that has it.
PROGRAMS = {
    "podman": "podman",
    "runc": "runc",
    "iptables": "iptables",
    "nft": "nftables",
    "mmdebstrap": "mmdebstrap",
    "gpgv": "gpgv",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "ip": "iproute2",
    "ss": "iproute2",
    "git": "git",
}


def missing_packages(
    find: Callable[[str], str | None] = shutil.which,
    exists: Callable[[str], bool] = os.path.exists,
    has_module: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None,
) -> dict[str, list[str]]:
    """Debian packages that are missing, each with what was looked for and not found."""
    missing: dict[str, list[str]] = {}
    for program, package in PROGRAMS.items():
        # Administration programs are where root's PATH may not look.
        if find(program) is None and not any(exists(f"{place}/{program}") for place in ("/usr/sbin", "/sbin")):
            missing.setdefault(package, []).append(f"program {program}")
    if not any(exists(path) for path in NETAVARK):
        missing.setdefault("netavark", []).append("podman's network program netavark")
    if not has_module("ensurepip"):  # Debian's python3 has neither; `python3 -m venv` fails without it
        missing.setdefault("python3-venv", []).append("Python module ensurepip")
    return missing


def install_packages() -> None:
    """Install missing packages by apt, after saying which and why. LocalError where that cannot be done here."""
    missing = missing_packages()
    if not missing:
        return
    reasons = "\n".join(f"  {package}: found no {', no '.join(what)}" for package, what in sorted(missing.items()))
    command = f"apt-get install --no-install-recommends {' '.join(sorted(missing))}"
    if shutil.which("apt-get") is None:
        raise LocalError(
            f"these Debian packages, or what they are called on this system, are missing:\n{reasons}\n"
            "There is no apt-get here: install them with this system's package manager, then run the command again"
        )
    if os.geteuid() != 0:
        raise LocalError(f"these Debian packages are missing:\n{reasons}\nInstall them as root: {command}")
    print(f"installing Debian packages:\n{reasons}", flush=True)
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for argv in (["apt-get", "-q", "update"], ["apt-get", "-q", "-y", *command.split()[1:]]):
        if _logged(argv, CACHE / "apt.log", quiet) != 0:
            raise LocalError(
                f"`{' '.join(argv)}` failed; its end:\n{_tail(CACHE / 'apt.log')}\n"
                f"These packages are needed: {', '.join(sorted(missing))}. Make them available to apt (a mirror in "
                "/etc/apt, a proxy in http_proxy) or install them by hand, then run the command again"
            )
    still = missing_packages()
    if still:
        raise LocalError(f"found {', '.join(still)} still missing after apt installed them, expected none")


def wanted_stamp(*locks: Path) -> str:
    """What is in .venv must have been made from: these lock files and this interpreter."""
    text = b"".join(lock.read_bytes() for lock in locks) + f"{sys.version} {os.path.realpath(sys.executable)}".encode()
    return hashlib.sha256(text).hexdigest()


def make_venv() -> None:
    """Make .venv from the lock file, unless it is whole and of this lock.

    The stamp is written last, so an interrupted installation is begun again; so is one of torch, and then all
    of .venv: pip takes what it has half installed for installed.
    """
    stamp, torch = VENV / "stamp", VENV / "stamp-torch"
    whole = _text(stamp) == wanted_stamp(LOCK) and (VENV / "bin" / "python").exists()
    if whole and _text(torch) in (None, wanted_stamp(LOCK, TORCH_LOCK)):
        return
    print(f"installing Python packages into {VENV} from {LOCK.relative_to(ROOT)}", flush=True)
    log = CACHE / "pip.log"
    if VENV.exists():
        shutil.rmtree(VENV)
    if _logged([sys.executable, "-m", "venv", str(VENV)], log) != 0:
        raise LocalError(f"could not make {VENV}; the end of {log}:\n{_tail(log)}")
    if _install(LOCK, log) != 0:
        raise LocalError(
            f"pip could not install what {LOCK.relative_to(ROOT)} pins; the end of {log}:\n{_tail(log)}\n"
            "Let pip reach a package index that has these files (pip's own settings: index-url, proxy, cert)"
        )
    stamp.write_text(wanted_stamp(LOCK), encoding="utf-8")


def make_torch() -> None:
    """Install torch into a whole .venv, unless it is there. LocalError where pip cannot get it."""
    stamp, wanted = VENV / "stamp-torch", wanted_stamp(LOCK, TORCH_LOCK)
    if _text(stamp) == wanted:
        return
    if stamp.exists():
        raise LocalError(f"found torch half or otherwise installed in {VENV}, expected none: `make setup` makes it anew")
    print(f"installing torch into {VENV} from {TORCH_LOCK.relative_to(ROOT)}", flush=True)
    log = CACHE / "pip-torch.log"
    stamp.write_text("begun", encoding="utf-8")
    # Where that index cannot be reached, pip may have the file from elsewhere: it should not try for long.
    if _install(TORCH_LOCK, log, f"--extra-index-url={TORCH_INDEX}", "--retries=1", "--timeout=20") != 0:
        raise LocalError(
            f"pip could not install what {TORCH_LOCK.relative_to(ROOT)} pins, which the instruments' tests need; "
            f"the end of {log}:\n{_tail(log)}\n"
            f"Let pip reach {TORCH_INDEX} (pip's own settings: proxy, cert), or download the file of torch that "
            "the lock pins elsewhere and name its directory in PIP_FIND_LINKS; then run the command again"
        )
    stamp.write_text(wanted, encoding="utf-8")


def _install(lock: Path, log: Path, *options: str) -> int:
    """Install what a lock pins into .venv; pip's exit status."""
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    return _logged([*pip, *options, "--only-binary=:all:", "--require-hashes", f"--requirement={lock}"], log)


def _text(path: Path) -> str | None:
    """What a file holds; None where it is not there."""
    return path.read_text(encoding="utf-8") if path.exists() else None


def _logged(argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> int:
    """Run a program with its output in a file; its exit status."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=env, check=False
        ).returncode


def _tail(log: Path, lines: int = 12) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def main() -> int:
    """Install everything; errors are one message and status 2."""
    try:
        if sys.version_info < OLDEST_PYTHON:
            raise LocalError(
                f"found Python {sys.version.split()[0]} ({sys.executable}), expected 3.11 or newer: "
                "name another with `make PYTHON=/path/to/python3 …`"
            )
        install_packages()
        make_venv()
    except LocalError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
