"""The decision: one function, for one real wave and for ten thousand simulated ones.

docs/judge.md has the reasoning. Arrays: S waves side by side (1 in real use), L looks, K workers of the wave,
J workers of earlier waves. Counts are sessions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy import special, stats

from dsv4_fleet.judge.statistics import (
    Ints,
    Likelihood,
    critical_total,
    intervals,
    none_bad,
    total_cdf,
)

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

INCONCLUSIVE: Final = 0
PASS: Final = 1
FAIL: Final = 2
NAMES: Final = ("INCONCLUSIVE", "PASS", "FAIL")

NEAR: Final = 3  # times the allowed rate: what a PASS must hardly ever overlook
NEAR_ERROR: Final = 0.01
KNOWN_ERROR: Final = 1e-6
CONTROL_ERROR: Final = 0.05
FAIL_PARTS: Final = 4  # evidence at any look: this wave's, the pool's; at the planned exposure: all counts, soft excess


@dataclass(frozen=True)
class Questions:
    """What is asked before there are data. Budgets are probabilities over the whole rollout."""

    allowed: float = 0.01  # rate of corrupted sessions
    known: float = 0.15  # rate of the fault that is to be gone
    pass_budget: float = 0.04  # of any wrong PASS where the rate is `allowed` or more
    fail_budget: float = 0.01  # of any FAIL where the rate is `allowed` or less
    difference_budget: float = 0.01  # of calling two equal arms different
    icc: float = 0.05  # correlation of two sessions of one worker
    waves: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.allowed < self.known < 1:
            raise ValueError(f"found allowed {self.allowed} and known {self.known}, expected 0 < allowed < known < 1")
        for name in ("pass_budget", "fail_budget", "difference_budget"):
            if not 0 < getattr(self, name) <= 0.1:
                raise ValueError(f"found {name} {getattr(self, name)}, expected more than 0 and at most 0.1")
        if not 0 <= self.icc <= 0.5:
            raise ValueError(f"found icc {self.icc}, expected 0 to 0.5")
        if self.waves < 1:
            raise ValueError(f"found {self.waves} waves, expected at least 1")

    @property
    def pass_error(self) -> float:
        """One wave's share of the budget."""
        return self.pass_budget / self.waves

    @property
    def excluded(self) -> tuple[tuple[float, float], ...]:
        """(rate, error): a PASS comes up with at most that probability where that is the rate."""
        near = min(NEAR * self.allowed, self.known)
        return (self.allowed, self.pass_error), (near, NEAR_ERROR), (self.known, KNOWN_ERROR)


def sessions_needed(questions: Questions, waves: tuple[int, ...], most: int) -> int | None:
    """Clean sessions on each worker that earn a PASS for every wave of these sizes, and for the pool at the end.

    None where `most` are too few.
    """
    total, smallest, largest = sum(waves), min(waves), max(waves)

    def enough(sessions: int) -> bool:
        alone = none_bad(sessions, questions.known, 0) <= questions.pass_error / largest
        return alone and all(
            none_bad(sessions, rate, 0) ** smallest <= error
            and none_bad(sessions, rate, questions.icc) ** total <= error
            for rate, error in questions.excluded
        )

    if not enough(most):
        return None
    low, high = 0, most  # `low` is not enough, `high` is
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class Shape:
    """Planned sessions of each worker: this wave's, earlier waves', the controls'; and the reference's total."""

    wave: tuple[int, ...]
    earlier: tuple[int, ...] = ()
    control: tuple[int, ...] = ()
    reference: int = 0

    @property
    def pool(self) -> tuple[int, ...]:
        return self.wave + self.earlier


@dataclass
class Evidence:
    """Counts; `against` is every planned session that is not shown to be clean."""

    hard: Ints  # [S, L, K] corrupted for certain among the first `seen`, which may exceed the planned ones
    seen: Ints  # [S, L, K]
    against: Ints  # [S, K] of the planned ones
    soft: Ints  # [S, K] of the planned ones: unconfirmed soft errors
    complete: Bools  # [S] every worker has its planned sessions, and nothing else stands against a PASS
    earlier_hard: Ints  # [S, J]
    earlier_against: Ints  # [S, J]
    control_hard: Ints  # [S]
    reference_soft: Ints  # [S]


@dataclass
class Decisions:
    """`verdict` holds codes; the others say why. All [S], but `worker_evidence`: [S, K]. Evidence is in e-values."""

    verdict: Ints
    wave_evidence: Floats
    pool_evidence: Floats
    worker_evidence: Floats
    fail_look: Ints  # -1 where there is none
    fail_end: Bools
    soft_excess: Bools
    wave_clear: Bools
    pool_clear: Bools
    workers_clear: Bools
    control_shows: Bools
    different: Bools


