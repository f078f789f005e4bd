"""Plots of attention weights after the test, and their history during training."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_tfm.callbacks.predictions import Predictions
from lightning_tfm.callbacks.summary import evaluated_prefix, evaluated_splits
from lightning_tfm.callbacks.training_progress import track
from lightning_tfm.data import LabeledDataset, MixtureDataset, PairDataset, TextDataset
from lightning_tfm.errors import DamagedError
from lightning_tfm.inference import AttentionExample, Prediction, short_title, worst_first
from lightning_tfm.inference.attention_maps import MAX_POSITIONS, AttentionMap
from lightning_tfm.layers import Positions
from lightning_tfm.loggers import example_loggers, run_folder
from lightning_tfm.runs.attention_history import AttentionHistory, ExampleHistory, extended
from lightning_tfm.runs.record import Run
from lightning_tfm.tasks.base import TaskModule

NUM_EXAMPLES = 2
"""Number of first test examples, and of test examples with the largest loss, whose attention is plotted."""

MAX_WEIGHTS = 2**16
"""Maximum number of attention weights that a validation adds to the history of a run, one byte each."""


class AttentionLogger(Callback):
    """Callback that records attention weights at each validation, and plots them after the test.

    During training, the run's folder contains the weights for the first validation examples, whose rows are those of
    the target, see `AttentionHistory`. After the test, it contains a plot of each layer for a few examples, and the
    positional encodings if the network has any. The rows of these plots are those of the model's own output; the gold
    alignment is outlined if it is right.
    """

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder, loader = run_folder(trainer), trainer.val_dataloaders
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking or folder is None:
            return
        module, run = cast(TaskModule, pl_module), Run(folder)
        maps = [
            (title, module.attention(content))  # on all processes, since they may divide the heads
            for title, content in first_examples(module, getattr(loader, "dataset", None))
        ]
        examples = [_recorded(title, layers) for title, layers in maps if layers]
        if examples and trainer.is_global_zero:
            history: AttentionHistory | None = None
            with suppress(DamagedError):
                history = run.attention_history
            run.write_attention_history(extended(history, trainer.global_step, examples))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        predictions = next((other for other in trainer.callbacks if isinstance(other, Predictions)), None)
        folder = run_folder(trainer)
        if predictions is None or folder is None:
            return
        tested = [(row, line) for name, row, line in predictions.lines if name == evaluated_splits(trainer)[0]]
        module = cast(TaskModule, pl_module)
        dataset = trainer.test_dataloaders[0].dataset
        examples = predicted_examples(tested) if tested else text_examples(module, dataset)
        if not trainer.is_global_zero:
            for example in examples:
                module.attention(example.content)  # processes that divide the heads compute together
            return
        from lightning_tfm.plots.pictures import missing_glyphs_named, on_one_canvas  # slow to import

        with missing_glyphs_named():
            pictures = self._draw(trainer, module, examples, Run(folder))
        for logger in example_loggers(trainer) if pictures else ():  # a network may have no attention and no positions
            captions = [path.stem for path in pictures]
            logger.log_image(
                f"{evaluated_prefix(trainer)}/attention", on_one_canvas(pictures), trainer.global_step, caption=captions
            )

    def _draw(self, trainer: Trainer, module: TaskModule, examples: list[AttentionExample], run: Run) -> list[Path]:
        """Save plots of attention weights and positional encodings of a run; return their paths."""
        from lightning_tfm.plots.pictures import draw_attention, draw_positions, save_figure

        pictures = []
        run.write_examples([example.content for example in examples])
        for row, title, content in track(trainer, examples, "drawing the attention of example"):
            for layer in (layer.cropped() for layer in module.attention(content)):
                path = run.attention_folder / Run.EXAMPLE_PICTURE.format(row, short_name(layer.layer))
                save_figure(draw_attention(layer, f"example {row}: {title}"), path, dpi=100)
                pictures.append(path)
        for name, layer in module.network.named_modules():
            if isinstance(layer, Positions) and (encodings := layer.table()) is not None:
                path = run.attention_folder / Run.PICTURE.format(name)
                save_figure(draw_positions(encodings, name.replace("_", " ")), path, dpi=100)
                pictures.append(path)
        return pictures


def predicted_examples(predictions: Sequence[tuple[int, Prediction]]) -> list[AttentionExample]:
    """Return the first predictions, and those with the largest loss, as attention examples."""
    worst = sorted(predictions, key=lambda line: worst_first(line[1]))[:NUM_EXAMPLES]
    examples = []
    for row, prediction in dict([*predictions[:NUM_EXAMPLES], *worst]).items():
        # Fonts have no tab.
        texts = (prediction["source"], prediction["target"], prediction["prediction"])
        source, target, output = (short_title(" ".join(text.split())) for text in texts)
        title = f"{source}\ntrue: {target}\npredicted: {output}"
        examples.append(AttentionExample(row, title, {**prediction}))
    return examples


def first_examples(module: TaskModule, dataset: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the first examples of a dataset with their titles; none if it holds neither pairs nor a text."""
    if isinstance(dataset, PairDataset | LabeledDataset):
        pairs = dataset.pairs[:NUM_EXAMPLES]
        return [
            (f"{short_title(pair.source)} \N{RIGHTWARDS ARROW} {short_title(pair.target)}", pair._asdict())
            for pair in pairs
        ]
    if isinstance(dataset, TextDataset | MixtureDataset):
        return [(short_title(content["text"]), content) for *_, content in text_examples(module, dataset)]
    return []


def _recorded(title: str, layers: Sequence[AttentionMap]) -> ExampleHistory:
    """Return the weights of an example, cropped to a part of MAX_WEIGHTS."""
    heads = sum(layer.weights.size(0) for layer in layers)
    size = max(1, min(MAX_POSITIONS, math.isqrt(MAX_WEIGHTS // (NUM_EXAMPLES * heads))))
    return {
        "title": title,
        "layers": [
            {
                "layer": layer.layer,
                "heads": layer.weights.size(0),
                "queries": layer.queries,
                "keys": layer.keys,
                "gold": layer.gold,
                "predicts": layer.predicts,
                "weights": [layer.encoded()],
            }
            for layer in (layer.cropped(size) for layer in layers)
        ],
    }


def text_examples(module: TaskModule, dataset: Any) -> list[AttentionExample]:
    """Return the first windows of a text as attention examples."""
    examples = []
    for row in range(min(NUM_EXAMPLES, len(dataset))):
        ids = dataset[torch.tensor([row])].target_in[0].tolist()
        content = {"ids": ids, "text": module.tokenizer.decode(ids).strip()}
        examples.append(AttentionExample(row, "self-attention", content))
    return examples


def short_name(layer: str) -> str:
    """Return the name of a layer in file names, such as decoder1_cross for decoder.1.cross_attention."""
    return re.sub(r"s?\.(\d+)", r"\1", layer).removesuffix("_attention").replace(".", "_")
