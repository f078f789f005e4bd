"""`lightning-tfm compare`: statistics against independent answers, groups of runs, tables and messages."""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
import re
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import stats

from lightning_tfm.commands.compare import compare as compare_command
from lightning_tfm.comparison import compare, find_groups
from lightning_tfm.comparison.figure import draw_comparisons, draw_curves
from lightning_tfm.comparison.paired_tests import TRIALS, compare_examples, randomization_test, sign_test
from lightning_tfm.comparison.statistics import (
    COVERAGE,
    LEVEL,
    MAX_SEEDS,
    RANDOM_STATE,
    RESAMPLES,
    difference_interval,
    effect_size,
    holm,
    mean_interval,
    permutation_p,
    power,
    probability_of_improvement,
    proportion_interval,
    seeds_needed,
    seeds_to_reach,
    smallest_p,
)
from lightning_tfm.comparison.tables import sentences, tables
from lightning_tfm.errors import UserError
from lightning_tfm.plots.style import COLUMNS
from lightning_tfm.runs.record import Run
from lightning_tfm.system.tables import breakable_latex
from support import records
from support.records import START

SIMULATIONS = 1_000


def at_most(probability, number=SIMULATIONS):
    """Return the number of successes that is exceeded with a probability of 0.001."""
    return stats.binom.ppf(0.999, number, probability)


def draws(number, effect=0.0, seed=0):
    """Return simulated groups of standard normal values, and baselines, whose means differ by an effect."""
    generator = np.random.default_rng(seed)
    shape = (SIMULATIONS, number)
    return generator.normal(effect, 1, shape).tolist(), generator.normal(0, 1, shape).tolist()


@pytest.mark.parametrize(("number", "matched"), [(8, True), (5, False)])
def test_level_of_permutation_test(number, matched):
    p_values = [permutation_p(*pair, matched=matched) for pair in zip(*draws(number), strict=True)]
    assert sum(p <= LEVEL for p in p_values) <= at_most(LEVEL)
    assert sum(p <= LEVEL for p in p_values) >= SIMULATIONS * LEVEL / 2, "the test is not too conservative"


@pytest.mark.parametrize(("number", "matched", "effect"), [(9, True, 1.2), (8, True, 0.8), (5, False, 1.8)])
def test_power_of_permutation_test(number, matched, effect):
    """Permutation tests of normal values have nearly the power of the t test, and never more."""
    scale = math.sqrt(2) if matched else 1  # the standard deviation of a difference of two values
    pairs = zip(*draws(number, effect * scale, seed=2), strict=True)
    significant = sum(permutation_p(*pair, matched=matched) <= LEVEL for pair in pairs)
    theory = power(effect, number, matched=matched)
    assert significant / SIMULATIONS == pytest.approx(theory, abs=4 * math.sqrt(theory * (1 - theory) / SIMULATIONS))


@pytest.mark.parametrize(("number", "effect"), [(6, 1.2), (20, 0.5)])
def test_power_equals_simulation(number, effect):
    generator = np.random.default_rng(3)
    for matched, test in ((True, stats.ttest_1samp), (False, stats.ttest_ind)):
        samples = generator.normal(effect, 1, (20_000, number))
        other = 0 if matched else generator.normal(0, 1, (20_000, number))
        share = (test(samples, other, axis=1).pvalue <= LEVEL).mean()
        assert power(effect, number, matched=matched) == pytest.approx(share, abs=0.012)


@pytest.mark.parametrize(
    ("effect", "matched", "needed"),
    [(0.5, True, 34), (0.8, True, 15), (0.2, True, 199), (0.5, False, 64), (0.8, False, 26), (0.2, False, 394)],
)
def test_seeds_needed_equal_published_tables(effect, matched, needed):
    """Compared with the tables of Cohen (1988) and G*Power."""
    assert seeds_needed(effect, matched=matched) == needed
    assert power(effect, needed, matched=matched) >= 0.8 > power(effect, needed - 1, matched=matched)


def test_smallest_p_and_number_of_seeds():
    assert smallest_p(5, 5, matched=True) == 2 / 32 > LEVEL
    assert [seeds_to_reach(LEVEL, matched=matched) for matched in (True, False)] == [6, 4]
    for number in range(2, 8):
        apart = [10.0 + value for value in range(number)], [0.0] * number
        for matched in (True, False):
            assert permutation_p(*apart, matched=matched) == pytest.approx(smallest_p(number, number, matched=matched))
    for matched in (True, False):
        assert seeds_needed(1e6, matched=matched) == seeds_to_reach(LEVEL, matched=matched)
        assert seeds_needed(1e-6, matched=matched) == MAX_SEEDS + 1


def enumerated_p(values, baseline, matched):
    """Return the p value of the permutation test, computed in fractions."""
    values, baseline = ([Fraction(str(value)) for value in side] for side in (values, baseline))
    if matched:  # flip all signs
        gaps = [value - other for value, other in zip(values, baseline, strict=True)]
        observed = sum(gaps)
        signs = itertools.product(map(Fraction, (1, -1)), repeat=len(gaps))
        null = [sum(map(Fraction.__mul__, gaps, row)) for row in signs]
    else:  # exchange all values
        observed = sum(values)
        null = [sum(chosen) for chosen in itertools.combinations(values + baseline, len(values))]
    tail = min(sum(value <= observed for value in null), sum(value >= observed for value in null))
    return min(1.0, 2 * tail / len(null))


