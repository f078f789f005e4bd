"""`lightning-tfm compare`: compare groups of runs over seeds: intervals and tests."""

from __future__ import annotations

import sys
from pathlib import Path

from lightning_tfm.commands.parser import CommandParser, check_figures, check_new_file
from lightning_tfm.comparison import compare as compare_groups
from lightning_tfm.comparison import find_groups
from lightning_tfm.comparison.tables import FORMATS, sentences, to_terminal
from lightning_tfm.errors import escape_controls, rank_zero_print
from lightning_tfm.system.files import write_text
from lightning_tfm.system.terminal import LiteralConsole


def compare(arguments: list[str]) -> int:
    """Print the comparison of groups of runs, and write it to files."""
    options = make_parser().parse_args(arguments)
    if options.output is not None:
        check_new_file("--output", options.output, options.overwrite)
    columns = check_figures(options, "figure", "curves")
    groups, notes = find_groups(options.groups)
    found = [compare_groups(groups, metric, notes) for metric in options.metric or [None]]
    comparisons = list({comparison.metric: comparison for comparison in found}.values())
    if options.figure is not None or options.curves is not None:
        from lightning_tfm.comparison.figure import draw_comparisons, draw_curves  # slow to import
        from lightning_tfm.plots.pictures import missing_glyphs_named, save_figure

        wanted = {options.figure: draw_comparisons, options.curves: draw_curves}
        figures = {path: draw(comparisons, columns) for path, draw in wanted.items() if path is not None}
        with missing_glyphs_named():
            for path, figure in figures.items():
                save_figure(figure, path)
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
    for path in filter(None, (options.output, options.figure, options.curves)):
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
        metavar="FORMAT",
        help=f"format of the text: {', '.join(FORMATS)} (default: table); latex, markdown and csv "
        "are one table with the mean and the standard deviation of each metric",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the text to a file")
    parser.add_figures(
        figure="draw the means and the differences",
        curves="draw the validations of each metric by training step",
    )
    return parser
