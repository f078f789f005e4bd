"""Folder of a run: the names of its files, their contents as records, and the state of the run.

docs/reference/run_folder.md describes the format, which has the version `FORMAT`.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar, Literal, NotRequired

from filelock import FileLock
from typing_extensions import TypedDict

from lightning_tfm.config.settings import (
    IGNORED,
    SEEDS,
    is_below,
    read_json,
    read_yaml,
    settings_of_weights,
    without_seed,
)
from lightning_tfm.errors import UserError, rank_zero_print
from lightning_tfm.runs.attention_history import AttentionHistory
from lightning_tfm.runs.inspection import Inspection
from lightning_tfm.runs.lock import INTERVAL, is_locked, lock_file
from lightning_tfm.system.files import copy_file, write_text
from lightning_tfm.system.versions import Git, Hardware

FORMAT = 1
"""Version of the format of a run's files, which is increased when their meaning changes; stored in each `Start`."""

TIME_LIMIT = "time limit"
"""Reason to stop early after which a run can be continued."""

HEADLINES = ("val/bleu", "val/exact_match", "val/accuracy", "val/loss_per_character", "val/loss")
"""Metrics by priority; the first that a run has logged is its main one."""

FINAL = ("test/", "val/final/")
"""Prefixes of the metrics of the evaluation after training."""

PER_CATEGORY = {"exact_match": True, "nll": False, "ser": False, "wer": False}
"""Metrics that are computed for each category of pairs, and whether higher values are better."""

MACRO = "macro_"
"""Prefix of the names of means over categories, each of which has the same weight whatever its number of pairs."""

HEAD_SCORES = "val/heads/"
"""Prefix of the metrics of `HeadScores`, which are named val/heads/LAYER/head_N/SCORE."""

TELEMETRY = ("trainer/tokens_per_second", "trainer/gpu_memory_gib", "trainer/mfu", "DeviceStatsMonitor.")
"""Prefixes of the metrics of speed and memory, which differ between equal runs."""

CHECKPOINT_NAME = re.compile(r"best\.ckpt|last\.ckpt|step_(0|[1-9][0-9]*)\.ckpt")
"""File names of the checkpoints that `fit` saves; their folder may contain other files."""


