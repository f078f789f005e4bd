"""Writer of `metrics.csv`, for runs that are killed and resumed."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.core.saving import save_hparams_to_yaml
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from lightning_tfm.errors import rank_zero_print
from lightning_tfm.runs.record import Run
from lightning_tfm.system.files import atomic_write, naming_file, relative
from lightning_tfm.system.private import writer_of


class MetricsWriter(ExperimentWriter):
    """Lightning's writer of `metrics.csv` and `hparams.yaml`, except that no file is ever truncated.

    Rows are appended to `metrics.csv`, without the epoch. A file with other columns or fewer rows is written anew, and
    replaces it.
    """

    def _check_log_dir_exists(self) -> None:
        """Keep the rows of a resumed run, which Lightning would delete."""

    @property
    def run(self) -> Run:
        """Return the run."""
        return Run(Path(self.log_dir))

    def log_metrics(self, metrics_dict: dict[str, Any], step: int | None = None) -> None:
        super().log_metrics(without_epoch(metrics_dict), step)

    def log_hparams(self, params: dict[str, Any]) -> None:
        self.hparams.update(params)
        with atomic_write(Path(self.log_dir, self.NAME_HPARAMS_FILE)) as file:
            save_hparams_to_yaml(file.name, self.hparams)

    def save(self) -> None:
        """Write the recorded rows, which `synchronize` makes durable."""
        path = Path(self.metrics_file_path)
        columns = sorted(set(self.metrics_keys).union(*self.metrics))
        if columns != self.metrics_keys:
            rows, _ = self.run.read_rows()
            self._replace([*rows, *self.metrics], columns)
        elif self.metrics:
            with naming_file(path), path.open("a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, self.metrics_keys).writerows(self.metrics)
        self.metrics = []

    def synchronize(self) -> None:
        """Synchronize the written rows to disk."""
        path = Path(self.metrics_file_path)
        if path.exists():
            with naming_file(path), path.open("ab") as file:
                os.fsync(file.fileno())

    def keep(self, step: int) -> None:
        """Delete the rows from a step on, which a resumed run repeats; a file with damaged rows is copied before."""
        rows, damaged = self.run.read_rows()
        if damaged:
            copy, noun = self.run.keep_damaged(Run.METRICS), "row" if damaged == 1 else "rows"
            rank_zero_print(
                f"skipping {damaged} damaged {noun} of {relative(self.metrics_file_path)}, copied to {copy.name}"
            )
        if rows or damaged:
            kept = [{name: value for name, value in row.items() if value} for row in rows if int(row["step"]) < step]
            self._replace(kept, sorted(set().union(*kept)))

    def _replace(self, rows: Sequence[Mapping[str, Any]], columns: list[str]) -> None:
        self.run.write_rows(rows, columns)
        self.metrics_keys = columns


def without_epoch(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics without the epoch: to Lightning, a run is a single epoch, see ResumableDataLoader."""
    return {name: value for name, value in metrics.items() if name != "epoch"}


def flush(trainer: Trainer) -> None:
    """Write the logged metrics, since a resumed run appends to them, and synchronize those in its folder to disk."""
    for logger in trainer.loggers:
        logger.save()
        if isinstance(writer := writer_of(logger), MetricsWriter):
            writer.synchronize()
