"""The one error of this package."""

from __future__ import annotations


class PatchError(Exception):
    """A release cannot be built; the message says what was found, what was expected, what to do."""
