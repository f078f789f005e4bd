"""Groups of runs to compare, which differ in their settings but not in their data."""

from __future__ import annotations

import glob
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

from lightning_tfm.comparison.statistics import Interval, mean_interval
from lightning_tfm.config.settings import is_below
from lightning_tfm.errors import UserError
from lightning_tfm.runs.names import ROOT, named_run
from lightning_tfm.runs.record import HEADLINES, MACRO, Run, Start
from lightning_tfm.system.files import relative

COSTS = {"train_seconds": False, "samples_per_second": True}
"""Metrics of the cost of a run, and whether higher values are better."""

DIGITS = 7
"""Significant digits of metrics, which are computed in float32."""

MAX_LISTED = 3
"""Maximum number of settings in the name of a group, and of items listed in a note."""


@dataclass(frozen=True)
class Group:
    """Finished runs with different seeds, whose values of a metric are compared with those of other groups.

    Attributes:
        name: the name of the group.
        runs: the runs, by increasing seed once a metric is chosen.
        values: the value of the metric of each run; empty until a metric is chosen.
    """

    name: str
    runs: tuple[Run, ...]
    values: tuple[float, ...] = ()

    @property
    def seeds(self) -> tuple[int, ...]:
        """Return the seeds of the runs."""
        return tuple(run.summary.seed for run in self.runs)

    @property
    def mean(self) -> float:
        """Return the mean over seeds."""
        return statistics.fmean(self.values)

    @cached_property
    def interval(self) -> Interval | None:
        """Return the 95% interval of the mean; None if it is not defined."""
        return mean_interval(self.values)


def metrics_of(run: Run) -> dict[str, float]:
    """Return the metrics of a finished run by full name, such as "test/loss", and its COSTS if it has trained."""
    costs = {name: getattr(run.summary, name) for name in COSTS}
    metrics = run.summary.metrics | {name: value for name, value in costs.items() if value is not None}
    return {name: float(f"{value:.{DIGITS}g}") for name, value in metrics.items()}


def find_groups(arguments: Sequence[str]) -> tuple[list[Group], list[str]]:
    """Return the groups of runs that some arguments name, and notes on runs that are left out.

    An argument `NAME=RUNS[,RUNS]` is one group. The runs of all other arguments are grouped by their settings except
    for the seed. RUNS is the folder of a run, a folder of such folders, a pattern
    or a checkpoint; folders may be relative to ROOT, so that the name of an experiment stands for all of its runs.

    Raises:
        UserError: if an argument names no run, if a group has no finished run, or if a run is in two groups.
    """
    names: list[str] = []
    notes: list[str] = []
    runs: list[tuple[str, Run]] = []
    for argument in arguments:
        name, equals, paths = argument.partition("=")
        if not equals or Path(argument).exists() or re.search(r"[/\\*?\[]", name):
            name, paths = "", argument
        elif not name or name in names:
            raise UserError(f"GROUP must have a name of its own, but is {argument!r}; name it A=RUNS")
        names += [name] if name else []
        named = [run for path in (paths.split(",") if name else [paths]) for run in _find_runs(path, argument)]
        finished = _without_evaluations([run for run in dict.fromkeys(named) if is_readable(run, notes)], notes)
        if name and (different := differing([run.settings for run in finished])):
            notes.append(f"the runs of {name} differ in {listed(different)}, not only in the seed")
        runs += [(name, run) for run in finished]
    groups = group_runs(runs)
    missing = [name for name in names if name not in (group.name for group in groups)]
    if missing or not groups:
        raise UserError(
            f"GROUP must name finished runs, but {listed(missing) or ' '.join(arguments)} "
            f"{'has' if missing else 'names'} none: {listed(notes)}"
        )
    _check_disjoint(groups)
    notes += [
        f"{group.name} is an ensemble of {len(members)} checkpoints: {listed(members)}"
        for group in groups
        for members in [run.summary.members for run in group.runs]
        if members
    ]
    return groups, notes


