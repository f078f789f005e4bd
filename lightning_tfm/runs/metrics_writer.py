"""Writer of `metrics.csv`, which a run can be killed at any time and continue."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.core.saving import save_hparams_to_yaml
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from lightning_tfm.errors import rank_zero_print
from lightning_tfm.system.files import (
    atomic_write,
    copy_file,
    naming_file,
    parse_metrics,
    read_metrics,
    relative,
    write_text,
)


class MetricsWriter(ExperimentWriter):
    """Lightning's writer of `metrics.csv` and `hparams.yaml`, except that no file is ever truncated.

    Rows are appended to `metrics.csv`. A file with other columns or fewer rows is written anew, and replaces it.
    """

    def _check_log_dir_exists(self) -> None:
        """Keep the rows of a resumed run, which Lightning would delete."""

    @property
    def path(self) -> Path:
        """Return the path of `metrics.csv`."""
        return Path(self.metrics_file_path)

    def log_hparams(self, params: dict[str, Any]) -> None:
        self.hparams.update(params)
        with atomic_write(Path(self.log_dir, self.NAME_HPARAMS_FILE)) as file:
            save_hparams_to_yaml(file.name, self.hparams)

    def save(self) -> None:
        """Write the recorded rows, which `synchronize` makes durable."""
        if columns := set().union(*self.metrics) - set(self.metrics_keys):
            earlier = read_metrics(self.path) if self.path.exists() else []
            self._replace([*earlier, *self.metrics], sorted(columns.union(self.metrics_keys)))
        elif self.metrics:
            with naming_file(self.path), self.path.open("a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, self.metrics_keys).writerows(self.metrics)
        self.metrics = []

    def synchronize(self) -> None:
        """Synchronize the written rows to disk."""
        if self.path.exists():
            with naming_file(self.path), self.path.open("ab") as file:
                os.fsync(file.fileno())

    def keep(self, step: int) -> None:
        """Delete the rows from a step on, which a resumed run repeats; a file with damaged rows is copied before."""
        if not self.path.exists():
            return
        rows, damaged = parse_metrics(self.path)
        if damaged:
            copy = self.path.with_name(f"{self.path.name}.damaged")
            copy_file(self.path, copy)
            noun = "row" if damaged == 1 else "rows"
            rank_zero_print(f"skipping {damaged} damaged {noun} of {relative(self.path)}, copied to {copy.name}")
        kept = [{name: value for name, value in row.items() if value} for row in rows if int(row["step"]) < step]
        self._replace(kept, sorted(set().union(*kept)))

    def _replace(self, rows: Sequence[Mapping[str, Any]], columns: list[str]) -> None:
        text = StringIO()
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(rows)
        write_text(self.path, text.getvalue())
        self.metrics_keys = columns


def flush(trainer: Trainer) -> None:
    """Write the logged metrics, since a resumed run appends to them, and synchronize those in its folder to disk."""
    for logger in trainer.loggers:
        logger.save()
        writer = getattr(logger, "_experiment", None)
        if isinstance(writer, MetricsWriter):
            writer.synchronize()
