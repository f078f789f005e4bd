"""`lightning-tfm report`: show runs on one page: results, attention, errors, curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_tfm.commands.parser import CommandParser, check_new_file
from lightning_tfm.errors import UserError, rank_zero_print
from lightning_tfm.inference.loading import load
from lightning_tfm.reporting import collect_run, render, run_names
from lightning_tfm.reporting.collect import RunPage, add_forks
from lightning_tfm.runs.names import HELP, named_run
from lightning_tfm.system.files import write_text

POINTS = 1_200
"""Approximate number of points in the curves of a metric over all runs."""

MAX_PAGE_SIZE = 5_000_000
"""Maximum size of a page without networks, in bytes."""


def report(arguments: list[str]) -> int:
    """Write the page."""
    options = make_parser().parse_args(arguments)
    folders = [named_run(run).folder for run in options.runs]
    is_folder = options.output.endswith("/") or Path(options.output).is_dir()
    output = Path(options.output, "report.html" if is_folder else "")
    check_new_file("--output", output, options.overwrite)
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError("RUN must name each run once, but one is given twice; remove it")
    pages = [
        collect_run(folder, name, POINTS // len(folders), options.trust_package, options.input)
        for folder, name in zip(folders, run_names(folders), strict=True)
    ]
    add_forks(pages, POINTS // len(folders))
    rows = [(page.name, row) for page in pages for row in page.inputs]
    if rows and all(row["note"] for _, row in rows):
        raise UserError(f"--input must be a text for which a run has an output: {rows[0][1]['note']}")
    for name, row in rows:
        if row["note"]:
            rank_zero_print(f"no output of {name} for {row['input']!r}: {row['note']}")
    explorer = explorer_page(pages, options.trust_package) if options.live else ""
    write_text(output, page_of(pages, explorer))
    print(output)
    return 0


def page_of(pages: Sequence[RunPage], explorer: str = "") -> str:
    """Return the page, without some predictions and attention examples if it would be larger than MAX_PAGE_SIZE.

    Args:
        pages: the content, from which they are deleted.
        explorer: the page of the explorer, see `explorer_page`, whose size does not count.

    Raises:
        UserError: if the page is larger without any of them.
    """
    text, halved = render(pages, explorer), 0
    while len(text.encode()) - len(explorer.encode()) > MAX_PAGE_SIZE:
        if not any(page.predictions or page.attention or page.history for page in pages):
            raise UserError(
                f"the page must be below {MAX_PAGE_SIZE:,} bytes, but that of {len(pages)} runs is not; try fewer runs"
            )
        for page in pages:
            del page.predictions[len(page.predictions) // 2 :]
            del page.attention[len(page.attention) // 2 :]
            del page.history[len(page.history) // 2 :]
        text, halved = render(pages, explorer), halved + 1
    if halved:
        rank_zero_print(
            f"the page is limited to {MAX_PAGE_SIZE:,} bytes: it shows 1/{2**halved} of the predictions and attention "
            "examples"
        )
    return text


def explorer_page(pages: Sequence[RunPage], trust_packages: Sequence[str]) -> str:
    """Return the page of the explorer with the networks of the checkpoints of runs.

    Raises:
        UserError: if there are none, or one is not supported, see `lightning_tfm.explore.file.page`.
    """
    from lightning_tfm.explore import Explorer, file  # slow to import

    checkpoints = {page.name: page.checkpoint for page in pages if page.checkpoint}
    if not checkpoints:
        raise UserError("--live needs a run with a checkpoint, but there is none; leave it out")
    return file.page([Explorer(load(path, trust_packages), name, path=path) for name, path in checkpoints.items()])


def make_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        "lightning-tfm report",
        description="Show runs on one page: results, attention, errors, curves and settings. The page needs no "
        "connection.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help=HELP)
    parser.add_argument(
        "--output",
        default="report.html",
        metavar="FILE",
        help="file to write, or its folder (default: report.html)",
    )
    parser.add_argument(
        "--input", action="append", default=[], metavar="TEXT", help="show the output and the attention for a text, too"
    )
    parser.add_argument("--live", action="store_true", help="also embed the networks, to explore them on other texts")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    parser.add_trust_package()
    return parser
