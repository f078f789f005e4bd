"""Folder of a run: its creation, the search for the checkpoint from which it is resumed, and checks of its settings."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

from filelock import FileLock
from lightning.pytorch.loggers import CSVLogger

from lightning_tfm.checkpoint import has_training_state, read_index
from lightning_tfm.config.settings import is_below, parse_yaml, settings_of_weights
from lightning_tfm.errors import DamagedError, UserError, rank_zero_print
from lightning_tfm.runs.metrics_writer import MetricsWriter
from lightning_tfm.runs.record import TIME_LIMIT, Run
from lightning_tfm.system.files import make_folder
from lightning_tfm.system.private import logger_version, set_version

TRAINER = ("accelerator", "devices", "max_steps", "max_time", "num_nodes", "plugins", "strategy")
RECORDED = ("num_threads", "data.init_args.num_workers", *(f"trainer.{name}" for name in TRAINER))
"""Settings that may change when a run is resumed on different hardware or extended; recorded in provenance.json."""


class Resumption(NamedTuple):
    """Checkpoint from which a run is resumed.

    Attributes:
        checkpoint: the path of the checkpoint.
        modified: the time at which the file was modified, in nanoseconds, taken before it was read.
        extends: whether the run is continued in a new folder to keep its results unchanged: it has finished, or is
            forked.
    """

    checkpoint: Path
    modified: int
    extends: bool

    @property
    def run(self) -> Path:
        """Return the folder of the run that wrote the checkpoint."""
        return Run.of(self.checkpoint).folder


def newest_checkpoint(runs: Iterable[Run], read: Callable[[Path], dict[str, Any]] = read_index) -> Path | None:
    """Return the newest undamaged checkpoint of some runs that has the state of training, and print damaged ones.

    Raises:
        UserError: if `read`, which reads a checkpoint as `read_index` does, rejects a file that is not damaged.
    """
    paths = [path for run in runs for path in run.checkpoints()]
    for path in sorted(paths, key=lambda path: (path.stat().st_mtime_ns, path.as_posix()), reverse=True):
        try:
            if has_training_state(read(path)):
                return path
        except DamagedError:
            rank_zero_print(f"skipping {path}: it is damaged or incomplete")
    return None


def find_run(
    ckpt_path: str, folder: Path, max_steps: int | None, read: Callable[[Path], dict[str, Any]] = read_index
) -> Resumption | None:
    """Return the checkpoint from which `fit` resumes a run.

    Args:
        ckpt_path: the folder of a run, which may be relative to `folder` or to its parent; or `last` for the newest
            unfinished run or, if there is none, the newest run, if it finished after fewer steps or a time limit.
        folder: the folder of the experiment, which contains a folder for each run.
        max_steps: the number of steps to train; None if the learning rate depends on it, so that a finished run cannot
            be extended.
        read: a function that reads a checkpoint as `read_index` does.

    Returns:
        The checkpoint; None if `ckpt_path` is neither, or if no run has saved a checkpoint.

    Raises:
        UserError: if the run or all runs have finished, or there is no undamaged checkpoint.
    """
    modified: dict[Path, int] = {}

    def read_version(path: Path) -> dict[str, Any]:
        modified[path] = path.stat().st_mtime_ns  # another process may replace the file while it is read
        return read(path)

    if ckpt_path == "last":
        runs = [run for run in map(Run, folder.glob("*")) if run.checkpoints()]
        if not runs:
            rank_zero_print(f"no checkpoint below {folder} yet: starting from scratch")
            return None
        path = newest_checkpoint((run for run in runs if not run.has_finished), read_version)
        path = path or newest_checkpoint((run for run in runs if run.has_finished and _has_summary(run)), read_version)
        if path is None:
            raise no_checkpoint(folder)
        rule = f"--ckpt_path last needs an unfinished run below {str(folder)!r}, but all have finished"
        _check_unfinished(Run.of(path), max_steps, rule)
    elif named := next(filter(Path.is_dir, (Path(parent, ckpt_path) for parent in ("", folder, folder.parent))), None):
        run = Run(named if len(named.parts) >= 3 else Path(os.path.abspath(named)))  # its parents name the experiment
        rule = f"--ckpt_path must name an unfinished run, but {str(run.folder)!r} has finished"
        _check_unfinished(run, max_steps, rule)
        path = newest_checkpoint([run], read_version)
        if path is None:
            raise no_checkpoint(run.folder)
    else:
        return None
    return Resumption(path, modified[path], extends=Run.of(path).has_finished)


def no_checkpoint(folder: Path) -> UserError:
    """Return the error of a folder without an undamaged checkpoint, in which `--ckpt_path` searches for one."""
    return UserError(f"--ckpt_path needs an undamaged checkpoint below {str(folder)!r}, but there is none")


def enter_folder(logger: CSVLogger, prefix: str) -> bool:
    """Create the folder set by a logger or, by default, the next `PREFIX_N`, which no other process can get.

    Returns:
        Whether the folder is new.
    """
    if logger_version(logger) is not None:
        return make_folder(Path(logger.log_dir))
    parent = Path(logger.root_dir)
    numbers = [re.fullmatch(rf"{prefix}_(\d+)", path.name) for path in parent.glob(f"{prefix}_*")]
    first = max((int(number[1]) for number in numbers if number), default=-1) + 1
    names = (f"{prefix}_{number}" for number in itertools.count(first))
    set_version(logger, next(name for name in names if make_folder(parent / name)))
    return True


def check_empty(run: Run) -> None:
    """Raise UserError unless the folder for a new run or test is empty, see `Run.is_empty`."""
    if not run.is_empty:
        raise UserError(
            f"trainer.logger must name a new folder, but {str(run.folder)!r} holds a run; leave out its version, or "
            "resume the run with --ckpt_path"
        )


def open_run(logger: CSVLogger, resumed: Resumption | None, step: int | None) -> FileLock:
    """Lock the folder of a run, and keep the metrics of the steps before the checkpoint.

    Args:
        logger: the logger of the run.
        resumed: the run to resume; None for a new run.
        step: the step of the checkpoint; None if training starts without one.

    Returns:
        The lock, which is held until it is deleted.

    Raises:
        UserError: if another process trains the run, or has just continued or finished it, if its files have another
            version of the format, or if the folder for a new run is not empty.
    """
    folder = Path(logger.log_dir)
    run = Run(folder)
    lock = run.lock()
    if resumed is None or resumed.extends:
        check_empty(run)
    elif run.has_finished:
        raise UserError(f"the run {str(folder)!r} must be unfinished, but another process has just finished it")
    elif resumed.checkpoint.stat().st_mtime_ns != resumed.modified:
        raise UserError(
            f"the checkpoint of step {step} must be the last of the run {str(folder)!r}, but another process has just "
            "saved a later one; run the command again"
        )
    with suppress(DamagedError):  # which `Provenance` keeps
        _ = run.starts
    if resumed is not None and resumed.extends and step is not None:
        Run(resumed.run).copy_history(run, step)
    if step is not None:
        cast(MetricsWriter, logger.experiment).keep(step)  # a resumed run repeats the later steps
    return lock


def _check_unfinished(run: Run, max_steps: int | None, rule: str) -> None:
    """Check that a run has not finished, or can be extended: a time limit stopped it, or it has fewer steps.

    Raises:
        UserError: `rule`, and how to train on, if it has finished.
    """
    if not run.has_finished:
        return
    summary = run.summary
    stopped, last = summary.stopped_early, run.checkpoint_folder / Run.LAST
    has_all_steps = stopped != TIME_LIMIT if max_steps is None else summary.steps >= max_steps
    if not has_all_steps and stopped in (None, TIME_LIMIT):
        return
    if stopped and (max_steps is None or summary.steps < max_steps):
        advice = f"it has stopped early: to train on in a new folder, name {str(last)!r}, or "
    elif max_steps is None:
        advice = "it cannot be extended, since the learning rate depends on trainer.max_steps; "
    else:
        advice = f"raise trainer.max_steps ({max_steps}) to extend {str(run.folder)!r}, or "
    raise UserError(f"{rule}; {advice}start a new run without --ckpt_path")


def _has_summary(run: Run) -> bool:
    """Return whether the summary of a finished run can be read."""
    try:
        _ = run.summary
    except UserError as error:
        rank_zero_print(f"skipping a finished run: {error}")
        return False
    return True


def changed_settings(checkpoint: dict[str, Any], path: Path, settings: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings, nested as in config.yaml, that differ from those of a checkpoint, as (old, new) by name."""
    experiment = checkpoint.get("experiment")
    if experiment is None:  # not written by the command
        return {}
    saved, current = map(settings_of_weights, (parse_yaml(experiment["config"], path, "--ckpt_path"), settings))
    pairs = {name: (saved.get(name), current.get(name)) for name in {**saved, **current}}
    return {name: (old, new) for name, (old, new) in pairs.items() if old != new}


