"""The plan: what is asked, and how much must be seen, before there are data. It carries its own hash."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dsv4_fleet.judge.certify import FEWEST_SESSIONS, MOST_SESSIONS
from dsv4_fleet.judge.decide import Questions, Rules, Shape, sessions_needed

FORMAT: Final = 1
KIND: Final = "dsv4-fleet judge plan"
CONTROL_RULES: Final = ("concurrent", "held_back", "earlier")


class PlanError(ValueError):
    """A plan that is not one, or not the one that was made."""


@dataclass(frozen=True)
class Exposure:
    """What each worker must have seen before a PASS."""

    sessions: int
    turns: int = 3
    concurrency: int = 80  # sessions open at once, at the client
    at_worker: int = 60  # requests at once, as the worker itself says
    requests: int = 240  # since its boot: twice the number after which a fault was known to begin
    tokens: int = 10_000  # completion tokens
    failed: int = 0  # sessions without an answer, over the wave; each counts against a PASS as a corrupted one
    stratum: int = 30  # sessions of each kind: long, late, crowded, streamed, whole
    late: int = 120  # a request is late after so many
    crowded: int = 16  # requests at once


@dataclass(frozen=True)
class Control:
    """Where the comparison comes from: a worker in the same minutes, one held back by name, or earlier waves'."""

    rule: str = "concurrent"
    worker: str | None = None
    restart_window_s: float = 3600  # between the restarts of the two arms
    most_age_s: float = 86400  # of an earlier control

    def __post_init__(self) -> None:
        if self.rule not in CONTROL_RULES:
            raise PlanError(f"found control rule {self.rule!r}, expected one of {', '.join(CONTROL_RULES)}")
        if (self.rule == "held_back") != (self.worker is not None):
            raise PlanError(
                f"found control rule {self.rule} and worker {self.worker}, expected a name for held_back only"
            )


@dataclass(frozen=True)
class Plan:
    """`diagnostics` and `expect` by arm: instruments that may be on, and flags that each worker must have."""

    questions: Questions
    exposure: Exposure
    wave_sizes: tuple[int, ...]
    control: Control = Control()
    diagnostics: dict[str, list[str]] = field(default_factory=dict)
    expect: dict[str, dict[str, bool]] = field(default_factory=dict)
    seed: int = 1
    created: float = 0.0

    @property
    def hash(self) -> str:
        return hashlib.sha256(json.dumps(self.body(), sort_keys=True).encode()).hexdigest()

    def body(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "kind": KIND,
            **dataclasses.asdict(self),
            "wave_sizes": list(self.wave_sizes),
        }

    def to_json(self) -> dict[str, Any]:
        return {**self.body(), "hash": self.hash}

    def outlook(self) -> list[str]:
        """For each wave, whether flawless data would earn it a PASS."""
        lines: list[str] = []
        earlier: tuple[int, ...] = ()
        for number, size in enumerate(self.wave_sizes, 1):
            wave = (self.exposure.sessions,) * size
            rules = Rules(self.questions, Shape(wave, earlier), self.exposure.sessions)
            earlier += wave
            word = (
                "can earn a PASS" if rules.reachable else "will be INCONCLUSIVE: too few workers for the claim so far"
            )
            lines.append(f"wave {number}: {size} workers with {self.exposure.sessions} sessions each, {word}")
        return lines


def make(
    questions: Questions,
    wave_sizes: tuple[int, ...],
    sessions: int | None = None,
    control: Control | None = None,
    exposure: dict[str, Any] | None = None,
    **others: Any,
) -> Plan:
    """A plan made now. `sessions` is worked out where it is not given: the fewest that earn every wave a PASS."""
    if not wave_sizes or min(wave_sizes) < 1:
        raise PlanError(f"found wave sizes {list(wave_sizes)}, expected at least one, each at least 1")
    if len(wave_sizes) != questions.waves:
        raise PlanError(f"found {len(wave_sizes)} wave sizes, expected {questions.waves} as in the questions")
    if sessions is None:
        needed = sessions_needed(questions, wave_sizes, MOST_SESSIONS)
        sessions = max(FEWEST_SESSIONS, needed or 3 * FEWEST_SESSIONS)
    return Plan(
        questions,
        Exposure(sessions, **(exposure or {})),
        wave_sizes,
        control or Control(),
        created=round(time.time(), 3),
        **others,
    )


def read(path: Path) -> Plan:
    """The plan in this file; PlanError where it is none, OSError where it cannot be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PlanError(f"found {path} wrong ({error}), expected a plan; make one with --make-plan") from error
    return load(value)


def load(value: Any) -> Plan:
    """The plan from its JSON; PlanError where it is malformed or was changed after it was made."""
    if not isinstance(value, dict) or value.get("kind") != KIND or value.get("format") != FORMAT:
        raise PlanError(
            f"found no plan, expected an object of kind {KIND!r} and format {FORMAT}; make one with --make-plan"
        )
    try:
        plan = Plan(
            Questions(**value["questions"]),
            Exposure(**value["exposure"]),
            tuple(value["wave_sizes"]),
            Control(**value["control"]),
            value["diagnostics"],
            value["expect"],
            value["seed"],
            value["created"],
        )
    except (KeyError, TypeError) as error:
        raise PlanError(
            f"found a plan whose fields are wrong ({error}), expected those that --make-plan writes"
        ) from error
    if plan.hash != value.get("hash"):
        raise PlanError(
            f"found a plan with hash {value.get('hash')}, expected {plan.hash}: it was changed after it was "
            "made; make a new plan and take new data"
        )
    return plan
