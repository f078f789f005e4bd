"""summary.json: what a run reached, in which time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_tfm.files import write_text


def signatures(module: LightningModule) -> dict[str, str]:
    """Of sacrebleu's scores, by their names: with what settings they were computed; none where there are none."""
    scores = getattr(module, "scores", {})
    return next(iter(scores.values())).signatures if scores else {}


class Summary(Callback):
    """Says in a line what is trained, and writes `summary.json` into the run's folder once that has been tested.

    It holds: `test`, the test metrics by name; `signatures` of sacrebleu's scores, where there are any;
    `train_seconds`, validation included, over all starts of the run; `samples_per_second`, over those; `steps`;
    `parameters`; `seed`.
    """

    def __init__(self) -> None:
        self.started: float | None = None  # while training
        self.earlier_seconds = 0.0

    @property
    def train_seconds(self) -> float:
        """Of this start of the run and those before it."""
        return self.earlier_seconds + (time.perf_counter() - self.started if self.started else 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {"train_seconds": self.train_seconds}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == TrainerFn.FITTING:  # to test a checkpoint is not to go on with its run
            state = checkpoint["callbacks"].get(self.state_key, self.state_dict())
            self.earlier_seconds = state["train_seconds"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            parameters = sum(parameter.numel() for parameter in pl_module.parameters())
            data = trainer.datamodule
            print(
                f"{type(pl_module.network).__name__} of {parameters:,} parameters, {type(data).__name__} of "
                f"{len(data.datasets['train']):,} training examples, on {pl_module.device}, {trainer.precision}"
            )
        self.started = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.earlier_seconds, self.started = self.train_seconds, None

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.samples = trainer.train_dataloader.samples

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.earlier_seconds or not trainer.loggers:  # tested only, or without a folder of its own
            return
        test = {
            name.removeprefix("test/"): value.item()
            for name, value in trainer.callback_metrics.items()
            if name.startswith("test/")
        }
        told = signatures(pl_module)
        summary = {
            "test": test,
            **({"signatures": told} if told else {}),
            "train_seconds": round(self.earlier_seconds, 2),
            "samples_per_second": round(self.samples / self.earlier_seconds, 1),
            "steps": trainer.global_step,
            "parameters": sum(parameter.numel() for parameter in pl_module.parameters()),
            "seed": trainer.datamodule.seed,
        }
        path = Path(trainer.log_dir) / "summary.json"  # a broadcast: every process must ask
        if trainer.is_global_zero:
            write_text(path, json.dumps(summary, indent=2) + "\n")
