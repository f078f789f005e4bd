"""Comparison of groups of runs: means, differences from the baseline, tests, and what they mean in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_tfm.comparison.groups import Group, check_data, choose_metric, lower_is_better, test_set_of, with_values
from lightning_tfm.comparison.paired_tests import CORPUS, PairedTest, compare_examples
from lightning_tfm.comparison.statistics import (
    LEVEL,
    MAX_SEEDS,
    POWER,
    Interval,
    difference_interval,
    effect_size,
    holm,
    permutation_p,
    probability_of_improvement,
    seeds_needed,
    seeds_to_reach,
    smallest_p,
)


@dataclass(frozen=True)
class Difference:
    """Difference of a group from the baseline.

    Attributes:
        group: the group.
        baseline: the baseline.
        lower_is_better: whether lower values are better.
        comparisons: the number of groups that are compared with the baseline.
        p: the p value; None if a group has one seed.
        corrected_p: the p value after Holm's correction for all comparisons.
    """

    group: Group
    baseline: Group
    lower_is_better: bool
    comparisons: int
    p: float | None
    corrected_p: float | None

    @property
    def matched(self) -> bool:
        """Return whether both have the same seeds, whose values are compared in pairs."""
        return self.group.seeds == self.baseline.seeds

    @property
    def value(self) -> float:
        """Return the difference of the means."""
        return self.group.mean - self.baseline.mean

    @cached_property
    def interval(self) -> Interval | None:
        """Return the 95% interval of the difference; None if it is not defined."""
        return difference_interval(self.group.values, self.baseline.values, matched=self.matched)

    @property
    def improvement(self) -> float:
        """Return the probability that a run of the group is better than one of the baseline."""
        values, baseline = self.group.values, self.baseline.values
        return probability_of_improvement(values, baseline, lower_is_better=self.lower_is_better)

    @property
    def smallest_p(self) -> float:
        """Return the smallest p value that these numbers of seeds can have, after the correction."""
        numbers = len(self.group.seeds), len(self.baseline.seeds)
        return min(1.0, self.comparisons * smallest_p(*numbers, matched=self.matched))

    @property
    def level(self) -> float:
        """Return the strictest of Holm's levels."""
        return LEVEL / self.comparisons

    @cached_property
    def needed(self) -> int | None:
        """Return the number of seeds per group with which this difference would be significant, see `seeds_needed`.

        Returns:
            The number; None if it is not known.
        """
        effect = effect_size(self.group.values, self.baseline.values, matched=self.matched)
        return seeds_needed(effect, self.level, matched=self.matched) if effect else None

    @property
    def warning(self) -> str:
        """Return a sentence if there are too few seeds for any difference to be significant, otherwise ""."""
        number, other = len(self.group.seeds), len(self.baseline.seeds)
        seeds = f"{other} and {number} seeds"
        if number == other:
            seeds = f"{number} seed{'s' if number > 1 else ''} per group"
        enough = f"At least {seeds_to_reach(self.level, matched=self.matched)} seeds per group are needed"
        if self.p is None:
            return f"Too few seeds: with {seeds}, there is no test. {enough} for a significant difference."
        if self.smallest_p <= LEVEL:
            return ""
        several = f" and {self.comparisons} comparisons, the corrected p" if self.comparisons > 1 else ", p"
        return (
            f"Too few seeds: with {seeds}{several} is at least {self.smallest_p:.2g}, so no difference can be "
            f"significant at {LEVEL}. {enough}."
        )

    @property
    def verdict(self) -> str:
        """Return the result of the test in sentences."""
        group, baseline, p = self.group, self.baseline, self.corrected_p
        names = f"{group.name} and {baseline.name}"
        if len({*group.values, *baseline.values}) == 1:
            return f"All runs of {names} have the same value."
        if p is None:
            return f"{names} cannot be tested, which needs two seeds or more in each group."
        if p <= LEVEL:
            side = "better" if (self.value < 0) == self.lower_is_better else "worse"
            return f"{group.name} is {side} than {baseline.name} ({format_p(p)})."
        sentence = f"No difference between {names} is shown ({format_p(p)})."
        if self.needed is None or self.needed <= min(len(group.seeds), len(baseline.seeds)):
            return sentence
        if self.needed > MAX_SEEDS:
            return (
                f"{sentence} To show one as small as measured, more than {MAX_SEEDS:,} seeds per group would be needed."
            )
        return (
            f"{sentence} If it is as large as measured, about {self.needed:,} seeds per group would show it with a "
            f"probability of {POWER:.0%}."
        )


@dataclass(frozen=True)
class Comparison:
    """Comparison of groups in a metric; the first group is the baseline.

    Attributes:
        metric: the full name of the metric.
        lower_is_better: whether lower values are better.
        test_set: the name of the test set.
        groups: the groups that have the metric, with their values.
        notes: what was left out, and what could not be checked.
    """

    metric: str
    lower_is_better: bool
    test_set: str
    groups: tuple[Group, ...]
    notes: tuple[str, ...]

    @property
    def decimals(self) -> int:
        """Return the number of decimals with which values are shown: 2 from 10 on, such as BLEU, otherwise 4."""
        return 2 if max(abs(group.mean) for group in self.groups) >= 10 else 4

    @cached_property
    def differences(self) -> tuple[Difference, ...]:
        """Return the differences of the other groups from the baseline."""
        baseline, *others = self.groups
        p_values = [
            permutation_p(group.values, baseline.values, matched=group.seeds == baseline.seeds) for group in others
        ]
        return tuple(
            Difference(group, baseline, self.lower_is_better, len(others), p, corrected)
            for group, p, corrected in zip(others, p_values, holm(p_values), strict=True)
        )

    @property
    def scores_examples(self) -> bool:
        """Return whether the tests over examples compare scores, otherwise the numbers of correct examples."""
        return self.metric.rpartition("/")[2] in CORPUS

    @cached_property
    def examples(self) -> dict[tuple[str, int], PairedTest]:
        """Return the tests over examples against the baseline, by group and seed, with p values corrected together."""
        baseline, *others = self.groups
        paired = dict(zip(baseline.seeds, baseline.runs, strict=True))
        tests = {
            (group.name, seed): test
            for group in others
            for seed, run in zip(group.seeds, group.runs, strict=True)
            if seed in paired and (test := compare_examples(run, paired[seed], self.metric, self.test_set))
        }
        corrected = zip(tests.items(), holm([test.p for test in tests.values()]), strict=True)
        return {key: test._replace(p=p) for (key, test), p in corrected if p is not None}


def compare(groups: Sequence[Group], metric: str | None = None, notes: Sequence[str] = ()) -> Comparison:
    """Compare groups of runs.

    Args:
        groups: the groups, at least one; the first one is the baseline.
        metric: the metric, see `choose_metric`.
        notes: notes on runs that were left out before.

    Raises:
        UserError: if the groups are not comparable.
    """
    metric = choose_metric(groups, metric)
    chosen, left_out = with_values(groups, metric)
    runs = [run for group in chosen for run in group.runs]
    test_set = test_set_of(metric, runs)
    unchecked = check_data(chosen, metric, test_set)
    return Comparison(metric, lower_is_better(metric, runs), test_set, tuple(chosen), (*notes, *left_out, *unchecked))


def format_p(p: float) -> str:
    """Return a p value in a sentence, such as "p = 0.034" or "p < 0.001"."""
    return f"p = {p:.2g}" if p >= 0.001 else "p < 0.001"
