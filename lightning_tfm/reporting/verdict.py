"""Results of runs in sentences, and comparison of runs of the same task."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_tfm.comparison import compare, group_runs
from lightning_tfm.comparison.examples import sign_test
from lightning_tfm.comparison.groups import Group
from lightning_tfm.comparison.results import format_p, select
from lightning_tfm.comparison.tables import sentences, tables, verdicts
from lightning_tfm.config.experiments import format_value
from lightning_tfm.errors import UserError
from lightning_tfm.reporting.collect import Json


def result(run: Json) -> str:
    """Return the result of a run, such as "exact match 1.0000 on 1,000 test examples"."""
    if run["headline"] is None:
        return "no test yet"
    name, value = run["headline"]
    number = len(run["outcomes"])
    tested = f" on {number:,} {run['split']} examples" if number else f" on the {run['split']} split"
    return f"{_readable(name)} {format_value(value)}{tested}"


def verdict(runs: Sequence[Json]) -> str:
    """Describe which of several runs of one task is best, and on how many examples the best two differ.

    Args:
        runs: the runs, as returned by `collect_run`.

    Returns:
        Sentences; empty if fewer than two checkpoints have a finite result, or if the runs differ in their seeds only.
        If `compare` would refuse to compare them, for example since they were tested on different data, the reason.

    Note:
        Of a run and later tests of its checkpoint, only the first is compared. If more than two runs are equal, their
        examples are not compared.
    """
    by_checkpoint: dict[str, Json] = {}
    for run in runs:
        if run["record"] and run["headline"] and math.isfinite(run["headline"][1]):
            by_checkpoint.setdefault(run["checkpoint"] or run["name"], run)
    by_name = {run["name"]: run for run in by_checkpoint.values()}
    records = [run["record"] for run in by_name.values()]
    if len(records) < 2 or all(record.settings == records[0].settings for record in records):
        return ""
    try:
        found = select([Group(name, (run["record"],)) for name, run in by_name.items()])
    except UserError as error:
        return f"The runs are not compared: {error}."
    metric = _readable(found.metric.partition("/")[2])
    values = {group.name: group.values[0] for group in found.groups}
    best, second, *_ = sorted(values, key=lambda name: values[name] * (1 if found.lower_is_better else -1))
    value, other = values[best], values[second]
    *equal, last = [name for name in values if values[name] == value]
    if equal:
        text = f"{', '.join(equal)} and {last} are equal in {metric}: {format_value(value)}."
    else:
        text = (
            f"{best} has the best {metric}: {format_value(value)}, {abs(value - other):.4f} "
            f"{'below' if found.lower_is_better else 'above'} {second}."
        )
    notes = [f"Note: {note}." for note in found.notes]
    paired = "" if len(equal) > 1 else _paired(by_name[best], by_name[second])
    return " ".join(filter(None, [text, paired, *notes]))


def _paired(best: Json, second: Json) -> str:
    """Describe how two runs differ on the examples on which both were tested, with a sign test."""
    test = sign_test(best["outcomes"], second["outcomes"])
    if not test.ours + test.theirs:
        return ""
    return (
        f"Of {test.shared:,} shared examples, {test.ours:,} are correct only in {best['name']} and {test.theirs:,} "
        f"only in {second['name']} (sign test: {format_p(test.p)}). This compares two trained models; comparing their "
        "settings needs several seeds."
    )


def compare_seeds(runs: Sequence[Json]) -> Json | None:
    """Compare groups of runs of one task with several seeds.

    Args:
        runs: the runs, as returned by `collect_run`.

    Returns:
        The verdict, the sentences and the tables of the comparison; None unless there are several groups, one of them
        with several seeds.
    """
    groups = group_runs([run["folder"] for run in runs])
    if len(groups) < 2 or max(len(set(group.seeds)) for group in groups) < 2:
        return None
    try:
        comparison = compare(groups)
    except UserError as error:  # the page shows the runs nevertheless
        return {"verdict": f"The runs are not compared: {error}.", "tables": [], "sentences": []}
    found = {"verdict": " ".join(verdicts(comparison)), "sentences": sentences(comparison)}
    return found | {"tables": tables(comparison)}


def _readable(metric: str) -> str:
    return {"bleu": "BLEU"}.get(metric, metric.replace("_", " "))
