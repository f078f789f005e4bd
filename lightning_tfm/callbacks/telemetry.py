"""How fast a run is."""

from __future__ import annotations

import time

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.fabric.utilities.throughput import get_available_flops
from torch.utils.flop_counter import FlopCounterMode

from lightning_tfm.data import Batch
from lightning_tfm.networks import Network


class Telemetry(Callback):
    """Logs, every `trainer.log_every_n_steps` steps, beside the metrics of the module.

    - `samples`: target sequences seen since the run began, over all processes and starts; at validations, too.
    - `tokens_per_second`: tokens that are scored, or read, where texts are classified, over all processes, since the
      last time, validations left out.
    - on a GPU, `gpu_memory_gib`, the highest of this process, and `mfu`, model FLOP utilisation (Chowdhery et al.
      2022): what the products of a step need, as torch counts them in the first batch, over what the device could do;
      not of recurrent networks, whose kernels torch does not count.
    """

    def __init__(self) -> None:
        self.step = 0  # of the last time
        self.tokens: torch.Tensor | int = 0  # since then, of this process
        self.seconds = 0.0  # since then, until a validation began
        self.begun: float | None = None  # while training

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.peak = peak_flops(pl_module.device, half="16" in str(trainer.precision))
        if any(isinstance(module, torch.nn.RNNBase) for module in pl_module.network.modules()):
            self.peak = None  # torch does not count what its kernels for these do
        self.flops_per_token: float | None = None
        self._begin(trainer.global_step)

    def _begin(self, step: int) -> None:
        self.step, self.tokens, self.seconds, self.begun = step, 0, 0.0, time.perf_counter()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.begun is not None:
            self.seconds, self.begun = self.seconds + time.perf_counter() - self.begun, None

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            pl_module.log("samples", float(trainer.train_dataloader.samples), sync_dist=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self.begun = time.perf_counter()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        if self.peak and self.flops_per_token is None:
            # Before the module draws this batch's dropout: what is drawn here does not matter.
            self.flops_per_token = step_flops(pl_module.network, batch) / int(batch.tokens)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Batch, batch_idx: int
    ) -> None:
        self.tokens = self.tokens + batch.tokens
        if trainer.global_step == self.step or trainer.global_step % (trainer.log_every_n_steps or 1):
            return
        tokens = int(trainer.strategy.reduce(self.tokens, reduce_op="sum"))  # waits for the device
        speed = tokens / (self.seconds + time.perf_counter() - self.begun)
        told = {"samples": float(trainer.train_dataloader.samples), "tokens_per_second": speed}
        if pl_module.device.type == "cuda":
            told["gpu_memory_gib"] = torch.cuda.max_memory_allocated(pl_module.device) / 2**30
        if self.peak:
            told["mfu"] = speed * self.flops_per_token / self.peak / trainer.world_size
        pl_module.log_dict(told)
        self._begin(trainer.global_step)


def step_flops(network: Network, batch: Batch) -> int:
    """Floating-point operations of the products of a training step; backwards they are two for one."""
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False) as counter:
        network(*batch.inputs)
    return 3 * counter.get_total_flops()


def peak_flops(device: torch.device, half: bool) -> float | None:
    """What a device can do a second in dense products, of 16 bits or 32; None where that is not known."""
    if device.type != "cuda":
        return None
    if "H200" in torch.cuda.get_device_name(device):  # of which Lightning's table has the figures for sparse products
        return 989e12 if half else 67e12 if torch.get_float32_matmul_precision() == "highest" else 495e12
    return get_available_flops(device, torch.bfloat16 if half else torch.float32)
