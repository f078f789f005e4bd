"""Provenance of a run, written to provenance.json."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_tfm.config.settings import read_starts
from lightning_tfm.distributed.strategies import Elastic
from lightning_tfm.errors import UserError, rank_zero_print
from lightning_tfm.loggers import run_folder, wandb_loggers
from lightning_tfm.system.files import replace_file, write_text

GIT_SETTINGS = ("core.fsmonitor=false", "core.hooksPath=/dev/null", "safe.bareRepository=explicit")
"""Settings with which git runs no program named by a repository; filters have names of their own, see `git`."""

UNSAVED = (".env*", ".env*/**", "*.env")
"""Patterns of the files, often with secrets, whose changes are not saved."""

UNFILTERED = ":(top,attr:!filter)"
"""Files without a filter, which is a program: compared without it, those of Git LFS would all have changed."""

PACKAGES = ("lightning_tfm", "torch", "lightning", "torchmetrics", "wandb", "faker", "babel", "tokenizers", "sacrebleu")


class Provenance(Callback):
    """Callback that writes `provenance.json` to the run's folder when training starts.

    The file has one entry for each time the run is started or resumed. A later test or validation of a checkpoint
    writes an entry to its own folder. An entry contains:

    - `time`: the time in UTC.
    - `step`: the step at which training starts, or of the tested checkpoint.
    - `command`: the command line.
    - `checkpoint`: the tested or validated checkpoint, or the checkpoint of a different run from which training starts.
    - `changed_settings`: the settings that differ from the checkpoint from which training starts, as [old, new].
    - `git`: the state of the repository of the working directory, see `git`; uncommitted changes are saved as
      `uncommitted_N.diff`, where N is the index of the entry, which only the owner can read.
    - `framework`: the commit of the repository of this package, and whether files differ from it; null if there is no
      repository.
    - `versions`: the versions of Python and the packages.
    - `hardware`: the system, the processor, the GPUs, and the number of cores and threads.
    - `processes`: the number of processes of the run.
    - `data_fingerprint`: a hash of the texts of each split, which is also logged as a hyper-parameter.
    - `tokenizer_fingerprint`: a hash of the tokenizer.
    - `scored_symbols`: the symbols that the symbol error rate counts, see `Tokenizer`.
    - `wandb`: the id of the run in W&B; null without W&B.
    """

    def __init__(self) -> None:
        self.changed: dict[str, tuple[Any, Any]] = {}  # settings that differ from the checkpoint, as (old, new)
        self.begins_with: str | None = None  # the checkpoint of a different run
        self.is_recorded = False  # whether this process has written its entry
        self.step = 0  # of the loaded checkpoint

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.step = checkpoint["global_step"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._record(trainer, **({"checkpoint": self.begins_with} if self.begins_with else {}))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._record(trainer, checkpoint=str(trainer.ckpt_path))

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._record(trainer, checkpoint=str(trainer.ckpt_path))

    def _record(self, trainer: Trainer, **facts: str) -> None:
        folder = run_folder(trainer)
        if self.is_recorded or folder is None:
            return
        self.is_recorded = True
        for logger in trainer.loggers:
            logger.log_hyperparams({"data_fingerprint": trainer.datamodule.fingerprint})
        if not trainer.is_global_zero:
            return
        starts = _earlier_starts(folder)
        state = git(Path.cwd())
        if diff := state.pop("diff", None):
            write_text(folder / f"uncommitted_{len(starts)}.diff", diff, mode=0o600)  # it may contain secrets
        start = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "step": self.step,
            **facts,
            "command": shlex.join(sys.argv),
            "changed_settings": self.changed,
            "git": state,
            "versions": versions(),
            "framework": {name: value for name, value in framework().items() if name in ("commit", "dirty")},
            "hardware": hardware(),
            "processes": trainer.world_size,
            "data_fingerprint": trainer.datamodule.fingerprint,
            "tokenizer_fingerprint": trainer.datamodule.tokenizer.fingerprint,
            "scored_symbols": trainer.datamodule.tokenizer.scored_symbols,
            "wandb": next((logger.run_id for logger in wandb_loggers(trainer)), None),
        }
        if self.step and starts:
            _report_changes(starts[-1], start, elastic=isinstance(trainer.strategy, Elastic))
        write_text(folder / "provenance.json", json.dumps([*starts, start], indent=2) + "\n")


def _earlier_starts(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of `provenance.json` in a folder; a damaged file is renamed, so that the run continues."""
    try:
        return read_starts(folder)
    except UserError as error:
        path = folder / "provenance.json"
        kept = path.with_name(f"{path.name}.damaged")
        replace_file(path, kept)
        rank_zero_print(f"{error}; it is renamed to {kept.name}")
        return []


