"""Loggers for W&B, whose failures do not affect training, and for TensorBoard, and the writer of metrics.csv."""

from __future__ import annotations

import csv
import json
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, runtime_checkable
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import lightning.pytorch.loggers
from lightning import Trainer
from lightning.fabric.loggers.logger import _DummyExperiment
from lightning.pytorch.core.saving import save_hparams_to_yaml
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_tfm.checkpoint.shards import shard_folders
from lightning_tfm.errors import UserError, escape_controls, rank_zero_print
from lightning_tfm.runs.record import Run
from lightning_tfm.system.files import (
    atomic_write,
    delete_folder,
    naming_file,
    relative,
)

T = TypeVar("T")

CONNECT_TIMEOUT = 2.0
"""Timeout in seconds for a response of the W&B server, after which a run starts offline."""

START_TIMEOUT = 20.0
"""Timeout in seconds for a reachable server to start a run."""

FLUSH_INTERVAL = 1.0
"""Seconds between writes of an offline run to its file, the most that a killed process loses; W&B's default is 15."""

FOLDER_SETTINGS = {"entity", "mode", "project"}
"""Settings that W&B may read from the current folder, where its commands write them."""

FINISH_TIMEOUT = 60.0
"""Timeout in seconds for the upload at the end of a run, after which the remaining data stay in the W&B folder."""


