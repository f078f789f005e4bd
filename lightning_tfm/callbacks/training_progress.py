"""Progress of training, evaluation and plotting: bars in a terminal, and lines in it and in files."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar, cast

import lightning.pytorch.callbacks
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from tqdm import tqdm

from lightning_tfm.callbacks.checkpoints import Checkpoints
from lightning_tfm.callbacks.summary import evaluated_splits
from lightning_tfm.system.private import is_within_step
from lightning_tfm.system.progress import Bar, StepTime, progress_bar
from lightning_tfm.system.terminal import format_duration, format_value
from lightning_tfm.tasks.base import TaskModule

Item = TypeVar("Item")

SECONDS = 60
"""Seconds after which a file receives another line, if no validation ends before."""


class ProgressBar(lightning.pytorch.callbacks.ProgressBar):
    """Progress bar of the training steps, including those before a run was resumed, and of validation and test batches.

    It shows the remaining time, the training loss and the best value of the monitored metric, and fits into 80 columns.
    The values of each validation remain above it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_enabled = True  # on the first process
        self.steps: Bar | None = None  # while training
        self.batches: Bar | None = None  # while evaluating
        self.is_validated = False  # since the values were last shown: Checkpoints finds the best one after this hook

    def disable(self) -> None:
        self.is_enabled = False

    def enable(self) -> None:
        self.is_enabled = True

    def print(self, *values: Any, **settings: Any) -> None:
        tqdm.write(settings.get("sep", " ").join(map(str, values)), file=sys.stdout)  # above the progress bar

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        total = trainer.max_steps if trainer.max_steps > 0 else None
        self.steps = progress_bar(
            "step", self.is_enabled, StepTime(), total=total, initial=trainer.global_step, file=sys.stdout
        )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self.steps is not None
        assert self.steps.step_time is not None
        if trainer.global_step > self.steps.n:
            self.steps.step_time.update()
        # Reading the loss synchronizes with the device, so read it only when the bar is drawn, at most every 0.1 s.
        if self.steps.update(trainer.global_step - self.steps.n) or self.is_validated:
            self.steps.set_postfix_str(_values(trainer, pl_module))
            self.is_validated = False

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.steps is not None:
            self.steps.set_postfix_str(_values(trainer, pl_module))
            self.steps.close()
            self.steps = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_test_end(trainer, pl_module)
        self.on_train_end(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._open_batches("validation", trainer.num_val_batches)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        split = "validation" if evaluated_splits(trainer)[0] == "val" else "test"
        self._open_batches(split, trainer.num_test_batches)

    def _open_batches(self, split: str, sizes: Sequence[int | float]) -> None:
        total = int(sum(sizes))
        self.batches = progress_bar(f"{split}, batch", self.is_enabled, total=total, leave=False, file=sys.stdout)

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        if self.batches is not None:
            self.batches.update()

    on_test_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_test_end(trainer, pl_module)
        self.is_validated = True
        if self.is_enabled and self.steps is not None and self.steps.step_time is not None and not trainer.fast_dev_run:
            self.print(_line(trainer, pl_module, self.steps.step_time, trainer.callback_metrics))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.batches is not None:
            self.batches.close()
            self.batches = None


class ProgressLines(Callback):
    """Progress of a training in a file: a line for each validation, and for each minute without one."""

    def __init__(self) -> None:
        self.step_time = StepTime()
        self.printed = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if is_within_step(trainer):
            return
        self.step_time.update()
        if time.monotonic() > self.printed + SECONDS:
            self._print(trainer, pl_module, ())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._print(trainer, pl_module, trainer.callback_metrics)

    def _print(self, trainer: Trainer, pl_module: LightningModule, metrics: Collection[str]) -> None:
        self.printed = time.monotonic()
        if trainer.is_global_zero:
            print(_line(trainer, pl_module, self.step_time, metrics), flush=True)


def _line(trainer: Trainer, pl_module: LightningModule, step_time: StepTime, metrics: Collection[str]) -> str:
    """Format the step, the loss of the step, which of some metrics are monitored, and the time that is left."""
    checkpoints = _checkpoints(trainer)
    names = dict.fromkeys(["val/loss", *([checkpoints.monitor] if checkpoints is not None else [])])
    values = [f"{name} {format_value(trainer.callback_metrics[name].item())}" for name in names if name in metrics]
    if (loss := cast(TaskModule, pl_module).step.loss) is not None:
        values.insert(0, f"loss {format_value(loss.item())}")
    steps, total = trainer.global_step, trainer.max_steps
    if step_time.seconds is not None and total > steps:
        values.append(f"{format_duration((total - steps) * step_time.seconds)} left")
    return f"step {steps}{f'/{total}' if total > 0 else ''}: {', '.join(values)}"


def _checkpoints(trainer: Trainer) -> Checkpoints | None:
    """Return the callback that saves the best checkpoint, if there is one."""
    return next((other for other in trainer.checkpoint_callbacks if isinstance(other, Checkpoints)), None)


def _values(trainer: Trainer, pl_module: LightningModule) -> str:
    """Format the loss of the last step and the best value of the monitored metric so far."""
    values = []
    if (loss := cast(TaskModule, pl_module).step.loss) is not None:
        values.append(f"loss {loss.item():.4f}")
    checkpoints = _checkpoints(trainer)
    if checkpoints is not None and checkpoints.best_model_path:
        best = checkpoints.best_score * (-1 if checkpoints.higher_is_better else 1)
        values.append(f"best {best:.4f} {checkpoints.monitor}")  # a narrow terminal cuts the end
    return ", ".join(values)


def track(trainer: Trainer, items: Sequence[Item], description: str) -> Iterable[Item]:
    """Return items with a progress bar of an action on each, shown if the trainer's progress bar is enabled."""
    bar = trainer.progress_bar_callback
    is_shown = isinstance(bar, ProgressBar) and bar.is_enabled
    return progress_bar(description, is_shown, iterable=items, leave=False, file=sys.stdout)