class Rules:
    """What follows from questions and shape alone, worked out once."""

    def __init__(self, questions: Questions, shape: Shape, longest: int) -> None:
        self.questions, self.shape = questions, shape
        # The wave's claim is about these very workers, whose sessions are independent given each one's own rate; a
        # binomial bound on their mean rate is then safe. The pool's claim is about the fleet they were drawn from.
        self.wave_critical = critical_total(shape.wave, 0, questions.excluded)
        self.pool_critical = critical_total(shape.pool, questions.icc, questions.excluded)
        worker_error = questions.pass_error / len(shape.wave)
        self.worker_critical = np.array(
            [critical_total((size,), 0, ((questions.known, worker_error),)) for size in shape.wave]
        )
        self.control_critical = self._control()
        self.fail_critical = self._fail()
        self.threshold = FAIL_PARTS * questions.waves / questions.fail_budget
        self.pool_threshold = FAIL_PARTS / questions.fail_budget
        null_iccs = sorted({0.0, questions.icc / 4, questions.icc})
        self.nulls = tuple((questions.allowed * part, icc) for part in (1, 0.5, 0.25, 0.05) for icc in null_iccs)
        middle = math.sqrt(questions.allowed * questions.known)
        rates = ((questions.known, 0.5), (middle, 0.25), ((middle + questions.known) / 2, 0.25))
        iccs = sorted({0.0, questions.icc})
        self.alternatives = tuple((rate, icc) for rate, _ in rates for icc in iccs)
        self.weights = np.log([weight / len(iccs) for _, weight in rates for _ in iccs])
        self.likelihood = Likelihood(self.nulls + self.alternatives, max(longest, *shape.pool))

    @property
    def reachable(self) -> bool:
        """Whether flawless data of the planned size would earn a PASS."""
        return min(self.wave_critical, self.pool_critical, *self.worker_critical) >= 0

    def _control(self) -> int:
        """The fewest corrupted control sessions whose lower 95 % bound lies above the allowed rate."""
        total = sum(self.shape.control)
        return int(stats.binom.isf(CONTROL_ERROR, total, self.questions.allowed)) + 1 if total else 1

    def _fail(self) -> int:
        """The fewest corrupted sessions, at the planned exposure, that the allowed rate does not explain."""
        error = self.questions.fail_budget / self.questions.waves / FAIL_PARTS
        cdf = total_cdf(self.shape.wave, self.questions.allowed, self.questions.icc)
        return int(np.searchsorted(cdf, 1 - error)) + 1

    def evidence(self, bad: Ints, seen: Ints) -> tuple[Floats, Floats]:
        """E-values against "the rate is allowed": of all workers together [...], and of each alone [..., K].

        The numerator is a mixture over faults; the denominator the best of the allowed explanations, so that the
        quotient is an e-process for each of them. It may be looked at as often as one likes.
        """
        joint_null, each_null = (np.full(shape, -np.inf) for shape in (bad.shape[:-1], bad.shape))
        joint_fault, each_fault = joint_null.copy(), each_null.copy()
        for model in range(len(self.nulls)):
            value = self.likelihood(model, bad, seen)
            np.maximum(each_null, value, out=each_null)
            np.maximum(joint_null, value.sum(axis=-1), out=joint_null)
        for at, weight in enumerate(self.weights):
            value = self.likelihood(len(self.nulls) + at, bad, seen)
            np.logaddexp(each_fault, weight + value, out=each_fault)
            np.logaddexp(joint_fault, weight + value.sum(axis=-1), out=joint_fault)
        return joint_fault - joint_null, each_fault - each_null

    def wave_evidence(self, bad: Ints, seen: Ints) -> tuple[Floats, Floats, Floats]:
        """Logarithms of the e-values of this wave, the one that its FAIL is made of first: wave, joint, each."""
        joint, each = self.evidence(bad, seen)
        together = np.stack([joint, special.logsumexp(each, axis=-1) - math.log(each.shape[-1])])
        # Half of it is the mean over the workers: one bad worker is not outvoted by its peers.
        return special.logsumexp(together, axis=0) - math.log(2), joint, each

    def fails(self, hard: Sequence[int], seen: Sequence[int]) -> bool:
        """Whether these counts of the wave's workers are a FAIL already, however many sessions are still to come."""
        wave, _, _ = self.wave_evidence(np.array([hard]), np.array([seen]))
        return bool(wave[0] >= math.log(self.threshold))


