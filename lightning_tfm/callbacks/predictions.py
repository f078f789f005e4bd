"""What a model answers: samples at each validation, all answers of the test."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer

from lightning_tfm.data import Batch
from lightning_tfm.files import write_text
from lightning_tfm.loggers import wandb_loggers
from lightning_tfm.metrics import gathered
from lightning_tfm.modules.task import Evaluation, test_prefix

SAMPLES = 16
"""The first examples of the validation part."""

BY_KIND = ("exact_match", "nll")
"""What is told of each kind of pairs."""


def is_of_a_kind(metric: str) -> bool:
    """Whether a metric of the test is that of one kind of pairs, as test/exact_match/KIND."""
    return any(name in metric.split("/")[:-1] for name in BY_KIND)


class Predictions(Callback):
    """Shows a few answers of each validation as a table in W&B, and keeps all answers of the test.

    The test of a run writes `predictions.jsonl` into its folder, a line for each example, see `TaskModule.answered`.
    Where pairs have a kind, each kind's exact match is logged as `test/exact_match/KIND`, and as `test/nll/KIND` the
    mean loss of a target, in nats. Where texts are gone on with, there are no answers. Beside them lie the pictures of
    the answers, see `TaskModule.pictures`.
    """

    def __init__(self) -> None:
        self.samples: list[tuple[int, dict[str, Any]]] = []  # of a validation: row, line
        self.lines: list[tuple[str, int, dict[str, Any]]] = []  # of the test: set, row, line
        self.has_trained = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.has_trained = True

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Evaluation,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        loader = trainer.val_dataloaders
        if trainer.sanity_checking or not wandb_loggers(trainer):
            return
        rows = loader.sampler.batches[batch_idx]
        sampled = rows < SAMPLES
        lines = pl_module.answered(loader.dataset, rows[sampled].tolist(), outputs, sampled)
        if not lines:
            return
        self.samples += zip(rows[sampled].tolist(), lines, strict=True)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or not wandb_loggers(trainer):
            return
        lines = [line for _, line in sorted(gathered(self.samples), key=lambda sample: sample[0])]
        self.samples = []
        if not lines:
            return
        columns = ["source", "target", "answer", "right"]
        for logger in wandb_loggers(trainer):
            rows = [[line[name] for name in columns] for line in lines]
            step = max(0, trainer.global_step - 1)  # as Lightning counts them
            logger.log_table("val/samples", columns, rows, step=step)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.lines = []

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Evaluation,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        loader = trainer.test_dataloaders[dataloader_idx]
        rows = loader.sampler.batches[batch_idx]
        name = trainer.datamodule.test_sets[dataloader_idx]
        lines = pl_module.answered(loader.dataset, rows.tolist(), outputs, slice(None))
        if not lines:
            return
        self.lines += [(name, row, line) for row, line in zip(rows.tolist(), lines, strict=True)]

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.lines = gathered(self.lines)
        order = {name: place for place, name in enumerate(trainer.datamodule.test_sets)}
        self.lines.sort(key=lambda line: (order[line[0]], line[1]))
        by_kind = defaultdict(list)
        for name, _, line in self.lines:
            if line["kind"] is not None:
                for metric, value in zip(BY_KIND, (line["right"], line["nll"]), strict=True):
                    by_kind[f"{test_prefix(name)}/{metric}/{line['kind']}"].append(value)
        for name, values in sorted(by_kind.items()):
            mean = torch.tensor(values, device=pl_module.device).float().mean()
            pl_module.log(name, mean, add_dataloader_idx=False, sync_dist=True)
        if self.has_trained and self.lines and trainer.loggers:
            path = Path(trainer.log_dir) / "predictions.jsonl"  # a broadcast: every process must ask
            if trainer.is_global_zero:
                lines = (json.dumps({"set": name} | line, ensure_ascii=False) for name, _, line in self.lines)
                write_text(path, "".join(f"{line}\n" for line in lines))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.has_trained or not trainer.loggers:
            return
        folder = Path(trainer.log_dir)  # a broadcast: every process must ask
        if not trainer.is_global_zero:
            return
        for name, figure in pl_module.pictures([line for *_, line in self.lines]).items():
            figure.savefig(folder / f"{name}.png", dpi=100)
            for logger in wandb_loggers(trainer):
                logger.log_image(f"test/{name}", [str(folder / f"{name}.png")], trainer.global_step)
