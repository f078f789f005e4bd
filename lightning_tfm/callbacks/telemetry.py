"""How fast a run is."""

from __future__ import annotations

import time

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.fabric.utilities.throughput import get_available_flops

from lightning_tfm.data import Batch
from lightning_tfm.tokenizer import PAD


class Telemetry(Callback):
    """Logs, every `trainer.log_every_n_steps` steps, beside the metrics of the module.

    - `samples`: target sequences seen since the run began, over all processes and starts; at validations, too.
    - `tokens_per_second`: target tokens that are scored, over all processes, since the last time, validations left out.
    - on a GPU, `gpu_memory_gib`, the highest of this process, and `mfu`, the share of the device's peak that the
      products of the model need: 6 N a token, N without embeddings (Kaplan et al. 2020), attention left out.
    """

    def __init__(self) -> None:
        self.step = 0  # of the last time
        self.tokens: torch.Tensor | int = 0  # since then, of this process
        self.seconds = 0.0  # since then, until a validation began
        self.begun: float | None = None  # while training

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        network = pl_module.network
        embeddings = sum(m.weight.numel() for m in network.modules() if isinstance(m, torch.nn.Embedding))
        self.flops_per_token = 6 * (sum(p.numel() for p in network.parameters()) - embeddings)
        self.peak = None
        if pl_module.device.type == "cuda":
            dtype = torch.bfloat16 if "16" in str(trainer.precision) else torch.float32
            self.peak = get_available_flops(pl_module.device, dtype)
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

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Batch, batch_idx: int
    ) -> None:
        self.tokens = self.tokens + (batch.target_out != PAD).sum()
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
