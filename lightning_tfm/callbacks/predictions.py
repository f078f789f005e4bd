"""Logging of predictions: samples at each validation, and all predictions of the test."""

from __future__ import annotations

from collections import defaultdict
from operator import itemgetter
from statistics import fmean
from typing import Any, cast

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_tfm.callbacks.summary import evaluated_prefix, evaluated_splits
from lightning_tfm.data import Batch
from lightning_tfm.distributed.parallel import data_group
from lightning_tfm.loggers import example_loggers, run_folder
from lightning_tfm.runs.record import MACRO, PER_CATEGORY, Prediction, Run
from lightning_tfm.tasks.base import TaskModule
from lightning_tfm.tasks.metrics import all_gather_list

SAMPLES = 16
"""Number of validation examples, from the start of the split, whose predictions are logged."""


class Predictions(Callback):
    """Callback that logs predictions of each validation to loggers that support tables, and saves those of the test.

    The test writes each `Prediction` to its folder, and the figures of
    `TaskModule.figures` as PNG files. A validation of a checkpoint writes the same files. If pairs have categories, the
    exact match of each category is logged as `test/exact_match/CATEGORY`, the mean loss per target, in nats, as
    `test/nll/CATEGORY`, and the error rates of the task likewise. The mean of a metric over the categories of a test
    set, each with the same weight, is logged as `test/macro_exact_match`, except for the loss.

    Note:
        Language models have no predictions.
    """

    def __init__(self) -> None:
        self.lines: list[tuple[str, int, Prediction]] = []  # of an evaluation: name of the split, row, prediction

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.lines = []

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if outputs["predictions"] is None:
            return
        split, is_training = evaluated_splits(trainer)[dataloader_idx], trainer.state.fn == TrainerFn.FITTING
        lines = zip(batch.rows.tolist(), outputs["predictions"], strict=True)
        self.lines += [(split, row, line) for row, line in lines if row < SAMPLES or not is_training]

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        is_training = trainer.state.fn == TrainerFn.FITTING
        if trainer.sanity_checking or (is_training and not example_loggers(trainer)):
            return
        splits = list(evaluated_splits(trainer))
        self.lines = all_gather_list(self.lines, data_group(trainer.strategy))
        self.lines.sort(key=lambda line: (splits.index(line[0]), line[1]))  # the order of the data
        if is_training:
            self._log_table(trainer)
        else:
            self._save(trainer, cast(TaskModule, pl_module))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            self._draw(trainer, cast(TaskModule, pl_module))

    on_test_start = on_validation_start
    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end
    on_test_end = on_validation_end

    def _log_table(self, trainer: Trainer) -> None:
        columns = ["source", "target", "prediction", "correct"]
        rows = [list(itemgetter(*columns)(line)) for *_, line in self.lines]
        for logger in example_loggers(trainer) if rows else ():
            step = max(0, trainer.global_step - 1)  # the step at which Lightning logs this validation
            logger.log_table("val/predictions", columns, rows, step=step)

    def _save(self, trainer: Trainer, module: TaskModule) -> None:
        """Log the metrics of each category, and save all predictions."""
        by_category: dict[tuple[str, str], list[Prediction]] = defaultdict(list)
        for split, _, line in self.lines:
            if line["category"] is not None:
                by_category[evaluated_prefix(trainer, split), line["category"]].append(line)
        by_metric: dict[tuple[str, str], list[float]] = defaultdict(list)
        for (prefix, category), lines in sorted(by_category.items()):
            for metric, value in module.category_metrics(lines).items():
                self._log(module, f"{prefix}/{metric}/{category}", value, metric)
                by_metric[prefix, metric].append(value)
        for (prefix, metric), values in by_metric.items():
            if metric != "nll":
                self._log(module, f"{prefix}/{MACRO}{metric}", fmean(values), metric)
        folder = run_folder(trainer)
        if self.lines and folder and trainer.is_global_zero:
            Run(folder).write_predictions({"split": split, **line} for split, _, line in self.lines)

    def _log(self, module: TaskModule, name: str, value: float, metric: str) -> None:
        """Log a value of a metric of PER_CATEGORY."""
        mean = torch.tensor(value, device=module.device, dtype=torch.float32)
        module.log(name, mean, add_dataloader_idx=False, sync_dist=True, higher_is_better=PER_CATEGORY[metric])
        if metric == "ser":
            module.token_metrics.add(name)

    def _draw(self, trainer: Trainer, module: TaskModule) -> None:
        """Save and log the figures of the task."""
        folder = run_folder(trainer)
        if folder is None or not trainer.is_global_zero:
            return
        if not (figures := module.figures([line for *_, line in self.lines])):
            return
        from lightning_tfm.plots.pictures import missing_glyphs_named, save_figure  # slow to import

        for name, figure in figures.items():
            path = folder / Run.PICTURE.format(name)
            with missing_glyphs_named():
                save_figure(figure, path, dpi=100)
            for logger in example_loggers(trainer):
                logger.log_image(f"{evaluated_prefix(trainer)}/{name}", [str(path)], trainer.global_step)
