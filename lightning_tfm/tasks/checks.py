"""Checks of the settings of the Trainer before a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning import Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

from lightning_tfm.config.trust import REPLACEMENTS
from lightning_tfm.distributed.strategies import Elastic, ModelParallel
from lightning_tfm.errors import UserError
from lightning_tfm.system.private import (
    epochs_between_saves,
    saves_after_epochs,
    start_method,
    stops_after_epochs,
    timer_interval,
)
from lightning_tfm.tasks.metrics import all_gather_list

REFUSED = {
    BatchSizeFinder: "trains with other batches than the run",
    GradientAccumulationScheduler: "counts epochs of Lightning, of which a run has one",
    LearningRateFinder: "sets a learning rate that the model does not have",
    StochasticWeightAveraging: "changes the learning rate by epochs",
}
"""Callbacks of Lightning that are not supported, and why."""


def check_label_smoothing(value: float) -> None:
    """Raise UserError unless a label smoothing is at least 0 and below 1."""
    if not 0 <= value < 1:
        raise UserError(f"label_smoothing must be at least 0 and below 1, but is {value}; try 0.1")


def check_trainer(trainer: Trainer, stage: str, settings: Any = None) -> None:
    """Check the settings of the Trainer before it runs.

    Args:
        trainer: the trainer.
        stage: "fit", "validate", "test" or "predict".
        settings: the settings of the Trainer, some of which a dry run replaces; None for those of the Trainer.

    Raises:
        UserError: if a setting is not supported.
    """
    check_strategy(trainer.strategy)
    _check_callbacks(trainer)
    if settings is None and trainer.fast_dev_run:
        return
    settings = settings or trainer
    check_limits(trainer.strategy, settings)
    if stage == "fit":
        _check_epochs(trainer)
        saves = trainer.checkpoint_callback is not None and settings.limit_val_batches != 0
        if saves and isinstance(settings.val_check_interval, int):
            check_interval(settings.val_check_interval, trainer.accumulate_grad_batches)


def check_strategy(strategy: Strategy) -> None:
    """Raise UserError unless a strategy is supported, can divide its work, and starts each process by the command."""
    if isinstance(strategy, Elastic | ModelParallel):
        strategy.check_processes(strategy.num_nodes * strategy.num_processes)
    elif type(strategy) not in (SingleDeviceStrategy, DDPStrategy):  # DeepSpeed's and XLA's derive from these
        raise UserError(
            "trainer.strategy must be ddp, lightning_tfm.distributed.strategies.Elastic or "
            "lightning_tfm.distributed.strategies.ModelParallel (FSDP2 and tensor parallelism), but is "
            f"{type(strategy).__name__}"
        )
    if isinstance(strategy, DDPStrategy) and (method := start_method(strategy)) != "popen":
        raise UserError(
            f"trainer.strategy must start each process with the command, but ddp_{method} copies this process; try ddp"
        )


def check_limits(strategy: Strategy, settings: Any) -> None:
    """Check that evaluations with elastic determinism read all batches.

    Raises:
        UserError: if a limit, which Lightning applies to each process, selects other rows for each number of processes.
    """
    if not isinstance(strategy, Elastic) or strategy.num_micro_batches == 1:
        return
    for name in ("limit_val_batches", "limit_test_batches"):
        limit = getattr(settings, name)
        if limit and (isinstance(limit, int) or limit < 1):
            raise UserError(
                f"trainer.{name} must be 1.0 or 0 with lightning_tfm.distributed.strategies.Elastic, since a limit of "
                f"the batches selects other rows for each number of processes, but is {limit}; leave it out"
            )


def check_interval(interval: float | None, accumulated: int) -> None:
    """Check that validations, and so checkpoints, are between two steps.

    Args:
        interval: the number of batches between two validations; None or infinity if there is none.
        accumulated: the number of batches of a step.
    """
    if interval not in (None, math.inf) and interval % accumulated:
        raise UserError(
            "trainer.val_check_interval must be a multiple of trainer.accumulate_grad_batches "
            f"({accumulated}), since a checkpoint cannot be saved within a step, but is {interval}; "
            f"try {accumulated * max(1, round(interval / accumulated))}"
        )


def check_ranks(facts: Mapping[str, Any]) -> None:
    """Check that all processes of a run have the same values, by name, before they train.

    Raises:
        UserError: on all processes, if a value differs.
    """
    first, *others = all_gather_list([dict(facts)])
    for rank, other in enumerate(others, start=1):
        for name, value in first.items():
            if other.get(name) != value:
                raise UserError(
                    f"all processes of a run must have the same {name}, but rank 0 has {value} and rank {rank} has "
                    f"{other.get(name)}; start them with the same command and packages in a folder that they share"
                )


def _check_callbacks(trainer: Trainer) -> None:
    for callback in trainer.callbacks:
        for cls, reason in REFUSED.items():
            if isinstance(callback, cls):
                name = cls.__name__
                raise UserError(f"trainer.callbacks must not contain {name}, which {reason}; try {REPLACEMENTS[name]}")
        if isinstance(callback, EarlyStopping) and callback.patience < 0:
            raise UserError(
                f"patience of EarlyStopping in trainer.callbacks must be at least 0, but is {callback.patience}; try 3"
            )


def _check_epochs(trainer: Trainer) -> None:
    """Refuse settings that count epochs in a run of `max_steps`, which is a single epoch of Lightning."""
    if trainer.max_steps < 1:
        return
    between = trainer.check_val_every_n_epoch
    validates_once = between and trainer.val_check_interval == 1.0 and not trainer.fast_dev_run  # which sets both
    counted: list[tuple[str, object, str]] = [
        ("trainer.min_epochs", trainer.min_epochs and not trainer.min_steps, "raise trainer.max_steps"),
        ("trainer.min_steps", trainer.min_steps, "raise trainer.max_steps"),
        (
            "trainer.check_val_every_n_epoch",
            (between or 1) > 1 or (validates_once and trainer.early_stopping_callbacks),
            "set it to null, and trainer.val_check_interval to a number of batches",
        ),
        ("trainer.reload_dataloaders_every_n_epochs", trainer.reload_dataloaders_every_n_epochs, "leave it out"),
    ]
    for callback in trainer.callbacks:
        if isinstance(callback, EarlyStopping):
            mend = "set it to false, and trainer.val_check_interval to a number of batches"
            counted.append(("check_on_train_epoch_end of EarlyStopping", stops_after_epochs(callback), mend))
        elif isinstance(callback, ModelCheckpoint):
            mend = "leave it out to save after each validation, or set every_n_train_steps"
            counted.append(("every_n_epochs of ModelCheckpoint", epochs_between_saves(callback) > 1, mend))
            counted.append(("save_on_train_epoch_end of ModelCheckpoint", saves_after_epochs(callback), mend))
        elif isinstance(callback, Timer):
            counted.append(("interval of Timer", timer_interval(callback) == "epoch", "set it to step"))
        elif isinstance(callback, LearningRateMonitor):
            by_epoch = callback.logging_interval == "epoch"
            counted.append(("logging_interval of LearningRateMonitor", by_epoch, "set it to step"))
    for name, counts_epochs, mend in counted:
        if counts_epochs:
            raise UserError(
                f"{name} must not count epochs, since a run of trainer.max_steps is one epoch of Lightning; {mend}"
            )
