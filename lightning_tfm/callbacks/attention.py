"""Where a model looks: scored at each validation, drawn after the test."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer

from lightning_tfm.alignment import AlignmentScore, gold_links
from lightning_tfm.callbacks.predictions import Predictions
from lightning_tfm.data import Batch, Examples, PairDataset, TextDataset
from lightning_tfm.files import write_text
from lightning_tfm.inspection import Look, looks, window_looks
from lightning_tfm.layers import RotaryPositions, attention_maps
from lightning_tfm.loggers import wandb_loggers
from lightning_tfm.modules.task import TaskModule

LONG = 80
"""Characters of a source that a picture's title holds."""

DRAWN = 2
"""Examples of the test whose attention is drawn: so many of the first, and as many of the largest loss."""


class Attention(Callback):
    """Logs where the heads look at each validation, and draws it after the test.

    For every head that looks at the source, over the whole validation part, where its pairs have an alignment:
    `val/alignment/LAYER/head_N/accuracy`, `error_rate` and `entropy`, see AlignmentScore.

    The test of a run leaves `attention/*.png` in its folder: a picture for each layer of a few examples, with the
    gold alignment outlined, if there is one, and the encodings of positions, where the network has them. Of a text, the
    windows whose attention is drawn are kept as well, `attention/windows.json`.
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
        dataset = loader.dataset
        if trainer.sanity_checking or not isinstance(dataset, PairDataset):
            return
        if any(pair.alignment is None for pair in dataset.pairs):  # of the whole part: all processes must do the same
            return
        pairs = [dataset.pairs[row] for row in loader.sampler.batches[batch_idx].tolist()]
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
                for head, value in enumerate(torch.atleast_1d(values)):  # of one head, torchmetrics makes a scalar
                    pl_module.log(f"val/alignment/{layer}/head_{head}/{name}", value.float(), sync_dist=True)
            score.reset()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        predictions = next((other for other in trainer.callbacks if isinstance(other, Predictions)), None)
        if predictions is None or not predictions.has_trained or not trainer.loggers:
            return
        folder = Path(trainer.log_dir)  # a broadcast: every process must ask
        if not trainer.is_global_zero:
            return
        from lightning_tfm.pictures import on_one_canvas  # takes a while to import

        (folder / "attention").mkdir(exist_ok=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from")  # of no font that is at hand: a box is drawn
            pictures = self._draw(pl_module, predictions, trainer.test_dataloaders[0].dataset, folder / "attention")
        for logger in wandb_loggers(trainer) if pictures else ():  # a network may have neither
            captions = [path.stem for path in pictures]
            logger.log_image("test/attention", on_one_canvas(pictures), trainer.global_step, caption=captions)

    def _draw(self, module: TaskModule, predictions: Predictions, dataset: Examples, folder: Path) -> list[Path]:
        """Draws attention and positions into a folder."""
        from lightning_tfm.pictures import draw_attention, draw_positions

        pictures = []
        if isinstance(dataset, TextDataset):  # for the report, which has no text
            windows = [window_of(dataset, row) for row in range(min(DRAWN, len(dataset)))]
            write_text(folder / "windows.json", json.dumps(windows))
        tested = [(line["nll"], row) for name, row, line in predictions.lines if name == "test"]
        for row, title, found in _examples(module, dataset, tested):
            for look in (look.first() for look in found):
                path = folder / f"{row}_{look.layer}.png"
                title_of_layer = f"{look.layer}: {title}"
                draw_attention(look.weights, look.queries, look.keys, title_of_layer, look.gold).savefig(path, dpi=100)
                pictures.append(path)
        for name, layer in module.network.named_modules():
            if name.endswith(("positions", "rotary")) and hasattr(module.network, "max_length"):
                encodings = layer(torch.arange(module.network.max_length, device=module.device))
                if isinstance(layer, RotaryPositions):
                    encodings = torch.cat((encodings.real, encodings.imag), dim=-1)[0]  # cosines, then sines
                draw_positions(encodings).savefig(path := folder / f"{name}.png", dpi=100)
                pictures.append(path)
        return pictures


def window_of(dataset: TextDataset, row: int) -> list[int]:
    """The ids that are read in a row of a text."""
    return dataset[torch.tensor([row])].target_in[0].tolist()


def _examples(
    module: TaskModule, dataset: Examples, tested: list[tuple[float, int]]
) -> Iterator[tuple[int, str, list[Look]]]:
    """A few examples' rows, what is told of each, and where all layers look; `tested` has each row's loss."""
    if isinstance(dataset, TextDataset):
        for row in range(min(DRAWN, len(dataset))):
            ids = window_of(dataset, row)
            yield row, "each token over those that were read", window_looks(module.network, module.tokenizer, ids)
        return
    rows = [*range(min(DRAWN, len(tested))), *(row for _, row in sorted(tested, reverse=True)[:DRAWN])]
    for row in dict.fromkeys(rows):
        pair = dataset.pairs[row]
        asked = pair.source if len(pair.source) <= LONG else f"{pair.source[:LONG]}..."
        title = f"{asked} \N{RIGHTWARDS ARROW} {pair.target}".replace("\t", " ")  # which fonts do not have
        yield row, title, looks(module.network, module.tokenizer, pair)