class WandbLogger(lightning.pytorch.loggers.WandbLogger):
    """Lightning's WandbLogger, except that W&B never prompts the user and that its failures do not affect training.

    The run is online if the user is logged in and the server responds, otherwise offline; WANDB_MODE may be offline or
    disabled. If W&B fails, a warning is printed, and W&B is disabled for the rest of the run.

    Args:
        log_best: whether to log the best checkpoint as an artifact.
        settings: further arguments of Lightning's WandbLogger, except `log_model`.
    """

    _experiment: Any

    def __init__(self, log_best: bool = False, **settings: Any) -> None:
        if settings.get("log_model"):
            raise UserError("log_model must be false, but is true; log_best keeps the best checkpoint")
        super().__init__(**settings)
        self.log_best = log_best
        self._wandb_init.pop("anonymous")  # W&B warns about this argument, even if it is None
        self._connection: Future[tuple[str, bool | None]] | None = None
        self.failed = False

    def connect(self) -> None:
        """Start W&B's service and check its server in a background thread, since both take time.

        Note:
            Without this call, `experiment` does so when it is first accessed. Only rank 0 connects.
        """
        if rank_zero_only.rank == 0:  # type: ignore[attr-defined]  # set by Lightning
            self._connection = _in_thread(self._check_server)

    def _check_server(self) -> tuple[str, bool | None]:
        """Start W&B's service, and return the server's address and whether it responds; None for an offline run.

        Raises:
            UserError: if the current folder, which may come from a stranger, has other settings than FOLDER_SETTINGS.
        """
        import wandb

        settings = wandb.setup().settings
        if self._offline or settings.mode in ("offline", "dryrun", "disabled"):  # `mode` is set by WANDB_MODE
            return settings.base_url, None
        defaults = wandb.Settings()
        if others := sorted({*defaults.read_system_settings().all()} - FOLDER_SETTINGS):
            raise UserError(
                f"{relative(defaults.settings_workspace)!r} must not set {', '.join(others)}, since your API key could "
                f"be sent elsewhere; set {', '.join(f'WANDB_{name.upper()}' for name in others)} instead"
            )
        return settings.base_url, _is_reachable(f"{settings.base_url}/graphql")

    @property
    def experiment(self) -> Any:
        """Return the W&B run; a dummy on ranks other than 0, or if W&B has failed to start."""
        if self._experiment is None and rank_zero_only.rank == 0:  # type: ignore[attr-defined]  # set by Lightning
            for mode in (self._mode, lambda: "offline"):
                try:
                    import wandb

                    self._wandb_init["mode"] = chosen = mode()
                    offline = (chosen or wandb.setup().settings.mode) != "online"
                    # Silence W&B if offline, since `console.print_upload_command` shows how to upload the run.
                    self._wandb_init["settings"] = wandb.Settings(
                        init_timeout=START_TIMEOUT,
                        finish_timeout=FINISH_TIMEOUT,
                        x_transaction_log_flush_interval=FLUSH_INTERVAL,
                        silent=offline,
                        disable_git=True,  # it runs programs that the repository names, and uploads uncommitted changes
                        console="off" if sys.stdout.isatty() else "auto",  # the log would contain progress bars
                    )
                    with _without_launch_inputs():
                        return super().experiment
                except Exception as error:  # W&B can raise any exception, and training must continue
                    _warn(f"failed to start: {error}")
            self._experiment = _DummyExperiment()
        return super().experiment

    def describe(self, name: str, tags: list[str], commit: str) -> None:
        """Set the name and the tags of the run unless the user has set them, and log the commit."""
        self._wandb_init["name"] = self._wandb_init.get("name") or name
        self._wandb_init["tags"] = self._wandb_init.get("tags") or tags
        self._wandb_init["config"] = {"git_commit": commit} | (self._wandb_init.get("config") or {})

    def _mode(self) -> str | None:
        import wandb

        # Check the server first, since the login takes seconds without a server.
        connection, self._connection = self._connection, None
        address, is_reachable = self._check_server() if connection is None else connection.result()
        if is_reachable is None:
            return "offline" if self._offline else None
        with redirect_stdout(StringIO()):
            if is_reachable and wandb.login(prompt=False, verify=False):
                return "online"
        if not is_reachable:
            _warn(f"cannot be reached at {address}, so the run is offline")
        return "offline"

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._try(super().log_metrics, _without_epoch(metrics), step)

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        self._try(super().log_hyperparams, params)

    @rank_zero_only
    def log_missing(self, run: Run) -> None:
        """Log the metrics of a run that a killed process did not upload, from the last step of an online run on.

        Note:
            Only the server knows the last step, so nothing is logged again to an offline run. The last step is, since
            its validation may be missing.
        """
        self._try(self._log_missing, run)

    def _log_missing(self, run: Run) -> None:
        if isinstance(self.experiment, _DummyExperiment):
            return
        last = self.experiment.summary.get("trainer/global_step")
        for row in run.metrics():
            step = int(row.pop("step"))
            if last is not None and step >= last:
                self.log_metrics(row, step)

    @property
    def run_id(self) -> str | None:
        """Return the W&B id of the run; None if there is no run, or W&B has failed."""
        import wandb

        return self._experiment.id if isinstance(self._experiment, wandb.Run) and not self.failed else None

    @property
    def offline_pattern(self) -> str | None:
        """Return a shell pattern for the folders of an offline run, for `wandb sync`; None for any other run."""
        import wandb

        run = self._experiment
        if self.failed or not isinstance(run, wandb.Run) or not run.settings._offline or run.disabled:
            return None
        folder = Path(run.settings.sync_dir)
        return f"{shlex.quote(relative(folder.parent))}/offline-run-*-{run.id}"

    @rank_zero_only
    def finalize(self, status: str) -> None:
        super().finalize(status)
        if status == "failed" and (pattern := self.offline_pattern):
            _warn(f"stores the logged data offline; upload them with: wandb sync {pattern}")

    @rank_zero_only
    def log_table(  # type: ignore[override]  # without data frames, as MediaLogger
        self, key: str, columns: list[str], data: list[list[Any]], step: int | None = None
    ) -> None:
        self._try(partial(super().log_table, step=step), key, columns, data)

    @rank_zero_only
    def log_image(self, key: str, images: list[Any], step: int | None = None, **settings: Any) -> None:
        self._try(partial(super().log_image, step=step, **settings), key, images)

    @rank_zero_only
    def log_checkpoint(self, path: str) -> None:
        """Log a checkpoint as an artifact if `log_best` is set."""
        if self.log_best:
            self._try(self._log_artifact, path)

    def _log_artifact(self, path: str) -> None:
        import wandb

        artifact = wandb.Artifact(f"model-{self.experiment.id}", type="model")
        artifact.add_file(path)
        for folder in shard_folders(Path(path)):
            artifact.add_dir(str(folder), name=folder.name)
        self.experiment.log_artifact(artifact, aliases=[Path(path).stem])

    def _try(self, log: Any, *values: Any) -> None:
        if self.failed:
            return
        try:
            log(*values)
        except Exception as error:  # W&B can raise any exception
            import wandb

            self.failed = True
            _warn(f"has failed and is disabled for the rest of the run: {error}")
            with suppress(Exception, SystemExit):  # it exits if W&B's service has crashed
                wandb.teardown()  # otherwise, it would fail again when the process exits


