"""Reading of the runs to compare, and their groups, which differ in their settings but not in their data."""

from __future__ import annotations

import glob
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_tfm.config.experiments import HEADLINES
from lightning_tfm.config.settings import is_below, read_json, read_starts, read_yaml, settings_of_weights, without_seed
from lightning_tfm.errors import UserError
from lightning_tfm.system.files import relative

COSTS = {"train_seconds": False, "samples_per_second": True}
"""Metrics of the cost of a run, and whether higher values are better."""

DIGITS = 7
"""Significant digits of metrics, which are computed in float32."""

SHOWN = 3
"""Maximum number of settings in the name of a group, and of items listed in a note."""

MACHINE = ("processor", "gpus", "threads")
"""Properties of the hardware that change floating-point results, and the training time."""


@dataclass(frozen=True)
class Run:
    """A finished run, or a later test of a checkpoint.

    Attributes:
        folder: its folder.
        seed: the seed.
        settings: the settings that change its weights, by dotted name, except for the seed.
        metrics: the test metrics by name, such as "test/exact_match", and the COSTS of a run that has trained.
        higher_is_better: whether higher values of a metric are better, by name; of others, it is not known.
        token_metrics: the names of the metrics that are not comparable between tokenizers.
        fingerprint: the hash of the data of each split; empty if it was not recorded.
        tokenizer: the hash of the tokenizer; empty if it was not recorded.
        scored_symbols: the symbols that the symbol error rate counts, see `Tokenizer`; empty if they were not recorded.
        environment: the commit, the version of torch and the MACHINE.
        time: when the run was started, in ISO format.
    """

    folder: Path
    seed: int
    settings: dict[str, Any]
    metrics: dict[str, float]
    higher_is_better: dict[str, bool]
    token_metrics: frozenset[str]
    fingerprint: dict[str, str]
    tokenizer: str
    scored_symbols: str
    environment: dict[str, str]
    time: str

    @property
    def test_set(self) -> str:
        """Return the name of the main test set, "test" or, without one, "val"."""
        return "test" if any(name.startswith("test/") for name in self.metrics) else "val"


@dataclass(frozen=True)
class Group:
    """Runs with different seeds, whose values of a metric are compared with those of other groups.

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
        return tuple(run.seed for run in self.runs)


def find_groups(arguments: Sequence[str]) -> tuple[list[Group], list[str]]:
    """Return the groups of runs that some arguments name, and notes on runs that are left out.

    An argument `NAME=RUNS[,RUNS]` is one group. The runs of all other arguments are grouped by their settings except
    for the seed. RUNS is the folder of a run, a folder of such folders, or a pattern.

    Args:
        arguments: the arguments, at least one.

    Raises:
        UserError: if an argument names no run, if a group has no finished run, or if a run is in two groups.
    """
    named: list[tuple[str | None, list[Path]]] = []
    for argument in arguments:
        given, equals, paths = argument.partition("=")
        if equals and not Path(argument).exists() and not re.search(r"[/\\*?\[]", given):
            if not given or given in (other for other, _ in named):
                raise UserError(f"GROUP must have a name of its own, but is {argument!r}; name it A=RUNS")
            named.append((given, [folder for path in paths.split(",") for folder in _folders(path, argument)]))
        else:
            named.append((None, _folders(argument, argument)))
    notes: list[str] = []
    groups: list[Group] = []
    unnamed: dict[str, list[Run]] = {}
    places: dict[str, int] = {}  # of a group of equal settings among the groups
    for name, folders in named:
        found = [run for folder in dict.fromkeys(folders) if (run := read_run(folder, notes)) is not None]
        if name is not None:
            groups.append(Group(name, tuple(found)))
            notes += _mixed(name, found)
        for run in found if name is None else ():
            key = json.dumps(run.settings, sort_keys=True, default=str)
            if key not in unnamed:
                places[key] = len(groups)
                groups.append(Group("", ()))
            unnamed.setdefault(key, []).append(run)
    for (key, runs), label in zip(unnamed.items(), _labels(list(unnamed.values())), strict=True):
        groups[places[key]] = Group(label, tuple({run.folder.resolve(): run for run in runs}.values()))
    if empty := [group.name for group in groups if not group.runs]:
        raise UserError(f"GROUP must name finished runs, but {listed(empty)} has none: {listed(notes)}")
    if not groups:
        raise UserError(f"GROUP must name finished runs, but {' '.join(arguments)} names none: {listed(notes)}")
    _check_disjoint(groups)
    return groups, notes


def group_runs(folders: Sequence[Path]) -> list[Group]:
    """Return finished runs grouped by their settings except for the seed; unfinished ones are left out.

    Args:
        folders: the folders of the runs.
    """
    runs: dict[str, list[Run]] = {}
    for folder in folders:
        if (run := read_run(folder, [])) is not None:
            runs.setdefault(json.dumps(run.settings, sort_keys=True, default=str), []).append(run)
    members = list(runs.values())
    return [Group(label, tuple(found)) for label, found in zip(_labels(members), members, strict=True)]


def _folders(path: str, argument: str) -> list[Path]:
    """Return the folders of the runs at a path, in natural order.

    Raises:
        UserError: if there are none.
    """
    names = [path] if path and Path(path).is_dir() else glob.glob(path)  # an empty path would be the current folder
    found = [Path(name) for name in names if Path(name).is_dir()]
    folders = [
        folder
        for place in found
        for folder in ([place] if _is_run(place) else [config.parent for config in place.rglob("config.yaml")])
        if _is_run(folder)
    ]
    if not folders:
        raise UserError(
            f"GROUP must name runs, but {argument!r} names none; try a folder of runs, such as runs/date_gpt, "
            "or NAME=FOLDER"
        )
    return sorted(folders, key=_natural)


def _natural(path: Path) -> list[tuple[bool, int, str]]:
    """Return a key that sorts version_10 after version_9."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", str(path))]


