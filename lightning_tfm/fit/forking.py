"""Forks: new runs that begin as another run was at a step, with other settings."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

import yaml

from lightning_tfm.checkpoint import has_training_state, read_index
from lightning_tfm.errors import DamagedError, UserError, rank_zero_print
from lightning_tfm.runs.names import named_run
from lightning_tfm.runs.record import Lineage, Run
from lightning_tfm.system.files import relative

CSV_LOGGER = "lightning.pytorch.loggers.CSVLogger"


class Fork(NamedTuple):
    """Point at which a fork begins.

    Attributes:
        run: the run that is forked.
        step: the step after which the settings change.
        kept: the last checkpoint of the run up to this step; None if it has none.
        checkpoint: the checkpoint to load: that of the step or, until the steps before it have been replayed, another
            one of the run, against which the settings are checked.
        is_replayed: whether steps of the run must be repeated or have been, since no checkpoint of the step is kept.
    """

    run: Run
    step: int
    kept: Path | None
    checkpoint: Path
    is_replayed: bool

    @property
    def lineage(self) -> Lineage:
        """Return the record of the fork in its provenance."""
        checksum = None if self.kept is None else _checksum(self.kept)
        return {"run": relative(self.run.folder), "step": self.step, "checkpoint": checksum}

    @property
    def names(self) -> list[str]:
        """Return the names of the runs from which the fork begins, see `fork_names`."""
        return [*fork_names(self.run), _name(self.lineage)]


def take_fork(arguments: list[str]) -> tuple[list[str], str | None]:
    """Return the arguments of a command without `--fork`, and its value; None if it is missing."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--fork")
    options, others = parser.parse_known_args(arguments)
    return others, options.fork


def find_fork(name: str, read: Callable[[Path], dict[str, Any]] = read_index) -> Fork:
    """Return the point that `RUN@STEP` names, or the last checkpoint of `RUN`.

    Args:
        name: the name of the point; RUN is resolved by `named_run`.
        read: a function that reads a checkpoint as `read_index` does.

    Raises:
        UserError: if there is no such run or step, or if the steps before it cannot be repeated.
    """
    run_name, at, text = name.rpartition("@")
    run = named_run(run_name if at else text)
    steps = {path: step for path in run.checkpoints() if (step := _step(path, read)) is not None}
    if not steps:
        raise UserError(f"--fork must name a run with an undamaged checkpoint, but {relative(run.folder)!r} has none")
    starts = run.starts
    first = max((start["step"] for start in run.forks), default=starts[0]["step"] if starts else 0)
    last = max(steps.values())
    step = int(text) if at and text.isdecimal() else 0 if at else last
    if not max(1, first) <= step <= last:
        raise UserError(
            f"--fork must name a step from {max(1, first)} to {last} of {relative(run.folder)!r}, but is {name!r}"
            + (f"; the steps before are those of the run that it began from, {_origin(run)}" if first else "")
        )
    kept = max((path for path in steps if first <= steps[path] <= step), key=lambda path: steps[path], default=None)
    if kept is None and first:
        raise UserError(
            f"--fork must name a step after a checkpoint of {relative(run.folder)!r}, which began at step {first}, "
            f"but is {name!r}; try {min(value for value in steps.values() if value >= first)}"
        )
    checkpoint = kept or max(steps, key=lambda path: steps[path])
    return Fork(run, step, kept, checkpoint, kept is None or steps[kept] < step)


def write_settings(run: Run, folder: Path, logs_to: Path | None = None) -> Path:
    """Write the settings of a run for a new one, and return the path of the YAML file.

    Args:
        run: the run.
        folder: the folder of the file.
        logs_to: the folder to which the new run is logged; None for the loggers of the run, without its identity.
    """
    settings = run.config | {"ckpt_path": None, "trust_package": ""}  # only the command line may set them
    trainer = settings["trainer"] = dict(settings["trainer"])
    if logs_to is not None:
        arguments = {"save_dir": str(logs_to), "name": "replay", "version": "version_0"}
        trainer["logger"] = [{"class_path": CSV_LOGGER, "init_args": arguments}]
        settings["name"] = None
    for logger in trainer["logger"] or ():
        identity = () if logs_to else ("version", "id")
        logger["init_args"] |= {name: None for name in identity if name in logger["init_args"]}
    path = folder / f"{'replay' if logs_to else run.folder.resolve().parent.name}.yaml"
    path.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return path


def compare_replay(replay: Run, run: Run) -> None:
    """Print the first step of a replay whose training loss differs from that in the log of the run."""
    losses = {row["step"]: row["train/loss"] for row in run.metrics() if "train/loss" in row}
    for row in replay.metrics():
        step, loss = row["step"], row.get("train/loss")
        if loss is not None and losses.get(step, loss) != loss:
            rank_zero_print(
                f"the repeated steps differ from {relative(run.folder)} from step {step + 1:.0f} on (train/loss "
                f"{loss}, was {losses[step]}): the processor, the versions or the number of threads are others"
            )
            return


def fork_names(run: Run) -> list[str]:
    """Return the names of the runs from which a run was forked, the first one first, such as `copy_gpt/version_0`."""
    with suppress(UserError):  # `Provenance` replaces a damaged file
        return [_name(start["fork"]) for start in run.forks]
    return []


def _name(lineage: Lineage) -> str:
    return "/".join(Path(lineage["run"]).parts[-2:])


def _step(path: Path, read: Callable[[Path], dict[str, Any]]) -> int | None:
    """Return the step of a checkpoint; None if training cannot be resumed from it."""
    try:
        content = read(path)
    except DamagedError:
        rank_zero_print(f"skipping {path}: it is damaged or incomplete")
        return None
    return int(content["global_step"]) if has_training_state(content) else None


def _origin(run: Run) -> str:
    """Return the run or the checkpoint from which a run began."""
    return repr(run.forks[-1]["fork"]["run"] if run.forks else run.starts[0]["checkpoint"])


def _checksum(path: Path) -> str:
    """Return the SHA-256 that a checkpoint contains."""
    return ZipFile(path).comment.decode().removeprefix("sha256:")
