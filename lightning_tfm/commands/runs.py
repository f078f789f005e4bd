"""`lightning-tfm runs`: list the runs below a folder."""

from __future__ import annotations

from pathlib import Path

from lightning_tfm.commands.parser import CommandParser
from lightning_tfm.errors import UserError, escape_controls
from lightning_tfm.runs.record import Run
from lightning_tfm.system.terminal import LiteralConsole, format_duration, format_value, print_table


def make_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        "lightning-tfm runs",
        description="List the runs below a folder: name, state, best validation metric, test metric, training time.",
    )
    parser.add_argument(
        "folder", metavar="FOLDER", nargs="?", default="runs", help="the folder to list (default: runs)"
    )
    return parser


def runs(arguments: list[str]) -> int:
    """Print a table of the runs below a folder."""
    folder = Path(make_parser().parse_args(arguments).folder)
    if not folder.is_dir():
        raise UserError(
            f"FOLDER must be a folder with runs, but there is no folder {str(folder)!r}; train a run "
            "with lightning-tfm fit"
        )
    rows = [_row(run, folder) for run in Run.below(folder)]
    if not rows:
        raise UserError(f"FOLDER must hold runs, but {str(folder)!r} holds none; train one with lightning-tfm fit")
    print_table(("run", "state", "best", "result", "training"), rows, LiteralConsole())
    return 0


def _row(run: Run, folder: Path) -> list[str]:
    """Return the name of a run, its state, best validation metric, test metric and training time, as far as known."""
    name = run.folder.relative_to(folder).as_posix()
    try:
        state, result = run.state, None
        text: str = state
        if run.has_finished:
            seconds, result = run.summary.train_seconds, run.summary.headline
        else:
            step, seconds, _ = run.last_checkpoint
            text = f"stopped at step {step:,}" if state == "interrupted" else state
        best = None if state == "evaluated" else run.best()
        metrics = ["" if metric is None else f"{metric[0]} {format_value(metric[1])}" for metric in (best, result)]
        cells = [name, text, *metrics, "" if seconds is None else format_duration(seconds)]
    except Exception:  # whatever its files contain, the other runs must be listed
        cells = [name, "damaged", "", "", ""]
    return list(map(escape_controls, cells))
