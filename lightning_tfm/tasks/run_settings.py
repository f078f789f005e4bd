"""Settings that a resumed run must keep, and that all processes of a run must share."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from lightning import Trainer
from lightning.pytorch.callbacks import WeightAveraging

from lightning_tfm.config.settings import flatten
from lightning_tfm.distributed.strategies import Elastic
from lightning_tfm.optimizers import LRSchedule

PACKAGES = ("lightning_tfm", "lightning", "torch")
"""Packages whose versions all processes share."""

TRAINER = (
    "max_steps",
    "log_every_n_steps",
    "val_check_interval",
    "check_val_every_n_epoch",
    "limit_train_batches",
    "limit_val_batches",
)
"""Settings of the Trainer that all processes share, in addition to `step_settings`."""


def step_settings(trainer: Trainer, lr_schedule: LRSchedule) -> dict[str, Any]:
    """Return the settings of the Trainer that determine a step, by name, in one notation for equal settings."""
    clips, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    averaging = [callback for callback in trainer.callbacks if isinstance(callback, WeightAveraging)]
    num_micro_batches = trainer.strategy.num_micro_batches if isinstance(trainer.strategy, Elastic) else 1
    settings = {
        "trainer.precision": trainer.precision,
        "trainer.accumulate_grad_batches": trainer.accumulate_grad_batches,
        "trainer.gradient_clip_val": clips or None,
        "trainer.gradient_clip_algorithm": (algorithm.value if algorithm else "norm") if clips else None,
        "trainer.strategy.init_args.num_micro_batches": num_micro_batches if num_micro_batches > 1 else None,
        "checkpoint.monitor": getattr(trainer.checkpoint_callback, "monitor", None),
        "checkpoint.mode": getattr(trainer.checkpoint_callback, "mode", None),
        "decay of WeightAveraging": getattr(averaging[0], "decay", None) if averaging else None,
    }
    if lr_schedule.needs_max_steps and not trainer.fast_dev_run:  # which sets max_steps
        settings["trainer.max_steps"] = trainer.max_steps
    return settings


def shared_settings(trainer: Trainer, hyper_parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that all processes of a run must share, by name, in addition to `step_settings`."""
    settings: dict[str, Any] = {f"version of {name}": version(name) for name in PACKAGES}
    settings |= {f"trainer.{name}": getattr(trainer, name) for name in TRAINER}
    settings["trainer.callbacks"] = [callback.state_key for callback in trainer.early_stopping_callbacks]
    for name in ("every_n_train_steps", "keep_last", "keep_every"):
        settings[f"checkpoint.{name}"] = getattr(trainer.checkpoint_callback, name, None)
    data = trainer.datamodule
    if data is not None:
        settings["seed_everything"] = data.seed
        settings["data.init_args.eval_batch_size"] = data.eval_batch_size
        settings |= data.training_batches(data.division).settings
    settings |= flatten(dict(hyper_parameters), "model.init_args")
    if data is not None:
        settings |= {f"{split} data": fingerprint for split, fingerprint in data.fingerprint.items()}
    return settings
