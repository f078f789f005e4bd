"""`lightning-tfm sweep`: search for the best settings of an experiment, each trial of which is an ordinary run.

The folder of the sweep holds all of its state: the specification and the runs. A worker is one call of the command. It
locks the trials that it runs, and reads the outcomes of all trials from their folders. Several workers, also on several
machines that share the folder, therefore need no server, and a worker may be killed at any time.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from argparse import Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from filelock import FileLock, lock_descriptor
from rich import box
from rich.table import Table

from lightning_tfm.commands.parser import CommandParser
from lightning_tfm.config.experiments import find_experiment
from lightning_tfm.config.settings import read_json, read_yaml
from lightning_tfm.errors import UserError, handle_signals, interrupt, rank_zero_print, shell_quote
from lightning_tfm.fit.cli import TfmCLI, run
from lightning_tfm.fit.trainer_settings import WANDB
from lightning_tfm.reporting import render_sweep
from lightning_tfm.runs.children import INTERVAL, ChildRun
from lightning_tfm.sweeps import (
    Outcome,
    Trials,
    best_experiment,
    full_name,
    importances,
    ranked,
    read_specification,
    save_study,
    summarize,
    table,
    trial_name,
)
from lightning_tfm.sweeps.trials import FAILURE, SETTINGS
from lightning_tfm.system.files import make_folder, relative, write_text
from lightning_tfm.system.progress import progress_bar
from lightning_tfm.system.terminal import LiteralConsole, format_value

SPECIFICATION = "sweep.json"
"""File in the folder of a sweep: the specification and the YAML of the experiment, which must not change."""

LOCK = ".lock"
"""File in the folder of a sweep: the lock of the worker that writes the other files there."""

ERROR = "lightning-tfm: error: "
"""Beginning of the last line of a run that has failed."""

CLAIM, LOG = ".claim", "log"
"""Files in the folder of a trial: the lock of the worker that runs it, and the output of the run."""

SHOWN = 10
"""Number of trials in the table in the terminal."""

MAX_KILLS = 10
"""Maximum number of times that a run may be killed before the worker stops."""


class ParsingCLI(TfmCLI):
    """TfmCLI that parses and checks the settings of `fit`, but constructs and runs nothing."""

    def instantiate_classes(self) -> None:
        """Construct nothing."""

    def after_instantiate_classes(self) -> None:
        """Check nothing that is not constructed."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing."""


def sweep(arguments: list[str]) -> int:
    """Run the trials of a sweep that no other worker runs, and show the results once all trials are decided.

    Args:
        arguments: the command-line arguments.

    Returns:
        The exit status: 1 if no trial has finished, 0 otherwise.
    """
    options = _parse(arguments)
    if find_spec("optuna") is None:
        raise UserError("lightning-tfm sweep needs the package optuna; pip install 'lightning_tfm[sweep]'")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    handle_signals(interrupt)
    worker = Worker(options)
    worker.check()
    worker.work()
    return worker.show()


def make_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        "lightning-tfm sweep",
        description="Search for the best settings of an experiment. Run the command again to resume it after an "
        "interruption, or to join it on another machine that shares the folder.",
    )
    parser.add_argument("specification", metavar="SPEC", type=Path, help="the YAML file of the sweep")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="number of trials that this worker runs at a time (default: 1)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="folder of the trials and results (default: runs/SPEC)"
    )
    parser.add_trust_package()
    return parser


def _parse(arguments: list[str]) -> Namespace:
    options = make_parser().parse_args(arguments)
    if options.jobs < 1:
        raise UserError(f"--jobs must be at least 1, but is {options.jobs}; try 1")
    options.output = options.output or Path("runs", options.specification.stem)
    if options.output.is_file():
        raise UserError(f"--output must be a folder, but {str(options.output)!r} is a file; choose another")
    return options