def decide(rules: Rules, evidence: Evidence) -> Decisions:
    """The verdict of each of S waves.

    FAIL at any look, as soon as the evidence is there, and by an exact test at the planned exposure. PASS only
    for complete data, at the planned exposure, and only where this wave, each of its workers and the pool are
    clear and the control still shows the fault.
    """
    shape = rules.shape
    wave, joint, each = rules.wave_evidence(evidence.hard, evidence.seen)
    pool = joint
    if shape.earlier:
        looks, earlier = evidence.hard.shape[1], evidence.earlier_hard[:, None, :]
        before = np.broadcast_to(earlier, (len(earlier), looks, len(shape.earlier)))
        seen = np.broadcast_to(np.array(shape.earlier), before.shape)
        pool, _ = rules.evidence(
            np.concatenate([evidence.hard, before], axis=-1), np.concatenate([evidence.seen, seen], axis=-1)
        )
    failing = (wave >= math.log(rules.threshold)) | (pool >= math.log(rules.pool_threshold))
    fail_look = np.where(failing.any(axis=1), failing.argmax(axis=1), -1)

    against = evidence.against.sum(axis=1)
    pooled = against + evidence.earlier_against.sum(axis=1)
    wave_clear = against <= rules.wave_critical
    pool_clear = pooled <= rules.pool_critical
    soft_excess = np.zeros(len(against), dtype=bool)
    if shape.reference:
        wave_soft, pool_soft, soft_excess = _soft(rules, evidence, against, pooled)
        wave_clear |= wave_soft
        pool_clear |= pool_soft & (rules.pool_critical >= 0)
    workers_clear: Bools = np.all(evidence.against <= rules.worker_critical, axis=1)
    control_shows = (evidence.control_hard >= rules.control_critical) & bool(shape.control)

    planned = (evidence.seen[:, -1] == np.array(shape.wave)).all(axis=1)
    fail_end = planned & (evidence.hard[:, -1].sum(axis=1) >= rules.fail_critical)

    failed = (fail_look >= 0) | fail_end | soft_excess
    passed = ~failed & evidence.complete & wave_clear & pool_clear & workers_clear & control_shows
    return Decisions(
        verdict=np.where(failed, FAIL, np.where(passed, PASS, INCONCLUSIVE)),
        wave_evidence=np.exp(np.minimum(wave.max(axis=1), 700)),
        pool_evidence=np.exp(np.minimum(pool.max(axis=1), 700)),
        worker_evidence=np.exp(np.minimum(each.max(axis=1), 700)),
        fail_look=fail_look,
        fail_end=fail_end,
        soft_excess=soft_excess,
        wave_clear=wave_clear,
        pool_clear=pool_clear,
        workers_clear=workers_clear,
        control_shows=control_shows,
        different=_different(rules, evidence),
    )


def _soft(rules: Rules, evidence: Evidence, against: Ints, pooled: Ints) -> tuple[Bools, Bools, Bools]:
    """With the reference's own errors taken off: wave clear, pool clear; and whether the excess is above allowed."""
    questions, shape = rules.questions, rules.shape
    reference = (shape.reference,)
    least, _ = intervals(evidence.reference_soft, reference, 0, questions.pass_error / 2)
    _, wave = intervals(against, shape.wave, 0, questions.pass_error / 2)
    _, pool = intervals(pooled, shape.pool, questions.icc, questions.pass_error / 2)
    error = questions.fail_budget / questions.waves / FAIL_PARTS / 2
    _, most = intervals(evidence.reference_soft, reference, 0, error)
    soft, _ = intervals(evidence.soft.sum(axis=1), shape.wave, questions.icc, error)
    full = evidence.complete
    return (
        wave - least <= questions.allowed,
        pool - least <= questions.allowed,
        full & (soft - most > questions.allowed),
    )


def _different(rules: Rules, evidence: Evidence) -> Bools:
    """Whether the arms' intervals do not touch: wrong with at most the budget's probability, whatever the rate."""
    shape, questions = rules.shape, rules.questions
    if not shape.control:
        return np.zeros(len(evidence.control_hard), dtype=bool)
    # Only what lies within the plan counts, so that both totals have the distribution the intervals are made for.
    full = (evidence.seen[:, -1] == np.array(shape.wave)).all(axis=1)
    treated = np.where(full, evidence.hard[:, -1].sum(axis=1), 0)
    error = questions.difference_budget / 2
    low, high = intervals(treated, shape.wave, questions.icc, error)
    control_low, control_high = intervals(evidence.control_hard, shape.control, questions.icc, error)
    return full & ((low > control_high) | (high < control_low))


@functools.lru_cache(maxsize=32)
def rules_for(questions: Questions, shape: Shape, longest: int) -> Rules:
    """The same rules for the same questions and shape."""
    return Rules(questions, shape, longest)
