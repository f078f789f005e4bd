"""Loggers for W&B, whose failures do not affect training, and for TensorBoard."""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar, cast

import lightning.pytorch.loggers
import numpy as np
from lightning import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_tfm.checkpoint.shards import shard_folders
from lightning_tfm.config.settings import settings_of_weights
from lightning_tfm.errors import UserError, rank_zero_print
from lightning_tfm.runs.metrics_writer import without_epoch
from lightning_tfm.runs.record import FINAL, HEADLINES, Run, is_per_category
from lightning_tfm.system.files import delete_folder, relative
from lightning_tfm.system.private import (
    add_hparams,
    hide_later_steps,
    is_offline,
    logger_version,
    set_version,
    set_writer,
    wandb_arguments,
    without_wandb_launch,
    writer_of,
)

REACH_TIMEOUT = 4.0
"""Timeout in seconds for the W&B server to respond, including the resolution of its name."""

START_TIMEOUT = 20.0
"""Timeout in seconds for the login, and for a reachable W&B server to start a run."""

FOLDER_SETTINGS = {"entity", "mode", "project"}
"""Settings that W&B may read from the current folder, where its commands write them."""


T = TypeVar("T")


def _guarded(method: Callable[..., None]) -> Callable[..., None]:
    """Return a method of a `WandbLogger` that disables W&B for the rest of the run instead of raising an exception."""

    @wraps(method)
    def guarded(self: WandbLogger, *values: Any, **settings: Any) -> None:
        if self.failed:
            return
        try:
            method(self, *values, **settings)
        except Exception as error:  # W&B can raise any exception
            self.failed = True
            rank_zero_print(f"W&B has failed and is disabled for the rest of the run: {error}")
            import wandb

            with suppress(Exception, SystemExit):  # it exits if W&B's service has crashed
                wandb.teardown()  # otherwise, it would fail again when the process exits

    return guarded


