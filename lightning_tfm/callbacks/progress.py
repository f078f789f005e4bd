"""The bar of a training in a terminal."""

from __future__ import annotations

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar


class ProgressBar(TQDMProgressBar):
    """Lightning's, but for what it says of epochs: a run is one stream of steps."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        self.train_progress_bar.set_description("training")

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, int | str | float | dict]:
        """What is shown beside it, without the number of a version."""
        return {name: value for name, value in super().get_metrics(trainer, pl_module).items() if name != "v_num"}
