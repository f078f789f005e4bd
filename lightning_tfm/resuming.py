"""Finding the checkpoint from which a run is resumed, and checking its settings."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock
from lightning.pytorch.loggers import CSVLogger

from lightning_tfm.callbacks.checkpoints import SAVED
from lightning_tfm.callbacks.summary import SUMMARY
from lightning_tfm.checkpoint import latest_valid
from lightning_tfm.configuration import flatten, read_json, read_yaml
from lightning_tfm.errors import UserError, rank_zero_print
from lightning_tfm.run_folder import copy_history, is_empty, lock_run, reopen_metrics

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


def find_run(ckpt_path: str, folder: Path, max_steps: int) -> Resumption | None:
    """Return the checkpoint from which `fit` resumes a run.

    Args:
        ckpt_path: the folder of a run, or `last` for the newest run that is unfinished or has finished after fewer
            steps.
        folder: the folder of the experiment, which holds a folder for each run.
        max_steps: the number of steps to train.

    Returns:
        The checkpoint; None if `ckpt_path` is neither, or if no run has saved a checkpoint.

    Raises:
        UserError: if the run or all runs have finished, or all checkpoints are damaged.
    """
    if ckpt_path == "last":
        return _last_run(folder, max_steps)
    return _named_run(Path(ckpt_path), max_steps) if Path(ckpt_path).is_dir() else None


def open_run(logger: CSVLogger, resumed: Resumption | None, step: int | None) -> FileLock:
    """Lock the folder of a run, and keep the metrics of the steps before the checkpoint.

    Args:
        logger: the logger that creates the folder.
        resumed: the run to resume; None for a new run.
        step: the number of steps before the checkpoint; None if training starts without one.

    Returns:
        The lock, which is held until it is deleted.

    Raises:
        UserError: if another process trains the run or has just finished it, or if the folder of a new run holds a run.
    """
    folder = Path(logger.log_dir)
    lock = lock_run(folder)
    if resumed is not None and not resumed.extends:
        if (folder / SUMMARY).is_file():
            raise UserError(f"the run {str(folder)!r} must be unfinished, but another process has just finished it")
    elif not is_empty(folder):
        raise UserError(
            f"trainer.logger must name a new folder for a new run, but {str(folder)!r} holds a run; leave out "
            "its version, or resume the run with --ckpt_path"
        )
    if resumed is not None and resumed.extends:
        copy_history(resumed.run, folder)
    reopen_metrics(logger, step)
    return lock


def _last_run(folder: Path, max_steps: int) -> Resumption | None:
    """Return the newest run of an experiment that is unfinished, or has finished after fewer steps."""
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


def _named_run(run: Path, max_steps: int) -> Resumption:
    """Return the checkpoint from which the run in a folder is resumed."""
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
                f"{name} must match the run {str(run)!r} ({_shown(old)}) to resume it, but is {_shown(new)}; "
                "restore it, or start a new run without --ckpt_path"
            )
    return changed


def _is_below(name: str, groups: Iterable[str]) -> bool:
    return any(name == group or name.startswith(f"{group}.") for group in groups)


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