class Worker:
    """Worker of a sweep, which runs trials in child processes.

    Args:
        options: the options of the command.
    """

    def __init__(self, options: Namespace) -> None:
        self.folder, self.jobs = options.output, options.jobs
        self.specification = read_specification(options.specification)
        self.path = find_experiment(self.specification.experiment)
        self.experiment = read_yaml(self.path, "experiment")
        self.trust_packages: Sequence[str] = options.trust_package
        self.config: dict[str, Any] = {}
        self.children: dict[int, tuple[ChildRun, int]] = {}  # by trial, with the descriptor of its lock
        self.kills: dict[int, int] = {}  # by trial

    def check(self) -> None:
        """Check the settings and the folder, and run one batch of the experiment in a new sweep.

        Raises:
            UserError: if `fit` would refuse a setting, or if the folder holds another sweep.
        """
        specification = self.specification
        given = {*specification.settings, *specification.search}
        for name, instead in (("max_epochs", "max_steps"), ("check_val_every_n_epoch", "val_check_interval")):
            if f"trainer.{name}" in given or self.experiment.get("trainer", {}).get(name) not in (None, -1):
                raise UserError(
                    f"trainer.{name} must not be set in a sweep, whose trials are compared by steps; set {instead}"
                )
        self.config = self._parsed(specification.settings)
        for name in (*specification.settings, *specification.search):
            self._check_name(name)
        bounds = [[(name, value) for value in space.bounds] for name, space in specification.search.items()]
        for values in zip_longest(*bounds):
            self._parsed(specification.settings | dict(value for value in values if value is not None))
        max_steps, interval = (self.config["trainer"][name] for name in ("max_steps", "val_check_interval"))
        if max_steps < 1:
            raise UserError("trainer.max_steps must be set in the experiment or in settings, since trials must end")
        searched = {name.rpartition(".")[2] for name in specification.search}
        if not {"max_steps", "val_check_interval", "accumulate_grad_batches"}.isdisjoint(searched):
            raise UserError(
                "search must not contain trainer.max_steps, val_check_interval or accumulate_grad_batches, since the "
                "trials are compared by steps; set them in settings"
            )
        steps = interval / self.config["trainer"]["accumulate_grad_batches"] if isinstance(interval, int) else None
        if specification.asha and steps and specification.asha.min_steps % steps:
            raise UserError(
                f"asha.min_steps must be a multiple of the steps between two validations ({steps:g}, see "
                f"trainer.val_check_interval), but is {specification.asha.min_steps}"
            )
        self.trials = Trials(specification, self.folder, max_steps)
        self._check_folder()
        self.trials.update()
        with FileLock(self.folder / LOCK):  # another worker may start at the same time
            self._check_folder()
            if not (self.folder / SPECIFICATION).is_file():
                self._check_experiment()
            write_text(self.folder / SPECIFICATION, json.dumps(self._identity(), indent=2) + "\n")

    def _parsed(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return all settings of `fit`, after its checks."""
        return run(["fit", *self._arguments(settings)], ParsingCLI).settings()

    def _arguments(self, settings: dict[str, Any]) -> list[str]:
        objective = self.specification.objective
        arguments = ["--config", str(self.path), "--skip-test"]
        arguments += [f"--checkpoint.monitor={objective.metric}", f"--checkpoint.mode={objective.mode}"]
        arguments += [f"--{name}={_as_argument(value)}" for name, value in settings.items()]
        if objective.reach is not None:  # stopping_threshold must be exceeded
            threshold = np.nextafter(np.float32(objective.reach), np.float32(objective.sign * np.inf))
            stopping = {"monitor": objective.metric, "mode": objective.mode, "stopping_threshold": float(threshold)}
            stopping |= {"patience": 10**9, "check_on_train_epoch_end": False}
            callback = {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": stopping}
            arguments += [f"--trainer.callbacks+={json.dumps(callback)}"]
        if self.trust_packages:
            arguments += ["--trust-package", ",".join(self.trust_packages)]
        return arguments

    def _check_name(self, name: str) -> None:
        try:
            full_name(self.config, name)
        except KeyError:
            raise UserError(
                f"the experiment has no setting {name!r}; `lightning-tfm fit --help-all` lists them"
            ) from None

    def _identity(self) -> dict[str, Any]:
        """Return what must not change, except for the number of trials, which may grow."""
        specification = json.loads(json.dumps(self.specification, default=vars))
        return {"specification": specification, "experiment": self.path.read_text(encoding="utf-8")}

    def _check_folder(self) -> None:
        path = self.folder / SPECIFICATION
        if not path.is_file():
            if self.folder.is_dir() and any(
                not other.name.startswith((LOCK, path.name)) for other in self.folder.iterdir()
            ):
                raise UserError(
                    f"--output must be a new folder or one of this sweep, but {str(self.folder)!r} holds other files"
                )
            return
        earlier, ours = read_json(path, specification=dict), self._identity()
        for name, value in ours["specification"].items():
            old = earlier["specification"].get(name)
            if name == "trials" and value > old and self.specification.sampler != "grid":
                continue
            if value != old:
                raise UserError(
                    f"{name} must match the sweep in {str(self.folder)!r} ({_short(old)}), but is {_short(value)}; "
                    "restore it, or choose another --output"
                )
        if earlier.get("experiment") != ours["experiment"]:
            raise UserError(
                f"the experiment must match the sweep in {str(self.folder)!r}, but {str(self.path)!r} has changed; "
                "restore it, or choose another --output"
            )

    def _check_experiment(self) -> None:
        """Run one batch of the experiment, which checks what only a run can check, such as the name of the metric."""
        arguments = [*self._arguments(self.specification.settings), "--dry-run"]
        with TemporaryDirectory() as folder:
            for _ in range(MAX_KILLS):
                child = ChildRun(arguments, Path(folder, LOG), self.specification.threads)
                try:
                    status = child.process.wait()
                finally:
                    child.terminate()
                if not _is_killed(status):
                    break
            if status:
                shutil.rmtree(self.folder)
                message = child.last_line.removeprefix(ERROR).replace("checkpoint.monitor", "objective.metric")
                message = message.replace("checkpoint.mode", "objective.mode")
                raise UserError(f"the experiment of the sweep cannot run: {message}")

    def work(self) -> None:
        """Run trials until all are decided; a signal stops the runs of this worker, which save a checkpoint."""
        trials = self.trials
        with progress_bar("trials", shown=os.isatty(2), total=self.specification.trials) as bar:
            bar.update(len(trials.outcomes))
            try:
                while not trials.is_complete:
                    for outcome in trials.update():
                        bar.update()
                        rank_zero_print(self._describe(outcome))
                    self._watch()
                    while len(self.children) < self.jobs and self._start_next():
                        pass
                    time.sleep(INTERVAL)
            finally:
                for child, _ in self.children.values():
                    child.terminate()
                for child, claim in self.children.values():
                    child.process.wait()
                    os.close(claim)

    def _watch(self) -> None:
        """Stop the runs of decided trials, and handle the runs that have ended."""
        for number, (child, claim) in list(self.children.items()):
            if number in self.trials.outcomes:
                child.terminate()
            if child.is_running:
                continue
            status = child.process.returncode
            is_killed = _is_killed(status)
            if status and not is_killed and number not in self.trials.outcomes:
                write_text(self.trials.run(number) / FAILURE, child.last_line.removeprefix(ERROR))
            del self.children[number]
            os.close(claim)
            if is_killed and number not in self.trials.outcomes:
                self.kills[number] = self.kills.get(number, 0) + 1
                if self.kills[number] == MAX_KILLS:
                    raise UserError(
                        f"the run of trial {number} was killed {MAX_KILLS} times, perhaps since it needs more memory "
                        f"than there is; see {relative(child.log)}, and run the command again"
                    )

    def _start_next(self) -> bool:
        """Start or resume the first trial that no worker runs; return False if there is none."""
        for number in range(len(self.trials.settings)):
            if number in self.trials.outcomes or number in self.children:
                continue
            claim = _claim(self.trials.run(number))
            if claim is None:
                continue
            if self.trials.has_ended(number):  # since the folders were read
                os.close(claim)
                continue
            try:
                self.children[number] = self._start(number, claim), claim
            except BaseException:
                os.close(claim)
                raise
            return True
        return False

    def _start(self, number: int, claim: int) -> ChildRun:
        folder = self.trials.run(number)
        arguments = self._arguments(self.specification.settings | self.trials.settings[number])
        arguments += ["--trainer.enable_progress_bar=false", "--trainer.logger", json.dumps(self._loggers(number))]
        if any(folder.glob("checkpoints/*.ckpt")):
            arguments += ["--ckpt_path", str(folder.absolute())]
        else:  # killed before its first checkpoint
            for path in folder.iterdir():
                if path.name not in (CLAIM, SETTINGS):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.trials.record(number)
        return ChildRun(arguments, folder / LOG, self.specification.threads, [claim])

    def _loggers(self, number: int) -> list[dict[str, Any]]:
        """Return the loggers of a trial, whose CSVLogger creates its folder; W&B groups the trials of a sweep."""
        first, *others = self.config["trainer"]["logger"]
        place = {"save_dir": str(self.folder.parent), "name": self.folder.name, "version": trial_name(number)}
        loggers = [first | {"init_args": first["init_args"] | place}]
        for logger in others:
            group = {"group": self.folder.name} if logger["class_path"] == WANDB else {}
            loggers.append(logger | {"init_args": logger["init_args"] | group})
        return loggers

    def _describe(self, outcome: Outcome) -> str:
        names = self.specification.short_names
        settings = ", ".join(f"{names[name]} {_as_argument(value)}" for name, value in outcome.settings.items())
        reason = f": {outcome.message}" if outcome.message else ""
        return f"trial {outcome.number}: {summarize(self.specification.objective, outcome)} ({settings}){reason}"

    def show(self) -> int:
        """Print the best trials and the importances, and write the table, the best experiment and the page.

        Returns:
            The exit status.
        """
        specification, folder = self.specification, self.folder
        outcomes = ranked(specification, self.trials.outcomes.values())
        weights = importances(specification, outcomes)
        text = self._best_experiment(outcomes)
        curves = {number: self.trials.curve(number) for number in self.trials.outcomes}
        with FileLock(folder / LOCK):
            write_text(folder / "trials.csv", table(specification, outcomes))
            save_study(specification, self.trials.outcomes, folder / "study.log")
            if text:
                write_text(folder / "best.yaml", text)
            write_text(folder / "sweep.html", render_sweep(folder.name, specification, outcomes, weights, curves, text))
        names = specification.short_names
        console = LiteralConsole()
        shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        shown.add_column("rank", justify="right")
        shown.add_column("trial", justify="right")
        shown.add_column("result")
        for name in specification.search:
            shown.add_column(names[name], justify="right", overflow="fold")
        for rank, outcome in enumerate(outcomes[:SHOWN], start=1):
            cells = (_as_argument(outcome.settings[name]) for name in specification.search)
            shown.add_row(str(rank), str(outcome.number), summarize(specification.objective, outcome), *cells)
        console.print(f"\nTrials by {specification.objective.description}:")
        console.print(shown)
        if weights:
            described = ", ".join(f"{names[name]} {format_value(weight)}" for name, weight in weights.items())
            console.print(f"Importance for the best tenth (PED-ANOVA): {described}")
        if not text:
            metric = specification.objective.metric
            console.print(f"No trial has finished with a finite {metric}; see {relative(folder / 'trials.csv')}.")
            return 1
        console.print(
            f"All {len(outcomes)} trials: {relative(folder / 'trials.csv')}, {relative(folder / 'sweep.html')}"
        )
        console.print(f"\n  lightning-tfm fit --config {shell_quote(relative(folder / 'best.yaml'))}")
        return 0

    def _best_experiment(self, outcomes: Sequence[Outcome]) -> str:
        """Return the YAML of the best trial's experiment; empty if no trial has finished."""
        specification, best = self.specification, outcomes[0]
        if best.value is None:
            return ""
        description = (
            f"# The best of {len(outcomes)} trials of {specification.experiment}: trial {best.number}, "
            f"{specification.objective.description}: {summarize(specification.objective, best)}.\n"
        )
        settings = specification.settings | best.settings
        return description + best_experiment(self.experiment, self.config, settings)


def _is_killed(status: int) -> bool:
    """Return whether a signal ended a process, given its exit status."""
    return status < 0 or status > 128


def _claim(folder: Path) -> int | None:
    """Lock a trial, and return the descriptor of the lock; None if another worker or its run holds the lock.

    The run inherits the descriptor, so the lock is held until both the worker and the run have ended, even by SIGKILL.
    """
    make_folder(folder)
    descriptor = os.open(folder / CLAIM, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if lock_descriptor(descriptor, blocking=False):
            return descriptor
    except OSError as error:
        os.close(descriptor)
        raise UserError(
            f"--output must be on a file system with locks, but {str(folder.parent)!r} is not ({error.strerror}); "
            "choose another folder"
        ) from None
    os.close(descriptor)
    return None


def _as_argument(value: Any) -> str:
    """Return a setting as it is typed on the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
