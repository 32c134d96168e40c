"""Distributions and bounds against closed forms, brute force and simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from dsv4_fleet.judge import statistics


def test_none_of_eighty_is_only_below_3_7_percent() -> None:
    assert statistics.upper_bound(0, (80,), 0, 0.05) == pytest.approx(1 - 0.05 ** (1 / 80))
    assert statistics.upper_bound(0, (80,), 0, 0.05) == pytest.approx(0.037, abs=0.0005)


def test_below_one_percent_takes_299_clean_sessions() -> None:
    assert statistics.upper_bound(0, (298,), 0, 0.05) > 0.01 > statistics.upper_bound(0, (299,), 0, 0.05)


def test_correlated_workers_say_less_than_independent_sessions() -> None:
    bounds = [statistics.upper_bound(0, (75,) * 4, icc, 0.05) for icc in (0.0, 0.05, 0.1, 0.2)]
    assert bounds == sorted(bounds)
    assert bounds[1] > 2 * bounds[0]


@pytest.mark.parametrize("icc", [0.0, 0.1])
def test_totals_are_the_sum_of_each_workers_own_count(icc: float) -> None:
    sizes, rate = (3, 2, 3), 0.2
    each = [np.exp(statistics.log_pmf(size, rate, icc)) for size in sizes]
    totals = np.zeros(sum(sizes) + 1)
    for counts in itertools.product(*(range(size + 1) for size in sizes)):
        totals[sum(counts)] += math.prod(pmf[count] for pmf, count in zip(each, counts, strict=True))
    assert statistics.total_cdf(sizes, rate, icc) == pytest.approx(np.cumsum(totals))


def test_counts_have_the_mean_and_correlation_that_they_are_named_by() -> None:
    sessions, rate, icc = 40, 0.15, 0.1
    pmf, counts = np.exp(statistics.log_pmf(sessions, rate, icc)), np.arange(sessions + 1)
    mean = (pmf * counts).sum()
    variance = (pmf * (counts - mean) ** 2).sum()
    assert pmf.sum() == pytest.approx(1)
    assert mean == pytest.approx(sessions * rate)
    assert variance == pytest.approx(sessions * rate * (1 - rate) * (1 + (sessions - 1) * icc))


@pytest.mark.parametrize("icc", [0.0, 0.05, 0.2])
def test_no_bad_session_at_all(icc: float) -> None:
    assert statistics.none_bad(50, 0.03, icc) == pytest.approx(math.exp(statistics.log_pmf(50, 0.03, icc)[0]))


@pytest.mark.parametrize("icc", [0.0, 0.1])
def test_bounds_exclude_exactly_what_they_say(icc: float) -> None:
    sizes, total, error = (60, 40), 7, 0.05
    upper = statistics.upper_bound(total, sizes, icc, error)
    lower = statistics.lower_bound(total, sizes, icc, error)
    assert statistics.total_cdf(sizes, upper, icc)[total] == pytest.approx(error, rel=1e-3)
    assert 1 - statistics.total_cdf(sizes, lower, icc)[total - 1] == pytest.approx(error, rel=1e-3)
    assert lower < total / sum(sizes) < upper


@pytest.mark.parametrize("icc", [0.0, 0.1])
def test_intervals_by_look_up_contain_the_exact_ones(icc: float) -> None:
    sizes, error = (50, 50), 0.01
    totals = np.array([0, 1, 5, 40, 99, 100])
    lower, upper = statistics.intervals(totals, sizes, icc, error)
    for at, total in enumerate(totals):
        exact = statistics.lower_bound(total, sizes, icc, error), statistics.upper_bound(total, sizes, icc, error)
        assert lower[at] <= exact[0] + 1e-6
        assert upper[at] >= exact[1] - 1e-6
        assert upper[at] <= 1.1 * exact[1] + 1e-4


def test_the_critical_total_is_the_last_one_that_excludes_the_rate() -> None:
    assert statistics.critical_total((299,), 0, ((0.01, 0.05),)) == 0
    assert statistics.critical_total((298,), 0, ((0.01, 0.05),)) == -1
    critical = statistics.critical_total((400, 600), 0, ((0.01, 0.05),))
    cdf = statistics.total_cdf((400, 600), 0.01, 0)
    assert cdf[critical] <= 0.05 < cdf[critical + 1]


@pytest.mark.parametrize(("rate", "icc"), [(0.1, 0.0), (0.15, 0.2)])
def test_the_likelihood_is_that_of_the_sequence(rate: float, icc: float) -> None:
    likelihood = statistics.Likelihood(((0.5, 0.5), (rate, icc)), 20)
    bad, good = 3, 9
    found = likelihood(1, np.array([bad]), np.array([bad + good]))[0]
    assert found == pytest.approx(statistics.log_pmf(bad + good, rate, icc)[bad] - math.log(math.comb(bad + good, bad)))
