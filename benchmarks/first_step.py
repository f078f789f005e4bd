"""Callbacks for the start of a training, in a module with few imports, since importing is a part of the start."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer


class FirstStep(Callback):
    """Callback that writes the time of the first step to the file $FIRST_STEP and exits."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        Path(os.environ["FIRST_STEP"]).write_text(str(time.time()), encoding="utf-8")
        os._exit(0)


class FewSteps(Callback):
    """Callback that writes the time of the first step to the file $FIRST_STEP, and exits after the last one."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 0:
            Path(os.environ["FIRST_STEP"]).write_text(str(time.time()), encoding="utf-8")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        os._exit(0)
