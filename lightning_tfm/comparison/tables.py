"""Tables and sentences of comparisons, for a terminal, Markdown, LaTeX, CSV, JSON and the report."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from lightning_tfm.comparison.groups import check_environment
from lightning_tfm.comparison.publication import results_csv, results_latex, results_markdown, signatures
from lightning_tfm.comparison.results import Comparison
from lightning_tfm.comparison.statistics import COVERAGE
from lightning_tfm.system.tables import Table, comments
from lightning_tfm.system.terminal import LiteralConsole, print_table


def tables(comparison: Comparison) -> list[Table]:
    """Return the tables of the means, of the differences and of the tests over examples, if there are any."""
    every = (_means(comparison), _differences(comparison), _examples(comparison))
    return [table for table in every if table.rows]


def _means(comparison: Comparison) -> Table:
    digits = comparison.decimals
    rows = [
        (
            group.name,
            str(len(group.seeds)),
            f"{group.mean:.{digits}f}",
            _range(group.interval, f".{digits}f"),
            _range((min(group.values), max(group.values)), f".{digits}f"),
        )
        for group in comparison.groups
    ]
    order = "lower" if comparison.lower_is_better else "higher"
    header = ("group", "seeds", "mean", f"{COVERAGE:.0%} interval", "lowest to highest")
    return Table(f"{comparison.metric} ({order} is better)", header, rows)


def _differences(comparison: Comparison) -> Table:
    several, form = len(comparison.differences) > 1, f"+.{comparison.decimals}f"
    rows = [
        (
            each.group.name,
            _range([each.value], form),
            _range(each.interval, form),
            *("none" if p is None else _p(p) for p in (each.p, each.corrected_p)[: 1 + several]),
            f"{each.improvement:.2f}",
            "matched" if each.matched else "not matched",
        )
        for each in comparison.differences
    ]
    p_names = ("p", "p (Holm)")[: 1 + several]
    header = ("group", "difference", f"{COVERAGE:.0%} interval", *p_names, "P(better)", "seeds")
    return Table(f"Difference from {comparison.groups[0].name}", header, rows)


def _examples(comparison: Comparison) -> Table:
    digits = 2 if comparison.scores_examples else 0
    names = [name for name, _ in comparison.examples]
    rows = [
        (
            name if name not in names[:row] else "",
            str(seed),
            f"{test.examples:,}",
            f"{test.score:,.{digits}f}",
            f"{test.baseline:,.{digits}f}",
            _p(test.p),
        )
        for row, ((name, seed), test) in enumerate(comparison.examples.items())
    ]
    columns = ("score", "baseline") if comparison.scores_examples else ("only it right", "only baseline")
    title = f"Models of equal seeds on the {comparison.test_set} set, against {comparison.groups[0].name}"
    return Table(title, ("group", "seed", "examples", *columns, "p (Holm)" if len(rows) > 1 else "p"), rows)


def sentences(*comparisons: Comparison) -> list[str]:
    """Return what comparisons of the same groups say in sentences: the verdicts, then the notes.

    If there are several, each verdict begins with its metric.
    """
    found = [
        f"{comparison.metric}: {verdict}" if len(comparisons) > 1 else verdict
        for comparison in comparisons
        for verdict in verdicts(comparison)
    ]
    if any(comparison.examples for comparison in comparisons):
        found.append("The tests over examples compare two trained models each, not their settings.")
    notes = [note for each in comparisons for note in (*each.notes, *check_environment(each.groups))]
    return [*found, *(f"Note: {note}." for note in dict.fromkeys(notes))]


def verdicts(comparison: Comparison) -> list[str]:
    """Return the verdict on each difference, after a warning if there are too few seeds."""
    warnings = dict.fromkeys(each.warning for each in comparison.differences if each.warning)
    return [*warnings, *(each.verdict for each in comparison.differences)]


def _range(bounds: Sequence[float] | None, form: str) -> str:
    """Return numbers, such as the bounds of an interval, in a format; 0 has no sign."""
    texts = [f"{value:{form}}" for value in bounds or ()]
    return " to ".join(text if float(text) else text.lstrip("+-") for text in texts) or "none"


def _p(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def to_terminal(comparisons: Sequence[Comparison], console: Console) -> None:
    """Print comparisons; lines are only folded in a terminal."""
    for comparison in comparisons:
        for title, header, rows in tables(comparison):
            print_table(header, rows, console, title)
    for sentence in (*sentences(*comparisons), *signatures(comparisons)):
        style = "bold yellow" if "Too few seeds" in sentence else ""
        console.print(sentence, style=style, soft_wrap=not console.is_terminal)


def to_text(comparisons: Sequence[Comparison]) -> str:
    """Return what `to_terminal` prints, without colors."""
    written = io.StringIO()
    to_terminal(comparisons, LiteralConsole(file=written))
    return written.getvalue()


def to_markdown(comparisons: Sequence[Comparison]) -> str:
    """Return the table of results and the sentences in Markdown."""
    return f"{results_markdown(comparisons)}\n" + "".join(f"- {sentence}\n" for sentence in sentences(*comparisons))


def to_latex(comparisons: Sequence[Comparison]) -> str:
    """Return the table of results in LaTeX, and the sentences as comments."""
    return results_latex(comparisons) + comments(sentences(*comparisons))


def to_json(comparisons: Sequence[Comparison]) -> str:
    """Return a list of comparisons as JSON, with the values of all seeds."""
    return json.dumps([*map(_content, comparisons)], indent=2, ensure_ascii=False) + "\n"


def _content(comparison: Comparison) -> dict[str, Any]:
    return {
        "metric": comparison.metric,
        "lower_is_better": comparison.lower_is_better,
        "groups": [
            {
                "name": group.name,
                "values": dict(zip(group.seeds, group.values, strict=True)),
                "runs": {seed: str(run.folder) for seed, run in zip(group.seeds, group.runs, strict=True)},
                "mean": group.mean,
                "interval": group.interval,
            }
            for group in comparison.groups
        ],
        "differences": [
            {
                "group": each.group.name,
                "baseline": each.baseline.name,
                "matched": each.matched,
                "difference": each.value,
                "interval": each.interval,
                "p": each.p,
                "p_holm": each.corrected_p,
                "probability_of_improvement": each.improvement,
                "smallest_possible_p": each.smallest_p,
                "seeds_needed": each.needed,
            }
            for each in comparison.differences
        ],
        "examples": [
            {"group": name, "seed": seed, **test._asdict()} for (name, seed), test in comparison.examples.items()
        ],
        "signatures": signatures([comparison]),
        "sentences": sentences(comparison),
    }


FORMATS: dict[str, Callable[[Sequence[Comparison]], str]] = {
    "table": to_text,
    "markdown": to_markdown,
    "latex": to_latex,
    "csv": results_csv,
    "json": to_json,
}
"""Functions that return comparisons of the same groups as a text, by the name of the format."""
