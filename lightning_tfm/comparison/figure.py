"""Figures of comparisons: the values, means and differences with their intervals, and the learning curves."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lightning_tfm.comparison.groups import Group
from lightning_tfm.comparison.publication import base_name, metric_name
from lightning_tfm.comparison.results import Comparison
from lightning_tfm.comparison.statistics import COVERAGE, Interval, differences
from lightning_tfm.errors import UserError
from lightning_tfm.plots.pictures import style_for, text_width
from lightning_tfm.plots.style import COLUMNS, PALETTE

LABEL_WIDTH = 24
"""Width at which the name of a group is wrapped, in characters."""

AXIS_LABEL_WIDTH = 30
"""Width at which the label of an axis is wrapped, in characters."""

SPREAD = 0.25
"""Distance between the mean and the value of a seed, in rows."""

LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
"""Styles of learning curves, by which they can be told apart in black and white."""


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
    with rc_context(style_for(*(comparison.metric for comparison in comparisons), *names, columns=columns)):
        figure = Figure(figsize=(width, rows * (margin + step * len(names))), layout="constrained")
        grid = figure.subplots(rows, across, squeeze=False).reshape(len(comparisons), panels)
        for comparison, axes in zip(comparisons, grid, strict=True):
            _draw_means(axes[0], comparison)
            if comparison.differences:
                _draw_differences(axes[1], comparison, has_labels=across == 1)
            elif panels == 2:
                axes[1].set_axis_off()
    return figure


def draw_curves(comparisons: Sequence[Comparison], columns: int | None = None) -> Figure:
    """Draw the validations of the metrics of comparisons by training step.

    Args:
        comparisons: the comparisons, one for each metric.
        columns: the number of columns of a publication that the figure spans; None for a figure on a screen.

    Returns:
        The figure. A line is the mean over the seeds of a group, at the steps at which all of them were validated, and
        the area around it extends from the lowest to the highest seed.

    Raises:
        UserError: if no run was validated with a metric while it was trained.
    """
    metrics = dict.fromkeys(f"val/{base_name(comparison.metric)}" for comparison in comparisons)
    groups = {group.name: group for comparison in comparisons for group in comparison.groups}
    curves = {metric: {name: _curve(group, metric) for name, group in groups.items()} for metric in metrics}
    for metric, by_group in curves.items():
        if not any(by_group.values()):
            raise UserError(
                f"--curves needs runs that were validated with a metric, but none has {metric}; leave it out"
            )
    panels = len(metrics)
    across = min(panels, 1 if columns == 1 else 2)
    rows = -(-panels // across)
    width, height = (4.2 * across, 2.8) if columns is None else (COLUMNS[columns], 2.0)
    labels = {name: textwrap.fill(name, LABEL_WIDTH) for name in groups}
    with rc_context(style_for(*metrics, *labels, columns=columns)):
        figure = Figure(figsize=(width, rows * height), layout="constrained")
        grid = figure.subplots(rows, across, squeeze=False).flatten()
        for axes, (metric, by_group) in zip(grid, curves.items(), strict=False):
            for number, (name, curve) in enumerate(by_group.items()):
                style = {"color": PALETTE[number % len(PALETTE)], "label": labels[name]}
                means = {step: statistics.fmean(values) for step, values in curve.items()}
                axes.plot([*means], [*means.values()], linestyle=LINES[number % len(LINES)], linewidth=1.2, **style)
                low, high = ([choose(values) for values in curve.values()] for choose in (min, max))
                axes.fill_between([*means], low, high, color=style["color"], alpha=0.2, linewidth=0)
            axes.set_xlabel("training step")
            axes.set_ylabel(f"validation {metric_name(metric.removeprefix('val/'))}", parse_math=False)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
            axes.grid(linewidth=0.3)
        for axes in grid[panels:]:
            axes.set_axis_off()
        if len(groups) > 1:
            handles, _ = grid[0].get_legend_handles_labels()
            across = max(
                1, int(width / (0.5 + max(text_width(line) for label in labels.values() for line in label.split("\n"))))
            )
            legend = figure.legend(handles=handles, loc="outside upper center", ncols=min(across, len(groups)))
            for text in legend.get_texts():
                text.set_parse_math(False)
    return figure


def _curve(group: Group, metric: str) -> dict[int, list[float]]:
    """Return the finite values of a metric, one for each seed, at each training step at which all seeds have one."""
    curves = [
        {int(row["step"]) + 1: row[metric] for row in run.metrics() if math.isfinite(row.get(metric, math.nan))}
        for run in group.runs  # Lightning counts steps from 0
    ]
    return {step: [curve[step] for curve in curves] for step in sorted(set.intersection(*map(set, curves)))}


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
