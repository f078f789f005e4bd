"""Statistics of a few values per group: intervals, permutation tests, their power, and the correction of p values.

The values of a group are those of its seeds. With 3 to 20 of them, a test must not assume a normal distribution: the
tests are permutation tests, and the intervals are bootstrap intervals. Only the number of seeds that is needed assumes
a normal distribution. `matched` says whether the values of a group and of the baseline are pairs, of equal seeds.
"""

from __future__ import annotations

import math
import statistics
import warnings
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

COVERAGE = 0.95
"""Coverage of the intervals."""

LEVEL = 0.05
"""Level of the tests: a difference is called significant if p, after the correction, is at most this."""

POWER = 0.8
"""Probability of finding a difference for which numbers of seeds are computed."""

MAX_SEEDS = 10_000
"""Largest number of seeds that is computed."""

RESAMPLES = 9_999
"""Number of bootstrap samples."""

PERMUTATIONS = 200_000
"""Number of permutations above which they are drawn: a test is exact for up to 17 pairs, or two groups of 10."""

DIGITS = 12
"""Significant digits of values up to which their differences are equal, such as 0.3 - 0.2 and 0.2 - 0.1."""

RANDOM_STATE = 0
"""Seed of the bootstrap samples and the permutations, so that equal values give equal results."""


class Interval(NamedTuple):
    """Interval of a mean or of a difference."""

    low: float
    high: float


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Return the BCa bootstrap interval of the mean (Efron 1987); None for fewer than two different values."""
    return _bootstrap([values], np.mean)


def proportion_interval(number: int, total: int) -> Interval:
    """Return the interval of a proportion (Wilson 1927), such as that of the right ones of at least one example."""
    z = statistics.NormalDist().inv_cdf((1 + COVERAGE) / 2)
    center, spread = number + z**2 / 2, z * math.sqrt(number * (total - number) / total + z**2 / 4)
    return Interval(max(0.0, (center - spread) / (total + z**2)), min(1.0, (center + spread) / (total + z**2)))


def difference_interval(values: Sequence[float], baseline: Sequence[float], *, matched: bool) -> Interval | None:
    """Return the BCa bootstrap interval of the difference of the means, where matched values are resampled together.

    Returns:
        The interval; None for fewer than two different values, or, if they are matched, differences.
    """
    if matched:
        return mean_interval(differences(values, baseline))
    if list(values) < list(baseline):  # the same samples are drawn if the groups are swapped
        swapped = difference_interval(baseline, values, matched=False)
        return swapped and Interval(-swapped.high, -swapped.low)
    return _bootstrap([values, baseline], lambda x, y, axis: np.mean(x, axis=axis) - np.mean(y, axis=axis))


def differences(values: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Return the differences of matched values."""
    decimals = _decimals([*values, *baseline])
    return [round(value - other, decimals) for value, other in zip(values, baseline, strict=True)]


def _decimals(values: Sequence[float]) -> int:
    """Return the number of decimals of the first DIGITS digits of the largest value."""
    largest = max(map(abs, values))
    return DIGITS - 1 - math.floor(math.log10(largest)) if largest else DIGITS


def _bootstrap(samples: Sequence[Sequence[float]], statistic: object) -> Interval | None:
    from scipy import stats  # slow to import

    if any(len(sample) < 2 or max(sample) == min(sample) for sample in samples):
        return None
    with warnings.catch_warnings(action="ignore"), np.errstate(all="ignore"):  # where the interval is not defined
        interval = stats.bootstrap(
            [np.asarray(sample) for sample in samples],
            statistic,
            confidence_level=COVERAGE,
            n_resamples=RESAMPLES,
            method="BCa",
            rng=RANDOM_STATE,
        ).confidence_interval
    low, high = map(float, interval)
    return Interval(low, high) if math.isfinite(low + high) else None


