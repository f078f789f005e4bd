"""Settings of the Trainer: defaults, unsupported values, and the loggers of a run."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from lightning_tfm.callbacks import AttentionLogger, Predictions, Provenance, Summary, Telemetry
from lightning_tfm.data import TaskDataModule
from lightning_tfm.data.text_files import expand_path
from lightning_tfm.errors import UserError
from lightning_tfm.runs.record import Run

CSV, WANDB = "lightning.pytorch.loggers.CSVLogger", "lightning_tfm.loggers.WandbLogger"
"""Class paths of the default loggers."""

REFUSED = {"min_epochs": (None,), "min_steps": (None,), "limit_train_batches": (None, 1.0)}
"""Settings of the Trainer that must keep one of these values, since a run is a single stream of batches."""

CONVERTED = {"max_epochs": "max_steps", "check_val_every_n_epoch": "val_check_interval"}
"""Settings of the Trainer in passes over the training data, and the number to which `fit` converts each."""

UNLIMITED = ("devices", "max_epochs", "num_nodes")
"""Settings of the Trainer for which -1 is no limit."""

POSITIVE = (*UNLIMITED, "accumulate_grad_batches", "check_val_every_n_epoch", "val_check_interval")
"""Settings of the Trainer that must be at least 1."""

PLAIN_NAME = re.compile(r"[^\W_][\w.+-]*")
"""Name of a run: a folder, but not a path, an option or a hidden folder."""

HIDDEN = ("overfit_batches", *REFUSED)
"""Settings of the Trainer that help and shell completion omit."""


def defaults() -> dict[str, Any]:
    """Return the Trainer defaults of `fit`, `validate` and `test` that differ from Lightning's."""
    return {
        "devices": 1,
        "check_val_every_n_epoch": None,  # val_check_interval counts batches of the whole run
        "logger": [
            {"class_path": CSV, "init_args": {"save_dir": "runs", "name": None}},
            {"class_path": WANDB, "init_args": {"save_dir": "runs", "project": "lightning_tfm"}},
        ],
        # Summary is last, since its summary.json marks a finished run
        "callbacks": [Provenance(), Telemetry(), Predictions(), AttentionLogger(), Summary()],
        "enable_model_summary": False,  # Summary prints the size of the model
        "enable_progress_bar": None,  # shown in a terminal
        "use_distributed_sampler": False,  # the samplers of the data modules divide batches among processes
    }


def check_settings(config: Namespace, given: Collection[str]) -> None:
    """Raise UserError unless the seed, the threads, the name and the settings of the Trainer are supported.

    Epochs in a YAML file give way to the number that they would be converted to, if the command line has one.
    """
    trainer = config.trainer
    if not 0 <= config.seed_everything < 2**32:
        raise UserError(f"seed_everything must be from 0 to {2**32 - 1}, but is {config.seed_everything}; try 1")
    if config.num_threads < 1:
        raise UserError(f"num_threads must be at least 1, but is {config.num_threads}; try 1")
    if config.name is not None and not PLAIN_NAME.fullmatch(config.name):
        raise UserError(
            "name must be the name of a folder, of letters, digits and . _ + - only, that begins with a letter or a "
            f"digit, but is {config.name!r}; try my_run"
        )
    if trainer.overfit_batches:
        raise UserError(
            f"trainer.overfit_batches must be 0, but is {trainer.overfit_batches}; "
            "to overfit a few examples, lower data.train_size"
        )
    for name, unset in REFUSED.items():
        value = trainer[name]
        if (type(value), value) not in ((type(other), other) for other in unset):  # 1 is one batch, 1.0 is all batches
            raise UserError(
                f"trainer.{name} must not be set, since a run is a single stream of batches that ends at "
                f"trainer.max_steps, but is {value}; set trainer.max_steps"
            )
    if not isinstance(trainer.val_check_interval, int | None):
        raise UserError(
            f"trainer.val_check_interval must be a number of training batches, but is {trainer.val_check_interval}; to "
            "validate after each pass over the training data, set trainer.check_val_every_n_epoch to 1 instead"
        )
    for name in POSITIVE:
        value = trainer[name]
        if re.fullmatch(r"0|-\d+", str(value)) and not (name in UNLIMITED and str(value) == "-1"):
            raise UserError(f"trainer.{name} must be at least 1, but is {value}; try 1")
    for name in ("gradient_clip_val", "log_every_n_steps"):
        if (value := trainer[name]) is not None and value < 0:
            raise UserError(f"trainer.{name} must be at least 0, but is {value}; leave it out")
    days, _, _ = str(trainer.max_time).partition(":")
    if days.isdecimal() and len(days) > 8:  # timedelta raises an OverflowError
        raise UserError(f"trainer.max_time must be below 100,000,000 days, but is {trainer.max_time}; leave it out")
    for name, converted in CONVERTED.items():
        if trainer[name] not in (None, -1) and f"--trainer.{converted}" in given:
            if f"--trainer.{name}" in given:
                raise UserError(
                    f"trainer.{name} ({trainer[name]}) and trainer.{converted} ({trainer[converted]}) are mutually "
                    "exclusive; leave one out"
                )
            trainer[name] = None


def check_evaluations(settings: Namespace, data: TaskDataModule) -> None:
    """Raise UserError unless the limits of batches leave one for each evaluation of `fit`, which ends with a test."""
    if settings.limit_test_batches == 0:
        raise UserError(
            "trainer.limit_test_batches must be above 0, since fit ends with a test, but is 0; leave it out"
        )
    for name, loaders in (
        ("limit_val_batches", [data.val_dataloader()]),
        ("limit_test_batches", data.test_dataloader()),
    ):
        limit, batches = settings[name], min(map(len, loaders))
        if isinstance(limit, float) and 0 < limit * batches < 1:
            raise UserError(
                f"trainer.{name} must leave at least one of {batches} batches, but is {limit}; set it to an integer, "
                "the number of batches, or leave it out"
            )


def loggers_of_run(logger: Any, experiment: str, name: str | None = None) -> list[Namespace]:
    """Return the loggers of a run, starting with a CSVLogger, which creates the folder of the run.

    Args:
        logger: the setting `trainer.logger`.
        experiment: the name of the experiment: the default name of the CSVLogger, and the default group in W&B.
        name: the name that replaces both; None if it is not set.
    """
    loggers = [] if logger is True else as_list(logger)
    indices = [index for index, other in enumerate(loggers) if other.class_path.rpartition(".")[2] == "CSVLogger"]
    if indices:
        first = loggers.pop(indices[0])
    else:
        settings = Namespace(save_dir="runs", name=None, version=None, prefix="", flush_logs_every_n_steps=100)
        first = Namespace(class_path=CSV, init_args=settings)
    first.init_args.name = name or first.init_args.name or experiment
    for other in loggers:
        if other.class_path == WANDB and other.init_args.get("group") is None:
            other.init_args.group = name or experiment
    for other in (first, *loggers):
        if save_dir := other.get("init_args.save_dir"):  # in a YAML file, which no shell expands
            other.init_args.save_dir = str(expand_path(save_dir))
    return [first, *loggers]


def continue_run(loggers: list[Namespace], run: Path) -> None:
    """Configure loggers to continue a run."""
    first, *others = loggers
    settings = first.init_args
    settings.save_dir, settings.name, settings.version = str(run.parents[1]), run.parent.name, run.name
    for other in others:
        if other.class_path == WANDB and (id := Run(run).wandb_id):
            other.init_args.id = id


def as_list(value: Any) -> list[Any]:
    """Convert a setting that is null, a value or a list to a list."""
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
