"""Exponential moving average of the weights of a run."""

from __future__ import annotations

from typing import Any, cast

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch import callbacks
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from lightning_tfm.distributed.parallel import parallelize, reshard
from lightning_tfm.distributed.strategies import ModelParallel
from lightning_tfm.errors import UserError
from lightning_tfm.networks import Network
from lightning_tfm.system.private import averaged_model, set_averaged_model


class WeightAveraging(callbacks.WeightAveraging):
    """Lightning's WeightAveraging with an exponential moving average, used for validation and checkpoints.

    Checkpoints also contain the trained weights, from which a run is resumed. Early in training, the average spans
    about a third of the steps so far; otherwise, the initialization would dominate in short runs.

    Args:
        decay: maximum decay rate of the average, above 0 and below 1.

    Note:
        The average is stored in at least float32 for every precision, since half precision would lose small updates.
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 < decay < 1:
            raise UserError(f"decay must be above 0 and below 1, but is {decay}; try 0.999")

        def updated_average(average: Tensor, weight: Tensor, step: Any) -> Tensor:
            share = (3 / (step + 3)).clamp(min=1 - decay)  # a tensor: a Python number would synchronize with the GPU
            return torch.lerp(average, weight.to(average.dtype), share.to(average.dtype))

        super().__init__()
        self.decay, self.updated_average = decay, updated_average
        self._trained: list[Tensor] | None = None  # the trained weights while the module holds the average

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        # Lightning's hook would divide the module before copying it, which FSDP2 does not support. The module is moved
        # to the device and converted to half precision later.
        device = trainer.strategy.root_device
        # Buffers are lookup tables and scores, which are not trained.
        average = AveragedModel(pl_module, device, self.updated_average, use_buffers=False)
        if trainer.precision == "64-true":
            average.double()
        if isinstance(trainer.strategy, ModelParallel):
            network = cast(Network, average.module.network)
            parallelize(network, trainer.strategy.device_mesh, activation_checkpointing=False)
        set_averaged_model(self, average)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._trained is not None:  # during validation: a checkpoint saved now must contain the trained weights
            self._swap_models(pl_module)

    def _swap_models(self, pl_module: LightningModule) -> None:
        """Swap the trained weights of the module with the average, or back, without rounding."""
        reshard(pl_module)  # whole weights of a validation are copies
        parameters = list(pl_module.parameters())
        if self._trained is None:
            self._trained = [parameter.data.clone() for parameter in parameters]
            values = [parameter.data for parameter in averaged_model(self).module.parameters()]
        else:
            values, self._trained = self._trained, None
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data.copy_(value)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # Outside fit, Lightning 2.6 would load the trained weights instead of their average.
        if trainer.state.fn == TrainerFn.FITTING:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
