"""Make requirements/requirements.txt from requirements.in: every file of every pinned release, by hash.

pip's own settings (constraints, local directories) must not leak into a file that others install from, so
they are all left out but for the certificate and proxy.
"""

from __future__ import annotations

import os
import re
import sys

from tests.local.process import run
from tests.local.settings import CACHE, ROOT, LocalError

SOURCE = ROOT / "requirements" / "requirements.in"
LOCK = ROOT / "requirements" / "requirements.txt"
PIP_TOOLS = "pip-tools==7.6.2"
KEPT_SETTINGS = ("PIP_CERT", "PIP_PROXY", "PIP_DEFAULT_TIMEOUT")


def main() -> int:
    """Write the lock file; LocalError's message and status 2 where something of this machine would be in it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_") or name in KEPT_SETTINGS}
    env["PIP_CONFIG_FILE"] = os.devnull
    venv = CACHE / "lock-venv"
    if sys.version_info[:2] != (3, 11):
        print(f"lock: found Python {sys.version.split()[0]}, expected 3.11, the oldest supported", file=sys.stderr)
        return 2
    try:
        run([sys.executable, "-m", "venv", "--clear", str(venv)])
        run([str(venv / "bin" / "pip"), "install", "--quiet", PIP_TOOLS], timeout=300)
        fresh = LOCK.with_suffix(".new")
        run(
            [
                "env",
                "-i",
                *(f"{name}={value}" for name, value in env.items()),
                str(venv / "bin" / "pip-compile"),
                "--quiet",
                "--generate-hashes",
                "--no-header",
                "--no-emit-index-url",
                "--no-emit-find-links",
                "--no-emit-trusted-host",
                "--no-emit-options",
                "--allow-unsafe",
                "--strip-extras",
                f"--output-file={fresh}",
                str(SOURCE.relative_to(ROOT)),
            ],
            timeout=1200,
        )
        text = "# Made by `make lock` from requirements.in; do not edit.\n" + fresh.read_text(encoding="utf-8")
        fresh.unlink()
        leaks = re.findall(r"^.*(?:://|^-|/opt/|/home/|/root/).*$", text, re.MULTILINE)
        if leaks:
            raise LocalError(f"found something of this machine in the lock: {leaks[:3]}, expected none")
        LOCK.write_text(text, encoding="utf-8")
    except LocalError as error:
        print(f"lock: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
