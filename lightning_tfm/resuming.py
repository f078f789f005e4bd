"""Resuming of a run: its last checkpoint, its settings, its lock and its metrics.csv."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout
from lightning.pytorch.loggers import CSVLogger

from lightning_tfm.callbacks.checkpoints import SAVED
from lightning_tfm.callbacks.provenance import read_starts
from lightning_tfm.callbacks.summary import SUMMARY
from lightning_tfm.checkpoint import latest_valid
from lightning_tfm.configuration import flatten, read_json, read_yaml
from lightning_tfm.errors import UserError, rank_zero_print
from lightning_tfm.files import read_metrics, write_text

MAY_DIFFER = (
    "ckpt_path",
    "config",
    "dry_run",
    "trust_package",
    "trainer.enable_model_summary",
    "trainer.enable_progress_bar",
    "trainer.logger",
    "trainer.profiler",
)
"""Settings that do not change the weights of a run."""

MAY_CHANGE = (
    "data.init_args.num_workers",
    "trainer.accelerator",
    "trainer.devices",
    "trainer.max_steps",
    "trainer.num_nodes",
    "trainer.plugins",
    "trainer.strategy",
)
"""Settings that may change when a run is resumed on other hardware or extended; provenance.json records the changes."""


class Resumption(NamedTuple):
    """Checkpoint from which a run is resumed.

    Attributes:
        checkpoint: the path of the checkpoint.
        extends: whether its run has finished, and is continued in a new folder that leaves its results unchanged.
    """

    checkpoint: Path
    extends: bool

    @property
    def run(self) -> Path:
        """Return the folder of the run that has written the checkpoint."""
        return self.checkpoint.parents[1]


def newest_checkpoint(folder: Path) -> Path:
    """Return the newest undamaged checkpoint of an experiment's runs.

    Args:
        folder: the folder of the experiment, which holds a folder for each run.

    Raises:
        UserError: if there is none.
    """
    path = _newest_undamaged(folder.glob("*/checkpoints/*"))
    if path is None:
        raise UserError(_no_checkpoint(folder))
    return path


def last_run(folder: Path, max_steps: int) -> Resumption | None:
    """Return the newest run of an experiment that is unfinished, or has finished after fewer steps.

    Args:
        folder: the folder of the experiment, which holds a folder for each run.
        max_steps: the number of steps to train.

    Returns:
        The run; None if no run has saved a checkpoint.

    Raises:
        UserError: if all runs have finished, or all checkpoints are damaged.
    """
    runs = {path.parents[1] for path in folder.glob("*/checkpoints/*") if SAVED.fullmatch(path.name)}
    finished = {run for run in runs if _has_finished(run, max_steps)}
    path = _newest_undamaged(path for run in runs - finished for path in run.glob("checkpoints/*"))
    if path is not None:
        return _resumption(path)
    if runs - finished:
        raise UserError(_no_checkpoint(folder))
    if finished:
        raise UserError(
            f"--ckpt_path last must find an unfinished run below {str(folder)!r}, but all have finished; raise "
            f"trainer.max_steps ({max_steps}) to extend the newest one, or start a new run without --ckpt_path"
        )
    rank_zero_print(f"no checkpoint below {folder} yet: starting from scratch")
    return None


def named_run(run: Path, max_steps: int) -> Resumption:
    """Return the checkpoint from which the run in a folder is resumed.

    Args:
        run: the folder of the run.
        max_steps: the number of steps to train.

    Raises:
        UserError: if the run has finished, or has no undamaged checkpoint.
    """
    run = run if len(run.parts) >= 3 else Path(os.path.abspath(run))  # its parents name the experiment
    if _has_finished(run, max_steps):
        raise UserError(
            f"--ckpt_path must name an unfinished run, but {str(run)!r} has finished; raise trainer.max_steps "
            f"({max_steps}) to extend it"
        )
    path = _newest_undamaged(run.glob("checkpoints/*"))
    if path is None:
        raise UserError(f"--ckpt_path must name a run with an undamaged checkpoint, but {str(run)!r} has none")
    return _resumption(path)


def check_unfinished(run: Path) -> None:
    """Raise UserError if another process has finished a run before this one locked it."""
    if (run / SUMMARY).is_file():
        raise UserError(f"the run {str(run)!r} must be unfinished, but another process has just finished it")


def _has_finished(run: Path, max_steps: int) -> bool:
    """Return whether a run has finished, after `max_steps` steps or more, or by early stopping."""
    path = run / SUMMARY
    if not path.is_file():
        return False
    summary = read_json(path)
    return bool(summary["steps"] >= max_steps or summary.get("stopped_early"))


def _newest_undamaged(paths: Iterable[Path]) -> Path | None:
    """Return the newest undamaged checkpoint among files; report newer damaged ones."""
    path, damaged = latest_valid(path for path in paths if SAVED.fullmatch(path.name))
    for other in damaged:
        rank_zero_print(f"skipping {other}: it is damaged (wrong checksum)")
    return path


def _no_checkpoint(folder: Path) -> str:
    return f"--ckpt_path last needs an undamaged checkpoint below {str(folder)!r}, but there is none"


def _resumption(path: Path) -> Resumption:
    found = Resumption(path, extends=(path.parents[1] / SUMMARY).is_file())
    rank_zero_print(f"extending the run of {path} in a new folder" if found.extends else f"resuming from {path}")
    return found


def changed_settings(run: Path, settings: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ from those of a run and may do so, as (old, new) by name.

    Args:
        run: the folder of the run.
        settings: the settings with which it is resumed, nested as in its config.yaml.

    Raises:
        UserError: if any other setting differs.
    """
    path = run / "config.yaml"
    if not path.is_file():  # the run was killed before it was written
        return {}
    theirs, ours = (
        {name: value for name, value in flatten(nested).items() if not _is_below(name, MAY_DIFFER)}
        for nested in (read_yaml(path, "--ckpt_path"), settings)
    )
    pairs = {name: (theirs.get(name), ours.get(name)) for name in {**theirs, **ours}}
    changed = {name: (old, new) for name, (old, new) in pairs.items() if old != new}
    for name, (old, new) in changed.items():
        if not _is_below(name, MAY_CHANGE):
            raise UserError(
                f"{name} must be that of the run {str(run)!r} ({_shown(old)}) to resume it, but is {_shown(new)}; "
                "restore it, or start a new run without --ckpt_path"
            )
    return changed


