"""Where a model looks, scored at each validation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning import Callback, LightningModule, Trainer

from lightning_tfm.alignment import AlignmentScore, gold_links
from lightning_tfm.data import Batch, PairDataset
from lightning_tfm.layers import attention_maps


class AttentionScores(Callback):
    """Logs `val/alignment/LAYER/HEAD/accuracy`, `error_rate` and `entropy`, see AlignmentScore, for every head.

    Over the whole validation part, where its pairs have an alignment.
    """

    def __init__(self) -> None:
        self.scores: dict[str, AlignmentScore] = {}  # by layer

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Mapping[str, Any],
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        loader = trainer.val_dataloaders
        dataset: PairDataset = loader.dataset
        pairs = [dataset.pairs[row] for row in loader.sampler.batches[batch_idx].tolist()]
        if pairs[0].alignment is None:
            return
        gold = gold_links(pairs, batch)
        with attention_maps(pl_module.network) as maps:
            pl_module.network(batch.source, batch.target_in)
        for layer, weights in pl_module.network.over_source(maps, batch.source).items():
            if layer not in self.scores:
                self.scores[layer] = AlignmentScore(weights.size(1)).to(pl_module.device)
            self.scores[layer].update(weights, gold, batch)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for layer, score in self.scores.items():
            for name, values in score.compute().items():  # over all processes
                for head, value in enumerate(values):
                    pl_module.log(f"val/alignment/{layer}/head_{head}/{name}", value.float())
            score.reset()
