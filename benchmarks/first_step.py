"""Callback for the start of a training, in a module with few imports, since importing is a part of the start."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer

from benchmarks.memory import resident


class FirstStep(Callback):
    """Callback that writes the time and, on Linux, the peak memory in bytes to the file $FIRST_STEP and exits."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        peak = resident("VmHWM") if sys.platform == "linux" else 0
        Path(os.environ["FIRST_STEP"]).write_text(f"{time.time()} {peak}", encoding="utf-8")
        os._exit(0)


def train_yoyodyne(folder: str) -> None:
    """Train yoyodyne's pointer-generator LSTM of width 32 on train.tsv and val.tsv of a folder until the first step."""
    from benchmarks.peers import BARE, yoyodyne_model

    files = {split: f"{folder}/{split}.tsv" for split in ("train", "val")}
    with tempfile.TemporaryDirectory() as model_dir:
        data, model = yoyodyne_model("PointerGeneratorLSTMModel", files, model_dir, 32, 1e-3, batch_size=64)
        Trainer(accelerator="cpu", num_sanity_val_steps=0, callbacks=[FirstStep()], **BARE).fit(model, data)
