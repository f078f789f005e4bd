"""Results and cost of a run, written to its folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_tfm.callbacks.checkpoints import time_is_up
from lightning_tfm.loggers import run_folder
from lightning_tfm.runs import record
from lightning_tfm.runs.metrics_writer import flush
from lightning_tfm.runs.record import MACRO, TIME_LIMIT, Run
from lightning_tfm.tasks.base import TaskModule
from lightning_tfm.tasks.evaluation import test_prefix


def evaluated_splits(trainer: Trainer) -> Sequence[str]:
    """Return the names of the splits of a test, or "val" for a validation."""
    return cast(Sequence[str], trainer.datamodule.test_sets) if trainer.state.fn == TrainerFn.TESTING else ("val",)


def evaluated_prefix(trainer: Trainer, split: str | None = None) -> str:
    """Return the prefix of the metrics and pictures that a test or validation logs for a split, by default the first.

    Note:
        Without a test split, a test evaluates the validation split, with the prefix `val/final`.
    """
    split = split or evaluated_splits(trainer)[0]
    return test_prefix(split) if trainer.state.fn == TrainerFn.TESTING else split


def results(trainer: Trainer) -> tuple[str, dict[str, float]]:
    """Return the first split of the last evaluation, "test" or "val", and its metrics by name."""
    prefix = f"{evaluated_prefix(trainer)}/"
    metrics = trainer.callback_metrics.items()
    evaluated = {name.removeprefix(prefix): value.item() for name, value in metrics if name.startswith(prefix)}
    last = sorted(evaluated, key=lambda name: name.startswith(MACRO))  # callbacks log before the task
    return evaluated_splits(trainer)[0], {name: evaluated[name] for name in last}


class Summary(Callback):
    """Callback that prints the model and data sizes before training, and writes a `record.Summary` after the test."""

    def __init__(self) -> None:
        self.started: float | None = None  # while training
        self.earlier_seconds = 0.0
        self.steps = 0  # of the tested checkpoint
        self.members: list[str] | None = None  # of the tested ensemble

    @property
    def train_seconds(self) -> float:
        """Return the training seconds, including those before the run was resumed."""
        return self.earlier_seconds + (time.perf_counter() - self.started if self.started else 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {"train_seconds": self.train_seconds}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.steps = checkpoint["global_step"]
        self.members = [*map(str, checkpoint["members"])] if "members" in checkpoint else None
        if trainer.state.fn == TrainerFn.FITTING:  # testing a checkpoint does not resume its run
            state = checkpoint["callbacks"].get(self.state_key, self.state_dict())
            self.earlier_seconds = state["train_seconds"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        parameters = sum(parameter.numel() for parameter in pl_module.parameters())
        data = trainer.datamodule
        settings = cast(dict[str, Any], pl_module.hparams_initial["network"])
        network = settings["class_path"].rpartition(".")[2]  # FSDP2 changes the class of the network
        pl_module.print(
            f"{network} of {parameters:,} parameters, on {pl_module.device}, "
            f"{trainer.precision}\n"  # on one line, a terminal of 80 columns would cut a word
            f"{type(data).__name__} with {len(data.datasets['train']):,} training examples"
        )
        self.started = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.earlier_seconds, self.started = self.train_seconds, None

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.samples = trainer.train_dataloader.samples

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING or (folder := run_folder(trainer)) is None:
            return
        module = cast(TaskModule, pl_module)
        (split, metrics), prefix = results(trainer), evaluated_prefix(trainer)
        directions = {
            name.removeprefix(f"{prefix}/").removeprefix("val/"): value
            for name, value in module.higher_is_better.items()
            if name.startswith((f"{prefix}/", "val/"))  # some metrics exist in validations only
        }
        has_trained = bool(self.earlier_seconds)
        stopped_early = None
        if has_trained and trainer.global_step < trainer.max_steps:
            stopped_early = TIME_LIMIT if time_is_up(trainer) else "callback"
        summary = record.Summary(
            **{split: metrics},
            higher_is_better=directions,
            token_metrics=[name for name in metrics if f"{prefix}/{name}" in module.token_metrics],
            signatures=module.signatures,
            train_seconds=round(self.earlier_seconds, 2) if has_trained else None,
            samples_per_second=round(self.samples / self.earlier_seconds, 1) if has_trained else None,
            checkpoint=None if has_trained else str(trainer.ckpt_path),
            members=self.members,
            steps=trainer.global_step if has_trained else self.steps,
            stopped_early=stopped_early,
            parameters=sum(parameter.numel() for parameter in pl_module.parameters()),
            seed=trainer.datamodule.seed,
        )
        if trainer.is_global_zero:
            flush(trainer)  # a finished run has all its metrics
            Run(folder).write_summary(summary)

    on_test_end = on_validation_end
