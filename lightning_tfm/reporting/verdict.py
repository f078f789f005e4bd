"""Results of runs in sentences, and comparison of runs of the same task."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_tfm.comparison import Group, compare, group_runs, is_readable
from lightning_tfm.comparison.paired_tests import by_example, sign_test
from lightning_tfm.comparison.publication import RATES, metric_name
from lightning_tfm.comparison.results import Comparison, Difference, format_p
from lightning_tfm.comparison.statistics import COVERAGE, LEVEL, seeds_to_reach
from lightning_tfm.comparison.tables import sentences, tables
from lightning_tfm.errors import UserError
from lightning_tfm.reporting.collect import Json, RunPage
from lightning_tfm.system.terminal import format_value


def result(page: RunPage) -> str:
    """Return the result of a run, such as "exact match 1.0000 on 1,000 test examples"."""
    if not page.run.has_finished or (headline := page.run.summary.headline) is None:
        return "no test yet"
    split, _, name = headline[0].partition("/")
    number = len(by_example(page.run, split))
    tested = f" on {number:,} {split} examples" if number else f" on the {split} split"
    return f"{metric_name(name)} {format_value(headline[1])}{tested}"


def meaning(page: RunPage) -> str:
    """Return what the result of a run means: how many predictions are right, and the category with the fewest."""
    lines = [line for line in page.run.predictions if line.get("split", "test") == page.split]
    if not lines:
        return ""
    right = sum(line["correct"] for line in lines)
    text = f"{right:,} of {len(lines):,} {page.split} examples are predicted correctly"
    categories = [each for each in page.categories if each["split"] == page.split]
    if right in (0, len(lines)) or len(categories) < 2:
        return f"{text}."
    worst = min(categories, key=lambda each: each["exact match"])
    number = round(worst["exact match"] * worst["pairs"])
    return f"{text}; the category with the fewest is {worst['category']}, {number:,} of {worst['pairs']:,}."


def compare_pages(pages: Sequence[RunPage]) -> Json:
    """Compare runs of one task: groups of runs over their seeds if one has several, otherwise the single runs.

    Sets the group of the pages.

    Returns:
        `cards`, the names and results of the groups, or of the runs; `verdict`, which is empty if there is nothing to
        compare, or the reason why the runs cannot be compared, for example since they were tested on different data;
        and `sentences` and `tables` of a comparison over seeds, which are empty for single runs.
    """
    readable = [page for page in pages if is_readable(page.run, [])]
    groups = group_runs(("", page.run) for page in readable)
    try:
        if len(groups) > 1 and max(len(set(group.seeds)) for group in groups) > 1:
            comparison = compare(groups)
            for page in readable:
                page.group = next(group.name for group in groups if page.run in group.runs)
            return {
                "cards": [_card(group, comparison) for group in comparison.groups],
                "verdict": " ".join(_measured(each, comparison) for each in comparison.differences),
                "sentences": sentences(comparison),
                "tables": tables(comparison),
            }
        verdict = _compare_single(readable)
    except UserError as error:  # the page shows the runs nevertheless
        verdict = f"The runs are not compared: {error}."
    cards = [{"group": page.group, "value": result(page), "note": meaning(page)} for page in pages]
    return {"cards": cards, "verdict": verdict, "sentences": [], "tables": []}


def _card(group: Group, comparison: Comparison) -> Json:
    """Return the mean of a group."""
    numbers = [f"{value:.{comparison.decimals}f}" for value in (group.mean, min(group.values), max(group.values))]
    mean, lowest, highest = numbers
    note = f"mean over {len(group.seeds)} seeds, {lowest} to {highest}" if len(group.seeds) > 1 else "1 seed"
    return {"group": group.name, "value": f"{metric_name(comparison.metric.partition('/')[2])} {mean}", "note": note}


def _measured(difference: Difference, comparison: Comparison) -> str:
    """Return a difference with its interval, and the result of the test or what a test needs.

    For example: "gpt against transformer: exact match +21.2 points (95% interval +18.0 to +24.4), 3 seeds each; a test
    needs 6 seeds each."
    """
    metric = comparison.metric.partition("/")[2]
    is_rate = metric.rpartition("/")[2] in RATES
    factor, form, unit = (100, "+.1f", " points") if is_rate else (1, f"+.{comparison.decimals}f", "")
    bounds = " to ".join(f"{factor * bound:{form}}" for bound in difference.interval or ())
    interval = f" ({COVERAGE:.0%} interval {bounds})" if bounds else ""
    numbers = len(difference.group.seeds), len(difference.baseline.seeds)
    seeds = "{} and {} seeds".format(*numbers) if len(set(numbers)) > 1 else f"{numbers[0]} seeds each"
    measured = (
        f"{difference.group.name} against {difference.baseline.name}: {metric_name(metric)} "
        f"{factor * difference.value:{form}}{unit}{interval}, {seeds}"
    )
    if difference.smallest_p > LEVEL:
        return f"{measured}; a test needs {seeds_to_reach(difference.level, matched=difference.matched)} seeds each."
    return f"{measured}. {difference.verdict}"


def _compare_single(pages: Sequence[RunPage]) -> str:
    """Describe which of several runs of one task is best, and on how many examples the best two differ.

    Returns:
        Sentences; empty if fewer than two checkpoints have a finite result, or if the runs differ in their seeds only.

    Raises:
        UserError: if `compare` refuses to compare the runs.

    Note:
        Of a run and later tests of its checkpoint, only the first is compared. If more than two runs are equal, their
        examples are not compared.
    """
    by_checkpoint: dict[object, RunPage] = {}
    for page in pages:
        if page.run.summary.headline and math.isfinite(page.run.summary.headline[1]):
            by_checkpoint.setdefault(page.checkpoint.resolve() if page.checkpoint else page.name, page)
    by_name = {page.name: page for page in by_checkpoint.values()}
    settings = [page.run.settings for page in by_name.values()]
    if len(settings) < 2 or all(each == settings[0] for each in settings):
        return ""
    comparison = compare([Group(name, (page.run,)) for name, page in by_name.items()])
    metric, lower = metric_name(comparison.metric.partition("/")[2]), comparison.lower_is_better
    ranked = sorted(comparison.groups, key=lambda group: group.mean if lower else -group.mean)
    best, second = ranked[:2]
    *equal, last = (group.name for group in comparison.groups if group.mean == best.mean)
    if equal:
        text = f"{', '.join(equal)} and {last} are equal in {metric}: {format_value(best.mean)}."
    else:
        text = (
            f"{best.name} has the best {metric}: {format_value(best.mean)}, {abs(best.mean - second.mean):.4f} "
            f"{'below' if lower else 'above'} {second.name}."
        )
    paired = "" if len(equal) > 1 else _paired(by_name[best.name], by_name[second.name])
    return " ".join(filter(None, [text, paired, *(f"Note: {note}." for note in comparison.notes)]))


def _paired(best: RunPage, second: RunPage) -> str:
    """Describe how two runs differ on the examples on which both were tested, with a sign test."""
    examples, others = (by_example(page.run, page.split) for page in (best, second))
    test = sign_test([(line["correct"], others[key]["correct"]) for key, line in examples.items() if key in others])
    if not test.score + test.baseline:
        return ""
    return (
        f"Of {test.examples:,} shared examples, {test.score:,} are correct only in {best.name} and {test.baseline:,} "
        f"only in {second.name} (sign test: {format_p(test.p)}). This compares two trained models; comparing their "
        "settings needs several seeds."
    )
