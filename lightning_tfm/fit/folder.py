"""Creation of the folder of a run."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger

from lightning_tfm.errors import UserError
from lightning_tfm.runs.metrics_writer import MetricsWriter
from lightning_tfm.runs.record import Run
from lightning_tfm.system.files import make_folder
from lightning_tfm.system.private import logger_version, set_version, set_writer


def enter_folder(logger: CSVLogger, prefix: str) -> bool:
    """Create the folder set by a logger or, by default, the next `PREFIX_N`, which no other process can get.

    Returns:
        Whether the folder is new.
    """
    if logger_version(logger) is not None:
        is_new = make_folder(Path(logger.log_dir))
    else:
        parent = Path(logger.root_dir)
        numbers = [re.fullmatch(rf"{prefix}_(\d+)", path.name) for path in parent.glob(f"{prefix}_*")]
        first = max((int(number[1]) for number in numbers if number), default=-1) + 1
        names = (f"{prefix}_{number}" for number in itertools.count(first))
        set_version(logger, next(name for name in names if make_folder(parent / name)))
        is_new = True
    set_writer(logger, MetricsWriter(logger.log_dir))
    return is_new


def check_empty(run: Run) -> None:
    """Raise UserError unless the folder for a new run or test is empty, see `Run.is_empty`."""
    if not run.is_empty:
        raise UserError(
            f"trainer.logger must name a new folder, but {str(run.folder)!r} holds a run; leave out its version, or "
            "resume the run with --ckpt_path"
        )
