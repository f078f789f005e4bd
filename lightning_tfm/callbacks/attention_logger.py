"""Logging of attention weights: alignment scores at each validation, plots after the test."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning import Callback, LightningModule, Trainer

from lightning_tfm.callbacks.predictions import Predictions
from lightning_tfm.callbacks.progress import track
from lightning_tfm.callbacks.summary import evaluated_prefix
from lightning_tfm.data import Batch
from lightning_tfm.distributed.parallel import data_group
from lightning_tfm.inference import AttentionExample
from lightning_tfm.layers import Positions
from lightning_tfm.loggers import media_loggers, run_folder
from lightning_tfm.runs.record import Run
from lightning_tfm.system.files import atomic_write
from lightning_tfm.tasks.alignment import AlignmentScore
from lightning_tfm.tasks.base import TaskModule

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class AttentionLogger(Callback):
    """Callback that scores attention weights at each validation, and plots them after the test.

    If all validation pairs have a gold alignment, `val/alignment/LAYER/head_N/accuracy`, `aer` and `entropy` are
    logged for each head that attends to the source, over the whole validation split, see `AlignmentScore`. The head
    with the highest accuracy is saved in checkpoints for `lightning-tfm generate --alignments`.

    After the test, the run's folder contains `attention/*.png`: a plot of each layer for a few examples, of the model's
    own output, with the gold alignment outlined if the output is right, and the positional encodings if the network has
    any.
    """

    def __init__(self) -> None:
        self.scores: dict[str, AlignmentScore] = {}  # by layer

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        aligned = cast(TaskModule, pl_module).aligned_attention(trainer.val_dataloaders.dataset, batch)
        if aligned is None:
            return
        maps, gold = aligned
        for layer, weights in maps.items():
            if layer not in self.scores:
                self.scores[layer] = AlignmentScore(weights.size(1)).to(pl_module.device)
                self.scores[layer].process_group = data_group(trainer.strategy)
            self.scores[layer].update(weights, gold, batch)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        best = -1.0
        for layer, score in self.scores.items():
            for name, values in score.compute().items():  # over all processes
                for head, value in enumerate(torch.atleast_1d(values)):  # torchmetrics squeezes a single head
                    cast(TaskModule, pl_module).log(
                        f"val/alignment/{layer}/head_{head}/{name}",
                        value.float(),
                        sync_dist=True,
                        higher_is_better={"accuracy": True, "aer": False}.get(name),
                    )
                    if name == "accuracy" and value > best:
                        best = value.item()
                        cast(TaskModule, pl_module).alignment_head = (layer, head)
            score.reset()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        predictions = next((other for other in trainer.callbacks if isinstance(other, Predictions)), None)
        folder = run_folder(trainer)
        if predictions is None or folder is None:
            return
        tested = [(row, line) for name, row, line in predictions.lines if name == trainer.datamodule.test_sets[0]]
        module = cast(TaskModule, pl_module)
        examples = module.attention_examples(trainer.test_dataloaders[0].dataset, tested)
        if not trainer.is_global_zero:
            for example in examples:
                module.attention(example.content)  # processes that divide the heads compute together
            return
        from lightning_tfm.plots.pictures import missing_glyphs_named, on_one_canvas  # slow to import

        with missing_glyphs_named():
            pictures = self._draw(trainer, module, examples, Run(folder))
        for logger in media_loggers(trainer) if pictures else ():  # a network may have no attention and no positions
            captions = [path.stem for path in pictures]
            logger.log_image(
                f"{evaluated_prefix(trainer)}/attention", on_one_canvas(pictures), trainer.global_step, caption=captions
            )

    def _draw(self, trainer: Trainer, module: TaskModule, examples: list[AttentionExample], run: Run) -> list[Path]:
        """Save plots of attention weights and positional encodings of a run; return their paths."""
        from lightning_tfm.plots.pictures import draw_attention, draw_positions

        pictures = []
        run.write_examples([example.content for example in examples])
        for row, title, content in track(trainer, examples, "drawing the attention of example"):
            for layer in (layer.cropped() for layer in module.attention(content)):
                path = run.attention_folder / f"example_{row:04}_{short_name(layer.layer)}.png"
                _save(draw_attention(layer, f"example {row}: {title}"), path)
                pictures.append(path)
        for name, layer in module.network.named_modules():
            if isinstance(layer, Positions) and (encodings := layer.table()) is not None:
                _save(draw_positions(encodings, name.replace("_", " ")), path := run.attention_folder / f"{name}.png")
                pictures.append(path)
        return pictures


def _save(figure: Figure, path: Path) -> None:
    with atomic_write(path) as file:
        figure.savefig(file, dpi=100)


def short_name(layer: str) -> str:
    """Return the name of a layer in file names, such as decoder1_cross for decoder.1.cross_attention."""
    return re.sub(r"s?\.(\d+)", r"\1", layer).removesuffix("_attention").replace(".", "_")
