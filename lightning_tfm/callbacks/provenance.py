"""Provenance of a run, written to its folder."""

from __future__ import annotations

import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_tfm.distributed.strategies import Elastic
from lightning_tfm.errors import DamagedError, rank_zero_print
from lightning_tfm.loggers import run_folder, wandb_loggers
from lightning_tfm.runs.record import FORMAT, Lineage, Run, Start
from lightning_tfm.system.versions import framework, git, hardware, versions


class Provenance(Callback):
    """Callback that records each start or resumption of a run as a `Start`, and the uncommitted changes as a diff.

    A later test or validation of a checkpoint writes a start to its own folder. The data fingerprint is also logged as
    a hyper-parameter.
    """

    def __init__(self) -> None:
        self.changed: dict[str, tuple[Any, Any]] = {}  # settings that differ from the checkpoint, as (old, new)
        self.begins_with: str | None = None  # the checkpoint of a different run
        self.lineage: Lineage | None = None  # of a fork
        self.is_recorded = False  # whether this process has written its entry
        self.step = 0  # of the loaded checkpoint

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.step = checkpoint["global_step"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._record(trainer, self.begins_with)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            self._record(trainer, str(trainer.ckpt_path))

    on_test_start = on_validation_start

    def _record(self, trainer: Trainer, checkpoint: str | None) -> None:
        folder, data = run_folder(trainer), trainer.datamodule
        if self.is_recorded or folder is None:
            return
        self.is_recorded = True
        for logger in trainer.loggers:
            logger.log_hyperparams({"data_fingerprint": data.fingerprint})
        if not trainer.is_global_zero:
            return
        run = Run(folder)
        earlier = _earlier_starts(run)
        state, diff = git(Path.cwd())
        if diff:
            run.write_diff(len(earlier), diff)
        package, _ = framework()
        start: Start = {
            "format": FORMAT,
            "time": datetime.now(UTC).replace(microsecond=0),
            "step": self.step,
            "checkpoint": checkpoint,
            "command": shlex.join(sys.argv).encode(errors="backslashreplace").decode(),  # it may not be UTF-8
            "changed_settings": self.changed,
            "git": state,
            "versions": versions(),
            "framework": {"commit": package["commit"], "dirty": package["dirty"]},
            "hardware": hardware(),
            "processes": trainer.world_size,
            "data_fingerprint": data.fingerprint,
            "data_sizes": {split: len(examples) for split, examples in data.datasets.items()},
            "tokenizer_fingerprint": data.tokenizer.fingerprint,
            "scored_symbols": data.tokenizer.scored_symbols,
            "wandb": next((logger.run_id for logger in wandb_loggers(trainer)), None),
        }
        if self.lineage is not None:
            start["fork"] = self.lineage
        if self.step and earlier:
            _report_changes(earlier[-1], start, elastic=isinstance(trainer.strategy, Elastic))
        run.write_starts([*earlier, start])


def _earlier_starts(run: Run) -> list[Start]:
    """Return the earlier starts of a run; a damaged file is kept as a copy, so that the run continues."""
    try:
        return run.starts
    except DamagedError as error:
        rank_zero_print(f"{error}; it is kept as {run.keep_damaged(Run.PROVENANCE).name}")
        return []


def _report_changes(earlier: Start, start: Start, elastic: bool) -> None:
    """Print what has changed since a run was last started and may change its floating-point results."""
    before, after = (
        {name.replace("_", " "): value for name, value in each["hardware"].items() if name not in ("system", "cores")}
        | {f"version of {name}": value for name, value in each["versions"].items()}
        | ({} if elastic else {"processes": each["processes"]})
        for each in (earlier, start)
    )
    changes = [f"{name} ({new}, was {before.get(name)})" for name, new in after.items() if new != before.get(name)]
    if changes:
        rank_zero_print(
            f"resumed with other {', '.join(changes)}: results may differ from an undisturbed run by rounding"
        )