def group_runs(runs: Iterable[tuple[str, Run]]) -> list[Group]:
    """Group finished runs by name or, if it is empty, by their settings except for the seed."""
    members: dict[tuple[str, str], dict[Path, Run]] = {}
    for name, run in runs:
        key = name, "" if name else json.dumps(run.settings, sort_keys=True, default=str)
        members.setdefault(key, {})[run.folder.resolve()] = run
    groups = [(name, tuple(group.values())) for (name, _), group in members.items()]
    labels = iter(_labels([group for name, group in groups if not name]))
    return [Group(name or next(labels), group) for name, group in groups]


def _find_runs(path: str, argument: str) -> list[Run]:
    """Return the runs at a path, in natural order; raise UserError if there are none."""
    if Path(path).is_file():
        return [named_run(path)]
    for place in (path, str(ROOT / path)) if path else ():  # an empty path would be the current folder
        names = [place] if Path(place).is_dir() else glob.glob(place)
        folders = [Path(name) for name in names if Path(name).is_dir()]
        runs = [run for folder in folders for run in ([Run(folder)] if Run(folder).exists else Run.below(folder))]
        if runs:
            return sorted(runs, key=_natural)
    raise UserError(
        f"GROUP must name runs, but {argument!r} names none; try an experiment, such as date_gpt, a folder of runs, or "
        "NAME=RUNS"
    )


def _natural(run: Run) -> list[tuple[bool, int, str]]:
    """Return a key that sorts version_10 after version_9."""
    parts = re.split(r"(\d+)", str(run.folder))
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]


def is_readable(run: Run, notes: list[str]) -> bool:
    """Return whether a run has finished and is not damaged; otherwise, append a note."""
    try:
        if not run.has_finished:
            notes.append(f"{relative(run.folder)} has not finished, and is left out")
            return False
        _ = run.summary, run.settings, run.starts
    except UserError:
        notes.append(f"{relative(run.folder)} is damaged, and is left out")
        return False
    return True


def _without_evaluations(runs: Sequence[Run], notes: list[str]) -> list[Run]:
    """Leave out later tests and validations of checkpoints of these runs, and append a note on each.

    One with the settings of its run, but on another split, is kept, such as the test of a run of `fit --skip-test`.
    """
    by_folder = {run.folder.resolve(): run for run in runs}
    kept = []
    for run in runs:
        folders = [path.resolve().parent.parent for path in run.tested_checkpoints]
        trained = next((by_folder[folder] for folder in folders if folder in by_folder), None)
        completes = trained and run.settings == trained.settings and run.summary.split != trained.summary.split
        if trained is None or completes:
            kept.append(run)
        else:
            notes.append(f"{relative(run.folder)} evaluates {relative(trained.folder)} again, and is left out")
    return kept


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the settings that differ; of classes that differ, not their arguments."""
    names = dict.fromkeys(name for each in settings for name in each)
    different = [name for name in names if any(each.get(name) != settings[0].get(name) for each in settings)]
    classes = [f"{name.removesuffix('class_path')}init_args" for name in different if name.endswith(".class_path")]
    return [name for name in different if not is_below(name, classes)]


def listed(items: Iterable[object]) -> str:
    """Return up to MAX_LISTED items, separated by commas, with the number of the others."""
    texts = [str(item) for item in items]
    rest = f" and {len(texts) - MAX_LISTED} more" if len(texts) > MAX_LISTED else ""
    return ", ".join(texts[:MAX_LISTED]) + rest


def _labels(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Return names of groups: the experiment, unless all are of one, and the settings in which its groups differ.

    If these are more than MAX_LISTED, a group is named by those in which it differs from the first group of its
    experiment.
    """
    experiments = [runs[0].folder.resolve().parent.name for runs in groups]
    labels: list[str] = []
    for (run, *_), experiment in zip(groups, experiments, strict=True):
        of_experiment = [
            other[0].settings for other, name in zip(groups, experiments, strict=True) if name == experiment
        ]
        names = differing(of_experiment)
        has_few = len(names) <= MAX_LISTED
        if not has_few:
            names = differing([of_experiment[0], run.settings])
        parts = [_label(name, run.settings[name]) for name in names if run.settings.get(name) is not None]
        parts[MAX_LISTED:] = ["..."] if len(parts) > MAX_LISTED else []
        if not parts and not has_few:
            parts = ["baseline"]
        label = " ".join(parts if parts and len(set(experiments)) == 1 else [experiment, *parts])
        same = sum(other.split(" #")[0] == label for other in labels)
        labels.append(f"{label} #{same + 1}" if same else label)
    return labels