def _is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run; W&B also writes files named config.yaml."""
    return (folder / "config.yaml").is_file() and "wandb" not in folder.parts


def read_run(folder: Path, notes: list[str]) -> Run | None:
    """Return the run in a folder; None if it has not finished or is damaged.

    Args:
        folder: the folder.
        notes: a list to which a note on a missing run is appended.
    """
    if not (folder / "summary.json").is_file():
        notes.append(f"{relative(folder)} has not finished, and is left out")
        return None
    try:
        settings = settings_of_weights(read_yaml(folder / "config.yaml", "GROUP"))
        summary = read_json(folder / "summary.json")
        start: dict[str, Any] = next(reversed(read_starts(folder)), {})
        split = "test" if "test" in summary else "val"
        metrics = {f"{split}/{name}": value for name, value in summary.get(split, {}).items()}
        metrics |= {name: summary[name] for name in COSTS if name in summary}
        rounded = {name: float(f"{float(value):.{DIGITS}g}") for name, value in metrics.items()}
        directions = {f"{split}/{name}": bool(value) for name, value in summary.get("higher_is_better", {}).items()}
        token_metrics = frozenset(f"{split}/{name}" for name in summary.get("token_metrics", ()))
        seed, environment = int(summary["seed"]), _environment(start)
        fingerprint = {str(split): str(value) for split, value in (start.get("data_fingerprint") or {}).items()}
    except (UserError, AttributeError, LookupError, TypeError, ValueError):
        notes.append(f"{relative(folder)} is damaged, and is left out")
        return None
    return Run(
        folder=folder,
        seed=seed,
        settings=without_seed(settings),
        metrics=rounded,
        higher_is_better=directions | COSTS,
        token_metrics=token_metrics,
        fingerprint=fingerprint,
        tokenizer=str(start.get("tokenizer_fingerprint", "")),
        scored_symbols=str(start.get("scored_symbols", "")),
        environment=environment,
        time=str(start.get("time", "")),
    )


def _environment(start: dict[str, Any]) -> dict[str, str]:
    """Return what may change the results of equal settings, from an entry of provenance.json."""
    framework, hardware = start.get("framework") or {}, start.get("hardware") or {}
    changed = " with uncommitted changes" if framework.get("dirty") else ""
    facts = {"commit": f"{framework['commit'][:10]}{changed}" if framework.get("commit") else ""}
    facts["torch"] = (start.get("versions") or {}).get("torch", "")
    facts |= {name: hardware[name] for name in MACHINE if name in hardware}
    return {name: ", ".join(value) if isinstance(value, list) else str(value) for name, value in facts.items()}


def _mixed(name: str, runs: list[Run]) -> list[str]:
    """Return a note if the runs of a named group differ in settings other than the seed."""
    names = _differing([run.settings for run in runs])
    return [f"the runs of {name} differ in {listed(names)}, not only in the seed"] if names else []


def _differing(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the settings that differ; of classes that differ, not their arguments."""
    names = dict.fromkeys(name for each in settings for name in each)
    different = [name for name in names if any(each.get(name) != settings[0].get(name) for each in settings)]
    classes = [f"{name.removesuffix('class_path')}init_args" for name in different if name.endswith(".class_path")]
    return [name for name in different if not is_below(name, classes)]


