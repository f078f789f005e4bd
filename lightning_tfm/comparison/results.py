"""Comparison of groups of runs: means, differences from the baseline, tests, and what they mean in sentences."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_tfm.comparison.examples import CORPUS, ExampleTest, compare_examples
from lightning_tfm.comparison.groups import (
    Group,
    check_data,
    check_environment,
    choose_metric,
    lower_is_better,
    test_set_of,
    with_values,
)
from lightning_tfm.comparison.statistics import (
    LEVEL,
    MAX_SEEDS,
    POWER,
    Interval,
    difference_interval,
    effect_size,
    holm,
    mean_interval,
    permutation_p,
    probability_of_improvement,
    seeds_needed,
    seeds_to_reach,
    smallest_p,
)


@dataclass(frozen=True)
class Result:
    """Results of a group.

    Attributes:
        group: the group, with its values.
        mean: the mean over seeds.
        interval: the 95 % interval of the mean; None if it is not defined.
    """

    group: Group
    mean: float
    interval: Interval | None


@dataclass(frozen=True)
class Difference:
    """Difference of a group from the baseline.

    Attributes:
        group: the group.
        baseline: the baseline.
        matched: whether both have the same seeds, whose values are compared in pairs.
        value: the difference of the means.
        interval: its 95 % interval; None if it is not defined.
        p: the p value; None if a group has one seed.
        corrected_p: the p value after Holm's correction for all differences.
        improvement: the probability that a run of the group is better than one of the baseline.
        smallest_p: the smallest p value that these numbers of seeds can have, after the correction.
        needed: the number of seeds per group with which a difference of this size is significant with a probability of
            POWER, see `seeds_needed`; None if it is not known.
        verdict: what the test says, in sentences.
        too_few: a sentence about the number of seeds if it is too small for any difference to be significant, otherwise
            empty.
    """

    group: Group
    baseline: Group
    matched: bool
    value: float
    interval: Interval | None
    p: float | None
    corrected_p: float | None
    improvement: float
    smallest_p: float
    needed: int | None
    verdict: str
    too_few: str


@dataclass(frozen=True)
class Comparison:
    """Comparison of groups in a metric; the first group is the baseline.

    Attributes:
        metric: the full name of the metric.
        lower_is_better: whether lower values are better.
        test_set: the name of the test set.
        results: the results of all groups.
        differences: the differences of the other groups from the baseline.
        examples: the tests over the examples of the test set, by group and seed, with corrected p values.
        notes: what was left out, and what may make the groups incomparable.
    """

    metric: str
    lower_is_better: bool
    test_set: str
    results: tuple[Result, ...]
    differences: tuple[Difference, ...]
    examples: tuple[ExampleTest, ...]
    notes: tuple[str, ...]

    @property
    def decimals(self) -> int:
        """Return the number of decimals with which values are shown: 2 from 10 on, such as BLEU, otherwise 4."""
        return 2 if max(abs(result.mean) for result in self.results) >= 10 else 4

    @property
    def scores_examples(self) -> bool:
        """Return whether the tests over examples compare scores, otherwise the numbers of correct examples."""
        return self.metric.rpartition("/")[2] in CORPUS


def compare(groups: Sequence[Group], metric: str | None = None, notes: Sequence[str] = ()) -> Comparison:
    """Compare groups of runs.

    Args:
        groups: the groups, at least one; the first one is the baseline.
        metric: the metric, see `choose_metric`.
        notes: notes on runs that were left out before.

    Raises:
        UserError: if the groups cannot be compared.
    """
    name, lower, test_set, chosen, found_notes = select(groups, metric)
    baseline, *others = chosen
    p_values = [permutation_p(group.values, baseline.values, matched=group.seeds == baseline.seeds) for group in others]
    differences = [
        _difference(group, baseline, p, corrected, lower, len(others))
        for group, p, corrected in zip(others, p_values, holm(p_values), strict=True)
    ]
    return Comparison(
        metric=name,
        lower_is_better=lower,
        test_set=test_set,
        results=tuple(Result(group, statistics.fmean(group.values), mean_interval(group.values)) for group in chosen),
        differences=tuple(differences),
        examples=_examples(baseline, others, name, test_set),
        notes=(*notes, *found_notes, *check_environment(chosen)),
    )


class Selection(NamedTuple):
    """Comparable values of groups.

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
    groups: list[Group]
    notes: list[str]


