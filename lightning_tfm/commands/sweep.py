"""`lightning-tfm sweep`: search for the best settings of an experiment.

Optuna chooses the trials, each of which is an ordinary run. A worker is one call of the command. Workers share Optuna's
study, which is a journal file in the folder of the sweep, or a database. A trial whose worker was killed is taken up by
another one: with a journal file, the lock of the trial tells that it is lost; with a database, its heartbeat does.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shutil
import sys
import time
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from filelock import FileLock, lock_descriptor

from lightning_tfm.commands.parser import CommandParser, trust_arguments
from lightning_tfm.config.settings import settings_of_weights
from lightning_tfm.errors import UserError, format_command, handle_signals, interrupt, rank_zero_print, shell_quote
from lightning_tfm.fit.cli import SettingsCLI, run
from lightning_tfm.reporting.sweep_page import (
    as_text,
    best_value,
    ranked,
    render_sweep,
    short_names,
    state_of,
    trial_table,
)
from lightning_tfm.runs.children import ChildRun, run_children
from lightning_tfm.runs.lock import INTERVAL
from lightning_tfm.runs.record import Run
from lightning_tfm.system.files import make_folder, relative, write_text
from lightning_tfm.system.private import record_heartbeat, running_trial
from lightning_tfm.system.progress import progress_bar

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import RDBStorage
    from optuna.trial import FrozenTrial, Trial, TrialState

MAX_KILLS = 10
"""Number of times that a run may be killed, after which a worker no longer starts it again."""

KILLED = f"it was killed {MAX_KILLS} times, perhaps since it needs more memory than there is"
"""Message about a run that was killed MAX_KILLS times."""

LOCK = ".lock"
"""File in the folder of a sweep: the lock of the worker that begins a trial or writes the other files there."""

HEARTBEAT, GRACE_PERIOD = 10, 60
"""Seconds between the heartbeats of a trial in a database, and those after the last one until the trial is retried."""

SHOWN = 10
"""Number of the best trials that the command prints at its end."""


class ParsingCLI(SettingsCLI):
    """TfmCLI that parses and checks the settings of `fit`, but constructs and runs nothing."""

    def instantiate_classes(self) -> None:
        """Construct nothing."""

    def after_instantiate_classes(self) -> None:
        """Check nothing that is not constructed."""


@dataclass
class TrialRun:
    """Run of a trial.

    Attributes:
        trial: the trial.
        record: the folder of the run.
        child: the process; None if the run has finished after its worker was killed.
        lock: the descriptor of the lock of the trial.
        beaten: the time of the last heartbeat.
    """

    trial: Trial
    record: Run
    child: ChildRun | None
    lock: int
    beaten: float = -math.inf


def sweep(arguments: list[str]) -> int:
    """Run the trials of a sweep that no other worker runs, and show the results once all trials have ended.

    Args:
        arguments: the command-line arguments.

    Returns:
        The exit status: 1 if no trial has finished, 0 otherwise.
    """
    options = make_parser().parse_args(arguments)
    if find_spec("optuna") is None:
        raise UserError("lightning-tfm sweep needs the package optuna; pip install 'lightning_tfm[sweep]'")
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    warnings.filterwarnings("ignore", "All-NaN slice encountered")  # MedianPruner then prunes the trial
    warnings.filterwarnings("ignore", "Heartbeat of storage is supposed to be used with Study.optimize")
    handle_signals(interrupt)
    try:
        worker = Worker(options)
        worker.work()
        return worker.show()
    except (ImportError, SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        if options.storage is None:
            raise
        reason = str(error).partition("\n")[0]
        message = re.sub(r"(://[^:/\s]*):\S*@", r"\1:***@", f"{options.storage!r} does not: {reason}")
        mend = "install it" if isinstance(error, ImportError) else "start it, or correct the URL"
        raise UserError(f"--storage must be a database that answers, but {message}; {mend}") from error


def make_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        "lightning-tfm sweep",
        description="Search for the best settings of an experiment. Run the command again to resume it after an "
        "interruption, or to join it with another worker.",
    )
    parser.add_argument("specification", metavar="SPEC", type=Path, help="the YAML file of the sweep, as for W&B")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="number of trials that this worker runs at a time (default: 1)"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder of the runs (default: runs/sweeps/SPEC)")
    parser.add_argument("--storage", metavar="URL", help="database of the study (default: a file in the folder)")
    parser.add_trust_package()
    return parser


class Worker:
    """Worker of a sweep, which runs trials in child processes.

    Args:
        options: the options of the command.

    Raises:
        UserError: if `fit` would refuse the settings, or if the folder or the study is that of another sweep.
    """

    def __init__(self, options: Namespace) -> None:
        from lightning_tfm.commands.sweep_file import read_sweep_file

        if options.jobs < 1:
            raise UserError(f"--jobs must be at least 1, but is {options.jobs}; try 1")
        self.file = read_sweep_file(options.specification)
        self.folder = options.output or Path("runs", "sweeps", options.specification.stem)
        self.jobs, self.url = options.jobs, options.storage
        self.trusted = trust_arguments(options.trust_package)
        self.database: RDBStorage | None = None
        self.running: list[TrialRun] = []
        self.kills: Counter[Path] = Counter()
        for settings in self.file.bounds():
            self._parsed(settings)
        self.config = self._parsed(self.file.constants)
        if not self.config["trainer"]["logger"]:
            raise UserError("trainer.logger must not be false in a sweep, since each trial needs a folder; remove it")
        if not (self.folder / LOCK).is_file():
            if self.folder.is_file() or (self.folder.is_dir() and any(self.folder.iterdir())):
                raise UserError(f"--output must be a new folder, but {str(self.folder)!r} holds other files")
            self._dry_run()
            make_folder(self.folder)
            (self.folder / LOCK).touch()
        self.study = self._open_study()

    def _parsed(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return all settings of `fit`, after its checks."""
        return run(["fit", *self._arguments(settings)], ParsingCLI).settings()

    def _arguments(self, settings: dict[str, Any]) -> list[str]:
        monitor = [f"--checkpoint.monitor={self.file.metric}", f"--checkpoint.mode={self.file.goal[:3]}"]
        return [*self.file.arguments(settings), *monitor, "--skip-test", *self.trusted]

    def _child(self, arguments: Sequence[str], log: Path, pass_fds: Sequence[int] = ()) -> ChildRun:
        return ChildRun([*arguments, "--trainer.enable_progress_bar=false"], log, pass_fds)

    def _dry_run(self) -> None:
        """Run one batch of the experiment, which checks what only a run can check, such as the name of the metric."""
        arguments = [*self._arguments(self.file.constants), "--dry-run"]
        message = KILLED
        with TemporaryDirectory() as folder:
            for _ in range(MAX_KILLS):
                (child,) = run_children([lambda: self._child(arguments, Path(folder, "log"))])
                if child.process.returncode == 0:
                    return
                if _has_failed(child):
                    message = child.last_line.replace("checkpoint.monitor", "metric.name")
                    message = message.replace("checkpoint.mode", "metric.goal")
                    break
        raise UserError(f"the experiment of the sweep cannot run: {message}")

    def _open_study(self) -> Study:
        """Open or create the study, whose specification must not change, except for the number of trials."""
        import optuna
        from optuna.storages import JournalStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
        from optuna.storages.journal import JournalFileBackend

        if self.url:
            self.database = RDBStorage(
                self.url,
                heartbeat_interval=HEARTBEAT,
                grace_period=GRACE_PERIOD,
                heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(),
            )
        # The lock of the file is a symbolic link to it. The link of a killed worker is replaced after half a minute,
        # but only if it can be followed, so the name must be absolute: links are relative to their own folders.
        journal = str((self.folder / "study.log").resolve())
        study = optuna.create_study(
            storage=self.database or JournalStorage(JournalFileBackend(journal)),
            pruner=self.file.pruner,
            study_name=self.folder.name,
            direction=self.file.goal,
            load_if_exists=True,
        )
        content = json.loads(json.dumps(self.file.content | {"the experiment": settings_of_weights(self.config)}))
        for name, value in study.user_attrs.get("sweep", content).items():
            if content[name] != value:
                raise UserError(
                    f"{name} must match the sweep in {str(self.folder)!r} ({value!r:.60}), but is "
                    f"{content[name]!r:.60}; restore it, or choose another --output"
                )
        study.set_user_attr("sweep", content)
        return study

    def work(self) -> None:
        """Run trials until all have ended; a signal stops the runs of this worker, which save a checkpoint."""
        from optuna.exceptions import UpdateFinishedTrialError

        with progress_bar("trials", total=self.file.run_cap) as bar:
            try:
                while True:
                    while len(self.running) < self.jobs and self._begin():
                        pass
                    if not self.running and all(trial.state.is_finished() for trial in self._trials()):
                        return
                    for trial_run in list(self.running):
                        try:
                            self._watch(trial_run)
                        except UpdateFinishedTrialError:  # retried by another machine while this one slept
                            self._drop(trial_run)
                    bar.update(len(ranked(self.study)) - bar.n)
                    time.sleep(INTERVAL)
            finally:
                for trial_run in self.running:
                    if trial_run.child is not None:
                        trial_run.child.terminate()
                for trial_run in list(self.running):
                    self._drop(trial_run)

    def _begin(self) -> bool:
        """Take up a trial whose worker was killed, or begin another one; return False if there is none to begin."""
        from optuna.storages import fail_stale_trials
        from optuna.trial import TrialState

        fail_stale_trials(self.study)  # of a database, which enqueues them again
        with FileLock(self.folder / LOCK):  # no other worker of this folder begins a trial
            for frozen in [] if self.url else self._trials(TrialState.RUNNING):
                trial = running_trial(self.study, frozen)
                lock = _lock(self._folder(trial).with_suffix(".lock"))
                # Another worker may have told the result before it unlocked the trial.
                if lock is not None and self._trials()[trial.number].state == TrialState.RUNNING:
                    self._start(trial, lock)
                    return True
                if lock is not None:
                    os.close(lock)
            begun = sum(_original(frozen) == frozen.number for frozen in self._trials())
            if begun >= self.file.run_cap and not self._trials(TrialState.WAITING):
                return False
            trial = self.study.ask()
            self._beat(trial)
            lock = _lock(self._folder(trial).with_suffix(".lock"))
            if trial.user_attrs["index"] >= self.file.run_cap:  # a worker with another folder has begun the last one
                self.study.tell(trial, state=TrialState.FAIL)
                return False
            if lock is not None:  # otherwise, the run of a killed worker goes on, and the heartbeat stops until its end
                self._start(trial, lock)
            return lock is not None

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=states or None)

    def _beat(self, trial: Trial) -> None:
        """Record a heartbeat, if the study is in a database."""
        if self.database is not None:
            record_heartbeat(self.database, trial)

    def _folder(self, trial: Trial) -> Path:
        """Return the folder of a trial, which is named by its index; a trial that is retried has the same folder."""
        if "index" not in trial.user_attrs:
            trials = self._trials()
            earlier = trials[: _original(trials[trial.number])]
            trial.set_user_attr("index", sum(_original(other) == other.number for other in earlier))
        return self.folder / f"trial_{trial.user_attrs['index']:04}"

    def _start(self, trial: Trial, lock: int) -> None:
        """Start or resume the run of a trial."""
        record = Run(self._folder(trial))
        self.study.sampler = self.file.sampler(trial.user_attrs["index"])
        settings = self.file.suggest(trial)
        trial.set_user_attr("settings", settings)
        loggers = json.dumps(self._loggers(record.folder))
        arguments = [*self._arguments(settings), "--trainer.logger", loggers]
        if record.checkpoints():
            arguments += ["--ckpt_path", str(record.folder.absolute())]
        elif record.folder.is_dir() and not record.has_finished:  # killed before its first checkpoint
            shutil.rmtree(record.folder)
        log = record.folder.with_suffix(".log")
        child = None if record.has_finished else self._child(arguments, log, [lock])
        self.running.append(TrialRun(trial, record, child, lock))

    def _loggers(self, folder: Path) -> list[dict[str, Any]]:
        """Return the loggers of a trial: a CSVLogger, which creates its folder, and those of the user."""
        first, *others = self.config["trainer"]["logger"]
        place = {"save_dir": str(folder.parents[1]), "name": folder.parent.name, "version": folder.name}
        for logger in others:
            if "group" in logger["init_args"]:  # of W&B
                logger["init_args"]["group"] = folder.parent.name
        return [first | {"init_args": first["init_args"] | place}, *others]

    def _watch(self, run: TrialRun) -> None:
        """Report the validations of a run, stop it if Optuna prunes it, and tell its result at its end."""
        from optuna.trial import TrialState

        child, metric = run.child, self.file.metric
        has_ended = child is None or not child.is_running  # before its metrics are read
        values = [row[metric] for row in run.record.metrics() if metric in row]
        num_reported = len(self._trials()[run.trial.number].intermediate_values)
        for step, value in enumerate(values[num_reported:], start=num_reported):
            run.trial.report(value, step)
            if run.trial.should_prune() and not run.record.has_finished:
                self._end(run, state=TrialState.PRUNED)
                return
        finite = sorted(filter(math.isfinite, values), reverse=self.file.goal == "maximize")
        if not has_ended:
            if time.monotonic() > run.beaten + HEARTBEAT:
                run.beaten = time.monotonic()
                self._beat(run.trial)
        elif run.record.has_finished and finite:
            self._end(run, values=finite[0])
        elif run.record.has_finished:
            self._end(run, f"{metric} was never finite")
        elif child is not None and _has_failed(child):
            self._end(run, child.last_line)
        else:  # a signal has killed the run
            self.kills[run.record.folder] += 1
            if self.kills[run.record.folder] == MAX_KILLS:
                self._end(run, KILLED)
            else:
                self._drop(run)

    def _end(self, run: TrialRun, error: str = "", **result: Any) -> None:
        """Tell the result of a trial: a value, a state, or the message of an error."""
        from optuna.trial import TrialState

        if error:  # Optuna's TPE avoids the settings of pruned trials, but ignores failed ones
            run.trial.set_user_attr("error", error)
            result = {"state": TrialState.PRUNED}
        trial = self.study.tell(run.trial, **result, skip_if_finished=True)
        self._drop(run)
        rank_zero_print(describe(self.study, trial))

    def _drop(self, run: TrialRun) -> None:
        """Stop the run of a trial, and unlock the trial."""
        if run.child is not None:
            run.child.terminate()
            run.child.process.wait()
        os.close(run.lock)
        self.running.remove(run)

    def show(self) -> int:
        """Print the best trials, and write the table and the page; return the exit status."""
        trials, (columns, rows) = ranked(self.study), trial_table(self.study)
        best = trials[0]
        words = ["lightning-tfm", "fit", *self.file.arguments(best.user_attrs["settings"]), *self.trusted]
        words = [*map(shell_quote, words)]
        text = StringIO()
        csv.writer(text, lineterminator="\n").writerows([columns, *rows])
        with FileLock(self.folder / LOCK):
            write_text(self.folder / "trials.csv", text.getvalue())
            page = render_sweep(self.study, self.folder.name, self.file.metric, " ".join(words))
            write_text(self.folder / "sweep.html", page)
        print("\nBest trials:", *(describe(self.study, trial) for trial in trials[:SHOWN]), sep="\n  ")
        print(f"All trials: {relative(self.folder / 'trials.csv')}, {relative(self.folder / 'sweep.html')}")
        if best.state.name != "COMPLETE":
            print("No trial has finished.")
            return 1
        print(f"\n{format_command(words, sys.stdout)}")
        return 0


