"""Logging of throughput and memory."""

from __future__ import annotations

import time
from typing import cast

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.fabric.utilities.throughput import get_available_flops
from torch.utils.flop_counter import FlopCounterMode

from lightning_tfm.data import Batch, MicroBatches
from lightning_tfm.distributed.parallel import data_group
from lightning_tfm.networks import Network


class Telemetry(Callback):
    """Callback that logs throughput and memory every `trainer.log_every_n_steps` steps.

    - `trainer/tokens_per_second`: throughput over all processes since it was last logged, excluding validation. Counts
      target tokens or, in classification, input tokens.
    - `trainer/gpu_memory_gib`, on a GPU: the peak memory of this process, in GiB.
    - `trainer/mfu`, on a GPU: model FLOP utilization (Chowdhery et al. 2022), the FLOP/s of the matrix products
      relative to the peak FLOP/s of the device. torch counts the FLOPs in the first batch. Not logged for recurrent
      networks, whose kernels torch does not count.
    """

    def __init__(self) -> None:
        self.step = 0  # at which metrics were last logged
        self.tokens: torch.Tensor | int = 0  # of this process since that step
        self.started = 0.0  # the time of that step, later by the duration of each validation since

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.peak = peak_flops(pl_module.device, half="16" in str(trainer.precision))
        if cast(Network, pl_module.network).is_recurrent:
            self.peak = None  # torch does not count the FLOPs of these kernels
        self.flops_per_token: float | None = None
        self._begin(trainer.global_step)

    def _begin(self, step: int) -> None:
        self.step, self.tokens, self.started = step, 0, time.perf_counter()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validation_started = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.started += time.perf_counter() - self.validation_started

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Batch | MicroBatches, batch_idx: int
    ) -> None:
        if self.peak and self.flops_per_token is None:
            first = batch[0] if isinstance(batch, MicroBatches) else batch
            # The module seeds dropout after this hook, so the random numbers drawn here do not change the run.
            self.flops_per_token = step_flops(cast(Network, pl_module.network), first) / int(first.tokens)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: Batch | MicroBatches,
        batch_idx: int,
    ) -> None:
        self.tokens = self.tokens + batch.tokens
        if trainer.global_step == self.step or trainer.global_step % (trainer.log_every_n_steps or 1):
            return
        group = data_group(trainer.strategy)
        tokens = int(trainer.strategy.reduce(self.tokens, group, reduce_op="sum"))  # synchronizes with the device
        speed = tokens / (time.perf_counter() - self.started)
        values = {"trainer/tokens_per_second": speed}
        if pl_module.device.type == "cuda":
            values["trainer/gpu_memory_gib"] = torch.cuda.max_memory_allocated(pl_module.device) / 2**30
        if self.peak:
            assert self.flops_per_token is not None
            values["trainer/mfu"] = speed * self.flops_per_token / self.peak / trainer.world_size
        pl_module.log_dict(values)
        self._begin(trainer.global_step)


def step_flops(network: Network, batch: Batch) -> int:
    """Return the FLOPs of the matrix products of a training step; the backward pass counts twice the forward pass."""
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False) as counter:
        network(*batch.inputs)
    return 3 * counter.get_total_flops()


def peak_flops(device: torch.device, half: bool) -> float | None:
    """Return the peak FLOP/s of a device for dense matrix products; None if unknown.

    Args:
        device: the device.
        half: whether the precision is 16 bits instead of 32.
    """
    if device.type != "cuda":
        return None
    if "H200" in torch.cuda.get_device_name(device):  # Lightning's table lists its peaks for sparse matrices
        return 989e12 if half else 67e12 if torch.get_float32_matmul_precision() == "highest" else 495e12
    return get_available_flops(device, torch.bfloat16 if half else torch.float32)