def _label(name: str, value: object) -> str:
    """Return a short form of a setting, such as "warmup_steps=0", or the name of a class."""
    *_, last = name.split(".")
    if last == "class_path":
        return str(value).rpartition(".")[2]
    return f"{last}={value if isinstance(value, str) else json.dumps(value, default=str)}"


def _check_disjoint(groups: Sequence[Group]) -> None:
    """Check that no run is in two groups."""
    owners: dict[Path, str] = {}
    for group in groups:
        for run in group.runs:
            owner = owners.setdefault(run.folder.resolve(), group.name)
            if owner != group.name:
                raise UserError(
                    f"GROUP must not share runs with another, but {relative(run.folder)!r} is in {owner} and "
                    f"{group.name}; remove it from one"
                )


def lower_is_better(metric: str, runs: Sequence[Run]) -> bool:
    """Return whether lower values of a metric are better, as the runs have recorded it.

    Raises:
        UserError: if no run has recorded it.
    """
    name = metric.partition("/")[2] or metric
    for directions in (COSTS, *(run.summary.higher_is_better for run in runs)):
        if name in directions:
            return not directions[name]
    raise UserError(
        f"the metric must say whether higher values are better, but {metric} does not; log it with "
        "higher_is_better in the task, and test again"
    )


def test_set_of(metric: str, runs: Sequence[Run]) -> str:
    """Return the test set of a metric: "longer" for test/longer/exact_match, "test" for test/exact_match."""
    split, _, name = metric.partition("/")
    if split in COSTS:
        return runs[0].summary.split
    first = name.partition("/")[0]
    return first if any(first in start["data_fingerprint"] for run in runs for start in run.starts[-1:]) else split


def choose_metric(groups: Sequence[Group], metric: str | None) -> str:
    """Return the full name of the metric to compare.

    Args:
        groups: the groups.
        metric: its name, with or without the split, which at least one group must have; None for the first of HEADLINES
            that all groups have.

    Raises:
        UserError: if there is no such metric.
    """
    by_group = [{name for run in group.runs for name in metrics_of(run)} for group in groups]
    shared, available = set.intersection(*by_group), set.union(*by_group)
    names = [name.removeprefix("val/") for name in HEADLINES] if metric is None else [metric]
    candidates = [f"{split}{name}" for name in names for split in ("", "test/", "val/")]
    for metrics in (shared,) if metric is None else (shared, available):
        for name in candidates:
            if name in metrics:
                return name
    named = sorted((name for name in available if name.count("/") <= 1), key=lambda name: (name in COSTS, name))
    reason = f"none has {metric!r}"
    if metric is None:
        scores = "BLEU, exact match, accuracy, loss per character or loss"
        reason = f"the groups, tested on different splits or tasks, share no {scores}"
    raise UserError(
        f"--metric must name a metric that a group has, but {reason}; they have {', '.join(named) or 'no metric'}"
    )


def with_values(groups: Sequence[Group], metric: str) -> tuple[list[Group], list[str]]:
    """Return groups with the values of a metric, one run per seed, and notes on groups and runs that are left out.

    Raises:
        UserError: if no value of a group is finite.
    """
    chosen: list[Group] = []
    notes = []
    for group in groups:
        values = {run: metrics_of(run).get(metric) for run in group.runs}
        if all(value is None for value in values.values()):
            following = "" if group is not groups[0] else ", so the next group is the baseline"
            notes.append(f"{group.name} has no {metric}, and is left out{following}")
            continue
        by_seed: dict[int, tuple[Run, float]] = {}
        repeated = []
        for run in sorted(
            values, key=lambda run: ([start["time"].isoformat() for start in run.starts[-1:]], _natural(run))
        ):
            value, seed = values[run], run.summary.seed
            if value is None:
                notes.append(f"{relative(run.folder)} has no {metric}, and is left out")
            elif not math.isfinite(value):
                notes.append(f"{relative(run.folder)} has a {metric} of {value}, and is left out")
            else:
                if seed in by_seed:
                    repeated.append(relative(by_seed[seed][0].folder))
                by_seed[seed] = run, value  # the newest counts
        if repeated:
            notes.append(
                f"{group.name} has several runs of equal settings and seed: {listed(repeated)} left out for newer "
                "ones (NAME=RUNS names groups to compare them)"
            )
        if not by_seed:
            raise UserError(f"GROUP must have a finite value of {metric}, but {group.name} has none; choose a --metric")
        runs, finite = zip(*(by_seed[seed] for seed in sorted(by_seed)), strict=True)
        chosen.append(Group(group.name, runs, finite))
    return chosen, notes


