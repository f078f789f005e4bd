"""Table of results for a publication: a row per group and a column per metric, in LaTeX, Markdown and CSV."""

from __future__ import annotations

import csv
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO

from lightning_tfm.comparison.groups import Group
from lightning_tfm.comparison.results import Comparison
from lightning_tfm.runs.record import MACRO, PER_CATEGORY
from lightning_tfm.system.tables import breakable_latex, escape_latex

RATES = frozenset({"accuracy", "aer", "exact_match", "f1", "ser", "token_accuracy"})
"""Metrics that are fractions, which are shown in percent."""

NAMES = {"aer": "AER", "bleu": "BLEU", "chrf": "chrF2", "f1": "F1", "ser": "SER", "wer": "WER"}
"""Names of metrics in text; chrF2 is sacrebleu's name of its default chrF."""

HEADING_WIDTH = 14
"""Width at which the headings of columns are wrapped in LaTeX, in characters."""

COLUMN_WIDTH = 40
"""Maximum width of a table that fits into one of two columns of a page, in characters."""

SPLITS = {"test": "test", "val": "validation"}
"""Names of the splits in text."""


@dataclass(frozen=True)
class Results:
    """Table of results.

    Attributes:
        caption: the caption, with the number of seeds.
        header: the names of the columns: that of the groups is empty.
        rows: the cells, such as "93.83 ± 0.98".
        best: the indices (row, column) of the cells with the best mean of a column.
        signatures: the settings of sacrebleu's scores.
    """

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: frozenset[tuple[int, int]]
    signatures: tuple[str, ...]


def metric_name(metric: str) -> str:
    """Return the name of a metric in words, such as "exact match"."""
    return "/".join(" ".join(NAMES.get(word, word) for word in part.split("_")) for part in metric.split("/"))


def signatures(comparisons: Sequence[Comparison]) -> list[str]:
    """Return sacrebleu's signatures of the metrics that have one, such as "BLEU|nrefs:1|...", each once."""
    found: dict[str, None] = {}
    for comparison in comparisons:
        name = base_name(comparison.metric)
        for run in (run for group in comparison.groups for run in group.runs):
            if name in run.summary.signatures:
                found[f"{metric_name(name)}|{run.summary.signatures[name]}"] = None
    return [*found]


def results(comparisons: Sequence[Comparison]) -> Results:
    """Return the table of the means and standard deviations over seeds."""
    by_name = _groups(comparisons)
    rows = [[name, *map(_cell, comparisons, groups)] for name, groups in by_name.items()]
    columns = [*zip(*by_name.values(), strict=True)]
    best = {
        (row, number)
        for number, (comparison, column) in enumerate(zip(comparisons, columns, strict=True), start=1)
        for row in _best(comparison, column)
    }
    splits = {metric.partition("/")[0] for comparison in comparisons if "/" in (metric := comparison.metric)}
    header = ["", *(_heading(comparison, len(splits) == 1) for comparison in comparisons)]
    seeds = {name: {len(group.values) for group in groups if group} for name, groups in by_name.items()}
    numbers = set.union(*seeds.values())
    if len(numbers) > 1:
        header.append("seeds")
        for row in rows:
            row.append(" to ".join(map(str, sorted({min(seeds[row[0]]), max(seeds[row[0]])}))))
    where = f" on the {SPLITS.get(*splits, *splits)} set" if len(splits) == 1 else ""
    over = f"{next(iter(numbers))} seeds" if len(numbers) == 1 else "seeds"
    what = "one seed" if numbers == {1} else f"mean ± standard deviation over {over}"
    bold = " The best result of each column is bold." if best else ""
    caption = f"Results{where}: {what}.{bold}"
    return Results(caption, tuple(header), tuple(map(tuple, rows)), frozenset(best), tuple(signatures(comparisons)))