class WandbLogger(lightning.pytorch.loggers.WandbLogger):
    """Lightning's WandbLogger, except that W&B never prompts the user and that its failures do not affect training.

    The run is online if the user is logged in and the server responds, otherwise offline; WANDB_MODE may be offline or
    disabled. If W&B fails, a warning is printed, and W&B is disabled for the rest of the run.

    The step in W&B is that of the training. Metrics of the evaluation after training, of which there is one value each,
    are in the summary of the run.

    Args:
        log_best: whether to log the best checkpoint, which contains the vocabulary, as an artifact.
        log_examples: whether to log what contains texts of the data: tables of predictions, pictures and the output of
            the command.
        settings: further arguments of Lightning's WandbLogger, except `log_model`.
    """

    def __init__(self, log_best: bool = False, log_examples: bool = False, **settings: Any) -> None:
        if settings.get("log_model"):
            raise UserError("log_model must be false, but is true; log_best keeps the best checkpoint")
        super().__init__(**settings)
        self.log_best, self.log_examples = log_best, log_examples
        self.prefix = f"{settings['prefix']}{self.LOGGER_JOIN_CHAR}" if settings.get("prefix") else ""
        self.failed = False
        self.unreachable: str | None = None  # the address of a server that does not respond
        self.arguments = wandb_arguments(self)
        self.arguments.pop("anonymous")  # W&B warns about this argument, even if it is None
        self.arguments["mode"] = "offline"  # until `_start`
        self._mode: Future[str] | None = None

    @rank_zero_only
    def connect(self) -> None:
        """Choose the mode of the run in a background thread, which `experiment` awaits."""
        self._mode = _in_background(self._choose_mode)

    def _choose_mode(self) -> str:
        """Return "online", "offline" or a mode set by WANDB_MODE."""
        import wandb

        try:
            settings = wandb.setup().settings
            mode = "offline" if is_offline(self) else settings.mode  # set by WANDB_MODE
            if mode == "online":
                _check_folder_settings()
                is_reachable = _result(_in_background(partial(_is_reachable, settings.base_url)), REACH_TIMEOUT)
                self.unreachable = None if is_reachable else settings.base_url
                if not (is_reachable and wandb.login(prompt=False, verify=False)):
                    mode = "offline"
            return mode
        except Exception as error:  # W&B can raise any exception
            rank_zero_print(f"W&B failed to start: {error}")
            return "offline"

    @property
    def experiment(self) -> Any:
        """Return the W&B run, which is disabled if W&B has failed to start; a dummy on ranks other than 0."""
        if writer_of(self) is None:
            self._start()
        return super().experiment

    @rank_zero_only
    def _start(self) -> None:
        import wandb

        if self._mode is None:
            self.connect()
        chosen = _result(cast(Future[str], self._mode), START_TIMEOUT) or "offline"
        for mode in dict.fromkeys((chosen, "offline", "disabled")):
            try:
                settings = wandb.Settings(
                    init_timeout=START_TIMEOUT,
                    finish_timeout=60.0,  # of the upload, after which the remaining data stay in the folder
                    # the seconds that a killed process loses at most, by default 15
                    x_transaction_log_flush_interval=1.0,
                    silent=mode != "online",  # `console.print_state_of_wandb` shows how to upload the run
                    disable_git=True,  # it runs programs that the repository names, and uploads uncommitted changes
                    # the output contains predictions, and in a terminal progress bars
                    console="auto" if self.log_examples and not sys.stdout.isatty() else "off",
                )
                self.arguments |= {"mode": mode, "settings": settings}
                with without_wandb_launch():
                    set_writer(self, wandb.init(**self.arguments))
                return
            except Exception as error:
                rank_zero_print(f"W&B failed to start: {error}")

    def describe(self, name: str, tags: list[str], commit: str, settings: dict[str, Any]) -> None:
        """Set the name and the tags of the run unless the user has set them, and log the commit and the settings.

        Note:
            `wandb leet` shows no settings that are logged after the start of the run.
        """
        self.arguments["name"] = self.arguments.get("name") or name
        self.arguments["tags"] = self.arguments.get("tags") or tags
        self.arguments["config"] = {"git_commit": commit} | settings | (self.arguments.get("config") or {})

    @_guarded
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        metrics = without_epoch(metrics)
        values = [name for name, value in metrics.items() if isinstance(value, int | float)]  # others are pictures
        if final := [name for name in values if name.startswith(FINAL)]:
            self.experiment.summary.update({f"{self.prefix}{name}": metrics.pop(name) for name in final})
        if not metrics:
            return
        if step is None or step >= self.experiment.starting_step:  # a resumed run repeats steps that the server has
            self.experiment.log({f"{self.prefix}{name}": value for name, value in metrics.items()}, step)

    log_hyperparams = _guarded(lightning.pytorch.loggers.WandbLogger.log_hyperparams)
    log_table = _guarded(lightning.pytorch.loggers.WandbLogger.log_table)
    log_image = _guarded(lightning.pytorch.loggers.WandbLogger.log_image)

    @_guarded
    @rank_zero_only
    def log_missing(self, rows: Sequence[dict[str, float]]) -> None:
        """Log the rows of `metrics.csv` that a killed process did not upload, after the last step on the server.

        Note:
            An offline run does not know this step.
        """
        if self.experiment.starting_step:
            for row in rows:
                self.log_metrics(row, int(row.pop("step")))

    @_guarded
    @rank_zero_only
    def log_checkpoint(self, path: str) -> None:
        """Log a checkpoint as an artifact if `log_best` is set."""
        if not self.log_best:
            return
        import wandb

        artifact = wandb.Artifact(f"model-{self.experiment.id}", type="model")
        artifact.add_file(path)
        for folder in shard_folders(Path(path)):
            artifact.add_dir(str(folder), name=folder.name)
        self.experiment.log_artifact(artifact, aliases=[Path(path).stem])

    @property
    def run_id(self) -> str | None:
        """Return the W&B id of the run; None if there is no run, or W&B is disabled or has failed."""
        run = writer_of(self)
        is_missing = run is None or self.arguments["mode"] == "disabled"
        return None if is_missing or self.failed else run.id

    @property
    def offline_pattern(self) -> str | None:
        """Return a shell pattern for the folders of an offline run, also of one that has failed, for `wandb sync`.

        None for any other run.
        """
        run = writer_of(self)
        if run is None or self.arguments["mode"] not in ("offline", "dryrun"):
            return None
        folder = Path(run.settings.sync_dir).parent
        return f"{shlex.quote(relative(folder))}/offline-run-*-{run.id}"


