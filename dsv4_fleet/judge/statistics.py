"""Counts of bad sessions on correlated workers: distributions, exact bounds, evidence.

A worker's own rate is drawn from a beta distribution of mean `rate`; its sessions are independent given that
rate. `icc` is the correlation of two sessions of one worker: the beta's parameters are rate·s and (1-rate)·s with
s = 1/icc - 1. At icc 0 every worker has the same rate and counts are binomial.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
from scipy import optimize, special, stats

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Rates at which intervals for many totals are looked up; a bound is rounded outwards to one of them.
RATES: Floats = np.concatenate([[1e-9], special.expit(np.linspace(special.logit(1e-5), special.logit(0.9999), 400))])


def log_pmf(sessions: int, rate: float, icc: float) -> Floats:
    """Log probability of 0 … `sessions` bad ones on one worker."""
    counts = np.arange(sessions + 1)
    if icc == 0:
        return np.asarray(stats.binom.logpmf(counts, sessions, rate), dtype=float)
    size = 1 / icc - 1
    good, bad = (1 - rate) * size, rate * size
    choose = -special.betaln(sessions - counts + 1, counts + 1) - np.log(sessions + 1)
    pmf: Floats = choose + special.betaln(counts + bad, sessions - counts + good) - special.betaln(bad, good)
    return pmf


def total_cdf(sizes: tuple[int, ...], rate: float, icc: float) -> Floats:
    """P(total ≤ t) for t = 0 … sum(sizes), `sizes` being the sessions of each worker."""
    total = sum(sizes)
    if icc == 0:
        return np.asarray(stats.binom.cdf(np.arange(total + 1), total, rate), dtype=float)
    length = 1 << total.bit_length()
    spectrum = np.ones(length // 2 + 1, dtype=complex)
    for size in set(sizes):
        spectrum *= np.fft.rfft(np.exp(log_pmf(size, rate, icc)), length) ** sizes.count(size)
    pmf = np.fft.irfft(spectrum, length)[: total + 1]
    return np.clip(np.cumsum(np.clip(pmf, 0, None)), 0, 1)


def none_bad(sessions: float, rate: float, icc: float) -> float:
    """P(no bad session in `sessions` on one worker)."""
    if icc == 0:
        return float((1 - rate) ** sessions)
    size = 1 / icc - 1
    good = (1 - rate) * size
    return float(
        np.exp(
            special.gammaln(good + sessions)
            - special.gammaln(good)
            + special.gammaln(size)
            - special.gammaln(size + sessions)
        )
    )


def upper_bound(total: int, sizes: tuple[int, ...], icc: float, error: float) -> float:
    """The smallest rate that is excluded: `total` or fewer bad ones would come up with probability `error` there."""
    if total >= sum(sizes):
        return 1.0
    if icc == 0:
        return float(stats.beta.ppf(1 - error, total + 1, sum(sizes) - total))
    if total_cdf(sizes, 1 - 1e-9, icc)[total] > error:
        return 1.0
    return float(optimize.brentq(lambda rate: total_cdf(sizes, rate, icc)[total] - error, 1e-12, 1 - 1e-9))


def lower_bound(total: int, sizes: tuple[int, ...], icc: float, error: float) -> float:
    """The largest rate that is excluded: `total` or more bad ones would come up with probability `error` there."""
    if total <= 0:
        return 0.0
    if icc == 0:
        return float(stats.beta.ppf(error, total, sum(sizes) - total + 1))
    if 1 - total_cdf(sizes, 1 - 1e-9, icc)[total - 1] < error:
        return 1.0 - 1e-9
    return float(optimize.brentq(lambda rate: 1 - total_cdf(sizes, rate, icc)[total - 1] - error, 1e-12, 1 - 1e-9))


@functools.lru_cache(maxsize=8)
def _cdf_by_rate(sizes: tuple[int, ...], icc: float) -> Floats:
    """[rate of RATES, total] → P(total' ≤ total)."""
    return np.stack([total_cdf(sizes, float(rate), icc) for rate in RATES])


def intervals(totals: Ints, sizes: tuple[int, ...], icc: float, error: float) -> tuple[Floats, Floats]:
    """Lower and upper bound of the rate for each total, each wrong with probability `error` at most."""
    cdf = _cdf_by_rate(sizes, icc)
    # Both run one way in the rate, so counting the rates that are not excluded finds the bound.
    above = np.count_nonzero(cdf > error, axis=0)
    upper = np.append(RATES, 1.0)[above]
    at_least = 1 - np.concatenate([np.zeros((len(RATES), 1)), cdf[:, :-1]], axis=1)
    below = np.count_nonzero(at_least <= error, axis=0)
    lower = np.concatenate([[0.0], RATES])[below]
    return lower[totals], upper[totals]


def critical_total(sizes: tuple[int, ...], icc: float, errors: tuple[tuple[float, float], ...]) -> int:
    """The largest total that excludes every (rate, error) of `errors`; -1 where not even 0 does."""
    return min(int(np.searchsorted(total_cdf(sizes, rate, icc), error, side="right")) - 1 for rate, error in errors)


class Likelihood:
    """Log likelihood of a worker's sessions under some (rate, icc), by look-up.

    A sequence of x bad and m good sessions in any order has probability
    Π(rate·s + i, i < x) · Π((1-rate)·s + j, j < m) / Π(s + k, k < x + m).
    """

    def __init__(self, models: tuple[tuple[float, float], ...], longest: int) -> None:
        def rising(start: float) -> Floats:
            return np.concatenate([[0.0], np.cumsum(np.log(start + np.arange(longest)))])

        bad, good, all_ = [], [], []
        for rate, icc in models:
            if icc == 0:
                steps = np.arange(longest + 1)
                bad.append(steps * np.log(rate))
                good.append(steps * np.log1p(-rate))
                all_.append(np.zeros(longest + 1))
            else:
                size = 1 / icc - 1
                bad.append(rising(rate * size))
                good.append(rising((1 - rate) * size))
                all_.append(rising(size))
        self.bad, self.good, self.all = np.stack(bad), np.stack(good), np.stack(all_)

    def __call__(self, model: int, bad: Ints, seen: Ints) -> Floats:
        """For arrays of counts of one shape; the result has that shape."""
        result: Floats = self.bad[model][bad] + self.good[model][seen - bad] - self.all[model][seen]
        return result