def results_latex(comparisons: Sequence[Comparison]) -> str:
    """Return the table of results as a float in LaTeX, which needs the package booktabs.

    A wide table spans both columns of a page with two.
    """
    table = results(comparisons)
    headings = [textwrap.wrap(cell, HEADING_WIDTH) or [""] for cell in table.header]
    stacked = (r"\\".join(map(escape_latex, lines)) for lines in headings)
    header = [rf"\shortstack[r]{{{text}}}" if r"\\" in text else text for text in stacked]
    rows = [
        [
            rf"\textbf{{{escape_latex(cell)}}}" if (row, column) in table.best else escape_latex(cell)
            for column, cell in enumerate(cells)
        ]
        for row, cells in enumerate(table.rows)
    ]
    body = [" & ".join(row) + r" \\" for row in rows]
    columns = zip(headings, *([[cell] for cell in row] for row in table.rows), strict=True)
    width = sum(2 + max(len(line) for lines in column for line in lines) for column in columns)
    name, size = ("table*", r"\footnotesize") if width > COLUMN_WIDTH else ("table", r"\small")
    lines = [
        "% needs the package booktabs",
        rf"\begin{{{name}}}",
        r"\centering",
        rf"\caption{{{escape_latex(table.caption)}}}",
        r"\label{tab:results}",
        r"\par\smallskip",  # article has no space below a caption
        size,
        rf"\begin{{tabular}}{{@{{}}l{'r' * (len(header) - 1)}@{{}}}}",
        r"\toprule",
        " & ".join(header) + r" \\",
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
        *(rf"\par\smallskip\footnotesize {breakable_latex(signature)}" for signature in table.signatures),
        rf"\end{{{name}}}",
    ]
    return "".join(f"{line}\n" for line in lines)


def results_markdown(comparisons: Sequence[Comparison]) -> str:
    """Return the table of results in Markdown."""
    table = results(comparisons)
    rows = [
        [f"**{cell}**" if (row, column) in table.best else cell for column, cell in enumerate(cells)]
        for row, cells in enumerate(table.rows)
    ]
    lines = [table.header, ["---", *["--:"] * (len(table.header) - 1)], *rows]
    cells = [" | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in line) for line in lines]
    notes = "".join(f"\n`{signature}`\n" for signature in table.signatures)
    return f"{table.caption}\n\n" + "".join(f"| {line} |\n" for line in cells) + notes


def results_csv(comparisons: Sequence[Comparison]) -> str:
    """Return the means, the standard deviations and the numbers of seeds in CSV, as recorded and not in percent."""
    parts = ("mean", "standard deviation", "seeds")
    written = StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(["group", *(f"{comparison.metric} {part}" for comparison in comparisons for part in parts)])
    for name, groups in _groups(comparisons).items():
        row: list[object] = [name]
        for group in groups:
            if group is None:
                row += ["", "", ""]
            else:
                deviation = f"{statistics.stdev(group.values):.7g}" if len(group.values) > 1 else ""
                row += [f"{group.mean:.7g}", deviation, len(group.values)]
        writer.writerow(row)
    return written.getvalue()


def _groups(comparisons: Sequence[Comparison]) -> dict[str, list[Group | None]]:
    """Return the groups with their values of each metric, by name; None for a metric that a group lacks."""
    columns = [{group.name: group for group in comparison.groups} for comparison in comparisons]
    names = dict.fromkeys(name for column in columns for name in column)
    return {name: [column.get(name) for column in columns] for name in names}


def _best(comparison: Comparison, column: Sequence[Group | None]) -> list[int]:
    """Return the rows with the best mean as shown; none if all are equal."""
    means = {row: float(_number(comparison, group.mean)) for row, group in enumerate(column) if group}
    best = (min if comparison.lower_is_better else max)(means.values())
    return [row for row, mean in means.items() if mean == best] if len({*means.values()}) > 1 else []


def _cell(comparison: Comparison, group: Group | None) -> str:
    """Return the mean and the standard deviation of a group, such as "93.83 ± 0.98"."""
    if group is None:
        return "\N{EN DASH}"
    spread = f" ± {_number(comparison, statistics.stdev(group.values))}" if len(group.values) > 1 else ""
    return _number(comparison, group.mean) + spread


def _number(comparison: Comparison, value: float) -> str:
    """Return a value with the digits of the other tables, in percent if it is a rate."""
    if base_name(comparison.metric) in RATES:
        return f"{100 * value:.{comparison.decimals - 2}f}"
    return f"{value:.{comparison.decimals}f}"


def _heading(comparison: Comparison, has_one_split: bool) -> str:
    """Return the name of a metric with its unit and an arrow to better values."""
    *split, name = comparison.metric.split("/", 1)
    percent = " (%)" if base_name(comparison.metric) in RATES else ""
    arrow = "\N{DOWNWARDS ARROW}" if comparison.lower_is_better else "\N{UPWARDS ARROW}"
    return f"{metric_name(name if split and has_one_split else comparison.metric)}{percent} {arrow}"


def base_name(metric: str) -> str:
    """Return the name of a metric without its split, its test set, and its category or that it is a mean over them."""
    parts = metric.split("/")
    return next((part for part in parts[:-1] if part in PER_CATEGORY), parts[-1].removeprefix(MACRO))
