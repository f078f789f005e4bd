"""Progress bars for training, evaluation and plotting in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast

import lightning.pytorch.callbacks
from lightning import LightningModule, Trainer
from tqdm import tqdm

from lightning_tfm.callbacks.checkpoints import Checkpoints
from lightning_tfm.callbacks.summary import evaluated_splits
from lightning_tfm.system.progress import progress_bar
from lightning_tfm.tasks.base import TaskModule

Item = TypeVar("Item")


class ProgressBar(lightning.pytorch.callbacks.ProgressBar):
    """Progress bar of the training steps, including those before a run was resumed, and of validation and test batches.

    It shows the remaining time, the training loss and the best value of the monitored metric, and fits into 80 columns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_enabled = True  # on the first process
        self.steps: tqdm[Any] | None = None  # while training
        self.batches: tqdm[Any] | None = None  # while evaluating
        self.is_validated = False  # since the values were last shown: Checkpoints finds the best one after this hook

    def disable(self) -> None:
        self.is_enabled = False

    def enable(self) -> None:
        self.is_enabled = True

    def print(self, *values: Any, **settings: Any) -> None:
        tqdm.write(settings.get("sep", " ").join(map(str, values)), file=sys.stdout)  # above the progress bar

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        total = trainer.max_steps if trainer.max_steps > 0 else None
        self.steps = progress_bar("step", self.is_enabled, total=total, initial=trainer.global_step, file=sys.stdout)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self.steps is not None
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

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.batches is not None:
            self.batches.close()
            self.batches = None


def _values(trainer: Trainer, pl_module: LightningModule) -> str:
    """Format the loss of the last step and the best value of the monitored metric so far."""
    values = []
    if (loss := cast(TaskModule, pl_module).step.loss) is not None:
        values.append(f"loss {loss.item():.4f}")
    checkpoints = next((other for other in trainer.checkpoint_callbacks if isinstance(other, Checkpoints)), None)
    if checkpoints is not None and checkpoints.best_model_path:
        best = checkpoints.best_score * (-1 if checkpoints.higher_is_better else 1)
        values.append(f"best {best:.4f} {checkpoints.monitor}")  # a narrow terminal cuts the end
    return ", ".join(values)


def track(trainer: Trainer, items: Sequence[Item], description: str) -> Iterable[Item]:
    """Return items with a progress bar of an action on each, shown if the trainer's progress bar is enabled."""
    bar = trainer.progress_bar_callback
    is_shown = isinstance(bar, ProgressBar) and bar.is_enabled
    return progress_bar(description, is_shown, iterable=items, leave=False, file=sys.stdout)