@pytest.mark.parametrize("matched", [True, False])
def test_permutation_test_equals_enumeration(matched):
    """Values of few digits have many ties."""
    generator = random.Random(0)
    for _ in range(1_000):
        center, step = generator.choice([(0.99, 1e-4), (43, 1e-2), (1.5, 1e-3), (0, 1e-6), (98_765, 1e-1)])
        sizes = (generator.randint(2, 6),) * 2 if matched else (generator.randint(2, 4), generator.randint(2, 5))
        values, baseline = ([round(center + step * generator.randint(-5, 5), 6) for _ in range(size)] for size in sizes)
        expected = enumerated_p(values, baseline, matched)
        assert permutation_p(values, baseline, matched=matched) == pytest.approx(expected)


def test_equal_differences_have_no_spread():
    values, baseline = [123456.3, 123456.4, 123456.7], [123456.2, 123456.3, 123456.6]
    assert effect_size(values, baseline, matched=True) is None
    assert difference_interval(values, baseline, matched=True) is None


def test_intervals_equal_scipy():
    values, baseline = [0.92, 0.9, 0.95, 0.91, 0.93], [0.9, 0.91, 0.92, 0.87, 0.9]
    gaps = (np.asarray(values) - np.asarray(baseline)).round(12)

    def bootstrap(samples, statistic=np.mean):
        settings = {"n_resamples": RESAMPLES, "method": "BCa", "confidence_level": 0.95, "rng": RANDOM_STATE}
        return pytest.approx(tuple(stats.bootstrap(samples, statistic, **settings).confidence_interval))

    assert mean_interval(values) == bootstrap([values])
    assert difference_interval(values, baseline, matched=True) == bootstrap([gaps])
    assert difference_interval(values, baseline, matched=False) == bootstrap([values, baseline], mean_difference)


def mean_difference(x, y, axis):
    return x.mean(axis) - y.mean(axis)


def test_holm_equals_published_examples():
    """Compared with p.adjust of R."""
    assert holm([0.01, 0.04, 0.03, 0.02]) == pytest.approx([0.04, 0.06, 0.06, 0.06])
    assert holm([0.5, None, 0.01]) == pytest.approx([0.5, None, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_probability_of_improvement_is_u_statistic():
    generator = random.Random(0)
    for _ in range(20):
        values, baseline = ([generator.randrange(5) for _ in range(size)] for size in (6, 4))
        expected = stats.mannwhitneyu(values, baseline).statistic / 24
        assert probability_of_improvement(values, baseline, lower_is_better=False) == pytest.approx(expected)
        assert probability_of_improvement(values, baseline, lower_is_better=True) == pytest.approx(1 - expected)


@pytest.mark.parametrize("matched", [True, False])
@pytest.mark.parametrize("number", [2, 5, 8, 20])
def test_swapped_groups(number, matched):
    values, baseline = (pair[0] for pair in draws(number, 0.5, seed=number))
    assert permutation_p(values, baseline, matched=matched) == permutation_p(baseline, values, matched=matched)
    there, back = (difference_interval(*pair, matched=matched) for pair in ((values, baseline), (baseline, values)))
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low), abs=0.01)
    effect = effect_size(values, baseline, matched=matched)
    assert effect == pytest.approx(-effect_size(baseline, values, matched=matched))


def test_coverage_of_mean_interval():
    """BCa intervals of few values are too short: their coverage is about 84% for 5 values, and 92% for 20 values."""
    for number, coverage in ((5, 0.84), (20, 0.92)):
        samples, _ = draws(number, seed=4)
        covered = [interval.low <= 0 <= interval.high for interval in map(mean_interval, samples[:300])]
        assert sum(covered) / 300 == pytest.approx(coverage, abs=0.04)


@pytest.mark.parametrize(
    ("values", "baseline"),
    [
        ([1.0], [1.0]),
        ([1.0], [0.5, 0.6]),
        ([1.0] * 6, [1.0] * 6),
        ([1.0] * 6, [0.5] * 6),
        ([1.0] * 6, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]),
        ([0.3, 0.3, 0.3, 0.4], [0.1, 0.1, 0.1, 0.2]),
        ([0.0, 0.0, 0.0, 1e-300], [0.0] * 4),
        ([3e38, -3e38, 3e38], [1.0, 2.0, 3.0]),
        ([1.0, 2.0], [2.0, 1.0]),
    ],
)
def test_degenerate_values(values, baseline):
    for matched in [True, False] if len(values) == len(baseline) else [False]:
        for interval in (mean_interval(values), difference_interval(values, baseline, matched=matched)):
            assert interval is None or interval.low <= interval.high
        p = permutation_p(values, baseline, matched=matched)
        assert p is None or 0 < p <= 1
        effect_size(values, baseline, matched=matched)


def test_interval_of_a_proportion_is_that_of_scipy():
    for number, total in ((0, 1), (1, 1), (0, 30), (7, 30), (30, 30), (123, 1000)):
        expected = stats.binomtest(number, total).proportion_ci(COVERAGE, method="wilson")
        assert proportion_interval(number, total) == pytest.approx((expected.low, expected.high), abs=1e-12)


SETTINGS = {
    "seed_everything": 1,
    "trainer": {"max_steps": 100, "logger": [{"class_path": "CSVLogger", "init_args": {"save_dir": "runs"}}]},
    "model": {"class_path": "Seq2SeqModule", "init_args": {"lr_schedule": {"warmup_steps": 200}, "network": {}}},
    "data": {"class_path": "Date", "init_args": {"seed": 1}},
}


