"""provenance.json: where a run comes from."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer

from lightning_tfm.files import write_text
from lightning_tfm.loggers import wandb_loggers

PACKAGES = ("lightning_tfm", "torch", "lightning", "torchmetrics", "wandb", "faker", "babel", "tokenizers", "sacrebleu")


class Provenance(Callback):
    """Writes `provenance.json` into the run's folder when training starts, beside the config.yaml of all settings.

    It holds an entry for each start of the run, the first and those that went on with it: `time` (UTC), `step` that
    the start began with, `command`, `git` (see `git`), `versions` of Python and of the packages, `hardware`, and
    `data_fingerprint` of each split, and `wandb`, the run's id there. Changes that are not committed are saved as
    `uncommitted_N.diff`, for start N. The fingerprint is logged as a hyper-parameter as well.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.loggers or trainer.fast_dev_run:  # without a folder of its own
            return
        for logger in trainer.loggers:
            logger.log_hyperparams({"data_fingerprint": trainer.datamodule.fingerprint})
        folder = Path(trainer.log_dir)  # a broadcast: every process must ask
        if not trainer.is_global_zero:
            return
        path = folder / "provenance.json"
        starts = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        state = git()
        if diff := state.pop("diff", None):
            write_text(folder / f"uncommitted_{len(starts)}.diff", diff)
        start = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "step": trainer.global_step,
            "command": shlex.join(sys.argv),
            "git": state,
            "versions": versions(),
            "hardware": hardware(),
            "data_fingerprint": trainer.datamodule.fingerprint,
            "wandb": next((logger.run_id for logger in wandb_loggers(trainer)), None),
        }
        write_text(path, json.dumps([*starts, start], indent=2) + "\n")


def wandb_run(folder: Path) -> str | None:
    """The id that the run of this folder has in W&B; None if it has none."""
    path = folder / "provenance.json"
    starts = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return next((start["wandb"] for start in starts if start.get("wandb")), None)


def git() -> dict[str, Any]:
    """The state of the repository that this code lies in.

    `commit`, null outside a repository; `dirty`, whether files differ from it; if so, `diff`, and `untracked`, the
    names of files that it does not know.
    """

    try:
        commit = ask_git("rev-parse", "HEAD").strip()
        status = ask_git("status", "--porcelain", "--untracked-files=all").splitlines()
        diff = ask_git("diff", "HEAD", "--no-color", "--no-ext-diff", "--binary")
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}
    if not status:
        return {"commit": commit, "dirty": False}
    untracked = [line[3:] for line in status if line.startswith("??")]
    return {"commit": commit, "dirty": True, "untracked": untracked, "diff": diff}


def ask_git(*arguments: str, folder: Path = Path(__file__).parents[2]) -> str:
    """What git prints.

    Raises:
        OSError, subprocess.CalledProcessError: if there is no git, or no repository.
    """
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=True).stdout


def versions() -> dict[str, str]:
    """Python's and the packages'."""
    return {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}}


def hardware() -> dict[str, Any]:
    """What this process computes on."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
