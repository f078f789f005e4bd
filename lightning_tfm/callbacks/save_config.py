"""Saving of the configuration of a run."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from lightning import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback

from lightning_tfm.loggers import run_folder
from lightning_tfm.runs.record import Run
from lightning_tfm.system.files import write_text


class SaveConfig(SaveConfigCallback):
    """Callback that saves the settings in the folder of a run or of a later test, and in each checkpoint."""

    @cached_property
    def text(self) -> str:
        """Return the settings as YAML."""
        return str(self.parser.dump(self.config, skip_unset=False))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the settings atomically, since a resumed run may be killed at any time, and log all settings."""
        folder = run_folder(trainer)
        if folder is None or self.already_saved:
            return
        self.already_saved = True
        if not Path(self.config.ckpt_path or "").is_file():  # keep checkpoint files, but not the run to resume
            self.config.ckpt_path = None
        if trainer.is_global_zero:
            write_text(folder / Run.CONFIG, self.text)
            for logger in trainer.loggers:
                logger.log_hyperparams(yaml.safe_load(self.text))  # nested as in the file

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the settings, since `lightning-tfm test CHECKPOINT` has no other source for them."""
        name = str(trainer.loggers[0].name) if trainer.loggers else "unnamed"
        checkpoint["experiment"] = {"name": name, "config": self.text}
