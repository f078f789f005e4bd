"""Private names of Lightning, jsonargparse and argparse that no public name replaces, which an update may break.

Each stands in a function of its own, with a test in tests/system/test_private.py.
"""

from __future__ import annotations

from argparse import Action, ArgumentParser
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # importing this module is fast
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.strategies import DDPStrategy


def actions(parser: ArgumentParser) -> list[Action]:
    """Return the arguments of a parser."""
    return parser._actions


def read_no_files() -> None:
    """Keep jsonargparse from reading the value of a setting from a file or an address with that name."""
    from jsonargparse import _optionals

    _optionals._config_read_mode = "fF"  # a file that is not a file, which no path is


def yaml_loader() -> type[Any]:
    """Return the loader of YAML that jsonargparse uses for files and single values."""
    from jsonargparse import _loaders_dumpers

    return _loaders_dumpers.get_yaml_default_loader()


def replace_yaml_loader(loader: type[Any]) -> None:
    """Replace the loader of `yaml_loader`."""
    from jsonargparse import _loaders_dumpers

    _loaders_dumpers.yaml_default_loader = loader  # type: ignore[assignment]  # None before its first use


def start_method(strategy: DDPStrategy) -> str:
    """Return the method that starts the other processes: "popen" or the name of a method of multiprocessing."""
    return strategy._start_method or "popen"


def replace_default_timeout(strategy: DDPStrategy, timeout: timedelta) -> None:
    """Set the time that a process waits for the others, unless the user has set another than torch's default."""
    from torch.distributed.constants import default_pg_timeout

    if strategy._timeout == default_pg_timeout:
        strategy._timeout = timeout


def stops_after_epochs(callback: EarlyStopping) -> bool:
    """Return whether EarlyStopping checks its metric at the end of an epoch rather than of a validation."""
    return bool(callback._check_on_train_epoch_end)


def saves_after_epochs(callback: ModelCheckpoint) -> bool:
    """Return whether ModelCheckpoint saves at the end of an epoch rather than of a validation."""
    return bool(callback._save_on_train_epoch_end)


def epochs_between_saves(callback: ModelCheckpoint) -> int:
    """Return the number of epochs between two saves of ModelCheckpoint."""
    return callback._every_n_epochs


def timer_interval(callback: Timer) -> str:
    """Return whether Timer checks the time after each "step" or "epoch"."""
    return str(callback._interval)


def logger_version(logger: CSVLogger) -> int | str | None:
    """Return the version that the user has set; unlike `version`, it does not choose one."""
    return logger._version


def set_version(logger: CSVLogger, version: str) -> None:
    """Set the version of a logger, the name of its folder."""
    logger._version = version


def set_writer(logger: CSVLogger, writer: Any) -> None:
    """Replace the writer of metrics.csv."""
    logger._experiment = writer
