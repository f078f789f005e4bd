"""Printed summary of a finished run: test metrics, a few predictions, and commands that use the run."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

from lightning import Trainer
from rich import box
from rich.table import Column, Table
from rich.text import Text

from lightning_tfm.callbacks import Predictions
from lightning_tfm.callbacks.summary import evaluated_splits, results
from lightning_tfm.errors import escape_controls, format_command, shell_quote
from lightning_tfm.inference import Prediction
from lightning_tfm.loggers import wandb_loggers
from lightning_tfm.runs.record import Run, is_per_category
from lightning_tfm.system.files import relative
from lightning_tfm.system.terminal import LiteralConsole

MAX_SOURCE_LENGTH = 100
"""Maximum length of a source in the summary, in characters."""

MAX_PREDICTIONS = 3
"""Maximum number of correct predictions and of wrong predictions in the summary."""


def print_results(trainer: Trainer) -> None:
    """Print the metrics and a few predictions."""
    console = LiteralConsole(soft_wrap=True)
    split, metrics = results(trainer)
    table = Table(split, Column("", justify="right"), box=box.SIMPLE_HEAD)
    for name, value in metrics.items():
        if not is_per_category(f"{split}/{name}"):  # shown by the report
            table.add_row(name, f"{value:.4f}")
    console.print(table)
    lines = _predictions_of_first_split(trainer)
    wrong = sorted((line for line in lines if not line["correct"]), key=lambda line: -line["nll"])
    for line in [line for line in lines if line["correct"]][:MAX_PREDICTIONS]:
        console.print(_format_prediction("correct  ", line, "green"))
    for line in wrong[:MAX_PREDICTIONS]:
        console.print(_format_prediction("wrong    ", line, "red") + f" (expected {escape_controls(line['target'])})")


def print_next_commands(trainer: Trainer, checkpoint: str, trust_packages: str) -> None:
    """Print commands that use a run."""
    folder = relative(Path(checkpoint).parents[1])
    # "-" starts an option
    sources = (line["source"] for line in _predictions_of_first_split(trainer) if not line["source"].startswith("-"))
    example = next((shell_quote(_truncate(source)) for source in sources), "TEXT")
    print(f"\nThe run is saved in {escape_controls(folder)}.\nTo query the model or view its report:\n")
    trusting = ["--trust-package", shell_quote(trust_packages)] if trust_packages else []
    is_run = Run(Path(folder)).exists
    named = shell_quote(folder if is_run else checkpoint)
    for command in [["generate", named, example], *([["report", named]] if is_run else [])]:
        print(format_command([_executable("lightning-tfm"), *command, *trusting], sys.stdout))
    print_state_of_wandb(trainer)


def print_state_of_wandb(trainer: Trainer) -> None:
    """Print, dimmed, whether W&B logs examples, and the command that uploads an offline run."""
    console = LiteralConsole(soft_wrap=True, style="dim")
    for logger in wandb_loggers(trainer):
        pattern = logger.offline_pattern
        if pattern is None and (logger.log_examples or logger.run_id is None):
            continue
        state = "W&B" if pattern is None else "W&B, offline"
        if logger.unreachable is not None:
            state += f" since {logger.unreachable} cannot be reached"
        examples = "" if logger.log_examples else " without examples (--trainer.logger.log_examples true logs them)"
        message = f"\n{state}: the run is logged{examples}{'' if pattern is None else '; to upload it:'}"
        console.print(message, soft_wrap=not console.is_terminal)
        if pattern is not None:
            console.print(format_command([_executable("wandb"), "sync", pattern], sys.stdout))


def _predictions_of_first_split(trainer: Trainer) -> list[Prediction]:
    """Return the predictions of the first test split, or of the validation split."""
    tested = next((other.lines for other in trainer.callbacks if isinstance(other, Predictions)), [])
    return [line for name, _, line in tested if name == evaluated_splits(trainer)[0]]


def _format_prediction(label: str, line: Prediction, style: str) -> Text:
    source, prediction = (escape_controls(text) for text in (_truncate(line["source"]), line["prediction"]))
    return Text.assemble(label, source, " → ", (prediction, style))


def _truncate(text: str) -> str:
    """Truncate a long text, at a space if possible."""
    if len(text) <= MAX_SOURCE_LENGTH:
        return text
    beginning = text[:MAX_SOURCE_LENGTH]
    return beginning.rpartition(" ")[0] or beginning


def _executable(command: str) -> str:
    """Return the name of a command, or its path in this environment if it is not on PATH."""
    return command if shutil.which(command) else shlex.quote(relative(Path(sys.executable).with_name(command)))