def check_data(groups: Sequence[Group], metric: str, test_set: str) -> list[str]:
    """Check that the groups were tested on equal data, by the fingerprints of equal seeds.

    Args:
        groups: the groups; the first one is the baseline.
        metric: the full name of the metric. If it is per token, the groups must also have equal tokenizers, or, for the
            symbol error rate, tokenizers that count the same symbols.
        test_set: the name of the test set.

    Returns:
        Notes on groups that cannot be checked.

    Raises:
        UserError: if data or tokenizers differ.
    """
    baseline, *others = groups
    is_ser = "ser" in metric.replace(MACRO, "").split("/")  # also of a category
    tokenizer = itemgetter("scored_symbols" if is_ser else "tokenizer_fingerprint")
    notes = []
    for group in others:
        is_equal = _is_equal(group, baseline, lambda start: start["data_fingerprint"].get(test_set))
        if is_equal is False:
            raise UserError(
                f"the groups must be tested on the same data, but the {test_set} data of {group.name} and "
                f"{baseline.name} differ; compare runs of one task, or test their checkpoints on the same data"
            )
        if is_equal is None:
            notes.append(
                f"whether {group.name} and {baseline.name} were tested on the same data is not known, since they "
                "share no seed with recorded data"
            )
        is_per_token = any(metric in _token_metrics(run) for run in (*baseline.runs, *group.runs))
        if is_per_token and _is_equal(group, baseline, tokenizer) is False:
            shared = set.intersection(
                *(metrics_of(run).keys() - _token_metrics(run) for each in groups for run in each.runs)
            )
            names = sorted(name for name in shared if name.count("/") == 1)
            raise UserError(
                f"the metric must not be per token for groups with different tokenizers, but is {metric}, and those of "
                f"{group.name} and {baseline.name} differ; try {' or '.join(names[:MAX_LISTED]) or 'equal tokenizers'}"
            )
    return notes


def _token_metrics(run: Run) -> set[str]:
    return {f"{run.summary.split}/{name}" for name in run.summary.token_metrics}


def _is_equal(group: Group, baseline: Group, recorded: Callable[[Start], str | None]) -> bool | None:
    """Compare the records of the last starts of two groups, by seed if the groups have seeds in common.

    Returns:
        Whether the records are equal; None if the values depend on the seed and the groups have no seed in common.
    """
    values, others = (
        {run.summary.seed: value for run in each.runs for start in run.starts[-1:] if (value := recorded(start))}
        for each in (group, baseline)
    )
    if shared := values.keys() & others.keys():
        return all(values[seed] == others[seed] for seed in shared)
    distinct = {*values.values()}, {*others.values()}
    return distinct[0] == distinct[1] if len(distinct[0]) == len(distinct[1]) == 1 else None


def check_environment(groups: Sequence[Group]) -> list[str]:
    """Return a note if the runs differ in their commit, version of torch or hardware."""
    values: dict[str, dict[object, None]] = defaultdict(dict)
    for start in (run.starts[-1] for group in groups for run in group.runs if run.starts):
        framework, hardware = start["framework"], start["hardware"]
        changed = " with uncommitted changes" if framework["dirty"] else ""
        values["commit"][(framework["commit"] or "unknown")[:10] + changed] = None
        values["torch"][start["versions"].get("torch", "unknown")] = None
        values["processor"][hardware["processor"]] = None
        values["gpus"][", ".join(hardware["gpus"]) or "none"] = None
        values["threads"][hardware["threads"]] = None
    different = [f"{name} ({listed(distinct)})" for name, distinct in values.items() if len(distinct) > 1]
    return [f"the runs differ in {', '.join(different)}, which may change their results"] if different else []