def is_per_category(metric: str) -> bool:
    """Return whether a metric is computed for a category of pairs, such as test/exact_match/CATEGORY."""
    return any(name in metric.split("/")[:-1] for name in PER_CATEGORY)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Results and cost of a run.

    Attributes:
        test: the test metrics by name; missing after a validation, or if the data have no test split.
        val: the metrics of the validation split in place of those of the test.
        higher_is_better: whether higher values of a metric, also of the validations, are better, by name; others have
            not been declared.
        token_metrics: the metrics that are not comparable between tokenizers, such as a loss per token.
        signatures: the settings of sacrebleu's scores, by name.
        train_seconds: the training time in seconds, including validation and the time before the run was resumed;
            missing in a later test or validation.
        samples_per_second: the training examples per second of this time.
        checkpoint: the path of the evaluated checkpoint, only in a later test or validation.
        members: the paths of the checkpoints that this checkpoint, an ensemble, consists of; missing for others.
        steps: the number of training steps.
        stopped_early: "time limit", or "callback", such as EarlyStopping, if there are fewer steps than `max_steps`.
        parameters: the number of parameters.
        seed: the seed.
    """

    test: dict[str, float] | None = None
    val: dict[str, float] | None = None
    higher_is_better: dict[str, bool] = field(default_factory=dict)
    token_metrics: list[str] = field(default_factory=list)
    signatures: dict[str, str] = field(default_factory=dict)
    train_seconds: float | None = None
    samples_per_second: float | None = None
    checkpoint: str | None = None
    members: list[str] | None = None
    steps: int
    stopped_early: str | None = None
    parameters: int
    seed: int

    @property
    def split(self) -> Literal["test", "val"]:
        """Return the name of the main test set: "test" or, without one, "val"."""
        return "val" if self.test is None else "test"

    @property
    def metrics(self) -> dict[str, float]:
        """Return the metrics by full name, such as "test/exact_match"."""
        return {f"{self.split}/{name}": value for name, value in (self.test or self.val or {}).items()}

    @property
    def headline(self) -> tuple[str, float] | None:
        """Return the main metric, such as ("test/exact_match", 1.0): the first of HEADLINES, if there is one."""
        names = (name.replace("val", self.split, 1) for name in HEADLINES)
        return next(((name, self.metrics[name]) for name in names if name in self.metrics), None)


class Lineage(TypedDict):
    """Point of another run at which a fork begins.

    Attributes:
        run: the folder of the run, relative to the working directory.
        step: the step after which the settings change.
        checkpoint: the SHA-256 of its last checkpoint up to this step, after which the steps were replayed; null if all
            steps were.
    """

    run: str
    step: int
    checkpoint: str | None


class Format(TypedDict):
    """Part of a `Start` that all versions of the format have."""

    format: int


class Start(Format):
    """Start or resumption of a run.

    Attributes:
        format: the version of the format of the run's files.
        time: the time in UTC, in ISO format.
        step: the step at which training starts, or of the tested checkpoint.
        command: the command line.
        checkpoint: the tested or validated checkpoint, or that of another run from which training starts; null if none.
        changed_settings: the settings that differ from the checkpoint from which training starts, as [old, new].
        fork: where a fork begins; missing in other starts.
        git: the repository of the working directory.
        framework: the repository of this package.
        versions: the versions of Python and the packages.
        hardware: the machine.
        processes: the number of processes.
        data_fingerprint: a hash of the texts of each split.
        data_sizes: the number of examples of each split; missing in runs of earlier versions.
        tokenizer_fingerprint: a hash of the tokenizer.
        scored_symbols: the symbols that the symbol error rate counts, see `Tokenizer`.
        wandb: the id of the run in W&B; null without W&B.
    """

    time: datetime
    step: int
    command: str
    checkpoint: str | None
    changed_settings: Mapping[str, Sequence[Any]]
    fork: NotRequired[Lineage]
    git: Git
    framework: Git
    versions: dict[str, str]
    hardware: Hardware
    processes: int
    data_fingerprint: dict[str, str]
    data_sizes: NotRequired[dict[str, int]]
    tokenizer_fingerprint: str
    scored_symbols: str
    wandb: str | None


class Prediction(TypedDict):
    """Prediction for an example.

    Attributes:
        split: the name of the test set.
        source: the input text.
        target: the reference.
        prediction: the output.
        correct: whether the output equals the reference.
        nll: the negative log-likelihood of the reference, in nats.
        category: the category of the example; null if the data have no categories.
        alignment: the gold links [source index, target index]; null if unknown.
        probability: the probability of the predicted label, only in classification.
    """

    split: NotRequired[str]
    source: str
    target: str
    prediction: str
    correct: bool
    nll: float
    category: str | None
    alignment: Sequence[Sequence[int]] | None
    probability: NotRequired[float]


@dataclass(frozen=True)
class Run:
    """Folder that `fit`, `test` or `validate` writes, with a reader and a writer for each file.

    Args:
        folder: the folder.

    Note:
        Properties read a file once. Create another `Run` to read what a running process has written since.
    """

    folder: Path

    CONFIG: ClassVar = "config.yaml"
    SUMMARY: ClassVar = "summary.json"
    PROVENANCE: ClassVar = "provenance.json"
    DIFF: ClassVar = "uncommitted_{}.diff"
    METRICS: ClassVar = "metrics.csv"
    PREDICTIONS: ClassVar = "predictions.jsonl"
    EXAMPLES: ClassVar = "examples.json"
    HISTORY: ClassVar = "history.json"
    PICTURE: ClassVar = "{}.png"
    EXAMPLE_PICTURE: ClassVar = "example_{:04}_{}.png"
    BEST: ClassVar = "best.ckpt"
    LAST: ClassVar = "last.ckpt"
    STEP: ClassVar = "step_{}.ckpt"
    INSPECTION: ClassVar = "inspect.json"
    TABLES: ClassVar = "tables.tex"
    LOCK: ClassVar = ".lock"

    @classmethod
    def below(cls, folder: Path) -> list[Run]:
        """Return the runs in a folder, which may be one, sorted by path; W&B also writes files named config.yaml."""
        configs = sorted(folder.rglob(cls.CONFIG))
        return [cls(path.parent) for path in configs if "wandb" not in path.relative_to(folder).parts]

    @classmethod
    def of(cls, checkpoint: Path) -> Run:
        """Return the run that has written a checkpoint."""
        return cls(checkpoint.parents[1])

    # Settings and state

    @property
    def exists(self) -> bool:
        """Return whether the folder is that of a run."""
        return (self.folder / self.CONFIG).is_file()

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return the settings, nested as in the file.

        Raises:
            UserError: if the file does not exist or is damaged.
        """
        return read_yaml(self.folder / self.CONFIG, "RUN")

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Return the settings that change the weights, by dotted name, except for the seed.

        Those of a fork include `fork`, the step at which it begins and the settings before.

        Raises:
            UserError: if a file does not exist or is damaged.
        """
        forks = [describe_fork(start["fork"]["step"], start["changed_settings"]) for start in self.forks]
        return without_seed(settings_of_weights(self.config)) | ({"fork": "; ".join(forks)} if forks else {})

    @property
    def is_empty(self) -> bool:
        """Return whether there is no checkpoint, no logged metric and no result."""
        return not self.has_finished and not any(self.checkpoint_folder.glob("*")) and not self.metrics()

    @property
    def has_finished(self) -> bool:
        """Return whether the run has a summary, which is written last."""
        return (self.folder / self.SUMMARY).is_file()

    @property
    def state(self) -> Literal["running", "interrupted", "finished", "evaluated"]:
        """Return the state; that of a later test or validation of a checkpoint is "evaluated".

        Raises:
            UserError: if the summary is damaged.
        """
        if not self.has_finished:
            return "running" if self.is_locked else "interrupted"
        return "evaluated" if self.summary.train_seconds is None else "finished"

    @property
    def is_locked(self) -> bool:
        """Return whether a process holds the lock."""
        return is_locked(self.folder / self.LOCK)

    def lock(self) -> FileLock:
        """Lock the run until the returned lock is deleted or the process ends, even by SIGKILL.

        Raises:
            UserError: see `lock_file`.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        return lock_file(self.folder / self.LOCK, f"the run {str(self.folder)!r}")

    def wait(self) -> None:
        """Wait until no process holds the lock, such as the child of a command that was killed."""
        if self.is_locked:
            rank_zero_print(f"waiting for the process that writes {self.folder}")
        while self.is_locked:
            time.sleep(INTERVAL)

    # Results

    @cached_property
    def summary(self) -> Summary:
        """Return the results of a run that has finished.

        Raises:
            UserError: if it has not, or the file is damaged.
        """
        if not self.has_finished:
            raise UserError(f"the run {str(self.folder)!r} must have finished, but has not; resume it with --ckpt_path")
        return read_json(self.folder / self.SUMMARY, Summary)

    @property
    def tested_checkpoints(self) -> list[Path]:
        """Return where the checkpoint of a later test or validation may be; empty for a run that has trained.

        Raises:
            UserError: see `summary`.
        """
        if (checkpoint := self.summary.checkpoint) is None:
            return []
        # Relative to the folder where the command ran, or beside the folder of the test.
        return [Path(checkpoint), self.folder.parent.joinpath(*Path(checkpoint).parts[-3:])]

    def write_summary(self, summary: Summary) -> None:
        """Write the results, which marks the run as finished."""
        content = {name: value for name, value in asdict(summary).items() if value is not None}
        write_text(self.folder / self.SUMMARY, json.dumps(content, indent=2) + "\n")

    @cached_property
    def starts(self) -> list[Start]:
        """Return the starts of the run, the first one first; empty if the file does not exist.

        Raises:
            DamagedError: if the file is damaged.
            UserError: if it cannot be read, or has another version of the format.
        """
        path = self.folder / self.PROVENANCE
        if not path.exists():
            return []
        for start in read_json(path, list[Format]):
            if start["format"] != FORMAT:
                raise UserError(
                    f"{str(path)!r} must have version {FORMAT} of the format of a run, but has version "
                    f"{start['format']}; use the version of lightning_tfm that wrote it"
                )
        return read_json(path, list[Start])

    @property
    def forks(self) -> list[Start]:
        """Return the starts at which forks began, those of the runs that were forked first; empty for other runs.

        Raises:
            UserError: see `starts`.
        """
        return [start for start in self.starts if "fork" in start]

    @property
    def begins_elsewhere(self) -> bool:
        """Return whether training began with a checkpoint of another run, as that of a fork does.

        Raises:
            UserError: see `starts`.
        """
        return any("fork" in start or start["checkpoint"] for start in self.starts)

    @property
    def wandb_id(self) -> str | None:
        """Return the id of the run in W&B; None if it was not logged to W&B, or the starts are damaged."""
        with suppress(UserError):
            return next((start["wandb"] for start in reversed(self.starts) if start["wandb"]), None)
        return None

    @property
    def given_settings(self) -> dict[str, str]:
        """Return the settings that the command lines of the starts add to the experiment, without the seed, as texts.

        Raises:
            UserError: see `starts`.
        """
        given: dict[str, str] = {}
        for start in self.starts:
            words = shlex.split(start["command"])
            options = words[words.index("fit") + 1 :] if "fit" in words else []
            configs = [option for option in options[:1] if not option.startswith("-")]
            for option, following in itertools.pairwise([*options, "--"]):
                name, equals, value = option.removeprefix("--").partition("=")
                name = name.replace("-", "_")
                text = value if equals or following.startswith("--") else following
                if option in ("-c", "--config") or option.startswith("--config="):
                    configs.append(text)
                elif option.startswith("--") and not is_below(name, (*IGNORED, *SEEDS)):
                    given[name] = text
            given |= {"config": ", ".join(configs[1:])} if configs[1:] else {}  # the first is the experiment
        return given

    @property
    def size(self) -> int:
        """Return the size of all files, in bytes."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    @property
    def modified(self) -> float:
        """Return when a file was last modified, in seconds since the epoch."""
        return max((path.stat().st_mtime for path in self.folder.rglob("*") if path.is_file()), default=0.0)

    def write_starts(self, starts: Sequence[Start]) -> None:
        """Write the starts of the run."""
        content = json.dumps(starts, indent=2, default=datetime.isoformat)
        write_text(self.folder / self.PROVENANCE, content + "\n")

    def write_diff(self, number: int, diff: str) -> None:
        """Write the uncommitted changes at a start, readable by the owner only, since they may contain secrets."""
        write_text(self.folder / self.DIFF.format(number), diff, mode=0o600)

    @cached_property
    def predictions(self) -> list[Prediction]:
        """Return the predictions of the test; empty if there are none, as for a language model.

        Raises:
            UserError: if the file is damaged.
        """
        return self.first_predictions(None)

    def first_predictions(self, number: int | None) -> list[Prediction]:
        """Return at most this number of predictions of the test; all for None.

        Raises:
            UserError: if their lines are damaged.
        """
        path = self.folder / self.PREDICTIONS
        if not path.is_file():
            return []
        with path.open("rb") as file:  # lines of text would also end at a carriage return, which the data may contain
            lines = [line for line in itertools.islice(file, number) if line.endswith(b"\n")]
        return read_json(path, list[Prediction], b"[%b]" % b",".join(lines))

    def write_predictions(self, predictions: Iterable[Prediction]) -> None:
        """Write the predictions of the test."""
        lines = (json.dumps(prediction, ensure_ascii=False) for prediction in predictions)
        write_text(self.folder / self.PREDICTIONS, "".join(f"{line}\n" for line in lines))

    @property
    def attention_folder(self) -> Path:
        """Return the folder of the plots of attention weights and positional encodings."""
        return self.folder / "attention"

    @property
    def examples(self) -> list[dict[str, Any]]:
        """Return the examples whose attention was plotted after the test, see `Predictor.attention`.

        Raises:
            UserError: if the file is damaged.
        """
        path = self.attention_folder / self.EXAMPLES
        return read_json(path, list[dict[str, Any]]) if path.is_file() else []

    def write_examples(self, examples: Sequence[dict[str, Any]]) -> None:
        """Write the examples whose attention was plotted after the test."""
        write_text(self.attention_folder / self.EXAMPLES, json.dumps(examples, ensure_ascii=False))

    @property
    def attention_history(self) -> AttentionHistory | None:
        """Return the attention weights at the validations of the training; None if there are none.

        Raises:
            UserError: if the file is damaged.
        """
        path = self.attention_folder / self.HISTORY
        return read_json(path, AttentionHistory) if path.is_file() else None

    def write_attention_history(self, history: AttentionHistory) -> None:
        """Write the attention weights at the validations of the training."""
        write_text(self.attention_folder / self.HISTORY, json.dumps(history, ensure_ascii=False))

    @property
    def inspection_folder(self) -> Path:
        """Return the folder of the results of `inspect`."""
        return self.folder / "inspect"

    @property
    def inspection_path(self) -> Path:
        """Return the path of the results of `inspect` in JSON."""
        return self.inspection_folder / self.INSPECTION

    @property
    def inspection(self) -> Inspection | None:
        """Return the results of `inspect`; None if there are none.

        Raises:
            UserError: if the file is damaged.
        """
        return read_json(self.inspection_path, Inspection) if self.inspection_path.is_file() else None

    def write_inspection(self, inspection: Inspection) -> None:
        """Write the results of `inspect`."""
        content = json.dumps(inspection, ensure_ascii=False, allow_nan=False)
        write_text(self.inspection_path, content)

    # Metrics

    def metrics(self) -> list[dict[str, float]]:
        """Return the intact rows of metrics.csv, each with the values that were logged at a step, counted from 0."""
        rows, _ = self.read_rows()
        return [{name: float(value) for name, value in row.items() if value} for row in rows]

    def read_rows(self) -> tuple[list[dict[str, str]], int]:
        """Return the intact rows of metrics.csv as texts, and the number of damaged ones.

        Note:
            The last line of a running or killed process may be incomplete; it is not counted.
        """
        path = self.folder / self.METRICS
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        header, *lines = text.split("\n")[:-1] or [""]
        names, rows, damaged = _fields(header), [], 0
        for line in filter(str.strip, lines):
            try:
                row = dict(zip(names, _fields(line), strict=True))
                int(row["step"])
                for value in filter(None, row.values()):
                    float(value)
                rows.append(row)
            except (KeyError, ValueError):
                damaged += 1
        return rows, damaged

    def write_rows(self, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
        """Replace metrics.csv by rows."""
        text = StringIO()
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(rows)
        write_text(self.folder / self.METRICS, text.getvalue())

    def best(self) -> tuple[str, float] | None:
        """Return the validation metric that selects the checkpoint, and its best value; None if it is not known."""
        try:
            monitor, mode = (self.config["checkpoint"][name] for name in ("monitor", "mode"))
            directions = self.summary.higher_is_better if self.has_finished else self.last_checkpoint[2]
            higher_is_better = directions[monitor.removeprefix("val/")] if mode is None else mode == "max"
        except (UserError, AttributeError, KeyError, TypeError):  # edited by the user, or before the first checkpoint
            return None
        values = [row[monitor] for row in self.metrics() if monitor in row]
        values = [value for value in values if not math.isnan(value)] or values
        return (monitor, (max if higher_is_better else min)(values)) if values else None

    # Checkpoints

    @property
    def checkpoint_folder(self) -> Path:
        """Return the folder of the checkpoints."""
        return self.folder / "checkpoints"

    def checkpoint(self, *names: str) -> Path | None:
        """Return the first existing checkpoint of some file names, such as `BEST` and `LAST`; None if there is none."""
        return next(filter(Path.is_file, (self.checkpoint_folder / name for name in names)), None)

    def checkpoints(self) -> list[Path]:
        """Return the paths of the existing checkpoints."""
        return [path for path in self.checkpoint_folder.glob("*") if CHECKPOINT_NAME.fullmatch(path.name)]

    @cached_property
    def last_checkpoint(self) -> tuple[int, float | None, dict[str, bool]]:
        """Return the step and the training seconds of last.ckpt, and whether higher values of its monitor are better.

        Returns:
            The three; 0, None and {} without a readable checkpoint.
        """
        if (path := self.checkpoint(self.LAST)) is None:
            return 0, None, {}
        from lightning_tfm.checkpoint import read_index  # slow to import

        try:
            checkpoint = read_index(path)
            seconds = float(checkpoint["callbacks"]["Summary"]["train_seconds"])
            monitor = checkpoint["step_settings"]["checkpoint.monitor"].removeprefix("val/")
            directions = {monitor: checkpoint["callbacks"]["Checkpoints"]["higher_is_better"]}
            return checkpoint["global_step"], seconds, directions
        except (AttributeError, LookupError, TypeError, ValueError):  # including UserError
            return 0, None, {}

    # Damaged files, and an extension in a new folder

    def keep_damaged(self, name: str) -> Path:
        """Copy a damaged file, which the run then replaces, and return the path of the copy."""
        copy_file(self.folder / name, copy := self.folder / f"{name}.damaged")
        return copy

    def copy_history(self, extension: Run, step: int) -> None:
        """Copy what the training has recorded to the folder of an extension or a fork, which is another run in W&B.

        Starts after the step from which it trains on are omitted.
        """
        starts: list[Start] = [{**start, "wandb": None} for start in self.starts if start["step"] <= step]
        if starts:
            extension.write_starts(starts)
        paths = [self.folder / self.METRICS, self.attention_folder / self.HISTORY]
        for path in (*paths, *(self.folder / self.DIFF.format(number) for number in range(len(starts)))):
            if path.is_file():
                copy_file(path, extension.folder / path.relative_to(self.folder))


def describe_fork(step: int, changed: Mapping[str, Sequence[Any]]) -> str:
    """Return the step at which a fork begins and the settings before, without the seed, as in `Run.settings`."""
    return ", ".join([f"step {step}", *(f"{name} {old}" for name, (old, _) in without_seed({**changed}).items())])


def _fields(line: str) -> list[str]:
    """Return the fields of a line of a CSV file; empty if the line is damaged."""
    try:
        return next(csv.reader([line], strict=True), [])
    except csv.Error:
        return []
