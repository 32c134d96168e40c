"""What the agent is asked to do: by a request from the loader, or by its own stored copy's arguments."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from . import check, secrets
from .errors import AgentError
from .journal import hide

USAGE = "usage: agent.pyz run ID | recover ID | recover --boot | follow ID LINE SECONDS"


def answer(body: bytes, program: bytes) -> int:
    """Carry out one request and print one JSON object; the exit status."""
    secret: list[str] = []

    def work() -> dict[str, Any]:
        request = check.request(json.loads(body), ("op",))
        if isinstance(request.get("secrets"), dict):
            secret.extend(secrets.texts(check.secrets(request["secrets"])))
        if os.geteuid() != 0:
            raise AgentError(f"agent: found user id {os.geteuid()}, expected 0. Run it as root (become: true).")
        return _requested(request, program)

    return _say(work, secret)


def _requested(request: dict[str, Any], program: bytes) -> dict[str, Any]:
    # Each operation imports what it needs: a program that starts often should start fast.
    operation = request["op"]
    if operation == "inspect":
        from . import cache, inspect

        cache.remember(program)
        return inspect.inspect(check.request(request, ("worker", "secrets")))
    if operation == "compile":
        from . import python_env

        needed = check.request(request, ("python", "sources"))
        return python_env.compile_sources(needed["python"], needed["sources"])
    if operation == "start":
        from . import start

        return start.start(request, program)
    raise AgentError(f"request.op: found {operation!r}, expected inspect, compile or start.")


def main(arguments: list[str]) -> int:
    """The stored program. `run` and `recover` write their result to the transaction; the exit status says little."""
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if name == "follow" and len(rest) == 3:
        from . import follow

        return _say(lambda: follow.follow(rest[0], int(rest[1]), float(rest[2])), [])
    if name == "run" and len(rest) == 1:
        from . import cache
        from .journal import Transaction
        from .transaction import Change

        with open(sys.argv[0], "rb") as file:
            cache.remember(file.read())
        result = Change(Transaction(rest[0]), secrets.load(rest[0])).run()
        print(f"{result['end_state']}: {result['error'] or 'done'}")
        return 0
    if name == "recover" and len(rest) == 1:
        from . import recover

        if rest[0] == "--boot":
            for one in recover.at_boot():
                print(f"{one['id']}: {one['end_state']}")
        else:
            repaired = recover.after_stop(rest[0])
            print(f"{rest[0]}: {repaired['end_state'] if repaired else 'has its result'}")
        return 0
    print(USAGE, file=sys.stderr)
    return 64


def _say(work: Callable[[], dict[str, Any]], secret: list[str]) -> int:
    try:
        said, status = {"format": check.FORMAT, "ok": True, **work()}, 0
    except AgentError as error:
        said, status = {"format": check.FORMAT, "ok": False, "error": hide(str(error), secret)}, 1
    except Exception:
        text = "agent: an error that it does not know; expected none. Report this: " + traceback.format_exc()[-3000:]
        said, status = {"format": check.FORMAT, "ok": False, "error": hide(text, secret)}, 1
    print(json.dumps(said, ensure_ascii=True, separators=(",", ":")), flush=True)
    return status
