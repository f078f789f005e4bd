"""Saving of best.ckpt and last.ckpt, and handling of signals."""

from __future__ import annotations

import math
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_tfm.checkpoint import copy_checkpoint, is_whole
from lightning_tfm.distributed.signals import SignalExchange
from lightning_tfm.errors import (
    Interrupted,
    UserError,
    handle_signals,
    interrupt,
    interruption,
    nearest,
    rank_zero_print,
)
from lightning_tfm.loggers import run_folder
from lightning_tfm.runs.metrics_writer import flush
from lightning_tfm.runs.record import CHECKPOINT_NAME, Run
from lightning_tfm.system.files import relative
from lightning_tfm.system.private import disable_sigterm_broadcast, is_before_validation, is_within_step
from lightning_tfm.tasks.base import TaskModule
from lightning_tfm.tasks.checks import check_interval


class Checkpoints(Checkpoint):
    """Callback that saves `best.ckpt`, by a validation metric, and `last.ckpt`, for resuming, in the run's folder.

    Checkpoints of the latest validations can be kept as `step_N.ckpt`, for weight averaging. Checkpoints are saved only
    after a complete step and its validation, so a resumed run neither repeats nor skips any.

    On SIGTERM, SIGUSR1, SIGHUP or Ctrl-C, training stops after saving the next checkpoint; a second Ctrl-C stops it
    immediately.

    Args:
        every_n_train_steps: number of steps between saves of last.ckpt, the most steps that a killed run can lose.
        monitor: validation metric that selects the best checkpoint.
        mode: "min" if lower values of the metric are better, "max" if higher values are; None for what the metric says.
        keep_last: number of latest validations whose checkpoints are kept as `step_N.ckpt`.
        keep_every: number of steps between checkpoints that are all kept as `step_N.ckpt`, to fork the run; 0 for none.

    Attributes:
        enabled: whether to save checkpoints. The command disables them without a logger.
        extended: the folder of the run that this run extends; its best checkpoint is the best so far.
        last_step: the step after which training stops once last.ckpt is saved, as after a signal; None for all steps.
    """

    def __init__(
        self,
        every_n_train_steps: int = 200,
        monitor: str = "val/loss",
        mode: Literal["min", "max"] | None = None,
        keep_last: int = 0,
        keep_every: int = 0,
    ) -> None:
        if every_n_train_steps < 1:
            raise UserError(f"checkpoint.every_n_train_steps must be at least 1, but is {every_n_train_steps}; try 200")
        if keep_last < 0:
            raise UserError(f"checkpoint.keep_last must be at least 0, but is {keep_last}; try 5")
        if keep_every < 0:
            raise UserError(f"checkpoint.keep_every must be at least 0, but is {keep_every}; try 1000")
        self.every_n_train_steps, self.keep_last, self.keep_every = every_n_train_steps, keep_last, keep_every
        self.monitor, self.mode = monitor, mode
        self.enabled = True
        self.extended: Path | None = None
        self.last_step: int | None = None
        self.dirpath: Path | None = None  # None if nothing is saved
        self.best_score = math.inf  # the negative metric if higher values are better
        self.higher_is_better = mode == "max"  # without a mode, what the metric says at the first validation
        self.stopped = False  # by early stopping
        self.signum: int | None = None  # the first that this process has received
        self.has_ctrl_c = False  # whether it has received SIGINT
        self.ending: int | None = None  # the signal that ends training, the same on all processes
        self.saved_step: int | None = None  # since the run was started or resumed
        self.handlers: dict[int, Any] = {}

    @property
    def best_model_path(self) -> str:
        """Return the path of the best checkpoint, or "" if there is none; the Trainer requires this name."""
        return str(self.dirpath / Run.BEST) if self.dirpath and self.best_score < math.inf else ""

    @property
    def last_model_path(self) -> str:
        """Return the path of the last checkpoint, or "" if nothing is saved."""
        return str(self.dirpath / Run.LAST) if self.dirpath else ""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not self.enabled or trainer.fast_dev_run:
            return
        self.dirpath = Run(run_folder(trainer) or Path(trainer.default_root_dir)).checkpoint_folder
        best = Run(self.extended).checkpoint_folder / Run.BEST if self.extended else None
        if best and stage == "fit" and is_whole(best):
            if trainer.is_global_zero:
                copy_checkpoint(best, self.dirpath / best.name)
            trainer.strategy.barrier()

    def state_dict(self) -> dict[str, Any]:
        return {
            "best_score": self.best_score,
            "higher_is_better": self.higher_is_better,
            "stopped": self.stopped,
        }

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["callbacks"].get(self.state_key)
        if state is None or trainer.state.fn != TrainerFn.FITTING:
            return
        self.higher_is_better = state["higher_is_better"]
        if self.dirpath and Path(trainer.ckpt_path or "").resolve().parent == self.dirpath.resolve():
            trainer.should_stop = state["stopped"]
        else:  # a new run, which trains on: it has a time limit and a patience of its own
            ended = (Timer, EarlyStopping) if state["stopped"] else Timer
            for callback in trainer.callbacks:
                if isinstance(callback, ended):
                    checkpoint["callbacks"].pop(callback.state_key, None)
        # A run resumed in a new folder has no best checkpoint there yet, and a damaged one is ignored.
        best = self.dirpath / Run.BEST if self.dirpath else None
        if best and is_whole(best):
            self.best_score = state["best_score"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # `check_trainer` checks a number of batches; a fraction of them becomes one only now.
        if trainer.enable_validation and isinstance(trainer.val_check_interval, float) and not trainer.fast_dev_run:
            check_interval(trainer.val_check_batch, trainer.accumulate_grad_batches)
        if self.keep_every and self.dirpath:
            number = trainer.max_steps // self.keep_every - trainer.global_step // self.keep_every
            size = 3 * sum(weight.numel() * weight.element_size() for weight in pl_module.parameters()) / 1e6
            rank_zero_print(
                f"checkpoint.keep_every {self.keep_every} needs about {number * size:,.1f} MB of disk space: "
                f"{number:,} x {size:,.1f} MB, for the weights and two moments"
            )
        self.exchange = SignalExchange()
        # Lightning broadcasts a SIGTERM in each batch; here, all signals are exchanged, see `SignalExchange`.
        disable_sigterm_broadcast(trainer)
        if threading.current_thread() is threading.main_thread():  # only the main thread may set signal handlers
            self.handlers = handle_signals(self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        # A shell repeats the SIGHUP of a closed terminal, and a supervisor its SIGTERM, so only a user is impatient.
        if self.has_ctrl_c and signum == signal.SIGINT and interruption(sys.exc_info()[1]) is None:
            raise Interrupted(signum, self.saved_step)
        self.has_ctrl_c |= signum == signal.SIGINT
        self.signum = self.signum or signum

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.saved_step == trainer.global_step:  # metrics of this step were logged after the checkpoint
            flush(trainer)
        self._end_if_interrupted()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Lightning checks the same next; a run resumed from a checkpoint saved before a validation would skip it.
        if not is_within_step(trainer) and not is_before_validation(trainer):
            self._save_if_due(trainer, self._signal_of_any(trainer, waits=False))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        directions = cast(TaskModule, pl_module).higher_is_better
        _check_monitor(trainer, "checkpoint.{}", self.monitor, self.mode, directions.get(self.monitor))
        for callback in trainer.callbacks:
            if isinstance(callback, EarlyStopping | ModelCheckpoint):
                name, setting = callback.monitor or "step", f"{{}} of {type(callback).__name__} in trainer.callbacks"
                # The metrics of the training are not known before the first step; Lightning adds step and epoch.
                if not name.startswith(("train/", "trainer/")) and name not in ("step", "epoch"):
                    _check_monitor(trainer, setting, name, callback.mode, directions.get(name))
        if trainer.sanity_checking or trainer.fast_dev_run:  # before the first step
            return
        self.stopped = trainer.should_stop and not time_is_up(trainer)
        if self.mode is None:
            self.higher_is_better = directions[self.monitor]
        score = trainer.callback_metrics[self.monitor].item() * (-1 if self.higher_is_better else 1)
        if non_finite := self._not_finite(trainer):
            rank_zero_print(f"{non_finite} at step {trainer.global_step}; these weights are not saved as the best")
        elif score < self.best_score:
            self.best_score = score  # before saving, since the checkpoint contains it
            self._save(trainer, self.best_model_path)
        if self.keep_last and self.dirpath:
            self._save(trainer, str(self.dirpath / Run.STEP.format(trainer.global_step)))
            names = [CHECKPOINT_NAME.fullmatch(path.name) for path in self.dirpath.glob("*")]
            steps = sorted(int(name[1]) for name in names if name and name[1] and not self._keeps(int(name[1])))
            for step in steps[: -self.keep_last]:
                trainer.strategy.remove_checkpoint(self.dirpath / Run.STEP.format(step))
        self._save_if_due(trainer, self._signal_of_any(trainer, waits=True))

    def _keeps(self, step: int) -> bool:
        """Return whether the checkpoint of a step is kept, as one of an interval."""
        return self.keep_every > 0 and step % self.keep_every == 0

    def _not_finite(self, trainer: Trainer) -> str:
        """Return a message if the validation loss or the monitored metric is not finite, otherwise ""."""
        metrics = {name: trainer.callback_metrics.get(name) for name in ("val/loss", self.monitor)}
        values = {name: value for name, value in metrics.items() if value is not None and not value.isfinite()}
        return " and ".join(f"{name} is {value:g}" for name, value in values.items())

    def _save_if_due(self, trainer: Trainer, signum: int | None) -> None:
        """Save last.ckpt if it is time to, or if training ends after a signal of any process."""
        self.stopped = trainer.should_stop and not time_is_up(trainer)
        step = trainer.global_step
        self.ending = 0 if step == self.last_step else signum
        if self._keeps(step) and self.dirpath:
            self._save(trainer, str(self.dirpath / Run.STEP.format(step)))
        due = step % self.every_n_train_steps == 0 or step == trainer.max_steps
        if (due or trainer.should_stop or self.ending is not None) and self.dirpath:
            self._save(trainer, self.last_model_path)
            self.saved_step = step

    def _save(self, trainer: Trainer, path: str) -> None:
        """Save a checkpoint, or raise UserError on all processes if it cannot be written."""
        if self.dirpath is None:
            return
        flush(trainer)
        failure = None
        try:
            trainer.save_checkpoint(path)
        except UserError as error:
            failure = str(error)
            trainer.strategy.barrier()  # the other processes wait at this barrier in save_checkpoint
        failure = trainer.strategy.broadcast(failure)
        if failure is not None:
            raise UserError(failure)

    def _signal_of_any(self, trainer: Trainer, waits: bool) -> int | None:
        """Return the signal that any process has received, or None.

        Args:
            trainer: the trainer.
            waits: whether to wait for the other processes; otherwise, the signal is that of the step before.
        """
        if trainer.world_size == 1:
            return self.signum
        exchange = self.exchange.now if waits else self.exchange.of_last_step
        return exchange(self.signum or 0, trainer.strategy.root_device) or None

    def _end_if_interrupted(self) -> None:
        if self.ending is not None:
            # On every process, since each machine prints how to resume.
            ckpt_path = None
            if self.dirpath is not None and self.saved_step is not None:
                ckpt_path = relative(self.dirpath.parent)
            raise Interrupted(self.ending, self.saved_step, ckpt_path)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        flush(trainer)  # with the last step, whose metrics were logged after the checkpoint
        self.ending = self._signal_of_any(trainer, waits=True)
        self._end_if_interrupted()
        self._restore_handlers()
        if self.signum is not None:  # it has arrived meanwhile
            interrupt(self.signum, None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        for signum, handler in self.handlers.items():
            signal.signal(signum, handler)
        self.handlers = {}


def time_is_up(trainer: Trainer) -> bool:
    """Return whether a time limit, such as `trainer.max_time`, ends the training."""
    timers = [callback for callback in trainer.callbacks if isinstance(callback, Timer)]
    return any(remaining is not None and remaining <= 0 for remaining in (timer.time_remaining() for timer in timers))


def _check_monitor(
    trainer: Trainer, setting: str, monitor: str, mode: str | None, higher_is_better: bool | None
) -> None:
    """Check that a monitored metric is a metric of the validation, and that the mode is that of the metric.

    Args:
        trainer: the trainer.
        setting: the name of a setting, with {} for "monitor" or "mode".
        monitor: the name of the metric.
        mode: "min", "max", or None for what the metric says.
        higher_is_better: what the metric says; None if it does not.
    """
    if monitor not in trainer.callback_metrics:
        names = sorted(name for name in trainer.callback_metrics if name.startswith("val/"))
        if "alignment" not in monitor:  # a metric of each head
            names = [name for name in names if not name.startswith("val/alignment/")]
        raise UserError(
            f"{setting.format('monitor')} must be a metric of the validation, but is {monitor!r}"
            f"{nearest(monitor, names)}"
        )
    if higher_is_better is None and mode is None:
        raise UserError(
            f"{setting.format('mode')} must be set for {monitor}, which does not say whether higher values are better, "
            "but is missing; set it to min or max, or log the metric with higher_is_better"
        )
    if mode is not None and higher_is_better is (mode == "min"):
        side, other = ("higher", "max") if higher_is_better else ("lower", "min")
        raise UserError(
            f"{setting.format('mode')} must be {other} for {monitor}, of which {side} values are better, but is {mode}"
        )