def listed(items: Iterable[object]) -> str:
    """Return up to SHOWN items, separated by commas, with the number of the others."""
    texts = [str(item) for item in items]
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + more


def _labels(groups: list[list[Run]]) -> list[str]:
    """Return names of groups: the experiment, unless all are of one, and the settings in which its groups differ.

    If these are more than SHOWN, a group is named by those in which it differs from the first group of its experiment.
    """
    experiments = [runs[0].folder.resolve().parent.name for runs in groups]
    labels: list[str] = []
    for runs, experiment in zip(groups, experiments, strict=True):
        alike = [other[0].settings for other, name in zip(groups, experiments, strict=True) if name == experiment]
        own, names = runs[0].settings, _differing(alike)
        is_short = len(names) <= SHOWN
        if not is_short:
            names = _differing([alike[0], own])
        values = {name: own.get(name) for name in names}
        parts = [_label(name, value) for name, value in values.items() if value is not None]
        parts = [*parts[:SHOWN], *(["..."] if len(parts) > SHOWN else [])]
        parts = parts or ([] if is_short else ["baseline"])
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
    owner: dict[Path, str] = {}
    for group in groups:
        for run in group.runs:
            other = owner.setdefault(run.folder.resolve(), group.name)
            if other != group.name:
                raise UserError(
                    f"GROUP must not share runs with another, but {relative(run.folder)!r} is in {other} and "
                    f"{group.name}; remove it from one"
                )


def lower_is_better(metric: str, runs: Sequence[Run]) -> bool:
    """Return whether lower values of a metric are better, as the runs have recorded it.

    Raises:
        UserError: if no run has recorded it.
    """
    found = next((run.higher_is_better[metric] for run in runs if metric in run.higher_is_better), None)
    if found is None:
        raise UserError(
            f"the metric must say whether higher values are better, but {metric} does not; log it with "
            "higher_is_better in the task, and test again"
        )
    return not found


def test_set_of(metric: str, runs: Sequence[Run]) -> str:
    """Return the test set of a metric: "longer" for test/longer/exact_match, "test" for test/exact_match."""
    split, _, name = metric.partition("/")
    if split in COSTS:
        return runs[0].test_set
    first = name.partition("/")[0]
    return first if any(first in run.fingerprint for run in runs) else split


def choose_metric(groups: Sequence[Group], metric: str | None) -> str:
    """Return the full name of the metric to compare.

    Args:
        groups: the groups.
        metric: its name, with or without the split, which at least one group must have; None for the first of HEADLINES
            that all groups have.

    Raises:
        UserError: if there is no such metric.
    """
    by_group = [{name for run in group.runs for name in run.metrics} for group in groups]
    shared = set.intersection(*by_group)
    names = [name.removeprefix("val/") for name in HEADLINES] if metric is None else [metric]
    candidates = [f"{split}{name}" for name in names for split in ("", "test/", "val/")]
    known = set.union(*by_group)
    searched = (shared,) if metric is None else (shared, known)
    found = next((name for names in searched for name in candidates if name in names), None)
    if found is None:
        named = sorted((name for name in known if name.count("/") <= 1), key=lambda name: (name in COSTS, name))
        reason = f"none has {metric!r}"
        if metric is None:
            reason = "the groups share no BLEU, exact match, accuracy, loss per character or loss"
        raise UserError(
            f"--metric must name a metric that a group has, but {reason}; they have {', '.join(named) or 'no metric'}"
        )
    return found