@runtime_checkable
class MediaLogger(Protocol):
    """Protocol of loggers that support tables and images."""

    def log_table(self, key: str, columns: list[str], data: list[list[Any]], step: int | None = None) -> None:
        """Log a table.

        Args:
            key: the name of the table.
            columns: the names of the columns.
            data: the rows.
            step: the training step.
        """

    def log_image(self, key: str, images: list[Any], step: int | None = None, **settings: list[Any]) -> None:
        """Log images.

        Args:
            key: the name of the images.
            images: the images, as paths or arrays.
            step: the training step.
            settings: lists with one entry per image, such as `caption`.
        """


def media_loggers(trainer: Trainer) -> list[MediaLogger]:
    """Return the loggers of a trainer that support tables and images."""
    return [logger for logger in trainer.loggers if isinstance(logger, MediaLogger)]


def wandb_loggers(trainer: Trainer) -> list[WandbLogger]:
    """Return the W&B loggers of a trainer."""
    return [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]


def describe_run(loggers: Sequence[Logger], tags: list[str], commit: str | None) -> None:
    """Set the name, such as `copy_gpt/version_0`, the tags and the commit of a run in W&B and TensorBoard.

    Args:
        loggers: the loggers of the run, of which the first has created the folder.
        tags: the tags.
        commit: the commit of the working directory; None outside a repository.
    """
    first, *others = loggers
    for other in others:
        if isinstance(other, WandbLogger | TensorBoardLogger):
            other.describe(run_name(first), tags, commit or "unknown")


def resume_loggers(loggers: Sequence[Logger], step: int) -> None:
    """Let the loggers of a resumed run continue at a step.

    Args:
        loggers: the loggers of the run, of which the first has the metrics before the step.
        step: the number of steps before the checkpoint.
    """
    first, *others = loggers
    for other in others:
        if isinstance(other, WandbLogger):
            other.log_missing(Run(Path(cast(CSVLogger, first).log_dir)))
        elif isinstance(other, TensorBoardLogger):
            other._kwargs["purge_step"] = step  # TensorBoard hides later steps of the killed process


def run_name(logger: Logger) -> str:
    """Return the name of a logger's run, such as `copy_gpt/version_0`."""
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return f"{logger.name}/{version}"


def run_folder(trainer: Trainer) -> Path | None:
    """Return the folder of a run; None without a logger, and for `fast_dev_run`.

    Args:
        trainer: the trainer of the run.

    Note:
        All processes must call this function, since the path is broadcast.
    """
    if not trainer.loggers or trainer.fast_dev_run:
        return None
    logger = trainer.loggers[0]
    folder = Path(logger.save_dir or trainer.default_root_dir) / run_name(logger)
    return Path(trainer.strategy.broadcast(str(folder)))


class TensorBoardLogger(lightning.pytorch.loggers.TensorBoardLogger):
    """Lightning's TensorBoardLogger, which writes to `runs/tensorboard` by default. Requires the package tensorboard.

    Args:
        save_dir: the parent folder of `name`.
        name: the folder that contains a folder for each run, such as `copy_gpt_version_0`.
        settings: further arguments of Lightning's TensorBoardLogger.
    """

    def __init__(self, save_dir: str = "runs", name: str = "tensorboard", **settings: Any) -> None:
        try:
            super().__init__(save_dir, name, default_hp_metric=False, **settings)
        except ModuleNotFoundError:
            raise UserError("TensorBoardLogger needs the package tensorboard; pip install tensorboard") from None
        self._is_new = False

    def describe(self, name: str, tags: list[str], commit: str) -> None:
        """Set the name of the run unless the user has set it, and log the tags and the commit with the settings."""
        if self._version is None:
            self._version = name.replace("/", "_")
        self._is_new = not Path(self.log_dir).exists()
        cast(dict[str, Any], self.hparams).update(tags=", ".join(tags), git_commit=commit)

    @rank_zero_only
    def log_hyperparams(self, params: Any, metrics: Any = None, step: int | None = None) -> None:
        """Log the settings to `hparams.yaml`, and the tags and the commit as a text too, which TensorBoard shows."""
        super().log_hyperparams(params, metrics, step)
        settings = cast(dict[str, Any], self.hparams)
        if "git_commit" in settings:
            self.experiment.add_text("run", f"{settings['tags']}; commit {settings['git_commit']}")

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics(_without_epoch(metrics), step)

    def discard(self) -> None:
        """Delete the folder of the run if this logger has created it."""
        if self._is_new:
            self.experiment.close()
            delete_folder(Path(self.log_dir))