HIGHER = ("exact_match", "longer/exact_match", "exact_match/loss", "exact_match/ser", "macro_exact_match")
LOWER = ("nll/accuracy", "loss", "ser", "loss_per_character", "word_errors", "wer", "ser/a", "macro_ser")
DIRECTIONS = dict.fromkeys(HIGHER, True) | dict.fromkeys(LOWER, False)


def write_run(folder, seed, warmup_steps=200, test=None, processor="A", lines=(), finished=True, start=None, **metrics):
    """Write the files of a run that `compare` reads, which was tested on data with a fingerprint."""
    config = json.loads(json.dumps(SETTINGS))
    config["seed_everything"] = config["data"]["init_args"]["seed"] = seed
    config["model"]["init_args"]["lr_schedule"]["warmup_steps"] = warmup_steps
    start = {
        "time": f"2026-01-01T00:00:{seed:02d}",
        "data_fingerprint": {"train": "x", "test": test or f"of seed {seed}"},
        "hardware": START["hardware"] | {"processor": processor},
    } | (start or {})
    summary = {
        "test": metrics,
        "higher_is_better": {name: DIRECTIONS[name] for name in metrics if name in DIRECTIONS},
        "token_metrics": [name for name in metrics if name in ("loss", "ser", "ser/a", "macro_ser")],
        "train_seconds": 2.0 + seed,
        "seed": seed,
    }
    records.write_run(folder, config, summary if finished else None, start, lines)


