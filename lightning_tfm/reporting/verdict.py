"""Results of runs in sentences, and comparison of runs of the same task."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_tfm.catalog import format_value
from lightning_tfm.comparison import compare, group_runs
from lightning_tfm.comparison.examples import sign_test
from lightning_tfm.comparison.results import format_p
from lightning_tfm.comparison.tables import sentences, tables, verdicts
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
        Sentences; empty if fewer than two checkpoints were tested, or if their headline metrics or splits differ.

    Note:
        Of a run and later tests of its checkpoint, only the first is compared. If more than two runs are equal, their
        examples are not compared.
    """
    by_checkpoint: dict[str, Json] = {}
    for run in runs:
        if run["headline"]:
            by_checkpoint.setdefault(run["checkpoint"] or run["name"], run)
    tested = list(by_checkpoint.values())
    names = {run["headline"][0] for run in tested}
    if len(tested) < 2 or len(names) > 1 or len({run["split"] for run in tested}) > 1:
        return ""
    (name,) = names
    is_loss = name.endswith("loss")
    best, second, *_ = sorted(tested, key=lambda run: run["headline"][1] * (1 if is_loss else -1))
    value, other = best["headline"][1], second["headline"][1]
    if value == other:
        *equal, last = [run["name"] for run in tested if run["headline"][1] == value]
        text = f"{', '.join(equal)} and {last} are equal in {_readable(name)}: {format_value(value)}."
        if len(equal) > 1:
            return text
    else:
        text = (
            f"{best['name']} has the best {_readable(name)}: {format_value(value)}, {abs(value - other):.4f} "
            f"{'below' if is_loss else 'above'} {second['name']}."
        )
    return f"{text} {_paired(best, second)}".strip()


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
        return {"verdict": verdict(runs), "tables": [], "sentences": [str(error)]}
    found = {"verdict": " ".join(verdicts(comparison)), "sentences": sentences(comparison)}
    return found | {"tables": tables(comparison)}


def _readable(metric: str) -> str:
    return {"bleu": "BLEU"}.get(metric, metric.replace("_", " "))
