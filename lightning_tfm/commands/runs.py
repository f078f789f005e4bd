"""`lightning-tfm runs`: list or delete the runs below a folder."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_tfm.commands.parser import CommandParser
from lightning_tfm.comparison.differences import shown
from lightning_tfm.config.settings import without_seed
from lightning_tfm.errors import UserError, escape_controls, nearest
from lightning_tfm.runs.names import ROOT
from lightning_tfm.runs.record import Run
from lightning_tfm.system.files import delete_folder
from lightning_tfm.system.terminal import LiteralConsole, format_duration, format_value, print_table

COLUMNS = {
    "run": "run",
    "state": "state",
    "step": "step",
    "training": "seconds",
    "seed": "seed",
    "size": "bytes",
    "best": "best",
    "result": "result",
    "changed": "changed",
}
"""Columns of the table, and the attribute of a `Row` that sorts each."""


@dataclass(frozen=True)
class Row:
    """Row of the list; what is not known is None or empty.

    Attributes:
        run: the path of the run, relative to the listed folder.
        bytes: the size of its files.
        state: the state of the run, or "damaged".
        step: the number of training steps so far, or of the last checkpoint if the run is interrupted.
        max_steps: the number of steps of the complete run.
        seconds: the training time in seconds, of a running one up to its last checkpoint.
        seconds_left: the remaining training time of a running one, if it has saved a checkpoint.
        seed: the seed.
        best: the best validation metric, by name.
        result: the main test metric, by name.
        changed: the settings that were given on the command line; of a fork, those that differ from the forked run.
        parent: the path of the run that was forked, relative to the listed folder if it is listed.
        fork_step: the step at which the fork begins.
    """

    run: str
    bytes: int
    state: str = "damaged"
    step: int | None = None
    max_steps: int | None = None
    seconds: float | None = None
    seconds_left: float | None = None
    seed: int | None = None
    best: dict[str, float] = field(default_factory=dict)
    result: dict[str, float] = field(default_factory=dict)
    changed: dict[str, str] = field(default_factory=dict)
    parent: str | None = None
    fork_step: int | None = None

    @property
    def cells(self) -> list[str]:
        """Return the cells of the table."""
        fork = {} if self.parent is None else {"fork": f"{self.parent}@{self.fork_step}"}
        left = "" if self.seconds_left is None else f", {format_duration(self.seconds_left)} left"
        steps = [f"{number:,}" for number in (self.step, self.max_steps) if number is not None]
        metrics = [
            " ".join(f"{name} {format_value(value)}" for name, value in metric.items())
            for metric in (self.best, self.result)
        ]
        return [
            self.run,
            f"{self.state}{left}",
            " of ".join(steps),
            "" if self.seconds is None else format_duration(self.seconds),
            "" if self.seed is None else str(self.seed),
            f"{self.bytes / 1e6:,.1f} MB",
            *metrics,
            ", ".join(f"{name} {value}".rstrip() for name, value in (fork | self.changed).items()),
        ]


def make_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        "lightning-tfm runs",
        description="List the runs below a folder: state, step, training time, seed, size, best validation metric, "
        "test metric, and the settings given on the command line. Forks are below the runs that they began from, with "
        "the step and the changed settings. Or delete runs.",
    )
    parser.add_argument(
        "folder", metavar="FOLDER", nargs="?", default=str(ROOT), help=f"the folder to list (default: {ROOT})"
    )
    parser.add_argument("--sort", choices=COLUMNS, metavar="COLUMN", help=f"sort by {', '.join(COLUMNS)}")
    parser.add_argument(
        "--older-than", type=float, metavar="DAYS", help="only runs whose files were last modified before DAYS days"
    )
    parser.add_argument("--json", action="store_true", help="write a JSON list")
    parser.add_argument(
        "--delete",
        nargs="*",
        metavar="RUN",
        help="delete these runs or, with --older-than and without RUN, all listed ones; running ones are refused",
    )
    parser.add_argument("--yes", action="store_true", help="delete without asking")
    return parser


def runs(arguments: list[str]) -> int:
    """Print a table of the runs below a folder, or delete some of them."""
    options = make_parser().parse_args(arguments)
    folder = Path(options.folder)
    if not folder.is_dir():
        raise UserError(
            f"FOLDER must be a folder with runs, but there is no folder {str(folder)!r}; train a run "
            "with lightning-tfm fit"
        )
    if options.older_than is not None and not 0 <= options.older_than < math.inf:
        raise UserError(f"--older-than must be a number of days of at least 0, but is {options.older_than}; try 30")
    found = {run.folder.relative_to(folder).as_posix(): run for run in Run.below(folder)}
    if not found:
        raise UserError(f"FOLDER must hold runs, but {str(folder)!r} holds none; train one with lightning-tfm fit")
    if options.older_than is not None:
        latest = time.time() - options.older_than * 24 * 60 * 60
        found = {name: run for name, run in found.items() if run.modified <= latest}
    if options.delete is not None:
        if not options.delete and options.older_than is None:
            raise UserError("--delete needs the names of runs or --older-than, but has neither; name a run")
        names = dict.fromkeys(_listed(name, found) for name in options.delete) or found
        return _delete({name: found[name] for name in names}, options.yes)
    rows = _tree(_rows(found), options.sort or "run")
    if options.json:
        print(json.dumps(without_nan([asdict(row) for _, row in rows]), indent=2))
    elif rows:
        _print(rows)
    else:
        print("no run is older")
    return 0


def _print(rows: Sequence[tuple[int, Row]]) -> None:
    cells = [["  " * depth + name, *others] for depth, (name, *others) in ((depth, row.cells) for depth, row in rows)]
    print_table([*COLUMNS], cells, LiteralConsole())


def _tree(rows: Sequence[Row], column: str) -> list[tuple[int, Row]]:
    """Return the rows, sorted by a column, each fork below the run that it began from, with their depths."""
    by_name = {row.run: row for row in rows}

    def branch(row: Row) -> list[Row]:
        """Return a row after those of the runs that it began from."""
        rows = [row]
        while (parent := by_name.get(rows[0].parent or "")) is not None and parent not in rows:
            rows.insert(0, parent)
        return rows

    branches = sorted(map(branch, rows), key=lambda branch: [(*_key(row, column), row.run) for row in branch])
    return [(len(branch) - 1, branch[-1]) for branch in branches]


def _rows(found: dict[str, Run]) -> list[Row]:
    """Return the rows of runs by name."""
    names = {os.path.abspath(run.folder): name for name, run in found.items()}
    return [_row(name, run, names) for name, run in found.items()]


def _row(name: str, run: Run, names: Mapping[str, str]) -> Row:
    """Return the row of a run, as far as its files can be read, given the names of the listed folders."""
    try:
        state, maximum = run.state, run.config["trainer"]["max_steps"]
        if run.has_finished:
            summary = run.summary
            step, seconds, seed, result, left = (
                summary.steps,
                summary.train_seconds,
                summary.seed,
                summary.headline,
                None,
            )
        else:
            (step, seconds, _), seed, result, left = run.last_checkpoint, run.config["seed_everything"], None, None
            if state == "running":
                logged = [int(row["step"]) + 1 for row in run.metrics()[-1:]]
                saved, step = step, min(max(step, *logged, 0), maximum)  # the test is logged after the last step
                left = seconds / saved * (maximum - step) if seconds and saved else None
        best = None if state == "evaluated" else run.best()
        best_metric, metric = ({} if value is None else dict([value]) for value in (best, result))
        maximum = None if state == "evaluated" else maximum
        row = Row(name, run.size, state, step, maximum, seconds, left, seed, best_metric, metric, run.given_settings)
        for start in run.forks[-1:]:
            parent, changed = start["fork"]["run"], without_seed({**start["changed_settings"]}).items()
            row = replace(
                row,
                changed={name.replace(".init_args", ""): shown(new) for name, (_, new) in changed},
                parent=names.get(os.path.abspath(parent), parent.removeprefix(f"{ROOT}/")),
                fork_step=start["fork"]["step"],
            )
        return row
    except Exception:  # whatever its files contain, the other runs must be listed
        return Row(name, run.size)


def _key(row: Row, column: str) -> tuple[bool, Any]:
    """Return the key that sorts a row by a column; unknown values come last."""
    value = getattr(row, COLUMNS[column])
    return value in (None, {}), [*value.items()] if isinstance(value, dict) else value or 0


def without_nan(value: Any) -> Any:
    """Replace values that JSON does not have by None."""
    if isinstance(value, dict):
        return {name: without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [*map(without_nan, value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _listed(name: str, found: dict[str, Run]) -> str:
    """Return the name in the list of a run that is given by this name or by its folder."""
    for listed, run in found.items():
        if name == listed or os.path.abspath(name) == os.path.abspath(run.folder):
            return listed
    raise UserError(f"--delete must name listed runs, but {name!r} is none{nearest(name, found)}")


def _delete(chosen: dict[str, Run], yes: bool) -> int:
    """Delete runs after a confirmation; return the exit status, 1 without one."""
    if not chosen:
        print("no run to delete")
        return 0
    for name, run in chosen.items():
        if run.is_locked:
            raise UserError(f"--delete must name runs that no process trains, but {name!r} is running; stop it first")
    if not yes:
        if not sys.stdin.isatty():
            raise UserError("--delete needs a terminal, to ask, or --yes, but has neither; add --yes")
        _print(_tree(_rows(chosen), "run"))
        if input(f"Delete {len(chosen)} run{'s' if len(chosen) > 1 else ''}? [y/N] ").strip().lower() not in (
            "y",
            "yes",
        ):
            print("nothing was deleted")
            return 1
    for run in chosen.values():
        lock = run.lock()  # another process may have resumed the run since
        delete_folder(run.folder)
        lock.release()
        if run.folder.exists():
            raise UserError(f"{str(run.folder)!r} could not be deleted completely; check its permissions")
        print(f"deleted {escape_controls(str(run.folder))}")
    return 0
