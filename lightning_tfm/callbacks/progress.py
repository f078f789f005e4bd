"""Progress bar for training in a terminal."""

from __future__ import annotations

from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar

METRICS = ("train/loss", "val/loss", "val/exact_match", "val/bleu", "val/accuracy")
"""Metrics that are shown beside the bar, if they are logged."""


class ProgressBar(TQDMProgressBar):
    """Lightning's progress bar over all batches of a run, including those before it was resumed."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: dict[str, str] = {}

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        done = trainer.fit_loop.total_batch_idx + 1
        self.train_progress_bar.reset(self.total_train_batches)
        self.train_progress_bar.initial = self.train_progress_bar.n = done
        self.train_progress_bar.set_description("training")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % (trainer.log_every_n_steps or 1) == 0:  # reading a metric synchronizes with the device
            metrics = trainer.callback_metrics
            self.shown = {name: f"{metrics[name].item():.4g}" for name in METRICS if name in metrics}
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        return dict(self.shown)
