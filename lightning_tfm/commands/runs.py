"""`lightning-tfm runs`: list the runs below a folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.table import Table

from lightning_tfm.commands.parser import CommandParser
from lightning_tfm.config.experiments import HEADLINES, format_duration, format_value
from lightning_tfm.config.settings import read_json, read_yaml
from lightning_tfm.errors import UserError, escape_controls
from lightning_tfm.runs.record import Run
from lightning_tfm.system.files import read_metrics
from lightning_tfm.system.terminal import LiteralConsole


class RunStatus(NamedTuple):
    """Status of a run.

    Attributes:
        name: the path of the run, relative to the listed folder.
        state: "finished", "running", "stopped at step N" or "damaged"; "evaluated" for a test or validation of a
            checkpoint.
        best: the best value of the validation metric that selects the checkpoint.
        result: the main metric of the test or the evaluation.
        seconds: the training time in seconds, of an unfinished run up to its last checkpoint; None for an evaluation.
    """

    name: str
    state: str
    best: str = ""
    result: str = ""
    seconds: float | None = None


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
    found = [run_status(path.parent, folder) for path in sorted(folder.rglob("config.yaml"))]
    if not found:
        raise UserError(f"FOLDER must hold runs, but {str(folder)!r} holds none; train one with lightning-tfm fit")
    rows = [(*map(escape_controls, run[:4]), "" if run[4] is None else format_duration(run[4])) for run in found]
    console = LiteralConsole()
    whole = not console.is_terminal  # in a file or a pipe, each run is one line; in a terminal, cells are folded
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, cells in zip(("run", "state", "best", "result", "training"), zip(*rows, strict=True), strict=True):
        table.add_column(name, overflow="fold", min_width=max(map(len, (name, *cells))) if whole else None)
    for row in rows:
        table.add_row(*row)
    console.print(table, soft_wrap=whole)
    return 0


def run_status(run: Path, folder: Path) -> RunStatus:
    """Return the status of a run.

    Args:
        run: the folder of the run.
        folder: the listed folder.
    """
    name = run.relative_to(folder).as_posix()
    try:
        return _read_status(run, name)
    except Exception:  # whatever its files contain, the other runs must be listed
        return RunStatus(name, "damaged")


def _read_status(run: Path, name: str) -> RunStatus:
    """Return the status of a run; raise an exception if a file of the run is damaged."""
    if (run / "summary.json").is_file():
        summary = read_json(run / "summary.json")
        split = "test" if "test" in summary else "val"  # the data may have no test split
        names = [name.removeprefix("val/") for name in HEADLINES]
        metric = next((name for name in names if name in summary[split]), None)
        result = "" if metric is None else f"{split}/{metric} {format_value(summary[split][metric])}"
        trained = "train_seconds" in summary
        state = "finished" if trained else "evaluated"
        best = _best(run, summary.get("higher_is_better", {})) if trained else ""
        return RunStatus(name, state, best, result, summary.get("train_seconds"))
    step, seconds, directions = _last_checkpoint(run)
    state = "running" if Run(run).is_locked else f"stopped at step {step:,}"
    return RunStatus(name, state, _best(run, directions), seconds=seconds)


def _metrics(run: Path) -> list[dict[str, str]]:
    """Return the logged metrics of a run; empty if there are none."""
    path = run / "metrics.csv"
    return read_metrics(path) if path.is_file() else []


def _best(run: Path, directions: Mapping[str, bool]) -> str:
    """Return the best value of the metric that selects the checkpoint of a run; empty if it is not known.

    Args:
        run: the folder of the run.
        directions: whether higher values of a metric are better, by name without the split.
    """
    try:
        settings = read_yaml(run / "config.yaml", "FOLDER")["checkpoint"]
        monitor, mode = settings["monitor"], settings["mode"]
        higher_is_better = directions[monitor.removeprefix("val/")] if mode is None else mode == "max"
    except (UserError, AttributeError, KeyError, TypeError):  # edited by the user, or before the first checkpoint
        return ""
    values = [float(row[monitor]) for row in _metrics(run) if row.get(monitor)]
    known = [value for value in values if not math.isnan(value)] or values
    return f"{monitor} {format_value((max if higher_is_better else min)(known))}" if known else ""


def _last_checkpoint(run: Path) -> tuple[int, float | None, dict[str, bool]]:
    """Return the step and the training time of the last checkpoint of a run, and the direction of its monitor.

    Returns:
        The three, see `_best`; 0, None and {} without a readable checkpoint.
    """
    path = run / "checkpoints/last.ckpt"
    if not path.is_file():
        return 0, None, {}
    from lightning_tfm.checkpoint import read_index  # slow to import

    try:
        checkpoint = read_index(path)
        seconds = float(checkpoint["callbacks"]["Summary"]["train_seconds"])
        monitor = checkpoint["step_settings"]["checkpoint.monitor"].removeprefix("val/")
        directions = {monitor: checkpoint["callbacks"]["Checkpoints"]["higher_is_better"]}
        return checkpoint["global_step"], seconds, directions
    except (AttributeError, LookupError, TypeError, ValueError):  # including UserError
        return 0, None, {}
