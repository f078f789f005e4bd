"""Results and cost of a run, written to summary.json."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_tfm.files import write_text


def signatures(module: LightningModule) -> dict[str, str]:
    """Return the signatures (settings) of sacrebleu's scores, by name; empty if the module has no scores."""
    scores = getattr(module, "scores", {})
    return next(iter(scores.values())).signatures if scores else {}


class Summary(Callback):
    """Prints a line about the model and the data before training, and writes `summary.json` after the test.

    The file, in the run's folder, contains: `test`, the test metrics by name; `signatures` of sacrebleu's scores, if
    there are any; `train_seconds`, including validation and the time before the run was resumed; `samples_per_second`,
    over this time; `steps`; `parameters`, their number; `seed`.
    """

    def __init__(self) -> None:
        self.started: float | None = None  # while training
        self.earlier_seconds = 0.0

    @property
    def train_seconds(self) -> float:
        """Return the seconds of training, including those before the run was resumed."""
        return self.earlier_seconds + (time.perf_counter() - self.started if self.started else 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {"train_seconds": self.train_seconds}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == TrainerFn.FITTING:  # testing a checkpoint does not resume its run
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
        if not self.earlier_seconds or not trainer.loggers:  # not trained, or the run has no folder
            return
        test = {
            name.removeprefix("test/"): value.item()
            for name, value in trainer.callback_metrics.items()
            if name.startswith("test/")
        }
        scores = signatures(pl_module)
        summary = {
            "test": test,
            **({"signatures": scores} if scores else {}),
            "train_seconds": round(self.earlier_seconds, 2),
            "samples_per_second": round(self.samples / self.earlier_seconds, 1),
            "steps": trainer.global_step,
            "parameters": sum(parameter.numel() for parameter in pl_module.parameters()),
            "seed": trainer.datamodule.seed,
        }
        path = Path(trainer.log_dir) / "summary.json"  # log_dir broadcasts: every process must read it
        if trainer.is_global_zero:
            write_text(path, json.dumps(summary, indent=2) + "\n")
