"""Folder of a run: its creation, and its deletion if it has no results."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger

from lightning_tfm.errors import UserError
from lightning_tfm.runs.metrics_writer import MetricsWriter
from lightning_tfm.runs.record import Run
from lightning_tfm.system.files import delete_folder, make_folder
from lightning_tfm.system.private import logger_version, set_version, set_writer


class RunFolder:
    """Folder of a run, a test or a validation, in the process that writes to it.

    Attributes:
        path: the path of the folder; None before `enter`.
        is_new: whether this process has created the folder.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self.is_new = False

    def enter(self, logger: CSVLogger, prefix: str) -> None:
        """Create the folder set by a logger or, by default, the next `PREFIX_N`, which no other process can get."""
        if logger_version(logger) is not None:
            self.is_new = make_folder(Path(logger.log_dir))
        else:
            parent = Path(logger.root_dir)
            numbers = [re.fullmatch(rf"{prefix}_(\d+)", path.name) for path in parent.glob(f"{prefix}_*")]
            first = max((int(number[1]) for number in numbers if number), default=-1) + 1
            names = (f"{prefix}_{number}" for number in itertools.count(first))
            set_version(logger, next(name for name in names if make_folder(parent / name)))
            self.is_new = True
        self.path = Path(logger.log_dir)
        set_writer(logger, MetricsWriter(logger.log_dir))

    @property
    def resumable(self) -> Path | None:
        """Return the path if the folder contains a checkpoint to resume from; None otherwise."""
        return self.path if self.path is not None and any(Run(self.path).checkpoint_folder.glob("*")) else None

    def holds(self, file: Any) -> bool:
        """Return whether a file, or None, lies in the folder."""
        return self.path is not None and isinstance(file, str | Path) and self.path in Path(file).parents

    def discard_if_empty(self) -> bool:
        """Delete the folder if this process has created it and has written no results; return whether it did."""
        if self.path is None or not self.is_new or not Run(self.path).is_empty:
            return False
        delete_folder(self.path)
        return True


def check_empty(folder: Path) -> None:
    """Raise UserError unless the folder for a new run or test is empty, see `Run.is_empty`."""
    if not Run(folder).is_empty:
        raise UserError(
            f"trainer.logger must name a new folder, but {str(folder)!r} holds a run; leave out its version, or resume "
            "the run with --ckpt_path"
        )