def _check_folder_settings() -> None:
    """Check that the current folder, which may come from a stranger, has no other settings than FOLDER_SETTINGS."""
    import wandb

    settings = wandb.Settings()
    if others := sorted({*settings.read_system_settings().all()} - FOLDER_SETTINGS):
        raise UserError(
            f"{relative(settings.settings_workspace)!r} must not set {', '.join(others)}, since your API key could be "
            f"sent elsewhere; set {', '.join(f'WANDB_{name.upper()}' for name in others)} instead"
        )


def _in_background(function: Callable[[], T]) -> Future[T]:
    """Call a function, which must not raise an exception, in a thread that does not keep the process alive."""
    future: Future[T] = Future()
    Thread(target=lambda: future.set_result(function()), daemon=True).start()
    return future


def _result(future: Future[T], timeout: float) -> T | None:
    """Return the result of a background thread; None if it takes longer than a timeout in seconds."""
    with suppress(TimeoutError):
        return future.result(timeout)
    return None


def _is_reachable(address: str) -> bool:
    """Return whether a server responds in time, and with JSON or an error, unlike the login page of a public network.

    Note:
        The timeout does not include the resolution of the server's name.
    """
    import requests

    try:
        response = requests.post(
            f"{address}/graphql",
            json={"query": "{viewer{id}}"},
            timeout=2.0,
            auth=lambda request: request,  # otherwise, requests sends a password of .netrc
        )
        if response.ok:
            response.json()
        return response.status_code < 500
    except requests.RequestException:
        return False


def example_loggers(trainer: Trainer) -> list[Any]:
    """Return the loggers of a trainer that log tables and images of examples, if the user wants it."""
    return [logger for logger in trainer.loggers if getattr(logger, "log_examples", False)]


def wandb_loggers(trainer: Trainer) -> list[WandbLogger]:
    """Return the W&B loggers of a trainer."""
    return [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]


def describe_run(
    loggers: Sequence[Logger],
    tags: list[str],
    commit: str | None,
    settings: dict[str, Any],
    parents: Sequence[str],
) -> None:
    """Set the name, such as `copy_gpt/version_0`, the tags, the commit and the settings in W&B and TensorBoard.

    Args:
        loggers: the loggers, of which the first names the run.
        tags: the tags.
        commit: the commit; None if it is unknown.
        settings: the settings.
        parents: the names of the runs that were forked; TensorBoard shows the last one below those before it.
    """
    name = run_name(loggers[0])
    for logger in loggers[1:]:
        if isinstance(logger, WandbLogger):
            logger.describe(name, tags, commit or "unknown", settings)
        elif isinstance(logger, TensorBoardLogger):
            folders = [each.replace("/", "_") for each in (*parents, name)]
            logger.describe("/".join(folders), tags, commit or "unknown", settings)


def resume_loggers(loggers: Sequence[Logger], step: int) -> None:
    """Let the loggers of a resumed run continue after a number of steps; the first has the metrics before."""
    for logger in loggers[1:]:
        if isinstance(logger, WandbLogger):
            logger.log_missing(Run(Path(cast(CSVLogger, loggers[0]).log_dir)).metrics())
        elif isinstance(logger, TensorBoardLogger):
            hide_later_steps(logger, step)


def run_name(logger: Logger) -> str:
    """Return the name of a logger's run, such as `copy_gpt/version_0`."""
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return f"{logger.name}/{version}"


def run_folder(trainer: Trainer) -> Path | None:
    """Return the folder of a run; None without a logger, and for `fast_dev_run`.

    Note:
        All processes must call this function, since the path is broadcast.
    """
    if not trainer.loggers or trainer.fast_dev_run:
        return None
    logger = trainer.loggers[0]
    folder = Path(logger.save_dir or trainer.default_root_dir) / run_name(logger)
    return Path(trainer.strategy.broadcast(str(folder)))


