"""`lightning-tfm list`: list the project's experiments."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_tfm.catalog import Experiment, format_value, list_experiments, packaged_folder
from lightning_tfm.commands.parser import CommandParser


def make_parser() -> CommandParser:
    """Return the parser of the command."""
    return CommandParser(
        "lightning-tfm list",
        description="List the experiments with their results and training time. "
        "`lightning-tfm fit --config NAME` runs one.",
    )


def list_(arguments: list[str]) -> int:
    """Print a table of the experiments: name, description, claimed results and training time."""
    make_parser().parse_args(arguments)
    experiments = {experiment.name: experiment for experiment in list_experiments(packaged_folder())}
    experiments |= {experiment.name: experiment for experiment in list_experiments(Path("experiments"))}
    rows = [
        (experiment.name, result(experiment), f"{experiment.seconds:,.0f} s" if experiment.claims else "")
        for experiment in experiments.values()
    ]
    console, table = Console(highlight=False), Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    rest = console.width - 6  # without the margins
    for name, cells in zip(("experiment", "result", "training"), zip(*rows, strict=True), strict=True):
        width = max(map(len, (name, *cells)))
        table.add_column(name, width=width)
        rest -= width + 1
    table.add_column("task", no_wrap=True, width=max(4, rest))  # truncated in a narrow terminal
    for row, experiment in zip(rows, experiments.values(), strict=True):
        table.add_row(*row, experiment.description)
    console.print(table)
    return 0


def result(experiment: Experiment) -> str:
    """Return the first claim of an experiment."""
    if not experiment.claims:
        return ""
    claim = experiment.claims[0]
    return f"{claim.metric} {format_value(claim.value)}"
