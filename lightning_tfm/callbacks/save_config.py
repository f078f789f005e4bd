"""Saving of the configuration of a run."""

from __future__ import annotations

import yaml
from lightning import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback


class SaveConfig(SaveConfigCallback):
    """Saves config.yaml into the folder of a training run, never into the current folder."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.loggers:
            self.overwrite = True  # when a run is resumed
            super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Log all settings as hyper-parameters, nested as in the file."""
        settings = yaml.safe_load(self.parser.dump(self.config, skip_unset=False))
        for logger in trainer.loggers:
            logger.log_hyperparams(settings)