def check_changes(run: Path, changed: dict[str, tuple[Any, Any]], keeps_max_steps: bool) -> None:
    """Check that a run can be resumed with the changes returned by `changed_settings`.

    Args:
        run: the folder of the run.
        changed: the changes.
        keeps_max_steps: whether the learning rate depends on `trainer.max_steps`.

    Raises:
        UserError: if a changed setting is not in RECORDED.
    """
    for name, (old, new) in changed.items():
        if name == "trainer.max_steps" and keeps_max_steps:
            raise UserError(
                f"trainer.max_steps must match the run {str(run)!r} ({old}) to resume it, since the learning rate "
                f"depends on it, but is {new}; restore it, or start a new run without --ckpt_path "
                "(model.init_args.lr_schedule.decay: inverse_sqrt allows an extension)"
            )
        if not is_below(name, RECORDED):
            raise UserError(
                f"{name} must match the run {str(run)!r} ({display(old)}) to resume it, but is {display(new)}; "
                "restore it, or start a new run without --ckpt_path"
            )


def check_data(run: Path, saved: dict[str, str], fingerprint: dict[str, str], skips_test: bool) -> None:
    """Check that each split has the fingerprint in the checkpoint of a run, except for test data that are not read."""
    for split, value in saved.items():
        if fingerprint.get(split) != value and not (skips_test and split not in fingerprint):
            raise UserError(
                f"the {split} data must match the run {str(run)!r} to resume it, but differ; restore them, "
                "or start a new run without --ckpt_path"
            )


def display(value: Any) -> str:
    """Return the value of a setting for a message."""
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
