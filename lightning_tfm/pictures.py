"""Figures of attention weights, positional encodings and confusion matrices."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from torch import Tensor

HEADS_A_ROW = 4
"""Number of panels per row in a figure of attention weights."""

LABELS = 20
"""Maximum number of labels for which a confusion matrix shows its counts."""

LARGEST = 2_000
"""Maximum width and height of an image logged to W&B, in pixels."""


def draw_attention(
    weights: Tensor,
    queries: Sequence[str],
    keys: Sequence[str],
    title: str = "",
    gold: Iterable[tuple[int, int]] = (),
) -> Figure:
    """Draw the attention weights of a layer, with one panel per head.

    Args:
        weights: (H, T, S), from 0 to 1.
        queries: the T row labels.
        keys: the S column labels.
        title: title above all panels.
        gold: cells (column, row) of the gold alignment, which are outlined.
    """
    heads, T, S = weights.shape
    columns = min(heads, HEADS_A_ROW)
    rows = -(-heads // columns)
    width = max(columns * (0.9 + 0.16 * S), 3.0)
    lines = len(title) / (12 * width)  # about twelve characters per inch
    figure = Figure(figsize=(width, rows * (0.8 + 0.19 * T) + 0.2 * lines), layout="constrained")
    for head, axes in enumerate(figure.subplots(rows, columns, squeeze=False).flat):
        if head >= heads:
            axes.set_axis_off()
            continue
        image = axes.imshow(weights[head].float().cpu().numpy(), vmin=0, vmax=1, cmap="Blues", aspect="auto")
        axes.set_xticks(range(S), keys, fontsize=7, rotation=90 if max(map(len, keys)) > 1 else 0, parse_math=False)
        axes.set_yticks(range(T), queries, fontsize=7, parse_math=False)
        axes.tick_params(length=0)
        if heads > 1:
            axes.set_title(f"head {head}", fontsize=8)
        for column, row in gold:
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="tab:orange"))
    figure.colorbar(image, ax=figure.axes, shrink=0.6, label="weight")
    figure.suptitle(title, fontsize=9, parse_math=False, wrap=True)
    return figure


def draw_positions(encodings: Tensor) -> Figure:
    """Draw positional encodings (N, D) as a heat map, and up to four dimensions as curves."""
    N, D = encodings.shape
    values = encodings.detach().float().cpu()
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    heat, curves = figure.subplots(1, 2)
    image = heat.imshow(values.T.numpy(), cmap="RdBu", aspect="auto", vmin=-values.abs().max(), vmax=values.abs().max())
    heat.set_xlabel("position")
    heat.set_ylabel("dimension")
    figure.colorbar(image, ax=heat)
    for dimension in torch.linspace(0, D // 2 - 1, min(4, D)).int().tolist():
        curves.plot(range(N), values[:, dimension].numpy(), label=f"dimension {dimension}")
    curves.set_xlabel("position")
    curves.legend(fontsize=8)
    return figure


def draw_confusion(labels: Sequence[str], counts: Mapping[tuple[str, str], int]) -> Figure:
    """Draw a confusion matrix, with references in rows and predictions in columns.

    Note:
        With more than LABELS labels, counts and some of the labels are left out.

    Args:
        labels: the labels.
        counts: number of examples by (reference, prediction).
    """
    values = torch.tensor([[counts.get((row, column), 0) for column in labels] for row in labels])
    shares = values / values.sum(1, keepdim=True).clamp(min=1)
    size = 1.8 + 0.8 * min(len(labels), LABELS)
    figure = Figure(figsize=(size + 0.8, size), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares.numpy(), vmin=0, vmax=1, cmap="Blues")
    if len(labels) <= LABELS:
        for row, column in itertools.product(range(len(labels)), repeat=2):
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, f"{values[row, column]:,}", ha="center", va="center", color=color)
    named = range(0, len(labels), -(-len(labels) // (3 * LABELS)))
    axes.set_xticks(named, [labels[n] for n in named], parse_math=False, rotation=90 if len(labels) > LABELS else 0)
    axes.set_yticks(named, [labels[n] for n in named], parse_math=False)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    figure.colorbar(image, ax=axes, shrink=0.8, label="fraction of the row")
    return figure


def on_one_canvas(paths: Iterable[Path]) -> list[Image.Image]:
    """Load images and pad them to one size.

    Note:
        W&B shows the images of one name side by side and crops them if their sizes differ. Images above LARGEST are
        scaled down, since many are in memory at once.

    Args:
        paths: the image files.
    """
    pictures = []
    for path in paths:
        with Image.open(path) as file:
            pictures.append(file.convert("RGB"))
        pictures[-1].thumbnail((LARGEST, LARGEST))
    size = (max(picture.width for picture in pictures), max(picture.height for picture in pictures))
    padded = []
    for picture in pictures:
        canvas = Image.new("RGB", size, "white")
        canvas.paste(picture)
        padded.append(canvas)
    return padded
