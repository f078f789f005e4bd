"""W&B, which a run can do without."""

from __future__ import annotations

import json
import shlex
import sys
import threading
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import lightning.pytorch.loggers
from lightning import Trainer
from lightning.fabric.loggers.logger import _DummyExperiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_tfm.errors import UserError
from lightning_tfm.files import relative

PATIENCE = 2.0
"""Seconds that W&B's server may take to answer before the run starts without it."""

STARTING = 20.0
"""Seconds that a server that answers may take to begin a run."""

FINISH = 60.0
"""Seconds that uploading may take when a run ends. What is not uploaded by then lies in W&B's folder."""


class WandbLogger(lightning.pytorch.loggers.WandbLogger):
    """Lightning's, but W&B cannot hurt the training: it never asks, and a run goes on as if it were not there.

    Online where the user is logged in and the server answers, otherwise offline; WANDB_MODE may say offline or
    disabled. Where W&B fails, at the start or later, it is left out, and that is said.

    Args:
        log_best: whether the best checkpoint is kept as an artifact.
        settings: those of Lightning's.
    """

    def __init__(self, log_best: bool = False, **settings: Any) -> None:
        if settings.get("log_model"):
            raise UserError("log_model must be false, but is true; log_best keeps the best checkpoint")
        super().__init__(**settings)
        self.log_best = log_best
        self._wandb_init.pop("anonymous")  # W&B warns of it, even of None
        self.failed = False

    @property
    def experiment(self) -> Any:
        """W&B's run; one that does nothing on all processes but the first, and where W&B fails."""
        if self._experiment is None and rank_zero_only.rank == 0:
            for mode in (self._mode, lambda: "offline"):
                try:
                    import wandb

                    self._wandb_init["mode"] = chosen = mode()
                    offline = (chosen or wandb.setup().settings.mode) != "online"
                    # Offline it has nothing to say that the end of a run does not, see `upload_command`.
                    self._wandb_init["settings"] = wandb.Settings(
                        init_timeout=STARTING, finish_timeout=FINISH, silent=offline
                    )
                    return super().experiment
                except Exception as error:  # whatever it is, training matters more
                    _warn(f"does not start: {error}")
            self._experiment = _DummyExperiment()
        return super().experiment

    def _mode(self) -> str | None:
        import wandb

        settings = wandb.setup().settings
        if self._offline or settings.mode in ("offline", "dryrun", "disabled"):  # the latter by WANDB_MODE
            return "offline" if self._offline else None
        # The server first: to log in takes seconds where there is none.
        answers = _answers(f"{settings.base_url}/graphql")
        with redirect_stdout(StringIO()):
            if answers and wandb.login(prompt=False, verify=False):
                return "online"
        if not answers:
            _warn(f"cannot be reached at {settings.base_url}, so the run is offline")
        return "offline"

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        metrics = {name: value for name, value in metrics.items() if name != "epoch"}  # a run is one, see data.py
        self._try(super().log_metrics, metrics, step)

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        self._try(super().log_hyperparams, params)

    @property
    def run_id(self) -> str | None:
        """What the run is called in W&B; None where it has failed."""
        import wandb

        return self._experiment.id if isinstance(self._experiment, wandb.Run) and not self.failed else None

    @property
    def offline_pattern(self) -> str | None:
        """Where the run's starts lie until `wandb sync` uploads them, if it is offline."""
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
            _warn(f"has what was logged so far; upload it with: wandb sync {pattern}")

    @rank_zero_only
    def log_table(self, key: str, columns: list[str], data: list[list[Any]], step: int | None = None) -> None:
        self._try(partial(super().log_table, step=step), key, columns, data)

    @rank_zero_only
    def log_image(self, key: str, images: list[Any], step: int | None = None, **settings: list[Any]) -> None:
        self._try(partial(super().log_image, step=step, **settings), key, images)

    @rank_zero_only
    def log_checkpoint(self, path: str) -> None:
        """Keeps a checkpoint as an artifact, where that was asked for."""
        if self.log_best:
            self._try(self._log_artifact, path)

    def _log_artifact(self, path: str) -> None:
        import wandb

        artifact = wandb.Artifact(f"model-{self.experiment.id}", type="model")
        artifact.add_file(path)
        self.experiment.log_artifact(artifact, aliases=[Path(path).stem])

    def _try(self, log: Any, *values: Any) -> None:
        if self.failed:
            return
        try:
            log(*values)
        except Exception as error:  # a dead service raises whatever it happens to touch first
            import wandb

            self.failed = True
            _warn(f"has failed and is left out: {error}")
            with suppress(Exception):
                wandb.teardown()  # or it would fail again when the process ends


def wandb_loggers(trainer: Trainer) -> list[WandbLogger]:
    """A trainer's."""
    return [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]


class TensorBoardLogger(lightning.pytorch.loggers.TensorBoardLogger):
    """Lightning's, which lies beside the runs unless it is told where. Needs `pip install tensorboard`.

    Args:
        save_dir: the folder of `name`.
        name: the folder of the runs' own, `version_0` and so on.
        settings: those of Lightning's.
    """

    def __init__(self, save_dir: str = "runs", name: str = "tensorboard", **settings: Any) -> None:
        try:
            super().__init__(save_dir, name, default_hp_metric=False, **settings)
        except ModuleNotFoundError:
            raise UserError("TensorBoardLogger needs the package tensorboard; pip install tensorboard") from None


def _answers(address: str) -> bool:
    """Whether a server says anything but that it cannot serve, soon."""
    answers = []

    def ask() -> None:
        try:
            request = Request(address, b'{"query": "{viewer{id}}"}', {"Content-Type": "application/json"})
            try:
                with urlopen(request, timeout=PATIENCE) as response:
                    json.load(response)  # and not the page of a hotel
                answers.append(200)
            except HTTPError as error:
                answers.append(error.code)
        except Exception:  # no answer, or none that W&B would give
            return

    # In a thread, for the look-up of a name knows no timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return bool(answers) and answers[0] < 500


def _warn(text: str) -> None:
    if rank_zero_only.rank == 0:
        print(f"lightning-tfm: W&B {text}", file=sys.stderr)
