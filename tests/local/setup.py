"""Install what demo and tests need: Debian packages where they are missing, and .venv from the lock file.

Standard library only: it runs before anything is installed. ``python3 -m tests.local.setup``
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


def wanted_stamp() -> str:
    """What .venv must have been made from: the lock file and this interpreter."""
    text = LOCK.read_bytes() + f"{sys.version} {os.path.realpath(sys.executable)}".encode()
    return hashlib.sha256(text).hexdigest()


def make_venv() -> None:
    """Make .venv from the lock file, unless it is whole and of this lock.

    The stamp is written last, so an interrupted installation is begun again.
    """
    stamp = VENV / "stamp"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted_stamp() and (VENV / "bin" / "python").exists():
        return
    print(f"installing Python packages into {VENV} from {LOCK.relative_to(ROOT)}", flush=True)
    log = CACHE / "pip.log"
    if VENV.exists():
        shutil.rmtree(VENV)
    if _logged([sys.executable, "-m", "venv", str(VENV)], log) != 0:
        raise LocalError(f"could not make {VENV}; the end of {log}:\n{_tail(log)}")
    install = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    if _logged([*install, "--only-binary=:all:", "--require-hashes", f"--requirement={LOCK}"], log) != 0:
        raise LocalError(
            f"pip could not install what {LOCK.relative_to(ROOT)} pins; the end of {log}:\n{_tail(log)}\n"
            "Let pip reach a package index that has these files (pip's own settings: index-url, proxy, cert)"
        )
    stamp.write_text(wanted_stamp(), encoding="utf-8")


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
