"""summary.json: what a run reached, in which time, from what."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer

from lightning_tfm.data import Batch

PACKAGES = ("lightning_tfm", "torch", "lightning", "torchmetrics", "wandb", "faker", "babel")


class Summary(Callback):
    """Writes `summary.json` into the run's folder once the trained model has been tested.

    It holds: `test`, the test metrics by name; `train_seconds`, validation included; `samples_per_second`, over
    those; `parameters`; `seed`; `data_fingerprint` of each split; `versions`; `git_commit`, null outside a
    repository. The fingerprint is logged as a hyper-parameter as well.
    """

    def __init__(self) -> None:
        self.train_seconds = 0.0
        self.samples = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            logger.log_hyperparams({"data_fingerprint": trainer.datamodule.fingerprint})
        self.samples = 0
        self.started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        self.samples += batch.target_in.size(0)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.train_seconds = time.perf_counter() - self.started
        samples = torch.tensor(self.samples, device=pl_module.device)
        self.samples = int(trainer.strategy.reduce(samples, reduce_op="sum"))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.train_seconds or not trainer.loggers:  # tested only, or without a folder of its own
            return
        test = {
            name.removeprefix("test/"): value.item()
            for name, value in trainer.callback_metrics.items()
            if name.startswith("test/")
        }
        summary = {
            "test": test,
            "train_seconds": round(self.train_seconds, 2),
            "samples_per_second": round(self.samples / self.train_seconds, 1),
            "parameters": sum(parameter.numel() for parameter in pl_module.parameters()),
            "seed": trainer.datamodule.seed,
            "data_fingerprint": trainer.datamodule.fingerprint,
            "versions": {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}},
            "git_commit": git_commit(),
        }
        path = Path(trainer.log_dir) / "summary.json"  # a broadcast: every process must ask
        if trainer.is_global_zero:
            path.write_text(json.dumps(summary, indent=2) + "\n")


def git_commit() -> str | None:
    """The commit that this code is at, if it is a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
