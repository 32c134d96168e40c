"""The decision on counts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dsv4_fleet.judge.decide import (
    FAIL,
    INCONCLUSIVE,
    PASS,
    Decisions,
    Evidence,
    Questions,
    Rules,
    Shape,
    decide,
    sessions_needed,
)
from dsv4_fleet.judge.statistics import lower_bound

INDEPENDENT = Questions(icc=0.0)


def judged(
    hard: list[int],
    sessions: int = 330,
    control: int = 50,
    earlier: tuple[int, ...] = (),
    questions: Questions = INDEPENDENT,
    complete: bool = True,
    soft: list[int] | None = None,
    reference: tuple[int, int] = (0, 0),
    controls: int = 1,
) -> tuple[Rules, Decisions]:
    """One wave with these corrupted sessions on its workers, spread evenly over ten looks."""
    shape = Shape((sessions,) * len(hard), (sessions,) * len(earlier), (sessions,) * controls, reference[1])
    rules = Rules(questions, shape, sessions)
    looks = np.linspace(0.1, 1, 10)
    counts = (np.array(hard)[None, None, :] * looks[None, :, None]).astype(int)
    seen = np.broadcast_to((sessions * looks).astype(int)[None, :, None], counts.shape)
    wrong = np.array([soft or [0] * len(hard)])
    evidence = Evidence(
        hard=counts,
        seen=seen,
        against=counts[:, -1] + wrong,
        soft=wrong,
        complete=np.array([complete]),
        earlier_hard=np.array([earlier], dtype=np.int64).reshape(1, -1),
        earlier_against=np.array([earlier], dtype=np.int64).reshape(1, -1),
        control_hard=np.array([control]),
        reference_soft=np.array([reference[0]]),
    )
    return rules, decide(rules, evidence)


def verdict(*arguments: object, **others: object) -> int:
    return int(judged(*arguments, **others)[1].verdict[0])  # type: ignore[arg-type]  # passed through


def test_a_clean_wave_passes_at_the_planned_exposure() -> None:
    assert verdict([0]) == PASS


def test_incomplete_data_never_pass() -> None:
    assert verdict([0], complete=False) == INCONCLUSIVE


def test_eighty_clean_sessions_are_too_few() -> None:
    rules, decisions = judged([0], sessions=80)
    assert not rules.reachable
    assert decisions.verdict[0] == INCONCLUSIVE


@pytest.mark.parametrize("control", [0, 3])
def test_a_control_that_does_not_show_the_fault_voids_the_comparison(control: int) -> None:
    _, decisions = judged([0], control=control)
    assert not decisions.control_shows[0]
    assert decisions.verdict[0] == INCONCLUSIVE


def test_without_a_control_there_is_no_pass() -> None:
    assert verdict([0], controls=0, control=0) == INCONCLUSIVE


def test_the_controls_lower_bound_must_lie_above_the_allowed_rate() -> None:
    rules, _ = judged([0])
    critical = rules.control_critical
    assert lower_bound(critical - 1, (330,), 0, 0.05) < 0.01 < lower_bound(critical, (330,), 0, 0.05)


def test_the_fault_fails_early() -> None:
    _, decisions = judged([50])
    assert decisions.verdict[0] == FAIL
    assert decisions.fail_look[0] == 0


def test_a_fault_needs_neither_control_nor_complete_data_to_fail() -> None:
    assert verdict([50], complete=False, control=0) == FAIL


def test_one_bad_worker_is_not_outvoted_by_its_peers() -> None:
    _, decisions = judged([50, 0, 0, 0, 0, 0, 0, 0])
    assert decisions.verdict[0] == FAIL


def test_one_bad_worker_is_not_outvoted_by_earlier_waves() -> None:
    assert verdict([50], earlier=(0,) * 20) == FAIL


def test_a_wave_that_is_not_clear_is_not_cleared_by_the_pool() -> None:
    _, decisions = judged([3], earlier=(0,) * 20)
    assert decisions.pool_clear[0]
    assert not decisions.wave_clear[0]
    assert decisions.verdict[0] == INCONCLUSIVE


def test_a_clear_wave_does_not_clear_the_pool() -> None:
    _, decisions = judged([0], earlier=(9,) * 3)
    assert decisions.wave_clear[0]
    assert not decisions.pool_clear[0]
    assert decisions.verdict[0] != PASS


def test_correlated_workers_must_be_many() -> None:
    correlated = dataclasses.replace(INDEPENDENT, icc=0.05)
    assert verdict([0], questions=correlated) == INCONCLUSIVE
    assert verdict([0], questions=correlated, earlier=(0,) * 7) == PASS


def test_the_budget_is_the_rollouts() -> None:
    def needed(waves: int) -> int | None:
        return sessions_needed(dataclasses.replace(INDEPENDENT, waves=waves), (1,) * waves, 2000)

    assert (needed(1), needed(3)) == (321, 430)


def test_honest_soft_errors_do_not_fail() -> None:
    for soft in (5, 12):
        _, decisions = judged([0, 0], soft=[soft, soft], reference=(2 * soft, 660))
        assert decisions.verdict[0] != FAIL


def test_soft_errors_beyond_the_references_fail() -> None:
    _, decisions = judged([0, 0], soft=[50, 50], reference=(10, 660))
    assert decisions.soft_excess[0]
    assert decisions.verdict[0] == FAIL


def test_soft_errors_without_a_reference_neither_pass_nor_fail() -> None:
    assert verdict([0, 0], soft=[50, 50]) == INCONCLUSIVE


def test_many_soft_errors_that_the_reference_has_too_can_pass() -> None:
    _, decisions = judged([0, 0], sessions=20_000, soft=[300, 300], reference=(620, 40_000), control=3000)
    assert decisions.verdict[0] == PASS


def test_arms_differ_only_where_their_intervals_are_apart() -> None:
    assert judged([0], control=50)[1].different[0]
    assert not judged([49], control=50)[1].different[0]
    assert not judged([0], control=4)[1].different[0]


def test_a_run_may_stop_just_where_the_verdict_would_be_fail() -> None:
    rules, _ = judged([0, 0])
    for hard in range(0, 12):
        counts, seen = np.array([[[hard, 0]]]), np.array([[[40, 40]]])
        wave, _, _ = rules.wave_evidence(counts, seen)
        assert rules.fails([hard, 0], [40, 40]) == (float(wave[0, 0]) >= np.log(rules.threshold))
    assert not rules.fails([0, 0], [0, 0])
    assert not rules.fails([1, 0], [40, 40])
    assert rules.fails([8, 0], [40, 40])


@pytest.mark.parametrize("icc", [0.0, 0.1])
@pytest.mark.parametrize("rate", [0.01, 0.002])
def test_the_evidence_is_fair_where_the_rate_is_allowed(rate: float, icc: float) -> None:
    """The mean of an e-value is at most 1 at every look."""
    rules = Rules(dataclasses.replace(INDEPENDENT, icc=icc), Shape((100, 100)), 100)
    random = np.random.default_rng(3)
    own = np.full((20_000, 2), rate) if icc == 0 else random.beta(rate * 9, (1 - rate) * 9, (20_000, 2))
    hard = random.binomial(100, own)
    joint, each = rules.evidence(hard, np.full_like(hard, 100))
    assert np.exp(joint).mean() < 1.1
    assert np.exp(each).mean() < 1.1


@pytest.mark.parametrize(
    "wrong", [{"allowed": 0.2}, {"known": 1.0}, {"pass_budget": 0.0}, {"fail_budget": 0.5}, {"icc": -0.1}, {"waves": 0}]
)
def test_questions_without_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"found .*, expected"):
        Questions(**wrong)  # type: ignore[arg-type]  # passed through
