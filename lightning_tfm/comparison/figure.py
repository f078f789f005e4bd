"""Figure of comparisons: the value of each seed, the means, the differences and their intervals."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_tfm.comparison.results import Comparison
from lightning_tfm.comparison.statistics import COVERAGE, Interval, differences
from lightning_tfm.plots.pictures import style_for
from lightning_tfm.plots.style import COLUMNS, PALETTE, PAPER, STYLE

LABEL_WIDTH = 24
"""Width at which the name of a group is wrapped, in characters."""

AXIS_LABEL_WIDTH = 30
"""Width at which the label of an axis is wrapped, in characters."""

SPREAD = 0.25
"""Distance between the mean and the value of a seed, in rows."""


def draw_comparisons(comparisons: Sequence[Comparison], columns: int | None = None) -> Figure:
    """Draw comparisons: the values and means of the groups and, for two groups or more, the differences.

    Args:
        comparisons: the comparisons, one for each metric.
        columns: the number of columns of a publication that the figure spans; None for a figure on a screen. In one
            column, the differences are below the means.

    Returns:
        The figure. Diamonds are means, lines are intervals, and dots are the values of the seeds, or the differences of
        matched seeds.
    """
    names = dict.fromkeys(group.name for comparison in comparisons for group in comparison.groups)
    panels = 2 if any(comparison.differences for comparison in comparisons) else 1
    across = 1 if columns == 1 else panels
    rows = len(comparisons) * panels // across
    width, margin, step = (4.2 * across, 1.0, 0.6) if columns is None else (COLUMNS[columns], 0.55, 0.3)
    fonts = style_for(*(comparison.metric for comparison in comparisons), *names)["font.family"]
    with rc_context((STYLE if columns is None else PAPER) | {"font.family": fonts}):
        figure = Figure(figsize=(width, rows * (margin + step * len(names))), layout="constrained")
        grid = figure.subplots(rows, across, squeeze=False).reshape(len(comparisons), panels)
        for comparison, axes in zip(comparisons, grid, strict=True):
            _draw_means(axes[0], comparison)
            if comparison.differences:
                _draw_differences(axes[1], comparison, has_labels=across == 1)
            elif panels == 2:
                axes[1].set_axis_off()
    return figure


def _draw_means(axes: Axes, comparison: Comparison) -> None:
    """Draw the values of the seeds and the mean of each group."""
    for row, group in enumerate(comparison.groups):
        _draw_row(axes, row, group.values, group.mean, group.interval)
    direction = "lower" if comparison.lower_is_better else "higher"
    _label(axes, comparison, f"{comparison.metric} ({direction} is better)", has_labels=True)


def _draw_differences(axes: Axes, comparison: Comparison, has_labels: bool) -> None:
    """Draw the difference of each group from the first one."""
    axes.axvline(0, color="0.6", linewidth=0.8)
    for row, difference in enumerate(comparison.differences, start=1):
        values = difference.group.values, difference.baseline.values
        pairs = differences(*values) if difference.matched else []
        _draw_row(axes, row, pairs, difference.value, difference.interval)
    _label(axes, comparison, f"difference from {comparison.groups[0].name}, with {COVERAGE:.0%} interval", has_labels)


def _label(axes: Axes, comparison: Comparison, label: str, has_labels: bool) -> None:
    """Label the axes, and the rows if the panel on the left has none."""
    names = [textwrap.fill(group.name, LABEL_WIDTH) for group in comparison.groups]
    axes.set_yticks(range(len(names)), names if has_labels else [""] * len(names), parse_math=False)
    axes.tick_params(left=has_labels)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(textwrap.fill(label, AXIS_LABEL_WIDTH), parse_math=False)
    axes.grid(axis="x", linewidth=0.3)
    axes.set_axisbelow(True)


def _draw_row(axes: Axes, row: int, values: Sequence[float], mean: float, interval: Interval | None) -> None:
    """Draw a row: dots below a mean with its interval."""
    color = PALETTE[row % len(PALETTE)]
    axes.scatter(values, [row + SPREAD] * len(values), s=14, color=color, alpha=0.6, linewidths=0)
    if interval is not None:
        axes.plot(interval, [row, row], color=color, linewidth=2, solid_capstyle="round")
    axes.scatter([mean], [row], s=30, color=color, marker="D", edgecolors="white", linewidths=0.8, zorder=3)
