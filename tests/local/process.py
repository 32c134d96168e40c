"""Run programs: bounded, with their output in the error message."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.local.settings import LocalError


@dataclass(frozen=True)
class Done:
    """A program that ended: exit status and output."""

    rc: int
    out: str
    err: str


def run(
    argv: Sequence[str],
    *,
    stdin: bytes | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
    check: bool = True,
) -> Done:
    """Run a program to its end, at most ``timeout`` seconds.

    ``env`` is added to this process's environment. LocalError when the program is missing, when it
    takes longer, and, with ``check``, when its exit status is not 0.
    """
    shown = shlex.join(argv[:12]) + (" …" if len(argv) > 12 else "")
    try:
        # Empty input where there is none of ours: a program must not wait for, or swallow, the caller's.
        done = subprocess.run(
            argv,
            input=stdin or b"",
            env={**os.environ, **(env or {})},
            capture_output=True,
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError as error:
        raise LocalError(f"found no program {argv[0]!r} on PATH: `make setup` installs what is needed") from error
    except subprocess.TimeoutExpired as error:
        raise LocalError(f"found `{shown}` still running after {timeout:.0f} s, ended it") from error
    result = Done(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))
    if check and result.rc != 0:
        said = (result.err.strip() or result.out.strip())[-2000:]
        raise LocalError(f"found exit status {result.rc} from `{shown}`, expected 0. It said:\n{said}")
    return result
