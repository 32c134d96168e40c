"""Run programs: bounded, with their output in the error message."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.local.settings import LocalError

#: How long an interrupted process waits for a program that should not be cut short.
FINISH_S = 60.0


@dataclass(frozen=True)
class Done:
    """A program that ended: exit status and output."""

    rc: int
    out: str
    err: str


def run(
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
    check: bool = True,
    finish: bool = False,
) -> Done:
    """Run a program to its end, at most ``timeout`` seconds.

    ``env`` is added to this process's environment. With ``finish``, an interruption of this process (Ctrl-C) waits
    for the program instead of ending it. LocalError when the program is missing, when it takes longer, and, with
    ``check``, when its exit status is not 0.
    """
    shown = shlex.join(argv[:12]) + (" …" if len(argv) > 12 else "")
    try:
        # A session of its own: Ctrl-C reaches this process alone, which then decides.
        process = subprocess.Popen(
            argv,
            env={**os.environ, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise LocalError(f"found no program {argv[0]!r} on PATH: `make setup` installs what is needed") from error
    with process:
        try:
            out, err = process.communicate(stdin, timeout)
        except subprocess.TimeoutExpired as error:
            end(process)
            raise LocalError(f"found `{shown}` still running after {timeout:.0f} s, ended it") from error
        except BaseException:
            if finish:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=FINISH_S)
            end(process)
            raise
    result = Done(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))
    if check and result.rc != 0:
        said = (result.err.strip() or result.out.strip())[-2000:]
        raise LocalError(f"found exit status {result.rc} from `{shown}`, expected 0. It said:\n{said}")
    return result


def end(process: subprocess.Popen[bytes]) -> None:
    """End a program that leads its own session, with all that it started there."""
    for number, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return
