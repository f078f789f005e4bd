"""Resuming of a run: its last checkpoint, its lock and its metrics.csv."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from lightning.pytorch.loggers import CSVLogger

from lightning_tfm.callbacks.checkpoints import SAVED
from lightning_tfm.checkpoint import latest_valid
from lightning_tfm.errors import UserError, rank_zero_print
from lightning_tfm.files import read_metrics


def resumable_checkpoint(folder: Path, required: bool) -> Path | None:
    """Return the newest undamaged checkpoint of an experiment's runs, or None if nothing was saved yet.

    Args:
        folder: the folder of the experiment, which holds a folder for each run.
        required: whether to raise UserError if nothing was saved yet.

    Raises:
        UserError: if all checkpoints are damaged, or if there is none although one is required.
    """
    path, damaged = latest_valid(path for path in folder.glob("*/checkpoints/*") if SAVED.fullmatch(path.name))
    for other in damaged:
        rank_zero_print(f"skipping {other}: it is damaged (wrong checksum)")
    if path is not None:
        rank_zero_print(f"resuming from {path}")
    elif damaged or required:
        raise UserError(f"--ckpt_path last needs an undamaged checkpoint below {str(folder)!r}, but there is none")
    else:
        rank_zero_print(f"no checkpoint below {folder} yet: starting from scratch")
    return path


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