def select(groups: Sequence[Group], metric: str | None = None) -> Selection:
    """Choose a metric of groups of runs, and check that its values are comparable.

    Args:
        groups: the groups, at least one; the first one is the baseline.
        metric: the metric, see `choose_metric`.

    Raises:
        UserError: if they are not comparable.
    """
    name = choose_metric(groups, metric)
    chosen, left_out = with_values(groups, name)
    runs = [run for group in chosen for run in group.runs]
    test_set = test_set_of(name, runs)
    return Selection(
        name, lower_is_better(name, runs), test_set, chosen, [*left_out, *check_data(chosen, name, test_set)]
    )


def _difference(
    group: Group, baseline: Group, p: float | None, corrected: float | None, lower: bool, comparisons: int
) -> Difference:
    """Compare a group with the baseline.

    Args:
        group: the group.
        baseline: the baseline.
        p: the p value.
        corrected: the corrected p value.
        lower: whether lower values are better.
        comparisons: the number of groups that are compared with the baseline.
    """
    matched = group.seeds == baseline.seeds
    ours, theirs = group.values, baseline.values
    value = statistics.fmean(ours) - statistics.fmean(theirs)
    effect = effect_size(ours, theirs, matched=matched)
    level = LEVEL / comparisons  # the strictest of Holm's levels
    needed = seeds_needed(effect, level, matched=matched) if effect else None
    least = min(1.0, comparisons * smallest_p(len(ours), len(theirs), matched=matched))
    too_few = ""
    if p is None:
        too_few = (
            f"Too few seeds: with {_seeds(group, baseline)}, there is no test. At least "
            f"{seeds_to_reach(level, matched=matched)} seeds per group are needed for a significant difference."
        )
    elif least > LEVEL:
        several = f" and {comparisons} comparisons, the corrected p" if comparisons > 1 else ", p"
        too_few = (
            f"Too few seeds: with {_seeds(group, baseline)}{several} is at least {least:.2g}, so no difference can be "
            f"significant at {LEVEL}. At least {seeds_to_reach(level, matched=matched)} seeds per group are needed."
        )
    return Difference(
        group=group,
        baseline=baseline,
        matched=matched,
        value=value,
        interval=difference_interval(ours, theirs, matched=matched),
        p=p,
        corrected_p=corrected,
        improvement=probability_of_improvement(ours, theirs, lower_is_better=lower),
        smallest_p=least,
        needed=needed,
        verdict=_verdict(group, baseline, value, corrected, needed, lower),
        too_few=too_few,
    )


def _seeds(group: Group, baseline: Group) -> str:
    """Return the numbers of seeds, such as "3 seeds per group" or "3 and 5 seeds"."""
    ours, theirs = len(group.seeds), len(baseline.seeds)
    if ours == theirs:
        return f"{ours} seed{'s' if ours > 1 else ''} per group"
    return f"{theirs} and {ours} seeds"


def _verdict(group: Group, baseline: Group, value: float, p: float | None, needed: int | None, lower: bool) -> str:
    """Return what the test of a difference says, in sentences; see `_difference` for the arguments."""
    names = f"{group.name} and {baseline.name}"
    if len({*group.values, *baseline.values}) == 1:
        return f"All runs of {names} have the same value."
    if p is None:
        return f"{names} cannot be tested, which needs two seeds or more in each group."
    if p <= LEVEL:
        side = "better" if (value < 0) == lower else "worse"
        return f"{group.name} is {side} than {baseline.name} ({format_p(p)})."
    sentence = f"No difference between {names} is shown ({format_p(p)})."
    if needed is None or needed <= min(len(group.seeds), len(baseline.seeds)):
        return sentence
    if needed > MAX_SEEDS:
        return f"{sentence} To show one as small as measured, more than {MAX_SEEDS:,} seeds per group would be needed."
    return (
        f"{sentence} If it is as large as measured, about {needed:,} seeds per group would show it with a probability "
        f"of {POWER:.0%}."
    )


def format_p(p: float) -> str:
    """Return a p value in a sentence, such as "p = 0.034" or "p < 0.001"."""
    return f"p = {p:.2g}" if p >= 0.001 else "p < 0.001"


def _examples(baseline: Group, others: Sequence[Group], metric: str, test_set: str) -> tuple[ExampleTest, ...]:
    """Return the tests over examples of all pairs of runs with equal seeds, corrected together."""
    theirs = {run.seed: run.folder for run in baseline.runs}
    found = [
        test
        for group in others
        for run in group.runs
        if run.seed in theirs
        and (test := compare_examples(group.name, run.seed, run.folder, theirs[run.seed], metric, test_set))
    ]
    corrected = holm([test.p for test in found])
    return tuple(test._replace(p=p) for test, p in zip(found, corrected, strict=True) if p is not None)
