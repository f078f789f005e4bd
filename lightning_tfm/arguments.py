"""Positional arguments: the experiment of `fit`, and the checkpoint of `validate` and `test`."""

from __future__ import annotations

from pathlib import Path

from lightning_tfm.checkpoint import read_index
from lightning_tfm.errors import UserError


def with_options(arguments: list[str], folder: Path) -> list[str]:
    """Replace a positional argument, an experiment to fit or a checkpoint to evaluate, with the equivalent options.

    Args:
        arguments: the command and its arguments.
        folder: a folder for the configuration of the checkpoint's experiment.

    Raises:
        UserError: if the command has no arguments, or the checkpoint does not contain its configuration.
    """
    if len(arguments) == 1:
        missing = "an experiment; `lightning-tfm list` shows them" if arguments == ["fit"] else "a checkpoint"
        raise UserError(f"lightning-tfm {arguments[0]} needs the name of {missing}")
    if arguments[1].startswith("-"):
        return arguments
    command, *options = arguments
    if command == "fit":
        return [command, "--config", *options]
    path = Path(options[0])
    if path.is_dir():
        path = next((file for name in ("best", "last") if (file := path / f"checkpoints/{name}.ckpt").is_file()), path)
    experiment = read_index(path).get("experiment")
    if experiment is None:
        raise UserError(
            f"CHECKPOINT must hold the configuration of its experiment, but {str(path)!r}, which was not written by "
            f"`lightning-tfm fit`, does not; try lightning-tfm {command} --config YAML --ckpt_path CHECKPOINT"
        )
    config = folder / f"{Path(experiment['name']).name}.yaml"
    config.write_text(experiment["config"], encoding="utf-8")
    return [command, "--config", str(config), "--ckpt_path", str(path), *options[1:]]
