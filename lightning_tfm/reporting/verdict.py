"""Results of runs in sentences, and comparison of runs of the same task."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_tfm.catalog import format_value
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
    from scipy.stats import binomtest

    shared = best["outcomes"].keys() & second["outcomes"].keys()
    ours = sum(best["outcomes"][key] and not second["outcomes"][key] for key in shared)
    theirs = sum(second["outcomes"][key] and not best["outcomes"][key] for key in shared)
    if not ours + theirs:
        return ""
    p = binomtest(ours, ours + theirs).pvalue
    compared = f"p = {p:.2g}" if p >= 0.001 else "p < 0.001"
    return (
        f"Of {len(shared):,} shared examples, {ours:,} are correct only in {best['name']} and {theirs:,} only in "
        f"{second['name']} (sign test: {compared}). This compares two trained models; comparing their settings needs "
        "several seeds."
    )


def _readable(metric: str) -> str:
    return {"bleu": "BLEU"}.get(metric, metric.replace("_", " "))
