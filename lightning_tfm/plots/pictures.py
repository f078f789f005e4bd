"""Figures of attention weights, positional encodings and confusion matrices."""

from __future__ import annotations

import functools
import itertools
import math
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unicodedata import east_asian_width

import matplotlib
import torch
from matplotlib import rc_context, rcParams
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from PIL import Image
from torch import Tensor

from lightning_tfm.errors import rank_zero_print
from lightning_tfm.inference.attention_maps import AttentionMap, visible
from lightning_tfm.plots.style import COLUMNS, HEAT, HIGHLIGHT, PALETTE, PAPER, STYLE
from lightning_tfm.system.files import atomic_write

HEADS_A_ROW = 2
"""Maximum number of panels per row in a figure of attention weights."""

CELL = 0.18
"""Maximum width and height of an attention weight, in inches."""

MAX_PANEL = 9.0
"""Maximum width of a row of panels and maximum height of a panel, in inches, to which long texts are scaled down."""

MAX_HEIGHT = 8.0
"""Maximum height of all panels in a publication, in inches."""

GAP = 0.25
"""Gap between the panels of two heads, in inches."""

_LABEL_SIZE = 8
"""Size of the labels of attention weights on a screen, in points."""

MIN_LABEL_DISTANCE = 0.12
"""Minimum distance of two labels of attention weights, in inches; if the weights are closer, not all have a label."""

MAX_LABEL_LENGTH = 16
"""Maximum length of a label of attention weights, in characters."""

LABELS = 20
"""Maximum number of labels for which a confusion matrix shows counts."""

MAX_IMAGE_SIZE = 2_000
"""Maximum width and height of an image logged to W&B, in pixels."""


MISSING_GLYPH = r"Glyph (\d+) .*missing from"
"""Beginning of matplotlib's warning about a character that no font has."""


@contextmanager
def missing_glyphs_named() -> Iterator[None]:
    """Name all characters that no font has in one line, in place of a warning of matplotlib for each."""
    missing, caught = [], list[warnings.WarningMessage]()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", MISSING_GLYPH)
            yield
    finally:
        for warning in caught:
            if glyph := re.match(MISSING_GLYPH, str(warning.message)):
                missing.append(chr(int(glyph[1])))
            else:
                warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)
    if missing:
        rank_zero_print(
            f"pictures show boxes for {len(set(missing))} characters that no installed font has, such as "
            f"{missing[0]!r}; install a font, such as Noto, and delete {matplotlib.get_cachedir()!r}"
        )


def save_figure(figure: Figure, path: Path, dpi: int = 300) -> None:
    """Save a figure to a .png, .pdf or .svg file; fonts are embedded in PDF, and letters are text in SVG."""
    with rc_context(STYLE), atomic_write(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=dpi)


def style_for(*texts: str, columns: int | None = None) -> dict[Any, Any]:
    """Return the style of a figure, with further installed fonts for the characters that the default font lacks.

    Args:
        texts: the texts of the figure.
        columns: the number of columns of a publication that the figure spans; None for a figure on a screen.
    """
    families = rcParams["font.family"]
    missing = set(map(ord, "".join("".join(texts).split()))) - _characters(findfont(FontProperties(family=families)))
    for font in fontManager.ttflist if missing else ():
        # The font of last resort has a placeholder for each character.
        if not font.name.startswith("Last Resort") and missing & _characters(font.fname):
            families = [*families, font.name]
            missing -= _characters(font.fname)
    return (STYLE if columns is None else PAPER) | {"font.family": families}


@functools.cache
def _characters(font: str) -> Set[int]:
    """Return the code points of a font file, none if it cannot be read, as one that was deleted."""
    try:
        return get_font(font).get_charmap().keys()
    except (OSError, RuntimeError):
        return set()


