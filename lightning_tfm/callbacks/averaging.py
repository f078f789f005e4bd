"""The moving average of a run's weights."""

from __future__ import annotations

from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch import callbacks
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_tfm.errors import UserError


class WeightAveraging(callbacks.WeightAveraging):
    """Keeps the exponential moving average of the weights, by Lightning, which validation and checkpoints have.

    What is trained goes on beside it, and lies in checkpoints too, for a run to go on from. At first the average
    reaches back over a third of the steps, and no further: in a short run, what was drawn would weigh most.

    Args:
        decay: what the average keeps of itself at each step, at most.
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 < decay < 1:
            raise UserError(f"decay must be above 0 and below 1, but is {decay}; try 0.999")

        def moved(average: Tensor, weight: Tensor, step: Tensor) -> Tensor:
            share = (3 / (step + 3)).clamp(min=1 - decay)  # on its device: a GPU need not be waited for
            return torch.lerp(average, weight, share.to(average.dtype))

        super().__init__(use_buffers=False, avg_fn=moved)  # buffers are tables and counts, not trained

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._device = trainer.strategy.root_device  # where the module will be, and is not yet
        super().setup(trainer, pl_module, stage)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # Lightning 2.6 would test the weights that were trained, not their average.
        if trainer.state.fn == TrainerFn.FITTING:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