def _report_changes(earlier: dict[str, Any], start: dict[str, Any], elastic: bool) -> None:
    """Print what has changed since a run was last started and may change its floating-point results.

    Args:
        earlier: the entry of the last start.
        start: the new entry.
        elastic: whether results do not depend on the number of processes.
    """
    pairs = {
        **{
            name: (earlier["hardware"].get(name), start["hardware"][name])
            for name in ("processor", "instruction set", "threads", "gpus")
        },
        **{f"version of {name}": (earlier["versions"].get(name), new) for name, new in start["versions"].items()},
        **({} if elastic else {"processes": (earlier.get("processes"), start["processes"])}),
    }
    changes = [f"{name} ({new}, was {old})" for name, (old, new) in pairs.items() if old != new]
    if changes:
        rank_zero_print(
            f"resumed with other {', '.join(changes)}: results may differ from an undisturbed run by rounding"
        )


def wandb_run(folder: Path) -> str | None:
    """Return the W&B id of the run in a folder; None if it was not logged to W&B, or provenance.json is damaged."""
    with suppress(UserError):
        return next((start["wandb"] for start in reversed(read_starts(folder)) if start.get("wandb")), None)
    return None


def git(folder: Path) -> dict[str, Any]:
    """Return the state of the git repository that contains a folder.

    Args:
        folder: the folder.

    Returns:
        `commit`, and `dirty`, whether files differ from the commit; both None outside a repository. If dirty, also
        `diff`, except for the files of UNSAVED, and `untracked`, the names of the untracked files.

    Note:
        Files with a filter, such as those of Git LFS, are not compared.
    """
    try:
        commit = head_commit(folder)
        names = run_git(folder, "config", "--list", "--name-only", "--null").split("\0")
        # Unlike -c, this option allows "=" in a name.
        filters = [f"--config-env={name}=EMPTY" for name in {*names} if name.startswith("filter.")]
        status = run_git(
            folder,
            *filters,
            *("status", "--porcelain", "--untracked-files=all", "--ignore-submodules=dirty", "--", UNFILTERED),
        ).splitlines()
        diff = run_git(
            folder,
            *filters,
            *("diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv", "--binary"),
            *("--ignore-submodules=dirty", "--submodule=short", "--", UNFILTERED),
            *(f":(top,exclude,glob)**/{pattern}" for pattern in UNSAVED),
        )
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}
    if not status:
        return {"commit": commit, "dirty": False}
    untracked = [line[3:] for line in status if line.startswith("??")]
    return {"commit": commit, "dirty": True, "untracked": untracked, "diff": diff}


def head_commit(folder: Path) -> str | None:
    """Return the commit of the git repository that contains a folder; None outside a repository."""
    try:
        return run_git(folder, "rev-parse", "HEAD").strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def framework() -> dict[str, Any]:
    """Return the state of the repository of this package, see `git`; the values are None for an installed wheel."""
    file = Path(__file__)
    try:
        run_git(file.parent, "ls-files", "--error-unmatch", file.name)  # a virtual environment may be in a repository
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}
    return git(file.parents[2])


def run_git(folder: Path, *arguments: str) -> str:
    """Run a git command and return its output.

    Args:
        folder: the working directory of the command.
        arguments: the arguments of git.

    Raises:
        OSError: if git is not installed.
        subprocess.CalledProcessError: if the command fails, for example outside a repository.

    Note:
        The repository may come from a stranger, so git runs no program that it names, and fetches nothing.
    """
    settings = [part for setting in GIT_SETTINGS for part in ("-c", setting)]
    command = ["git", "--no-optional-locks", "-C", str(folder), *settings, *arguments]
    environment = os.environ | {"EMPTY": "", "GIT_ALLOW_PROTOCOL": ""}
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", check=True, env=environment
    ).stdout


def versions() -> dict[str, str]:
    """Return the versions of Python and of PACKAGES."""
    return {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}}


def hardware() -> dict[str, Any]:
    """Return the system, the processor, the cores, the instruction set of torch, the threads and the GPUs."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