def draw_attention(attention: AttentionMap, title: str = "", columns: int | None = None) -> Figure:
    """Draw the attention weights of a layer, with one panel per head and the gold alignment outlined.

    Args:
        attention: the weights.
        title: the title, of any number of lines, above the name of the layer; omitted in a publication.
        columns: the number of columns of a publication that the figure spans; None for a figure on a screen.

    Note:
        The darkest color is a weight of 1, or the largest weight of the layer if that is below 0.5, as over long texts.
        The layout is computed from the number of characters in the labels, since drawing and measuring all labels would
        take seconds per figure.
    """
    heads, T, S = attention.weights.shape
    queries, keys = (list(map(_label, labels)) for labels in (attention.queries, attention.keys))
    style = style_for(title, *queries, *keys, columns=columns)
    size = style["xtick.labelsize"]
    left = 0.35 + max(text_width(query, size) for query in queries)
    right = 0.7  # of the panels, for the color bar
    above = 0.3 if heads > 1 else 0.1  # of a panel
    if columns is None:
        cell = min(CELL, MAX_PANEL / max(S, T))
        # Few panels per row if they are wide, so that labels stay legible if the picture is scaled down.
        across = min(
            range(min(heads, HEADS_A_ROW, max(1, int(MAX_PANEL / (S * cell)))), 0, -1),
            key=lambda number: max(number * S, -(-heads // number) * T),
        )
    else:
        room = COLUMNS[columns] - left - right
        sizes = {
            number: min(CELL, (room / number - GAP) / S, (MAX_HEIGHT / -(-heads // number) - above) / T)
            for number in range(heads, 0, -1)
        }
        across = max(sizes, key=lambda number: sizes[number])
        cell = sizes[across]
    rows = -(-heads // across)
    panel_width, panel_height = S * cell, T * cell
    every = math.ceil(MIN_LABEL_DISTANCE / cell)
    below = 0.1 + (size / 72 if max(map(len, keys)) == 1 else max(text_width(key, size) for key in keys))
    used = left + across * (panel_width + GAP) + right
    lines: list[str] = []
    if columns is None:
        width = max(used, 4.5)
        letters = int((width - left) / (0.62 * 9 / 72))
        wrapped = (textwrap.wrap(line, letters, max_lines=2, placeholder=" …") for line in title.splitlines())
        lines = [*itertools.chain.from_iterable(wrapped), attention.layer]
    else:
        width = COLUMNS[columns]
        left += (width - used) / 2
    bottom, top = 0.25, 0.2 * len(lines)
    height = bottom + below + rows * (above + panel_height) + top
    figure = Figure(figsize=(width, height))

    def add_axes(x: float, y: float, across: float, up: float) -> Axes:
        """Add axes at a position in inches."""
        return figure.add_axes((x / width, y / height, across / width, up / height))

    largest = attention.weights.max().item()
    darkest = 1.0 if largest >= 0.5 else largest
    with rc_context(style):
        for head, weights in enumerate(attention.weights.float().cpu().numpy()):
            row, column = divmod(head, across)
            y = height - top - (row + 1) * (above + panel_height)
            axes = add_axes(left + column * (panel_width + GAP), y, panel_width, panel_height)
            image = axes.imshow(weights, vmin=0, vmax=darkest, cmap=HEAT, aspect="auto")
            axes.tick_params(length=0)
            axes.spines[:].set_visible(True)
            # The panels of a column share the labels below it, and those of a row the labels on the left.
            below_it = (range(0, S, every), keys[::every]) if head + across >= heads else ((), ())
            axes.set_xticks(*below_it, parse_math=False)
            for tick in axes.get_xticklabels():
                tick.set_rotation(0 if len(tick.get_text()) == 1 else 90)
            on_the_left = (range(0, T, every), queries[::every]) if column == 0 else ((), ())
            axes.set_yticks(*on_the_left, parse_math=False)
            if heads > 1:
                axes.set_title(f"head {head}")
            outlines = [Rectangle((key - 0.5, query - 0.5), 1, 1) for key, query in attention.gold]
            axes.add_collection(PatchCollection(outlines, facecolor="none", edgecolor=HIGHLIGHT), autolim=False)
        length = min(panel_height, 1.5)
        bar = add_axes(left + across * (panel_width + GAP), height - top - above - length, 0.12, length)
        figure.colorbar(image, cax=bar, label="weight", ticks=MaxNLocator(2))
        start, middle = (width - used) / 2 if columns else 0.0, left + (across * (panel_width + GAP) - GAP) / 2
        up = height - top - bottom
        figure.supxlabel("attended symbol", x=middle / width, y=0.04 / height, va="bottom", fontsize=size)
        label = f"{attention.predicts} symbol".lstrip()
        figure.supylabel(label, x=(start + 0.04) / width, y=(bottom + up / 2) / height, ha="left", fontsize=size)
        if lines:
            heading = "\n".join(lines)
            figure.suptitle(heading, x=left / width, y=1 - 0.06 / height, ha="left", va="top", parse_math=False)
    return figure


def text_width(label: str, size: float = _LABEL_SIZE) -> float:
    """Return the approximate width of a label in inches, given the size of its letters in points."""
    return size / 72 * sum(1.0 if east_asian_width(letter) in "WF" else 0.62 for letter in label)


def _label(symbol: str) -> str:
    """Return the label of a symbol, which shows blanks and has at most MAX_LABEL_LENGTH characters."""
    symbol = visible(symbol)
    return symbol if len(symbol) <= MAX_LABEL_LENGTH else f"{symbol[: MAX_LABEL_LENGTH - 1]}…"


def draw_positions(encodings: Tensor, title: str = "positional encodings") -> Figure:
    """Draw positional encodings (N, D) as a heat map, and up to four dimensions as curves."""
    N, D = encodings.shape
    # A copy, since the storage of a tensor that has become an array cannot be resized, which FSDP2 does with weights.
    values = encodings.detach().to("cpu", torch.float32, copy=True)
    with rc_context(STYLE):
        figure = Figure(figsize=(10, 3.6), layout="constrained")
        heat, curves = figure.subplots(1, 2)
        largest = values.abs().max()
        image = heat.imshow(values.T.numpy(), cmap="RdBu", aspect="auto", vmin=-largest, vmax=largest)
        heat.set_xlabel("position")
        heat.set_ylabel("dimension")
        figure.colorbar(image, ax=heat)
        for color, dimension in zip(PALETTE, torch.linspace(0, D // 2 - 1, min(4, D)).int().tolist(), strict=False):
            curves.plot(range(N), values[:, dimension].numpy(), color=color, label=f"dimension {dimension}")
        curves.set_xlabel("position")
        curves.legend(loc="upper left", bbox_to_anchor=(1, 1))
        figure.suptitle(title)
    return figure


def draw_confusion(labels: Sequence[str], counts: Mapping[tuple[str, str], int]) -> Figure:
    """Draw a confusion matrix, with references in rows and predictions in columns, given the counts of these pairs.

    With more than LABELS labels, counts and some labels are omitted.
    """
    values = torch.tensor([[counts.get((row, column), 0) for column in labels] for row in labels])
    shares = values / values.sum(1, keepdim=True).clamp(min=1)
    size = 1.8 + 0.8 * min(len(labels), LABELS)
    with rc_context(style_for(*labels)):
        figure = Figure(figsize=(size + 0.8, size), layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(shares.numpy(), vmin=0, vmax=1, cmap=HEAT)
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
        correct, tested = int(values.trace()), int(values.sum())
        figure.suptitle(f"{correct:,} of {tested:,} correct")
    return figure


def on_one_canvas(paths: Iterable[Path]) -> list[Image.Image]:
    """Load images and pad them to the same size.

    Note:
        W&B shows the images of one name side by side and crops them if their sizes differ. Images larger than
        MAX_IMAGE_SIZE are scaled down, since many are in memory at once.
    """
    pictures = []
    for path in paths:
        with Image.open(path) as file:
            pictures.append(file.convert("RGB"))
        pictures[-1].thumbnail((MAX_IMAGE_SIZE, MAX_IMAGE_SIZE))
    size = (max(picture.width for picture in pictures), max(picture.height for picture in pictures))
    canvases = [Image.new("RGB", size, "white") for _ in pictures]
    for canvas, picture in zip(canvases, pictures, strict=True):
        canvas.paste(picture)
    return canvases
