"""What a model answers: samples at each validation, all answers of the test."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer

from lightning_tfm.data import Batch, PairDataset
from lightning_tfm.files import write_text
from lightning_tfm.loggers import WandbLogger

SAMPLES = 16
"""Of a validation: the same each time."""


class Predictions(Callback):
    """Shows a few answers of each validation as a table in W&B, and keeps all answers of the test.

    The test of a run writes `predictions.jsonl` into its folder, a line for each pair: `set`, `source`, `target`,
    `answer`, `right`, `nll` of the target in nats, `kind` and `alignment` of the pair. Where pairs have a kind, each
    kind's exact match is logged as `test/kind/KIND/exact_match`.
    """

    def __init__(self) -> None:
        self.lines: list[tuple[str, int, dict[str, Any]]] = []  # of this process: set, row, line
        self.has_trained = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.has_trained = True

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Mapping[str, Any],
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        loggers = [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]
        if batch_idx > 0 or not loggers or not trainer.is_global_zero:
            return
        rows = trainer.val_dataloaders.sampler.batches[0][:SAMPLES]
        lines = answered(trainer.val_dataloaders.dataset, rows.tolist(), outputs, pl_module.tokenizer)
        columns = ["source", "target", "answer", "right"]
        for logger in loggers:
            logger.log_table("val/samples", columns, [[line[name] for name in columns] for line in lines])

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.lines = []

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Mapping[str, Any],
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        loader = trainer.test_dataloaders[dataloader_idx]
        rows = loader.sampler.batches[batch_idx].tolist()
        name = trainer.datamodule.test_sets[dataloader_idx]
        lines = answered(loader.dataset, rows, outputs, pl_module.tokenizer)
        self.lines += [(name, row, line) for row, line in zip(rows, lines, strict=True)]

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.world_size > 1:
            parts: list[Any] = [None] * trainer.world_size
            torch.distributed.all_gather_object(parts, self.lines)
            self.lines = [line for part in parts for line in part]
        order = {name: place for place, name in enumerate(trainer.datamodule.test_sets)}
        self.lines.sort(key=lambda line: (order[line[0]], line[1]))
        by_kind = defaultdict(list)
        for name, _, line in self.lines:
            if line["kind"] is not None:
                prefix = "test" if name == "test" else f"test/{name}"
                by_kind[f"{prefix}/kind/{line['kind']}/exact_match"].append(line["right"])
        for name, right in sorted(by_kind.items()):
            pl_module.log(name, torch.tensor(right).double().mean().float(), add_dataloader_idx=False)
        if self.has_trained and trainer.loggers:
            path = Path(trainer.log_dir) / "predictions.jsonl"  # a broadcast: every process must ask
            if trainer.is_global_zero:
                lines = (json.dumps({"set": name} | line, ensure_ascii=False) for name, _, line in self.lines)
                write_text(path, "".join(f"{line}\n" for line in lines))


def answered(dataset: PairDataset, rows: list[int], outputs: Mapping[str, Any], tokenizer: Any) -> list[dict[str, Any]]:
    """What was answered to these pairs, the first of a batch."""
    lines = []
    for row, ids, nll in zip(rows, outputs["answers"].tolist(), outputs["nll"].tolist(), strict=False):
        pair, answer = dataset.pairs[row], tokenizer.decode(ids)
        lines.append(
            {
                "source": pair.source,
                "target": pair.target,
                "answer": answer,
                "right": answer == pair.target,
                "nll": round(nll, 4),
                "kind": pair.kind,
                "alignment": pair.alignment,
            }
        )
    return lines
