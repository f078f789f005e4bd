"""Heat maps of an inspection, with a row and a column for each part, position or symbol."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from lightning_tfm.plots.pictures import style_for, text_width
from lightning_tfm.plots.style import HEAT

CELL = 0.28
"""Maximum width and height of a cell, in inches."""

MAX_SIZE = 10.0
"""Maximum width and height of the cells of a heat map, in inches."""

LEGIBLE = 0.12
"""Minimum distance of two labels, in inches; if the cells are smaller, not all have a label."""

LEAST = 0.005
"""Minimum absolute value that is printed in a cell."""

LARGE = 0.24
"""Minimum width of a cell in which its value is printed, in inches."""


def draw_heatmap(
    values: Sequence[Sequence[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    label: str,
    column_label: str = "",
    row_label: str = "",
) -> Figure:
    """Draw values (R, C), in blue if they are positive, and in red if they are negative.

    Args:
        values: the values; NaN is left blank.
        rows: the labels of the rows.
        columns: the labels of the columns.
        title: the title.
        label: the name of the values, with their unit.
        column_label: the label of the horizontal axis.
        row_label: the label of the vertical axis.
    """
    array = np.array(values, dtype=float)
    R, C = array.shape
    cell = min(CELL, MAX_SIZE / max(R, C))
    across, up = C * cell, R * cell
    is_upright = max(map(len, columns)) <= 3  # such as EOS
    left = 0.15 + max(map(text_width, rows)) + (0.25 if row_label else 0)
    below = 0.15 + (0.12 if is_upright else max(map(text_width, columns))) + (0.25 if column_label else 0)
    width = max(left + across + 0.9, 4.0)
    lines = textwrap.wrap(title, int(width / 0.08), max_lines=2, placeholder=" …")
    above = 0.2 + 0.18 * len(lines)
    height = max(below + up, 1.1) + above
    figure = Figure(figsize=(width, height))
    largest = float(np.nanmax(np.abs(array), initial=0)) or 1.0
    cmap, lowest = ("RdBu", -largest) if (array < 0).any() else (HEAT, 0.0)
    with rc_context(style_for(title, *rows, *columns)):
        axes = figure.add_axes((left / width, (height - above - up) / height, across / width, up / height))
        image = axes.imshow(array, cmap=cmap, vmin=lowest, vmax=largest, aspect="auto")
        every = max(1, math.ceil(LEGIBLE / cell))
        axes.set_xticks(range(0, C, every), columns[::every], rotation=0 if is_upright else 90, parse_math=False)
        axes.set_yticks(range(0, R, every), rows[::every], parse_math=False)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlabel(column_label)
        figure.supylabel(row_label, x=0.05 / width, y=(height - above - up / 2) / height, ha="left", fontsize=8)
        for row, column in np.argwhere(np.abs(array) >= LEAST) if cell >= LARGE else ():
            value = array[row, column]
            color = "white" if abs(value) > 0.6 * largest else "black"
            text = f"{value:.2f}" if abs(value) < 1 else f"{value:.1f}"
            axes.text(column, row, text, ha="center", va="center", color=color, fontsize=5.5)
        length = max(min(up, 1.5), 0.9)
        bar = figure.add_axes(
            ((left + across + 0.15) / width, (height - above - length) / height, 0.12 / width, length / height)
        )
        figure.colorbar(image, cax=bar, label=label)
        heading = "\n".join(lines)
        figure.suptitle(heading, x=0.06 / width, y=1 - 0.06 / height, ha="left", va="top", parse_math=False)
    return figure
