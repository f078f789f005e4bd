"""Scores of attention heads during training."""

from __future__ import annotations

from typing import cast

import torch
from lightning import Callback, LightningModule, Trainer

from lightning_tfm.errors import UserError
from lightning_tfm.insight import Sample, head_scores
from lightning_tfm.runs.record import HEAD_SCORES
from lightning_tfm.tasks.base import TaskModule


class HeadScores(Callback):
    """Callback that logs the scores of each attention head at each validation, see `head_scores`.

    For example, `val/heads/layers.1.self_attention/head_2/induction` shows when an induction head appears.

    Args:
        num_examples: the number of validation examples for which the scores are computed, the first ones.
    """

    def __init__(self, num_examples: int = 64) -> None:
        if num_examples < 1:
            raise UserError(f"num_examples must be at least 1, but is {num_examples}; try 64")
        self.num_examples = num_examples

    @torch.no_grad()
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        module = cast(TaskModule, pl_module)
        dataset = trainer.val_dataloaders.dataset
        rows = torch.arange(min(self.num_examples, len(dataset)))
        data = trainer.datamodule  # None if the Trainer was given data loaders
        sample = Sample.from_dataset(dataset, rows, module.network, getattr(data, "target_parts", None))
        for head, scores in head_scores(module.network, sample.to(module.device)).items():
            for name, value in scores.items():
                module.log(f"{HEAD_SCORES}{head.name}/head_{head.head}/{name}", value, sync_dist=True)
