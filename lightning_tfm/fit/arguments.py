"""Positional arguments: the experiment of `fit`, and the run of `validate` and `test`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from lightning_tfm.checkpoint import read_index
from lightning_tfm.config.settings import parse_yaml
from lightning_tfm.errors import UserError
from lightning_tfm.runs.names import named_checkpoint

LOGGERS: dict[str, dict[str, Any]] = {
    "CSVLogger": {"save_dir": "runs", "name": None},
    "TensorBoardLogger": {"save_dir": "runs"},
    "WandbLogger": {"save_dir": "runs"},
}
"""Settings that replace those of a logger in a checkpoint, except for KEPT."""

KEPT = ("flush_logs_every_n_steps", "log_best", "offline", "prefix", "project")
"""Settings of loggers that name neither a folder, a run nor an account."""

SAVING = ("ModelCheckpoint", "OnExceptionCheckpoint")
"""Callbacks that write checkpoints, which are ignored in a checkpoint."""


def with_underscores(arguments: list[str]) -> list[str]:
    """Spell the names of settings as in YAML, with underscores, in place of which hyphens are accepted."""

    def spelled(argument: str) -> str:
        name, equals, value = argument.partition("=")
        return f"--{name[2:].replace('-', '_')}{equals}{value}" if name.startswith("--") else argument

    return [*map(spelled, arguments)]


def with_options(arguments: list[str], folder: Path, read: Callable[[Path], dict[str, Any]] = read_index) -> list[str]:
    """Replace a positional argument, an experiment to fit or a run to evaluate, with the equivalent options.

    Args:
        arguments: the command and its arguments.
        folder: a folder for the configuration of the checkpoint's experiment.
        read: a function that reads a checkpoint as `read_index` does.

    Raises:
        UserError: if there is no such run, or the checkpoint does not contain its configuration.
    """
    if arguments[1].startswith("-"):
        return arguments
    command, *options = arguments
    if command == "fit":
        return [command, "--config", *options]
    path = named_checkpoint(options[0])
    experiment = read(path).get("experiment")
    if experiment is None:
        raise UserError(
            f"CHECKPOINT must hold the configuration of its experiment, but {str(path)!r}, which was not written by "
            f"`lightning-tfm fit`, does not; try lightning-tfm {command} --config YAML --ckpt_path CHECKPOINT"
        )
    try:
        name, settings = Path(experiment["name"]).name, portable_settings(experiment["config"], path)
        name.encode()  # a name that is not valid Unicode could not be written to files
        config = folder / f"{name if name.strip('.') else 'unnamed'}.yaml"
        config.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        reason = f": {error}" if isinstance(error, UserError) else ""
        raise UserError(
            f"{str(path)!r} must hold the configuration of its experiment, but it is damaged{reason}"
        ) from None
    return [command, "--config", str(config), "--ckpt_path", str(path), *options[1:]]


def portable_settings(text: str, path: Path) -> dict[str, Any]:
    """Return the settings in a checkpoint, except for those that name a place to write to or an account.

    Raises:
        ValueError: if the settings have another form, such as `trainer.logger` or `logger+`, which the parser accepts.
    """
    settings = parse_yaml(text, path, "CHECKPOINT")
    trainer = settings["trainer"]
    if isinstance(trainer["callbacks"], dict):  # a single callback
        trainer["callbacks"] = [trainer["callbacks"]]
    loggers, callbacks = trainer["logger"] or [], trainer["callbacks"] or []
    is_canonical = isinstance(loggers, list) and isinstance(callbacks, list)
    if not is_canonical or not all(name.isidentifier() for name in (*settings, *trainer)):
        raise ValueError("the settings are not in the form of fit")
    settings |= {"ckpt_path": None, "name": None, "trust_package": ""}  # only the command line may set them
    trainer["default_root_dir"] = trainer["profiler"] = None
    for index, logger in enumerate(loggers):
        if (replaced := LOGGERS.get(logger["class_path"].rpartition(".")[2])) is not None:
            kept = {name: value for name, value in logger["init_args"].items() if name in KEPT}
            loggers[index] = {"class_path": logger["class_path"], "init_args": {**replaced, **kept}}
        else:  # of a trusted package, whose run is another one
            logger["init_args"] |= {name: None for name in ("version", "id") if name in logger["init_args"]}
    if callbacks:
        trainer["callbacks"] = [each for each in callbacks if each["class_path"].rpartition(".")[2] not in SAVING]
    return settings
