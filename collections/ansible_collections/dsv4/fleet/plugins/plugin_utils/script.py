"""The serve script as text: its digest, and what bash makes of it."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
import subprocess

from ansible_collections.dsv4.fleet.plugins.plugin_utils.flags import SettingError

PLACEHOLDER = "0" * 64
_STATE_LINE = re.compile(r"^export DSV4_FLEET_STATE=.*\n", re.MULTILINE)

# Functions come before special builtins in bash, so the script runs to its `exec` and is stopped there. The secrets file
# and the working directory are the worker's; here they are only noted.
_TRACE = r"""
cd() { __dsv4_cd=$1; }
source() { __dsv4_source=$1; }
.() { __dsv4_source=$1; }
exec() {
  builtin printf '%s\0' dsv4-exec "${__dsv4_cd-}" "${__dsv4_source-}" "$#" "$@"
  builtin export -n __dsv4_cd __dsv4_source
  __ENV__ -0
  builtin exit 0
}
"""


@dataclasses.dataclass(frozen=True)
class Run:
    """What bash did: the environment it would hand over (name to value), the command, the directory, the sourced file."""

    environment: dict[str, str]
    command: list[str]
    directory: str
    sourced: str


def state(text: str) -> str:
    """The state that *text* names: sha256, in hex, of the script without its own DSV4_FLEET_STATE line."""
    return hashlib.sha256(_STATE_LINE.sub("", text, count=1).encode()).hexdigest()


def seal(text: str) -> tuple[str, str]:
    """Put the script's own digest in the place of the placeholder.

    Returns:
        The finished text and its state.

    Raises:
        SettingError: when the template has no such line, or carriage returns.
    """
    if "\r" in text:
        raise SettingError(
            "serve script: found carriage returns in the rendered text; expected LF line ends only; convert the template"
        )
    if text.count(f"export DSV4_FLEET_STATE={PLACEHOLDER}\n") != 1 or len(_STATE_LINE.findall(text)) != 1:
        raise SettingError(
            "serve script: found no single line 'export DSV4_FLEET_STATE={{ dsv4_script.identity.DSV4_FLEET_STATE }}'; "
            "expected exactly one; put it back into the template"
        )
    digest = state(text)
    return text.replace(PLACEHOLDER, digest, 1), digest


def run(text: str) -> Run:
    """Let bash execute *text* up to its ``exec``, in an empty environment, and say what came out.

    Raises:
        SettingError: when bash fails, or ends without reaching ``exec``.
    """
    # An empty PATH: a script that does not end in exec must not start a program here.
    base = {"PATH": "/nonexistent", "LC_ALL": "C.UTF-8"}
    reader, writer = os.pipe()
    try:
        os.write(writer, _TRACE.replace("__ENV__", shutil.which("env") or "/usr/bin/env").encode())
    finally:
        os.close(writer)
    try:
        done = subprocess.run(
            [shutil.which("bash") or "/bin/bash", "-s"],
            input=text.encode(),
            env={**base, "BASH_ENV": f"/dev/fd/{reader}"},
            pass_fds=(reader,),
            capture_output=True,
            timeout=30,
            cwd="/",
        )
    finally:
        os.close(reader)
    parts = done.stdout.split(b"\0")
    if done.returncode != 0 or b"dsv4-exec" not in parts:
        said = done.stderr.decode(errors="replace").strip() or "nothing"
        raise SettingError(
            f"serve script: bash ended with {done.returncode} before any exec and said: {said}; expected the script to end "
            "in exec, so that the server is the unit's main process; correct the template"
        )
    start = parts.index(b"dsv4-exec")
    if start:
        raise SettingError("serve script: found output before exec; expected none; correct the template")
    directory, sourced, count = (part.decode() for part in parts[1:4])
    command = [part.decode() for part in parts[4 : 4 + int(count)]]
    after = (part.decode().partition("=") for part in parts[4 + int(count) :] if part)
    skip = {"BASH_ENV", "PWD", "OLDPWD", "SHLVL", "_"}
    environment = {name: value for name, _, value in after if name not in skip and base.get(name) != value}
    return Run(environment, command, directory, sourced)


def verify(text: str, environment: dict[str, str], command: list[str], directory: str, sourced: str) -> None:
    """Check that bash makes of the script exactly what was wanted.

    Raises:
        SettingError: naming each variable, word or path that differs.
    """
    found = run(text)
    problems = [
        f"{name}: found {found.environment.get(name, 'nothing')!r}, expected {environment.get(name, 'nothing')!r}"
        for name in sorted(found.environment.keys() | environment.keys())
        if found.environment.get(name) != environment.get(name)
    ]
    for what, got, want in (
        ("command", found.command, command),
        ("working directory", found.directory, directory),
        ("secrets file", found.sourced, sourced),
    ):
        if got != want:
            problems.append(f"{what}: found {got!r}, expected {want!r}")
    if problems:
        raise SettingError(
            "serve script: bash does not end up with what was wanted; correct the template:\n  " + "\n  ".join(problems)
        )