def permutation_p(values: Sequence[float], baseline: Sequence[float], *, matched: bool) -> float | None:
    """Return the two-sided p value of a permutation test of equal means.

    If the values are matched, the signs of their differences are flipped, otherwise the values are exchanged between
    the groups. The test is exact if there are at most PERMUTATIONS permutations, otherwise they are drawn.

    Returns:
        The p value; None for fewer than two values in a group, which cannot be tested.
    """
    from scipy import stats  # slow to import

    if min(len(values), len(baseline)) < 2:
        return None
    if matched:
        samples, kind = [np.asarray(differences(values, baseline))], "samples"
    else:
        # Sorted, so that the same permutations are drawn if the groups are swapped.
        samples, kind = [np.asarray(sample) for sample in sorted([list(values), list(baseline)])], "independent"

    def difference(x: np.ndarray, y: np.ndarray | None = None, *, axis: int) -> np.ndarray:
        return np.mean(x, axis=axis) - (0 if y is None else np.mean(y, axis=axis))

    test = stats.permutation_test(
        samples, difference, permutation_type=kind, n_resamples=PERMUTATIONS, batch=10_000, rng=RANDOM_STATE
    )
    # The tolerance of scipy's own p value is relative to the difference, which may be much smaller than the values.
    tolerance = 10.0 ** -_decimals([*values, *baseline])
    null, observed = test.null_distribution, test.statistic
    tail = min(np.count_nonzero(null <= observed + tolerance), np.count_nonzero(null >= observed - tolerance))
    drawn = int(smallest_p(len(values), len(baseline), matched=matched) < 2 / PERMUTATIONS)  # counts the observed one
    return min(1.0, 2 * (tail + drawn) / (len(null) + drawn))


def smallest_p(number: int, others: int, *, matched: bool) -> float:
    """Return the smallest two-sided p value that the permutation test of some numbers of values can have."""
    return min(1.0, 2 / (2**number if matched else math.comb(number + others, number)))


def seeds_to_reach(level: float, *, matched: bool) -> int:
    """Return the smallest number of seeds per group with which the permutation test can have a p value of `level`."""
    return next(number for number in range(2, 100) if smallest_p(number, number, matched=matched) <= level)


def probability_of_improvement(values: Sequence[float], baseline: Sequence[float], *, lower_is_better: bool) -> float:
    """Return the probability that a run of a group is better than one of the baseline (Agarwal et al. 2021).

    It is the share of all pairs of runs, where equal values count half.
    """
    signs = np.sign(np.subtract.outer(np.asarray(values), np.asarray(baseline)))
    return float((1 + (-signs if lower_is_better else signs)).mean() / 2)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Correct p values for several comparisons (Holm 1979); None for a comparison without p value is kept."""
    ordered = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(ordered):
        largest = max(largest, min(1.0, (len(ordered) - rank) * p))
        corrected[index] = largest
    return corrected


def effect_size(values: Sequence[float], baseline: Sequence[float], *, matched: bool) -> float | None:
    """Return the difference of the means in standard deviations (Cohen 1988).

    Returns:
        The effect size, by the standard deviation of the differences if the values are matched, otherwise by the pooled
        one of the groups; None for fewer than two values in a group, or if the standard deviation is 0.
    """
    if min(len(values), len(baseline)) < 2:
        return None
    if matched:
        spread = statistics.stdev(differences(values, baseline))
    else:
        squares = [(len(sample) - 1) * statistics.variance(sample) for sample in (values, baseline)]
        spread = math.sqrt(sum(squares) / (len(values) + len(baseline) - 2))
    return (statistics.fmean(values) - statistics.fmean(baseline)) / spread if spread else None


def power(effect: float, number: int, level: float = LEVEL, *, matched: bool) -> float:
    """Return the power of the two-sided t test of `number` normal values per group (noncentral t distribution)."""
    from scipy import stats  # slow to import

    freedom = number - 1 if matched else 2 * number - 2
    noncentrality = abs(effect) * math.sqrt(number if matched else number / 2)
    if noncentrality > 30:  # scipy's distribution is not accurate there
        return 1.0
    critical = stats.t.ppf(1 - level / 2, freedom)
    return float(stats.nct.sf(critical, freedom, noncentrality) + stats.nct.cdf(-critical, freedom, noncentrality))


def seeds_needed(effect: float, level: float = LEVEL, *, matched: bool) -> int:
    """Return the number of seeds per group with which an effect, see `effect_size`, is found with probability POWER.

    It is at least that with which the permutation test can be significant, and MAX_SEEDS + 1 if it is larger.
    """
    least = seeds_to_reach(level, matched=matched)
    numbers = range(least, MAX_SEEDS + 1)  # the power grows with the number
    return least + bisect_left(numbers, POWER, key=lambda number: power(effect, number, level, matched=matched))


def student_reach(values: Sequence[float], coverage: float, number: float = math.inf) -> float:
    """Return the half-width of the interval (Student's t) around the mean of at least two values.

    Args:
        values: the values.
        coverage: the coverage of the interval.
        number: the number of further values whose mean the interval predicts; by default, it is that of the
            distribution, for a confidence interval.
    """
    from scipy import stats  # slow to import

    spread = statistics.stdev(values) * math.sqrt(1 / len(values) + 1 / number)
    return float(stats.t.ppf((1 + coverage) / 2, len(values) - 1)) * spread
