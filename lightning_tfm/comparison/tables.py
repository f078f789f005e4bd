"""Tables and sentences of a comparison, for a terminal, Markdown, LaTeX, JSON and the report."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from lightning_tfm.comparison.results import Comparison
from lightning_tfm.comparison.statistics import COVERAGE, Interval
from lightning_tfm.system.terminal import LiteralConsole


@dataclass(frozen=True)
class Table:
    """Table of texts.

    Attributes:
        title: the title.
        header: the names of the columns.
        rows: the cells.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(comparison: Comparison) -> list[Table]:
    """Return the tables of the results, of the differences and of the tests over examples, if there are any."""
    shown = [_results(comparison)]
    if comparison.differences:
        shown.append(_differences(comparison))
    if comparison.examples:
        shown.append(_examples(comparison))
    return shown


def _results(comparison: Comparison) -> Table:
    digits = comparison.decimals
    order = "lower" if comparison.lower_is_better else "higher"
    rows = [
        (
            result.group.name,
            str(len(result.group.seeds)),
            f"{result.mean:.{digits}f}",
            _interval(result.interval, lambda value: f"{value:.{digits}f}"),
            " to ".join(f"{value:.{digits}f}" for value in (min(result.group.values), max(result.group.values))),
        )
        for result in comparison.results
    ]
    header = ("group", "seeds", "mean", f"{COVERAGE:.0%} interval", "lowest to highest")
    return Table(f"{comparison.metric} ({order} is better)", header, tuple(rows))


def _differences(comparison: Comparison) -> Table:
    several = len(comparison.differences) > 1
    rows = []
    for found in comparison.differences:
        p_values = (found.p, found.corrected_p) if several else (found.p,)
        rows.append(
            (
                found.group.name,
                _signed(found.value, comparison.decimals),
                _interval(found.interval, lambda value: _signed(value, comparison.decimals)),
                *("none" if p is None else _p(p) for p in p_values),
                f"{found.improvement:.2f}",
                "matched" if found.matched else "not matched",
            )
        )
    p_names = ("p", "p (Holm)") if several else ("p",)
    header = ("group", "difference", f"{COVERAGE:.0%} interval", *p_names, "P(better)", "seeds")
    return Table(f"Difference from {comparison.results[0].group.name}", header, tuple(rows))


def _examples(comparison: Comparison) -> Table:
    digits = 2 if comparison.scores_examples else 0
    names = [test.group for test in comparison.examples]
    rows = [
        (
            name if name not in names[:row] else "",
            str(test.seed),
            f"{test.examples:,}",
            f"{test.ours:,.{digits}f}",
            f"{test.theirs:,.{digits}f}",
            _p(test.p),
        )
        for row, (name, test) in enumerate(zip(names, comparison.examples, strict=True))
    ]
    p = "p (Holm)" if len(rows) > 1 else "p"
    columns = ("score", "baseline") if comparison.scores_examples else ("only it right", "only baseline")
    title = f"Models of equal seeds on the {comparison.test_set} set, against {comparison.results[0].group.name}"
    return Table(title, ("group", "seed", "examples", *columns, p), tuple(rows))


def sentences(comparison: Comparison) -> list[str]:
    """Return what the comparison says in sentences: the verdicts, then the notes."""
    notes = [f"Note: {note}." for note in comparison.notes]
    if comparison.examples:
        notes.insert(0, "The tests over examples compare two trained models each, not their settings.")
    return [*verdicts(comparison), *notes]


def verdicts(comparison: Comparison) -> list[str]:
    """Return the verdict on each difference, after a warning if there are too few seeds."""
    warnings = list(dict.fromkeys(found.too_few for found in comparison.differences if found.too_few))
    return warnings + [found.verdict for found in comparison.differences]


def _interval(interval: Interval | None, shown: Callable[[float], str]) -> str:
    return "none" if interval is None else f"{shown(interval.low)} to {shown(interval.high)}"


