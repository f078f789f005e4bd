"""`lightning-tfm compare`: compare groups of runs over seeds: intervals and tests."""

from __future__ import annotations

import sys
from pathlib import Path

from lightning_tfm.commands.parser import CommandParser, check_new_file
from lightning_tfm.comparison import compare as compare_groups
from lightning_tfm.comparison import find_groups
from lightning_tfm.comparison.tables import FORMATS, sentences, to_terminal
from lightning_tfm.errors import UserError, escape_controls, rank_zero_print
from lightning_tfm.system.files import write_text
from lightning_tfm.system.terminal import LiteralConsole

FIGURES = (".pdf", ".png", ".svg")
"""Suffixes of figures."""


def compare(arguments: list[str]) -> int:
    """Print the comparison of groups of runs, and write it to files."""
    options = make_parser().parse_args(arguments)
    for name, path in (("--output", options.output), ("--figure", options.figure)):
        if path is not None:
            check_new_file(name, path, options.overwrite)
    if options.figure is not None and options.figure.suffix not in FIGURES:
        raise UserError(
            f"--figure must end in {' or '.join(FIGURES)}, but is {str(options.figure)!r}; try compared.png"
        )
    if options.columns is not None and options.style != "paper":
        raise UserError(f"--columns must be set for --style paper only, but is {options.columns}; add --style paper")
    groups, notes = find_groups(options.groups)
    found = [compare_groups(groups, metric, notes) for metric in options.metric or [None]]
    comparisons = list({comparison.metric: comparison for comparison in found}.values())
    if options.figure is not None:
        from lightning_tfm.comparison.figure import draw_comparisons  # slow to import
        from lightning_tfm.plots.pictures import missing_glyphs_named, save_figure

        with missing_glyphs_named():
            columns = (options.columns or 1) if options.style == "paper" else None
            save_figure(draw_comparisons(comparisons, columns), options.figure)
    if options.output is None and options.format == "table":
        to_terminal(comparisons, LiteralConsole())
    else:
        text = FORMATS[options.format](comparisons)
        if options.output is not None:
            write_text(options.output, text)
        else:
            print(escape_controls(text) if sys.stdout.isatty() else text, end="")
        for sentence in sentences(*comparisons) if options.format == "csv" else ():
            rank_zero_print(sentence)  # the table has no place for it
    for path in filter(None, (options.output, options.figure)):
        print(path)
    return 0


def make_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        "lightning-tfm compare",
        description="Compare groups of runs over their seeds: means, differences from the first group, intervals and "
        "tests. Runs with equal settings except for the seed are a group, unless NAME=RUNS names it.",
    )
    parser.add_argument(
        "groups",
        metavar="GROUP",
        nargs="+",
        help="an experiment, a run, a folder of runs, a quoted pattern such as 'date_*', or NAME=RUNS[,RUNS]",
    )
    parser.add_argument(
        "--metric",
        action="append",
        metavar="NAME",
        help="such as test/loss; several are compared if it is given several times (default: bleu, exact_match, "
        "accuracy or loss, the first that all groups have)",
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="table",
        help="format of the text (default: table); latex, markdown and csv "
        "are one table with the mean and the standard deviation of each metric",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the text to a file")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw a figure to a .png, .pdf or .svg file")
    parser.add_argument(
        "--style",
        choices=("screen", "paper"),
        default="screen",
        help="style of the figure: for a screen, or of the width and the font size of a publication (default: screen)",
    )
    parser.add_argument(
        "--columns",
        type=int,
        choices=(1, 2),
        help="columns of the publication that the figure spans: 1, which are 3.3 inches (default), or 2, 6.9 inches",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")
    return parser
