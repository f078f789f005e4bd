"""Logging of predictions: samples at each validation, and all predictions of the test."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_tfm.callbacks.summary import evaluated_prefix
from lightning_tfm.data import Batch
from lightning_tfm.distributed.parallel import data_group
from lightning_tfm.loggers import media_loggers, run_folder
from lightning_tfm.runs.record import PER_CATEGORY, Prediction, Run
from lightning_tfm.system.files import atomic_write
from lightning_tfm.tasks.base import TaskModule
from lightning_tfm.tasks.evaluation import test_prefix
from lightning_tfm.tasks.metrics import all_gather_list

SAMPLES = 16
"""Number of validation examples, from the start of the split, whose predictions are logged."""


class Predictions(Callback):
    """Callback that logs predictions of each validation to loggers that support tables, and saves those of the test.

    The test writes each `Prediction` to its folder, and the figures of
    `TaskModule.figures` as PNG files. A validation of a checkpoint writes the same files. If pairs have categories, the
    exact match of each category is logged as `test/exact_match/CATEGORY`, and the mean loss per target, in nats, as
    `test/nll/CATEGORY`.

    Note:
        Language models have no predictions.
    """

    def __init__(self) -> None:
        self.samples: list[tuple[int, Prediction]] = []  # of a validation during training: row, prediction
        self.lines: list[tuple[str, int, Prediction]] = []  # of an evaluation: name of the split, row, prediction

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:
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
        if outputs["predictions"] is None or trainer.sanity_checking:
            return
        predictions = list(zip(batch.rows.tolist(), outputs["predictions"], strict=True))
        if trainer.state.fn == TrainerFn.VALIDATING:
            self.lines += [("val", *line) for line in predictions]
        elif media_loggers(trainer):
            self.samples += [line for line in predictions if line[0] < SAMPLES]

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._save(trainer, pl_module, ["val"])
            return
        if trainer.sanity_checking or not media_loggers(trainer):
            return
        lines = [
            line
            for _, line in sorted(
                all_gather_list(self.samples, data_group(trainer.strategy)), key=lambda sample: sample[0]
            )
        ]
        self.samples = []
        if not lines:
            return
        columns = ["source", "target", "prediction", "correct"]
        for logger in media_loggers(trainer):
            rows = [[line[name] for name in columns] for line in lines]
            step = max(0, trainer.global_step - 1)  # the step at which Lightning logs this validation
            logger.log_table("val/predictions", columns, rows, step=step)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._draw(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.lines = []

    def on_test_batch_end(
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
        name = trainer.datamodule.test_sets[dataloader_idx]
        self.lines += [(name, *line) for line in zip(batch.rows.tolist(), outputs["predictions"], strict=True)]

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer, pl_module, trainer.datamodule.test_sets)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw(trainer, pl_module)

    def _save(self, trainer: Trainer, pl_module: LightningModule, splits: Sequence[str]) -> None:
        """Log the metrics of each category, and save all predictions in the order of the data."""
        self.lines = all_gather_list(self.lines, data_group(trainer.strategy))
        order = {name: index for index, name in enumerate(splits)}
        self.lines.sort(key=lambda line: (order[line[0]], line[1]))
        by_category: dict[tuple[str, str], list[float]] = defaultdict(list)
        for name, _, line in self.lines:
            if line["category"] is not None:
                prefix = "val" if trainer.state.fn == TrainerFn.VALIDATING else test_prefix(name)
                for metric, value in zip(PER_CATEGORY, (line["correct"], line["nll"]), strict=True):
                    by_category[f"{prefix}/{metric}/{line['category']}", metric].append(value)
        for (name, metric), values in sorted(by_category.items()):
            mean = torch.tensor(values, device=pl_module.device).float().mean()
            cast(TaskModule, pl_module).log(
                name, mean, add_dataloader_idx=False, sync_dist=True, higher_is_better=PER_CATEGORY[metric]
            )
        folder = run_folder(trainer)
        if self.lines and folder and trainer.is_global_zero:
            Run(folder).write_predictions({"split": name, **line} for name, _, line in self.lines)

    def _draw(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save and log the figures of the task."""
        folder = run_folder(trainer)
        if folder is None or not trainer.is_global_zero:
            return
        figures = cast(TaskModule, pl_module).figures([line for *_, line in self.lines])
        if not figures:
            return
        from lightning_tfm.plots.pictures import missing_glyphs_named  # slow to import

        for name, figure in figures.items():
            path = folder / Run.PICTURE.format(name)
            with missing_glyphs_named(), atomic_write(path) as file:
                figure.savefig(file, dpi=100)
            for logger in media_loggers(trainer):
                logger.log_image(f"{evaluated_prefix(trainer)}/{name}", [str(path)], trainer.global_step)
