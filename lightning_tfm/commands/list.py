"""`lightning-tfm list`: list the experiments with their results."""

from __future__ import annotations

from pathlib import Path

from rich.padding import Padding

from lightning_tfm.commands.parser import CommandParser
from lightning_tfm.config.experiments import list_experiments, packaged_folder
from lightning_tfm.system.terminal import LiteralConsole, format_value


def make_parser() -> CommandParser:
    """Return the parser of the command."""
    return CommandParser(
        "lightning-tfm list",
        description="List the experiments with their results and training time. `lightning-tfm fit NAME` runs one.",
    )


def list_(arguments: list[str]) -> int:
    """Print each experiment: name, claimed result and training time, and below them its description."""
    make_parser().parse_args(arguments)
    experiments = {experiment.name: experiment for experiment in list_experiments(packaged_folder())}
    experiments |= {experiment.name: experiment for experiment in list_experiments(Path("experiments"))}
    rows = [
        (
            experiment.name,
            " ".join(f"{claim.metric} {format_value(claim.value)}" for claim in experiment.claims[:1]),
            f"{experiment.seconds:,.0f} s" if experiment.claims else "",
        )
        for experiment in experiments.values()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    console = LiteralConsole()
    whole = not console.is_terminal  # in a file or a pipe, lines are not wrapped
    for row, experiment in zip(rows, experiments.values(), strict=True):
        console.print("  ".join(map(str.ljust, row, widths)).rstrip(), style="bold", soft_wrap=whole)
        description = experiment.description
        text = f"  {description}" if whole else Padding(description, (0, 0, 0, 2))
        console.print(text, style="dim", soft_wrap=whole)
    return 0
