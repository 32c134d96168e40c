"""Carries requests to the agent on a host, over whatever connection Ansible has."""

from __future__ import annotations

import base64
import json
import shlex
import typing as t
import zlib

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible_collections.dsv4.fleet.plugins.module_utils.agent import pack


class AgentError(Exception):
    """The agent refused, or its answer could not be read; the text says what was found and what to do."""


class Unreachable(AgentError):
    """The host did not answer. Nothing is known of it, which is a failure and never an end of the play's own kind:
    Ansible goes on to later waves past an unreachable host (docs/decisions)."""


def pack_text(data: bytes) -> str:
    """Bytes as text for a request: base64 of zlib."""
    return base64.b64encode(zlib.compress(data, 6)).decode()


def unpack_text(text: str) -> bytes:
    """The bytes that ``pack_text`` was given."""
    return zlib.decompress(base64.b64decode(text))


class Agent:
    """The agent on one host."""

    def __init__(self, action: ActionBase, python: str) -> None:
        self._action = action
        self._python = python

    def call(self, request: dict[str, t.Any]) -> dict[str, t.Any]:
        """Send the program with *request* on standard input and return its answer."""
        argv, stdin = pack.command(request, python=self._python)
        return self._run(argv, stdin, str(request["op"]))

    def follow(self, program: str, transaction: str, line: int, seconds: int) -> dict[str, t.Any]:
        """Journal lines from *line* on, waiting at most *seconds* for the next; by the program the worker already has."""
        argv = [self._python, "-I", program, "follow", transaction, str(line), str(seconds)]
        return self._run(argv, None, "follow")

    def _run(self, argv: list[str], stdin: bytes | None, what: str) -> dict[str, t.Any]:
        try:
            done = self._action._low_level_execute_command(shlex.join(argv), in_data=stdin)
        except AnsibleConnectionFailure as error:
            raise Unreachable(str(error)) from error
        text = done["stdout"].strip().rpartition("\n")[2]
        try:
            answer = json.loads(text)
        except ValueError:
            said = (done["stderr"] or done["stdout"]).strip()[-2000:] or "nothing"
            text = (
                f"agent {what}: found exit code {done['rc']} and no answer; it said: {said}; expected one JSON object; "
                f"see that {self._python!r} on the host is Python 3.9 or newer (ansible_python_interpreter)"
            )
            # An ssh that is killed, or loses its master, ends by a signal or with 255 and whatever had come by then. A
            # program that has answered before and does not now was cut off as well.
            cut_off = done["rc"] < 0 or done["rc"] == 255 or what == "follow"
            raise (Unreachable if cut_off else AgentError)(text) from None
        if not answer.get("ok"):
            raise AgentError(f"agent {what}: {answer.get('error', 'found an answer without a reason')}")
        return answer


def interpreter(variables: t.Mapping[str, t.Any]) -> str:
    """The Python that runs the agent: ansible_python_interpreter where it is a path, else python3 on the host's PATH.

    Interpreter discovery would cost a round trip to each host.
    """
    value = str(variables.get("ansible_python_interpreter", "python3"))
    return "python3" if value.startswith("auto") else value