TAGS = {"train/loss": "loss/train", "val/loss": "loss/val"}
"""Tags of metrics whose tag is not their name; TensorBoard sorts groups of tags by name."""


class TensorBoardLogger(lightning.pytorch.loggers.TensorBoardLogger):
    """Lightning's TensorBoardLogger, which writes to `runs/tensorboard` by default. Requires the package tensorboard.

    The training and the validation loss are `loss/train` and `loss/val`, so that they come first, side by side.
    HPARAMS shows the settings that change the weights and the main metric of the last validation and of the test.

    Args:
        save_dir: the parent folder of `name`.
        name: the folder that contains a folder for each run, such as `copy_gpt_version_0`, which contains its forks.
        settings: further arguments of Lightning's TensorBoardLogger.
    """

    log_examples = True  # the files remain on this machine

    def __init__(self, save_dir: str = "runs", name: str = "tensorboard", **settings: Any) -> None:
        try:
            super().__init__(save_dir, name, default_hp_metric=False, **settings)
        except ModuleNotFoundError:
            raise UserError("TensorBoardLogger needs the package tensorboard; pip install tensorboard") from None
        self._is_new = False
        self._has_settings = False  # in HPARAMS

    def describe(self, name: str, tags: list[str], commit: str, settings: dict[str, Any]) -> None:
        """Set the name of the run unless the user has set it, and log the tags and the commit with the settings."""
        if logger_version(self) is None:
            set_version(self, name)
        self._is_new = not Path(self.log_dir).exists()
        cast(dict[str, Any], self.hparams).update(settings, tags=", ".join(tags), git_commit=commit)

    @rank_zero_only
    def log_hyperparams(self, params: Any, metrics: Any = None, step: int | None = None) -> None:
        """Log the settings to `hparams.yaml`, and the tags and the commit as a text too, which TensorBoard shows."""
        super().log_hyperparams(params, metrics, step)
        settings = cast(dict[str, Any], self.hparams)
        if "git_commit" in settings:
            self.experiment.add_text("run", f"{settings['tags']}; commit {settings['git_commit']}")

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._log_settings(metrics)
        curves = {name: value for name, value in without_epoch(metrics).items() if not is_per_category(name)}
        super().log_metrics({TAGS.get(name, name): value for name, value in curves.items()}, step)

    def _log_settings(self, metrics: Mapping[str, float]) -> None:
        """Log the settings to HPARAMS with the first validation, which shows what the main metric is."""
        headline = next((name for name in HEADLINES if name in metrics), None)
        if headline is None or self._has_settings:
            return
        self._has_settings = True
        settings = settings_of_weights(cast(dict[str, Any], self.hparams))
        values = {name: value if type(value) in (int, float) else str(value) for name, value in settings.items()}
        add_hparams(self, values, [TAGS.get(headline, headline), headline.replace("val/", "test/", 1)])

    @rank_zero_only
    def log_table(
        self, key: str, columns: Sequence[str], data: Sequence[Sequence[Any]], step: int | None = None
    ) -> None:
        """Log a table as a text in Markdown."""
        rows = [columns, ["---"] * len(columns), *data]
        cells = [[" ".join(str(cell).split()).replace("|", r"\|") for cell in row] for row in rows]
        self.experiment.add_text(key, "\n".join(f"| {' | '.join(row)} |" for row in cells), step)

    @rank_zero_only
    def log_image(self, key: str, images: Sequence[Any], step: int | None = None, caption: Sequence[str] = ()) -> None:
        """Log images, or files of them, each under its caption."""
        from PIL import Image

        for image, name in itertools.zip_longest(images, caption):
            picture = Image.open(image).convert("RGB") if isinstance(image, str) else image
            tag = f"{key}/{name}" if name else key
            self.experiment.add_image(tag, np.asarray(picture), step, dataformats="HWC")

    def discard(self) -> None:
        """Delete the folder of the run if this logger has created it."""
        if self._is_new:
            self.experiment.close()
            delete_folder(Path(self.log_dir))
