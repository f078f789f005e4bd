"""`lightning-tfm compare`: compare groups of runs over seeds: intervals and tests."""

from __future__ import annotations

import sys
from pathlib import Path

from lightning_tfm.commands.parser import CommandParser, check_new_file
from lightning_tfm.comparison import compare as compare_groups
from lightning_tfm.comparison import find_groups
from lightning_tfm.comparison.tables import FORMATS, to_terminal
from lightning_tfm.errors import UserError, escape_controls
from lightning_tfm.system.files import atomic_write, write_text
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
    groups, notes = find_groups(options.groups)
    comparison = compare_groups(groups, options.metric, notes)
    if options.figure is not None:
        from lightning_tfm.comparison.figure import draw_comparison  # slow to import
        from lightning_tfm.plots.pictures import missing_glyphs_named

        figure = draw_comparison(comparison)
        with missing_glyphs_named(), atomic_write(options.figure) as file:
            figure.savefig(file, format=options.figure.suffix[1:], dpi=150)
    if options.output is not None:
        write_text(options.output, FORMATS[options.format](comparison))
    elif options.format == "table":
        to_terminal(comparison, LiteralConsole())
    else:
        text = FORMATS[options.format](comparison)
        print(escape_controls(text) if sys.stdout.isatty() else text, end="")
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
        help="a run, a folder of runs, a quoted pattern such as 'runs/date_*', or NAME=RUNS[,RUNS]",
    )
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help="such as test/loss (default: bleu, exact_match, accuracy or loss, the first that all groups have)",
    )
    parser.add_argument("--format", choices=FORMATS, default="table", help="format of the text (default: table)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the text to a file")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw a figure to a .png, .pdf or .svg file")
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")
    return parser