def _signed(value: float, digits: int) -> str:
    """Return a difference with its sign; 0 has none."""
    text = f"{value:+.{digits}f}"
    return text if float(text) else f"{0:.{digits}f}"


def _p(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def to_terminal(comparison: Comparison, console: Console) -> None:
    """Print a comparison.

    Args:
        comparison: the comparison.
        console: where to print; lines are only folded in a terminal.
    """
    whole = not console.is_terminal
    for table in tables(comparison):
        shown = RichTable(
            title=table.title, title_style="bold", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        for number, name in enumerate(table.header):
            width = max(len(row[number]) for row in (table.header, *table.rows))
            shown.add_column(name, overflow="fold", min_width=width if whole or number else None)
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown, soft_wrap=whole)
    for sentence in sentences(comparison):
        style = "bold yellow" if sentence.startswith("Too few seeds") else ""
        console.print(sentence, style=style, soft_wrap=whole)


def to_text(comparison: Comparison) -> str:
    """Return what `to_terminal` prints, without colors."""
    written = io.StringIO()
    to_terminal(comparison, LiteralConsole(file=written))
    return written.getvalue()


def to_markdown(comparison: Comparison) -> str:
    """Return a comparison in Markdown."""
    parts = []
    for table in tables(comparison):
        lines = [table.header, tuple("---" for _ in table.header), *table.rows]
        cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
        parts.append(f"**{table.title}**\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in cells))
    parts.append("".join(f"- {sentence}\n" for sentence in sentences(comparison)))
    return "\n".join(part for part in parts if part)


def to_latex(comparison: Comparison) -> str:
    """Return a comparison as LaTeX tables, which need the package booktabs; the sentences are comments."""
    parts = []
    for table in tables(comparison):
        rows = [" & ".join(map(_latex, row)) + r" \\" for row in (table.header, *table.rows)]
        body = [rows[0], r"\midrule", *rows[1:]]
        columns = "l" + "r" * (len(table.header) - 1)
        lines = [f"% {table.title}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule", *body, r"\bottomrule"]
        parts.append("\n".join([*lines, r"\end{tabular}"]) + "\n")
    parts.append("".join(f"% {sentence}\n" for sentence in sentences(comparison)))
    return "\n".join(part for part in parts if part)


def _latex(text: str) -> str:
    """Escape a text for LaTeX."""
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$"}
    special |= {character: f"\\{character}" for character in "&%$#_{}"}
    escaped = "".join(special.get(character, character) for character in text)
    return escaped.replace(" to ", " to~").replace("-0.", "$-$0.")


def to_json(comparison: Comparison) -> str:
    """Return a comparison as JSON, with the values of all seeds."""
    content: dict[str, Any] = {
        "metric": comparison.metric,
        "lower_is_better": comparison.lower_is_better,
        "groups": [
            {
                "name": result.group.name,
                "values": dict(zip(result.group.seeds, result.group.values, strict=True)),
                "runs": {run.seed: str(run.folder) for run in result.group.runs},
                "mean": result.mean,
                "interval": result.interval,
            }
            for result in comparison.results
        ],
        "differences": [
            {
                "group": found.group.name,
                "baseline": found.baseline.name,
                "matched": found.matched,
                "difference": found.value,
                "interval": found.interval,
                "p": found.p,
                "p_holm": found.corrected_p,
                "probability_of_improvement": found.improvement,
                "smallest_possible_p": found.smallest_p,
                "seeds_needed": found.needed,
            }
            for found in comparison.differences
        ],
        "examples": [test._asdict() for test in comparison.examples],
        "sentences": sentences(comparison),
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


FORMATS: dict[str, Callable[[Comparison], str]] = {
    "table": to_text,
    "markdown": to_markdown,
    "latex": to_latex,
    "json": to_json,
}
"""Functions that return a comparison as a text, by the name of the format."""