def discard_tensorboard(loggers: Sequence[Logger]) -> None:
    """Delete what a run without results has written to TensorBoard."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.discard()


class MetricsWriter(ExperimentWriter):
    """Lightning's writer of `metrics.csv` and `hparams.yaml`, except that no file is ever truncated.

    Rows are appended to `metrics.csv`, and a new column is added in a new file, which replaces it.
    """

    def _check_log_dir_exists(self) -> None:
        """Keep the rows of a resumed run, which Lightning would delete."""

    @property
    def run(self) -> Run:
        """Return the run, whose metrics are written."""
        return Run(Path(self.log_dir))

    @property
    def path(self) -> Path:
        """Return the path of the metrics."""
        return Path(self.metrics_file_path)

    def log_hparams(self, params: dict[str, Any]) -> None:
        self.hparams.update(params)
        with atomic_write(Path(self.log_dir, self.NAME_HPARAMS_FILE)) as file:
            save_hparams_to_yaml(file.name, self.hparams)

    def save(self) -> None:
        """Write the recorded rows, which `synchronize` makes durable."""
        if not self.metrics:
            return
        columns = sorted(set(self.metrics_keys).union(*self.metrics))
        if columns != self.metrics_keys:
            earlier, _ = self.run.read_rows()
            self.run.write_rows([*earlier, *self.metrics], columns)
            self.metrics_keys = columns
        else:
            with naming_file(self.path), self.path.open("a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, self.metrics_keys).writerows(self.metrics)
        self.metrics = []

    def synchronize(self) -> None:
        """Synchronize the written rows to disk."""
        if self.path.exists():
            with naming_file(self.path), self.path.open("ab") as file:
                os.fsync(file.fileno())

    def keep(self, step: int) -> None:
        """Delete the rows from a step on, which a resumed run repeats; a file with damaged rows is copied before."""
        if not self.path.exists():
            return
        rows, damaged = self.run.read_rows()
        if damaged:
            copy = self.run.keep_damaged(Run.METRICS)
            noun = "row" if damaged == 1 else "rows"
            rank_zero_print(f"skipping {damaged} damaged {noun} of {relative(self.path)}, copied to {copy.name}")
        kept = [{name: value for name, value in row.items() if value} for row in rows if int(row["step"]) < step]
        self.metrics_keys = sorted(set().union(*kept))
        self.run.write_rows(kept, self.metrics_keys)


def flush(trainer: Trainer) -> None:
    """Write the logged metrics, since a resumed run appends to them, and synchronize those in its folder to disk."""
    for logger in trainer.loggers:
        logger.save()
        if isinstance(logger, CSVLogger) and isinstance(logger._experiment, MetricsWriter):
            logger._experiment.synchronize()


def _without_epoch(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics without the epoch: to Lightning, a run is a single epoch, see ResumableDataLoader."""
    return {name: value for name, value in metrics.items() if name != "epoch"}


def _is_reachable(address: str) -> bool:
    """Return whether a server responds within `CONNECT_TIMEOUT` with JSON, or with an HTTP error below 500."""

    def status() -> int:
        request = Request(address, b'{"query": "{viewer{id}}"}', {"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=CONNECT_TIMEOUT) as response:
                json.load(response)  # unlike the login page of a public Wi-Fi network
                return 200
        except HTTPError as error:
            return error.code

    # Use a thread, since a DNS lookup has no timeout.
    try:
        return _in_thread(status).result(CONNECT_TIMEOUT) < 500
    except Exception:  # no response, or not from W&B
        return False


def _in_thread(function: Callable[[], T]) -> Future[T]:
    """Call a function in a thread that does not keep the process from ending, and return its future result."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # otherwise, the future would be awaited forever
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


@contextmanager
def _without_launch_inputs() -> Iterator[None]:
    """Keep W&B from importing its launch package at the start of a run, unless it is imported already.

    W&B imports this package, which takes about a second, to apply inputs that only the package itself can have staged.
    """
    import wandb

    run: Any = wandb.Run
    if "wandb.sdk.launch" in sys.modules or not hasattr(run, "_detect_and_apply_job_inputs"):  # a private method
        yield
        return
    apply, run._detect_and_apply_job_inputs = run._detect_and_apply_job_inputs, lambda self: None
    try:
        yield
    finally:
        run._detect_and_apply_job_inputs = apply


def _warn(text: str) -> None:
    if rank_zero_only.rank == 0:  # type: ignore[attr-defined]  # set by Lightning
        print(f"lightning-tfm: W&B {escape_controls(text)}", file=sys.stderr)
