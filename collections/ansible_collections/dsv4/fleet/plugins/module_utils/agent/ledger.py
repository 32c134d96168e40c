"""What is known about a worker's states: proved, refused; its overrides; how its last transaction ended."""

from __future__ import annotations

from typing import Any

from . import files, paths

PROVED = 20  # how many proofs are remembered
NEEDS_PERSON = ("drained", "interrupted")


class Ledger:
    """ledger.json of one unit: each `save` replaces it whole."""

    def __init__(self, unit: str) -> None:
        self.path = f"{paths.worker(unit)}/ledger.json"
        found = files.read_json(self.path) or {}
        self.proved: list[dict[str, Any]] = found.get("proved", [])
        self.refused: dict[str, dict[str, Any]] = found.get("refused", {})
        self.overrides: dict[str, Any] = found.get("overrides", {})
        self.last: dict[str, Any] | None = found.get("last")

    def content(self) -> dict[str, Any]:
        return {
            "proved": self.proved,
            "refused": self.refused,
            "overrides": self.overrides,
            "last": self.last,
        }

    def save(self) -> None:
        files.directory(paths.WORKERS)
        files.directory(paths.worker(self.path.split("/")[-2]), 0o700)
        files.replace(self.path, files.canonical(self.content()), 0o600)

    def prove(self, state: str, identity: str, at: float, overrides: dict[str, Any]) -> None:
        """The state passed its gate and was admitted; a refusal of it is forgotten."""
        self.proved = [one for one in self.proved if one["state"] != state]
        self.proved = [*self.proved, {"state": state, "at": at, "id": identity, "overrides": overrides}][-PROVED:]
        self.refused.pop(state, None)

    def refuse(self, state: str, identity: str, at: float, reason: str) -> None:
        self.refused[state] = {"at": at, "id": identity, "reason": reason}

    def end(self, identity: str, end_state: str, failed: bool, state: str | None, at: float) -> None:
        self.last = {
            "id": identity,
            "end_state": end_state,
            "failed": failed,
            "state": state,
            "at": at,
            "acknowledged": False,
        }

    @property
    def needs_person(self) -> bool:
        """Whether the last end has to be looked at before anything else is done."""
        return self.last is not None and self.last["end_state"] in NEEDS_PERSON and not self.last["acknowledged"]

    def acknowledge(self) -> None:
        if self.last is not None:
            self.last["acknowledged"] = True

    def last_proved(self) -> str | None:
        """The newest proved state, unless it has failed its gate since."""
        if not self.proved or self.proved[-1]["state"] in self.refused:
            return None
        return str(self.proved[-1]["state"])
