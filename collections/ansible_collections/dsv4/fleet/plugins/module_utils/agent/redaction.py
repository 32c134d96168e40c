"""Texts, command lines and environments without what looks secret in them, for messages and evidence."""

from __future__ import annotations

import re

HIDDEN = "(secret)"
# A name one of whose parts ends so. Not "tokens": SGLang counts those by the dozen. DSV4_FLEET_* are digests.
_WORD = r"(?:KEYS?|TOKEN|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|CREDENTIALS?)"
_NAME = rf"(?!DSV4_FLEET_)[A-Z0-9_-]*{_WORD}(?:[_-][A-Z0-9_-]*)?"
_VARIABLE = re.compile(rf"{_NAME}\Z", re.IGNORECASE)
_OPTION = re.compile(rf"--?{_NAME}\Z", re.IGNORECASE)
_VALUE = r"""'[^']*'|"[^"]*"|[^\s'",]+"""
_ASSIGNMENT = re.compile(
    rf"((?<![A-Z0-9_-])(?:{_NAME}[\"']?\s?[=:]\s?|--{_NAME}\s+|Bearer\s+))({_VALUE})", re.IGNORECASE
)


def text(words: str) -> str:
    """Without the values in `NAME=value`, `--name value`, `"name": value`, and without bearer tokens."""
    return _ASSIGNMENT.sub(rf"\1{HIDDEN}", words)


def arguments(cmdline: list[str]) -> list[str]:
    """A command line without the values of options whose names look secret."""
    before = ["", *cmdline]
    return [HIDDEN if _OPTION.match(last) else text(word) for last, word in zip(before, cmdline)]


def environment(variables: dict[str, str]) -> dict[str, str]:
    """An environment, sorted by name, without the values of names that look secret."""
    return {name: HIDDEN if is_secret(name) else text(value) for name, value in sorted(variables.items())}


def is_secret(name: str) -> bool:
    """Does the variable's name look as if its value were secret?"""
    return bool(_VARIABLE.match(name))