def describe(study: Study, trial: FrozenTrial) -> str:
    """Return the result of an ended trial in one line."""
    value = best_value(study, trial)
    settings = trial.user_attrs["settings"]
    parts = [state_of(trial), *([] if value is None else [as_text(value)])]
    parts += [f"{short} {as_text(settings[name])}" for name, short in short_names(trial).items()]
    error = f": {trial.user_attrs['error']}" if "error" in trial.user_attrs else ""
    return f"trial {trial.user_attrs['index']}: {', '.join(parts)}{error}"


def _has_failed(child: ChildRun) -> bool:
    """Return whether a run has ended with an error, not by a signal."""
    return 0 < child.process.returncode <= 128


def _original(trial: FrozenTrial) -> int:
    """Return the number of a trial or, if it is a retry, of the trial that was lost first."""
    from optuna.storages import RetryHeartbeatStaleTrialCallback

    number = RetryHeartbeatStaleTrialCallback.retried_trial_number(trial)
    return trial.number if number is None else number


def _lock(path: Path) -> int | None:
    """Lock a trial, and return the descriptor of the lock; None if another worker or its run holds the lock.

    The run inherits the descriptor, so the lock is held until both the worker and the run have ended, even by SIGKILL.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if lock_descriptor(descriptor, blocking=False):
            return descriptor
    except OSError as error:
        raise UserError(
            f"--output must be on a file system with locks, but {str(path.parent)!r} is not ({error.strerror}); "
            "choose another folder"
        ) from None
    os.close(descriptor)
    return None