def _is_below(name: str, groups: Iterable[str]) -> bool:
    return any(name == group or name.startswith(f"{group}.") for group in groups)


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def copy_history(run: Path, folder: Path) -> None:
    """Copy the metrics and the provenance of a finished run to the folder of its extension.

    Note:
        The extension is another run in W&B.

    Args:
        run: the folder of the finished run.
        folder: the new folder.
    """
    for path in (run / "metrics.csv", *run.glob("uncommitted_*.diff")):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    if starts := [start | {"wandb": None} for start in read_starts(run)]:
        write_text(folder / "provenance.json", json.dumps(starts, indent=2) + "\n")


def is_empty(run: Path) -> bool:
    """Return whether a run has neither a checkpoint nor logged metrics."""
    metrics = run / "metrics.csv"
    logged = metrics.is_file() and any(True for _ in read_metrics(metrics))
    return not logged and not any(run.glob("checkpoints/*"))


def lock_run(folder: Path) -> FileLock:
    """Lock the folder of a run until the returned object is deleted or the process ends, even by SIGKILL.

    Raises:
        UserError: if another process holds the lock.

    Note:
        On a file system without locks, the folder is not locked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = _run_lock(folder)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(f"the run {str(folder)!r} is locked by another process; stop that process first") from None
    except PermissionError:
        raise  # the folder belongs to another user
    except OSError:
        pass  # the file system has no locks
    return lock


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the lock of a run.

    Args:
        folder: the folder of the run.
    """
    if not (folder / ".lock").exists():
        return False
    lock = _run_lock(folder)
    try:
        lock.acquire()
    except Timeout:
        return True
    except OSError:  # no permission, or a file system without locks
        return False
    lock.release()
    return False


def _run_lock(folder: Path) -> FileLock:
    return FileLock(folder / ".lock", blocking=False, fallback_to_soft=False)


def reopen_metrics(logger: CSVLogger, step: int | None) -> None:
    """Rewrite `metrics.csv` with the rows of the steps before `step`, which a resumed run does not repeat.

    Args:
        logger: the logger of the run.
        step: the number of steps before the checkpoint; None for a new run.

    Note:
        Meanwhile, the rows are kept in `metrics.csv.before`, so that none is lost if the process is killed.
    """
    metrics = Path(logger.log_dir) / "metrics.csv"
    kept = metrics.with_name("metrics.csv.before")
    if step is not None and metrics.exists() and not kept.exists():
        metrics.replace(kept)
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        _ = logger.experiment  # creates the file; warns if the folder is not empty
    if step is None or not kept.exists():
        return
    for row in read_metrics(kept):
        row_step = int(row.pop("step"))
        if row_step < step:
            values: dict[str, Any] = {name: value for name, value in row.items() if value}  # as they were written
            logger.log_metrics(values, row_step)
    logger.save()
    kept.unlink()