def write_runs(folder, values, metric="exact_match", seeds=None, **settings):
    """Write a run for each value of a metric, with a setting that names the folder unless one is given."""
    settings = {"warmup_steps": folder.name} | settings
    for number, (seed, value) in enumerate(zip(seeds or range(1, len(values) + 1), values, strict=True)):
        write_run(folder / f"version_{number}", seed, **settings, **{metric: value})


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Write the runs of two settings, of which the second is better for each of six seeds."""
    monkeypatch.chdir(tmp_path)
    write_runs(tmp_path / "runs/plain", [0.90, 0.91, 0.89, 0.92, 0.90, 0.91], warmup_steps=0)
    write_runs(tmp_path / "runs/warm", [0.93, 0.95, 0.93, 0.94, 0.95, 0.93], warmup_steps=200)
    return tmp_path / "runs"


def compared(*arguments, metric=None):
    groups, notes = find_groups(arguments)
    return compare(groups, metric, notes)


def test_better_group(runs):
    result = compared("runs/plain", "runs/warm")
    (difference,) = result.differences
    assert result.metric == "test/exact_match"
    assert [group.mean for group in result.groups] == pytest.approx([0.905, 0.938333], abs=1e-6)
    assert difference.matched
    assert difference.value == pytest.approx(0.2 / 6)
    assert difference.p == difference.corrected_p == 2 / 64
    assert difference.improvement == 1.0
    assert difference.interval.low > 0
    assert sentences(result) == ["warm is better than plain (p = 0.031)."]


@pytest.mark.parametrize("metric", DIRECTIONS)
def test_direction_of_metric(metric, runs):
    write_runs(runs / "a", [2.0, 2.1, 2.2, 2.1, 2.0, 2.1], metric=metric)
    write_runs(runs / "b", [1.0, 1.2, 1.1, 1.3, 1.0, 1.1], metric=metric)
    higher = DIRECTIONS[metric]
    result = compared("runs/a", "runs/b", metric=metric)
    assert result.differences[0].improvement == (0.0 if higher else 1.0)
    assert sentences(result) == [f"b is {'worse' if higher else 'better'} than a (p = 0.031)."]
    (sentence,) = sentences(compared("B=runs/b", "A=runs/a", metric=metric))
    assert sentence == f"A is {'better' if higher else 'worse'} than B (p = 0.031)."


def test_metric_without_direction(runs):
    write_runs(runs / "a", [2.0, 2.1], metric="words")
    with pytest.raises(UserError, match=r"the metric must say whether .* better, but test/words does not"):
        compared("runs/a", metric="words")


def test_metrics_per_token_need_equal_tokenizers(runs):
    for name, tokenizer in (("characters", "x"), ("subwords", "y")):
        for seed in (1, 2):
            losses = {"loss": 1.5, "loss_per_character": 1.5, "accuracy": 1} if name == "characters" else {"loss": 3.0}
            losses = {"loss_per_character": 1.2, "nll/all": 1.0} | losses
            start = {"tokenizer_fingerprint": tokenizer}
            write_run(runs / name / f"version_{seed}", seed, warmup_steps=name, start=start, **losses)
    found = compared("runs/characters", "runs/subwords")
    assert (found.metric, [group.mean for group in found.groups]) == ("test/loss_per_character", [1.5, 1.2])
    with pytest.raises(UserError, match=r"not be per token .* is test/loss, .* try test/loss_per_character$"):
        compared("runs/characters", "runs/subwords", metric="loss")
    assert compared("runs/characters", metric="loss").metric == "test/loss"


@pytest.mark.parametrize("metric", ["ser", "ser/a", "macro_ser"])
def test_symbol_error_rates_need_equal_symbols(metric, runs):
    for name, symbols in (("one", "characters"), ("other", "characters"), ("words", " ")):
        start = {"tokenizer_fingerprint": name, "scored_symbols": symbols}
        write_run(runs / name, 1, warmup_steps=name, start=start, **{metric: 0.5})
    assert compared("runs/one", "runs/other", metric=metric).metric == f"test/{metric}"
    with pytest.raises(UserError, match=rf"must not be per token .* but is test/{metric}, and those of B and A differ"):
        compared("A=runs/one", "B=runs/words", metric=metric)


def test_word_error_rates_are_percentages(runs, capsys):
    """WER is not multiplied by 100, unlike fractions, and its tests over examples count the words that are right."""
    for name, right in (("a", 3), ("b", 9)):
        lines = [{"source": str(n), "correct": n < right} for n in range(20)]
        metrics = {"wer": 100 - 5 * right, "exact_match": right / 20, "macro_exact_match": right / 20}
        write_run(runs / name, 1, warmup_steps=name, lines=lines, **metrics)
    groups = "a=runs/a", "b=runs/b"
    result = compared(*groups, metric="wer")
    assert [group.mean for group in result.groups] == [85, 55]
    assert result.examples["b", 1] == compared(*groups).examples["b", 1]
    names = ["wer", "exact_match", "macro_exact_match"]
    compare_command([*groups, *(f"--metric={name}" for name in names), "--format", "markdown"])
    table = capsys.readouterr().out
    assert "|  | WER \u2193 | exact match (%) \u2191 | macro exact match (%) \u2191 |" in table
    assert "| b | **55.00** | **45.00** | **45.00** |" in table


@pytest.mark.parametrize(
    "arguments",
    [
        ["runs/plain", "runs/warm"],
        ["runs"],
        ["runs/*"],
        ["runs/plain/version_*", "runs/warm/version_*"],
        [*(f"runs/plain/version_{number}" for number in (3, 1, 5, 0, 2, 4)), "runs/warm"],
        ["plain=runs/plain", "warm=runs/warm/version_[0-2],runs/warm/version_[3-5]"],
    ],
)
def test_group_arguments(arguments, runs):
    result = compared(*arguments)
    assert [group.name for group in result.groups] == ["plain", "warm"]
    assert tables(result) == tables(compared("runs/plain", "runs/warm"))
    assert result.notes == ()


def test_group_names_are_differences_from_the_baseline(runs):
    for number, change in enumerate(({}, {"a": 1}, {"b": 2}, {"c": 3}, {"a": 1, "d": 4})):
        folder = runs / f"many/version_{number}"
        write_run(folder, 1, exact_match=0.5)
        config = yaml.safe_load((folder / "config.yaml").read_text())
        config["data"]["init_args"] |= {"a": 0, "b": 0, "c": 0, "d": 0} | change
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    for seed in (1, 2, 3):
        write_run(runs / f"plain/version_{5 + seed}", seed, warmup_steps=50, exact_match=0.5)
    for name, expected in (
        ("many", [("baseline", 1), ("a=1", 1), ("b=2", 1), ("c=3", 1), ("a=1 d=4", 1)]),
        ("plain", [("warmup_steps=0", 6), ("warmup_steps=50", 3)]),
    ):
        groups, _ = find_groups([f"runs/{name}"])
        assert [(group.name, len(group.runs)) for group in groups] == expected


def test_different_seeds_are_not_matched(runs):
    write_runs(runs / "other", [0.93, 0.94, 0.92], seeds=[1, 2, 9])
    (difference,) = compared("runs/plain", "runs/other").differences
    assert not difference.matched
    values, baseline = [0.93, 0.94, 0.92], [0.90, 0.91, 0.89, 0.92, 0.90, 0.91]
    expected = stats.permutation_test([values, baseline], mean_difference, n_resamples=np.inf)
    assert difference.p == pytest.approx(expected.pvalue)


def test_too_few_seeds(runs):
    for name, shift in (("a", 0), ("b", 0.01), ("c", 0.02)):
        write_runs(runs / name, [0.5 + shift, 0.6 + shift, 0.61 + shift])
    for groups, p, needed in (
        (("a", "b"), "p is at least 0.25", 6),
        (("a", "b", "c"), "corrected p is at least 0.5", 7),
    ):
        first, *_ = sentences(compared(*(f"runs/{group}" for group in groups)))
        assert first.startswith("Too few seeds: with 3 seeds per group")
        assert f"{p}, so no difference can be significant at 0.05. At least {needed} seeds" in first


def test_sufficient_seeds_are_reported(runs):
    write_runs(runs / "a", [0.50, 0.51, 0.52, 0.53, 0.54, 0.55, 0.56])
    write_runs(runs / "b", [0.51, 0.50, 0.54, 0.52, 0.56, 0.54, 0.58])
    (sentence,) = sentences(compared("runs/a", "runs/b"))
    gaps = [0.01, -0.01, 0.02, -0.01, 0.02, -0.01, 0.02]
    needed = seeds_needed(np.mean(gaps) / np.std(gaps, ddof=1), matched=True)
    assert sentence.endswith(f"about {needed} seeds per group would show it with a probability of 80%.")


def test_order_of_runs_does_not_matter(runs):
    paths = [str(path) for path in runs.glob("*/version_*")]
    shuffled = [random.Random(seed).sample(paths, len(paths)) for seed in range(3)]
    first, *others = (set(tables(compared(*order))[0].rows) for order in shuffled)
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    ("values", "baseline", "sentence"),
    [
        ([1.0] * 3, [1.0] * 3, "All runs of b and a have the same value."),
        ([1.0], [0.5], "b and a cannot be tested, which needs two seeds or more in each group."),
        ([0.75] * 6, [0.5] * 6, "b is better than a (p = 0.031)."),
    ],
)
def test_degenerate_groups(values, baseline, sentence, runs):
    write_runs(runs / "a", baseline)
    write_runs(runs / "b", values)
    result = compared("runs/a", "runs/b")
    assert sentence in sentences(result)
    assert [row[3] for row in tables(result)[0].rows] == ["none", "none"]


def test_skipped_runs_are_noted(runs):
    write_run(runs / "plain/version_6", 7, warmup_steps=0, exact_match=math.nan)
    write_run(runs / "plain/version_7", 8, warmup_steps=0, finished=False)
    write_run(runs / "plain/version_8", 9, warmup_steps=0, loss=1.0)
    write_run(runs / "plain/version_9", 1, warmup_steps=0, exact_match=0.9)
    write_run(runs / "plain/version_10", 10, warmup_steps=0, exact_match=0.9)
    (runs / "plain/version_10/summary.json").write_text("{")
    result = compared("runs/plain", "runs/warm")
    assert tables(result)[1].rows == tables(compared("runs/plain/version_[0-5]", "runs/warm"))[1].rows
    assert result.notes == (
        "runs/plain/version_7 has not finished, and is left out",
        "runs/plain/version_10 is damaged, and is left out",
        "runs/plain/version_6 has a test/exact_match of nan, and is left out",
        "runs/plain/version_8 has no test/exact_match, and is left out",
        "plain has several runs of equal settings and seed: runs/plain/version_0 left out for newer ones "
        "(NAME=RUNS names groups to compare them)",
    )


def write_evaluation(folder, of, split, **data):
    """Write a later test or validation of the best checkpoint of a run, with other settings of the data."""
    evaluated = Run(of)
    config = json.loads(json.dumps(evaluated.config))
    config["data"]["init_args"] |= data
    summary = {"test": None, split: {"exact_match": 0.5}, "higher_is_better": DIRECTIONS, "train_seconds": None}
    summary |= {"seed": evaluated.summary.seed, "checkpoint": str(of / f"checkpoints/{Run.BEST}")}
    records.write_run(folder, config, summary, evaluated.starts[0])


@pytest.mark.parametrize("argument", ["runs/plain", "plain=runs/plain"])
def test_later_tests_are_not_runs(argument, runs):
    """Neither on other data nor again; a split of the same data that the run was not tested on adds to it."""
    expected = tables(compared(argument, "runs/warm"))
    write_evaluation(runs / "plain/test_0", runs / "plain/version_0", "val", path="other")
    write_evaluation(runs / "plain/test_1", runs / "plain/version_1", "test")
    write_evaluation(runs / "plain/validate_0", runs / "plain/version_2", "val")
    result = compared(argument, "runs/warm")
    assert tables(result) == expected
    assert result.notes[:2] == (
        "runs/plain/test_0 evaluates runs/plain/version_0 again, and is left out",
        "runs/plain/test_1 evaluates runs/plain/version_1 again, and is left out",
    )
    (group,) = compared("runs/plain", metric="val/exact_match").groups
    assert [run.folder.name for run in group.runs] == ["validate_0"]
    assert compared("runs/plain/test_*", metric="test/exact_match").groups[0].values == (0.5,)


def test_notes(runs):
    write_runs(runs / "longer", [0.25] * 6, metric="longer/exact_match")
    result = compared("runs/plain", "runs/longer", metric="longer/exact_match")
    assert [(group.name, group.mean) for group in result.groups] == [("longer", 0.25)]
    note = "plain has no test/longer/exact_match, and is left out, so the next group is the baseline"
    assert result.notes == (note,)
    (note,) = compared("A=runs/plain/version_[0-2],runs/warm/version_[3-5]").notes
    assert note == "the runs of A differ in model.init_args.lr_schedule.warmup_steps, not only in the seed"
    write_runs(runs / "other", [0.93] * 6, processor="B")
    note = "Note: the runs differ in processor (A, B), which may change their results."
    assert note in sentences(compared("runs/plain", "runs/other"))


def test_different_test_data(runs):
    write_runs(runs / "other", [0.9] * 6, test="other")
    with pytest.raises(UserError, match="the test data of other and plain differ; compare runs of one task"):
        compared("runs/plain", "runs/other")
    write_runs(runs / "third", [0.9] * 3, test="third", seeds=[7, 8, 9])
    with pytest.raises(UserError, match="the test data of third and other differ"):
        compared("runs/other", "runs/third")
    (note,) = compared("runs/plain", "runs/third").notes
    assert note.startswith("whether third and plain were tested on the same data is not known")


def predicted(correct):
    """Return the lines of predictions.jsonl; each source occurs twice."""
    outputs = {True: "a b c d", False: "a b"}
    return [
        {"split": "test", "source": f"{row // 2}", "target": "a b c d", "prediction": outputs[right], "correct": right}
        for row, right in enumerate(correct)
    ]


def test_sign_test_of_examples(runs):
    generator = random.Random(0)
    values, baseline = ([generator.random() < share for _ in range(200)] for share in (0.7, 0.5))
    write_run(runs / "a/version_0", 1, warmup_steps=1, lines=predicted(baseline), exact_match=0.5)
    write_run(runs / "b/version_0", 1, warmup_steps=2, lines=predicted(values), exact_match=0.7)
    (test,) = compared("runs/a", "runs/b").examples.values()
    pairs = list(zip(values, baseline, strict=True))
    only_new, only_baseline = pairs.count((True, False)), pairs.count((False, True))
    p = stats.binomtest(only_new, only_new + only_baseline).pvalue
    assert (test.examples, test.score, test.baseline, test.p) == (200, only_new, only_baseline, pytest.approx(p))
    assert sign_test([]).p == 1.0


@pytest.mark.parametrize("metric", ["bleu", "chrf"])
def test_randomization_test_equals_sacrebleu(metric, runs):
    from sacrebleu.metrics import BLEU, CHRF
    from sacrebleu.significance import PairedTest

    generator = random.Random(0)
    words = ["the", "a", "dog", "cat", "sees", "runs", "in", "red", "house"]
    references = [generator.choices(words, k=8) for _ in range(60)]
    outputs = [
        [
            " ".join(generator.choice(words) if generator.random() < noise else word for word in row)
            for row in references
        ]
        for noise in (0.3, 0.25)
    ]
    references = [" ".join(row) for row in references]
    for name, system in zip("ab", outputs, strict=True):
        lines = [
            {"split": "test", "source": str(number), "target": line, "prediction": output, "correct": line == output}
            for number, (line, output) in enumerate(zip(references, system, strict=True))
        ]
        write_run(runs / name, 1, lines=lines)
    test = compare_examples(Run(runs / "b"), Run(runs / "a"), f"test/{metric}", "test")
    scorer, systems = BLEU() if metric == "bleu" else CHRF(), list(zip("ab", outputs, strict=True))
    _, results = PairedTest(systems, {metric: scorer}, [references], test_type="ar", n_samples=TRIALS)()
    baseline, other = next(scores for name, scores in results.items() if name != "System")
    assert (test.score, test.baseline, test.p) == (other.score, baseline.score, other.p_value)


@pytest.mark.parametrize("metric", ["bleu", "chrf"])
def test_single_difference_is_not_significant(metric):
    references = [f"the cat number {number} sat on the mat" for number in range(20)]
    assert randomization_test(references, [*references[:-1], "a dog"], references, metric).p == 1.0


@pytest.mark.parametrize("format", ["table", "markdown", "latex", "json"])
def test_formats(format, runs, capsys):
    assert compare_command(["runs/plain", "runs/warm", "--format", format]) == 0
    printed, err = capsys.readouterr()
    assert err == ""
    assert compare_command(["runs/plain", "runs/warm", "--format", format, "--output", "out.txt"]) == 0
    assert (runs.parent / "out.txt").read_text() == printed
    assert "warm is better than plain (p = 0.031)." in printed
    if format == "json":
        (content,) = json.loads(printed)
        assert content["groups"][0]["values"] == {"1": 0.9, "2": 0.91, "3": 0.89, "4": 0.92, "5": 0.9, "6": 0.91}
        assert content["differences"][0]["p"] == 0.03125
    elif format == "table":
        assert "0.9383" in printed
        assert "+0.0333" in printed
    else:
        assert "93.83 ± 0.98" in printed.replace(r"$\pm$", "±")


@pytest.mark.parametrize("format", ["table", "markdown", "latex", "json"])
def test_names_are_printed_literally(format, runs, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    (runs / "plain").rename(runs / "[b]:cat:\x9b")
    assert compare_command(["runs/[b]:cat:\x9b", "runs/warm", "--format", format]) == 0
    printed = capsys.readouterr().out
    assert "[b]:cat:" in printed
    assert "\x9b" not in printed


def test_latex_is_escaped(runs, capsys):
    assert compare_command(["50%_A&B#=runs/plain", "--format", "latex"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("%")]
    assert r"50\%\_A\&B\# & 90.50 $\pm$ 1.05 \\" in lines


DISPLAYED = {"loss": 1, "exact_match": 100, "longer/exact_match": 100, "exact_match/loss": 100, "nll/accuracy": 1}


@pytest.fixture
def several_metrics(runs):
    """Write runs of three settings with metrics of both directions; one group lacks one, and two groups share one."""
    generator = random.Random(0)
    for name in ("a_1", "b", "c"):
        for seed in (1, 2, 3, 4):
            metrics = {metric: generator.random() for metric in DISPLAYED if (name, metric) != ("b", "loss")}
            write_run(runs / name / f"version_{seed}", seed, warmup_steps=name, **metrics)
    return [f"runs/{name}" for name in ("a_1", "b", "c")]


def printed_rows(format, text):
    """Return the header, the rows and the bold cells of a table in LaTeX or Markdown, without markup."""
    if format == "latex":
        body = text.partition(r"\toprule")[2].partition(r"\bottomrule")[0].replace(r"\midrule", "")
        rows = [line.removesuffix(r" \\").split(" & ") for line in body.split("\n") if line.strip()]
        for mark, plain in ((r"$\pm$", "±"), (r"\_", "_"), (r"\textbf{", "**"), ("}", "**"), (r"\%", "%")):
            rows = [[cell.replace(mark, plain) for cell in row] for row in rows]
    else:
        lines = [line[2:-2] for line in text.splitlines() if line.startswith("| ")]
        rows = [line.split(" | ") for line in (lines[0], *lines[2:])]
    bold = {(row[0], column) for row in rows for column, cell in enumerate(row) if cell.startswith("**")}
    header, *rows = [[cell.strip("* ") for cell in row] for row in rows]
    return header, rows, bold


@pytest.mark.parametrize("format", ["latex", "markdown"])
def test_table_of_several_metrics(format, several_metrics, capsys):
    """Check each cell against the values of the seeds, and bold against the direction of each metric."""
    metrics = [word for metric in DISPLAYED for word in ("--metric", metric)]
    compare_command([*several_metrics, *metrics, "--format", "json"])
    content = json.loads(capsys.readouterr().out)
    compare_command([*several_metrics, *metrics, "--format", format])
    text = capsys.readouterr().out
    header, rows, bold = printed_rows(format, text)
    assert [each["metric"] for each in content] == [f"test/{metric}" for metric in DISPLAYED]
    assert [row[0] for row in rows] == ["a_1", "c", "b"], "groups are in the order in which they first have a metric"
    for column, (metric, each) in enumerate(zip(DISPLAYED, content, strict=True), start=1):
        factor, digits = DISPLAYED[metric], 2 if DISPLAYED[metric] == 100 else 4
        values = {group["name"]: [factor * value for value in group["values"].values()] for group in each["groups"]}
        expected = {name: f"{np.mean(v):.{digits}f} ± {np.std(v, ddof=1):.{digits}f}" for name, v in values.items()}
        assert {row[0]: row[column] for row in rows} == {"b": "\N{EN DASH}"} | expected
        best = (max if DIRECTIONS[metric] else min)(values, key=lambda name: np.mean(values[name]))
        assert {name for name, place in bold if place == column} == {best}
        assert ("(%)" in header[column]) == (factor == 100)
    assert "Results on the test set: mean ± standard deviation over 4 seeds." in text.replace(r"$\pm$", "±")


def test_csv_has_the_recorded_values(several_metrics, capsys):
    compare_command([*several_metrics, "--metric", "loss", "--metric", "exact_match", "--format", "csv"])
    out, err = capsys.readouterr()
    rows = {row.pop("group"): row for row in csv.DictReader(out.splitlines())}
    assert "Note: b has no test/loss, and is left out." in err
    assert {rows["b"][f"test/loss {part}"] for part in ("mean", "standard deviation", "seeds")} == {""}
    groups, notes = find_groups(several_metrics)
    for group in compare(groups, "exact_match", notes).groups:
        for part, value in (("mean", np.mean(group.values)), ("standard deviation", np.std(group.values, ddof=1))):
            assert float(rows[group.name][f"test/exact_match {part}"]) == pytest.approx(value, rel=1e-6)
        assert rows[group.name]["test/exact_match seeds"] == "4"


def test_equal_means_and_different_numbers_of_seeds(runs, capsys):
    for name, values in (("a", [0.5, 0.7]), ("b", [0.60001, 0.59999]), ("c", [0.1])):
        write_runs(runs / name, values)
    compare_command(["runs/a", "runs/b", "runs/c", "--format", "markdown"])
    header, rows, bold = printed_rows("markdown", capsys.readouterr().out)
    assert rows == [["a", "60.00 ± 14.14", "2"], ["b", "60.00 ± 0.00", "2"], ["c", "10.00", "1"]]
    assert header[-1] == "seeds"
    assert bold == {("a", 1), ("b", 1)}


@pytest.mark.parametrize("format", ["table", "latex", "markdown", "json"])
def test_signatures_are_printed(format, runs, capsys):
    signature = "nrefs:1|tok:13a|version:2"
    for name in ("a", "b"):
        write_run(runs / name, 1, warmup_steps=name, bleu=30.0, exact_match=0.5)
        summary = json.loads((runs / name / "summary.json").read_text())
        summary |= {"signatures": {"bleu": signature}, "higher_is_better": {"bleu": True, "exact_match": True}}
        (runs / name / "summary.json").write_text(json.dumps(summary))
    compare_command(["runs/a", "runs/b", "--metric", "bleu", "--format", format])
    shown = breakable_latex(f"BLEU|{signature}") if format == "latex" else f"BLEU|{signature}"
    assert capsys.readouterr().out.count(shown) == 1
    compare_command(["runs/a", "runs/b", "--metric", "exact_match", "--format", format])
    assert "tok:13a" not in capsys.readouterr().out


@pytest.mark.parametrize("columns", [None, 1, 2])
def test_learning_curves(columns, runs):
    """Draw the mean, and the range, over the finite validations at the steps that all seeds of a group have."""
    for number in range(6):
        rows = [{"step": step, "val/exact_match": number + step, "val/loss": 1.0} for step in (9, 19, 29)]
        rows[2]["val/exact_match"] = "nan" if number == 5 else 0.0
        Run(runs / f"plain/version_{number}").write_rows(rows, ["step", "val/exact_match", "val/loss"])
    figure = draw_curves([compared("$a_b$=runs/plain", "runs/warm")], columns)
    axes, (line, empty) = figure.axes[0], figure.axes[0].lines
    assert axes.get_ylabel() == "validation exact match"
    assert line.get_xydata().tolist() == [[10, 11.5], [20, 21.5]]
    assert not len(empty.get_xydata())
    corners = axes.collections[0].get_paths()[0].vertices
    assert {tuple(corner) for corner in corners} == {(10, 9), (10, 14), (20, 19), (20, 24)}
    assert line.get_linestyle() != empty.get_linestyle()
    assert columns is None or figure.get_figwidth() == COLUMNS[columns]
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["$a_b$", "warm"]
    box = figure.get_tightbbox()
    assert 0 <= box.x0 < box.x1 <= figure.get_figwidth()
    assert box.y1 <= figure.get_figheight() + 1e-6


@pytest.mark.parametrize(("metrics", "float"), [(["exact_match"], "table"), (["exact_match", "loss", "ser"], "table*")])
def test_wide_tables_span_both_columns_in_latex(metrics, float, runs, capsys):
    for seed in (1, 2):
        write_run(runs / f"a/version_{seed}", seed, **dict.fromkeys(metrics, 0.5 + seed / 8))
    options = [word for name in metrics for word in ("--metric", name)]
    compare_command(["A_long_name=runs/a", *options, "--format", "latex"])
    printed = capsys.readouterr().out
    assert re.findall(r"\\(?:begin|end)\{(table\*?)\}", printed) == [float] * 2
    assert r"\shortstack[r]{exact match\\(\%) $\uparrow$}" in printed


@pytest.mark.parametrize("suffix", ["png", "pdf", "svg"])
def test_figure(suffix, runs, capsys):
    named = "\u1d84=runs/plain"  # the default font lacks this character
    assert compare_command([named, "runs/warm", "--figure", f"out.{suffix}"]) == 0
    assert "pictures show boxes" not in capsys.readouterr().err
    starts = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}
    assert (runs.parent / f"out.{suffix}").read_bytes().startswith(starts[suffix])
    with pytest.raises(UserError, match="--figure must be a new file"):
        compare_command(["runs/plain", "runs/warm", "--figure", f"out.{suffix}"])
    assert compare_command(["runs/plain", "runs/warm", "--figure", f"out.{suffix}", "--overwrite"]) == 0


@pytest.mark.parametrize(("columns", "inches"), [(1, 3.25), (2, 6.75)])
def test_figure_for_a_publication(columns, inches, several_metrics, capsys):
    """Check the width in points, that fonts are embedded as TrueType, and that no text leaves the figure."""
    metrics = ["--metric", "loss", "--metric", "exact_match"]
    style = ["--style", "paper", "--columns", str(columns), "--figure"]
    assert compare_command([*several_metrics, *metrics, *style, "out.pdf"]) == 0
    pdf = Path("out.pdf").read_bytes()
    (box,) = re.findall(rb"/MediaBox \[ *0 0 ([\d.]+)", pdf)
    assert float(box) == pytest.approx(72 * inches, abs=0.01)
    assert b"/FontFile2" in pdf
    assert b"/Type3" not in pdf
    compare_command([*several_metrics, *metrics, *style, "out.svg"])
    svg = Path("out.svg").read_text()
    assert f'width="{72 * inches:g}pt"' in svg
    assert ">test/loss (lower is better)</text>" in svg, "text is not outlines"
    groups, notes = find_groups(several_metrics)
    figure = draw_comparisons([compare(groups, metric, notes) for metric in ("loss", "exact_match")], columns)
    figure.draw_without_rendering()
    box = figure.get_tightbbox()
    assert 0 <= box.x0 < box.x1 <= inches
    assert box.y0 >= 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "GROUP must name runs, but 'nowhere' names none; try an experiment"),
        (["A=nowhere"], "GROUP must name runs, but 'A=nowhere' names none"),
        (["=runs/plain"], "GROUP must have a name of its own, but is '=runs/plain'"),
        (["A=runs/plain", "A=runs/warm"], "GROUP must have a name of its own, but is 'A=runs/warm'"),
        (["A=runs/plain", "B=runs/plain/version_3"], "'runs/plain/version_3' is in A and B; remove it from one"),
        (["runs", "--metric", "bleu"], "but none has 'bleu'; they have test/exact_match, samples_per_second"),
        (["A=runs/plain", "B=other"], "the groups, tested on different splits or tasks, share no BLEU"),
        (["young"], "GROUP must name finished runs, but young names none: young/version_0 has not finished"),
        (["A=runs/plain", "B=young"], "finished runs, but B has none: young/version_0 has not finished"),
        (["A=runs/plain,"], "GROUP must name runs, but 'A=runs/plain,' names none"),
        (["runs", "--output", "runs"], "--output must be a new file, but 'runs' exists"),
        (["runs", "--output", "no/x"], "--output must lie in a folder that exists, but 'no' does not"),
        (["runs", "--columns", "2"], "--columns must be set for --style paper only, but is 2; add --style paper"),
        (["runs", "--style", "paper"], "--style paper must be set for a figure only, but there is none; add --figure"),
        (["runs", "--curves", "x.pdf"], "validated with a metric, but none has val/exact_match; leave it out"),
        (["runs", "--curves", "x.gif"], "--curves must end in .pdf or .png or .svg, but is 'x.gif'; try x.pdf"),
        (["runs", "--metric", "exact_match", "--metric", "bleu"], "but none has 'bleu'; they have test/exact_match"),
        (["runs", "--figure", "x.gif"], "--figure must end in .pdf or .png or .svg, but is 'x.gif'"),
    ],
)
def test_invalid_arguments(arguments, message, runs):
    write_run(runs.parent / "young/version_0", 1, finished=False)
    write_run(runs.parent / "other/version_0", 1, perplexity=2.0)
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        compare_command(arguments)