def with_values(groups: Sequence[Group], metric: str) -> tuple[list[Group], list[str]]:
    """Return groups with the values of a metric, one run per seed, and notes on groups and runs that are left out.

    Args:
        groups: the groups.
        metric: the full name of the metric.

    Raises:
        UserError: if no value of a group is finite.
    """
    chosen: list[Group] = []
    notes = []
    for group in groups:
        if not any(metric in run.metrics for run in group.runs):
            following = "" if group is not groups[0] else ", so the next group is the baseline"
            notes.append(f"{group.name} has no {metric}, and is left out{following}")
            continue
        by_seed: dict[int, Run] = {}
        repeated = []
        for run in sorted(group.runs, key=lambda run: (run.time, _natural(run.folder))):  # the newest counts
            if metric not in run.metrics:
                notes.append(f"{relative(run.folder)} has no {metric}, and is left out")
            elif not math.isfinite(run.metrics[metric]):
                notes.append(f"{relative(run.folder)} has a {metric} of {run.metrics[metric]}, and is left out")
            else:
                if run.seed in by_seed:
                    repeated.append(relative(by_seed[run.seed].folder))
                by_seed[run.seed] = run
        if repeated:
            notes.append(
                f"{group.name} has several runs of equal settings and seed: {listed(repeated)} left out for newer "
                "ones (NAME=RUNS names groups to compare them)"
            )
        if not by_seed:
            raise UserError(f"GROUP must have a finite value of {metric}, but {group.name} has none; choose a --metric")
        runs = tuple(by_seed[seed] for seed in sorted(by_seed))
        chosen.append(replace(group, runs=runs, values=tuple(run.metrics[metric] for run in runs)))
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
    notes = []
    for group in others:
        data = [{run.seed: run.fingerprint.get(test_set) for run in each.runs} for each in (baseline, group)]
        is_equal, seed = _compare_by_seed(*data)
        if is_equal is False:
            raise UserError(
                f"the groups must be tested on the same data, but the {test_set} data{seed} of {group.name} and "
                f"{baseline.name} differ; compare runs of one task, or test their checkpoints on the same data"
            )
        if is_equal is None:
            notes.append(
                f"whether {group.name} and {baseline.name} were tested on the same data is not known, since they "
                "share no seed with recorded data"
            )
        counted = "scored_symbols" if metric.rpartition("/")[2] == "ser" else "tokenizer"
        tokenizers = [{run.seed: getattr(run, counted) for run in each.runs} for each in (baseline, group)]
        is_per_token = any(metric in run.token_metrics for run in (*baseline.runs, *group.runs))
        if is_per_token and _compare_by_seed(*tokenizers)[0] is False:
            shared = set.intersection(*(run.metrics.keys() - run.token_metrics for each in groups for run in each.runs))
            names = sorted(name for name in shared if name.count("/") == 1)
            raise UserError(
                f"the metric must not be per token for groups with different tokenizers, but is {metric}, and those of "
                f"{group.name} and {baseline.name} differ; try {' or '.join(names[:SHOWN]) or 'equal tokenizers'}"
            )
    return notes


def _compare_by_seed(ours: Mapping[int, str | None], theirs: Mapping[int, str | None]) -> tuple[bool | None, str]:
    """Return whether the values of two groups are equal, by seed, and the seed of the first difference.

    Args:
        ours: the value of each seed of the first group; empty or None if it was not recorded.
        theirs: the same for the second group.

    Returns:
        None if it is not known, which is so if no seed is in both groups and the values depend on the seed; the seed as
        " of seed N", or empty if the values do not depend on it.
    """
    common = sorted(seed for seed in ours.keys() & theirs.keys() if ours[seed] and theirs[seed])
    different = [seed for seed in common if ours[seed] != theirs[seed]]
    values = [{*group.values()} for group in (ours, theirs)]
    fixed = all(len(group) == 1 and all(group) for group in values)  # for any seed
    if different or (fixed and values[0] != values[1]):
        return False, f" of seed {different[0]}" if different and not fixed else ""
    return True if common or fixed else None, ""


def check_environment(groups: Sequence[Group]) -> list[str]:
    """Return a note if the runs differ in their commit, version of torch or hardware."""
    found: dict[str, dict[str, None]] = {}
    for run in (run for group in groups for run in group.runs):
        for name, value in run.environment.items():
            found.setdefault(name, {})[value or "unknown"] = None
    different = [f"{name} ({listed(values)})" for name, values in found.items() if len(values) > 1]
    return [f"the runs differ in {', '.join(different)}, which may change their results"] if different else []
