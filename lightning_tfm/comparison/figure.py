"""Figure of a comparison: the value of each seed, the means, the differences and their intervals."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_tfm.comparison.results import Comparison
from lightning_tfm.comparison.statistics import COVERAGE, Interval, differences
from lightning_tfm.plots.pictures import style_for
from lightning_tfm.plots.style import PALETTE

LABEL_WIDTH = 24
"""Width at which the name of a group is wrapped, in characters."""

SPREAD = 0.25
"""Distance between the mean and the value of a seed, in rows."""


def draw_comparison(comparison: Comparison) -> Figure:
    """Draw a comparison: the values and means of the groups and, for two groups or more, the differences.

    Returns:
        The figure. Diamonds are means, lines are intervals, and dots are the values of the seeds, or the differences of
        matched seeds.
    """
    groups = [group.name for group in comparison.groups]
    panels = 2 if comparison.differences else 1
    with rc_context(style_for(comparison.metric, *groups)):
        figure = Figure(figsize=(4.2 * panels, 1.0 + 0.6 * len(groups)), layout="constrained")
        axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
        for row, group in enumerate(comparison.groups):
            _draw_row(axes[0], row, group.values, group.mean, group.interval)
        axes[0].set_yticks(range(len(groups)), [textwrap.fill(name, LABEL_WIDTH) for name in groups])
        axes[0].set_ylim(len(groups) - 0.5, -0.5)
        direction = "lower" if comparison.lower_is_better else "higher"
        axes[0].set_xlabel(f"{comparison.metric} ({direction} is better)")
        if comparison.differences:
            axes[1].axvline(0, color="0.6", linewidth=0.8)
            for row, difference in enumerate(comparison.differences, start=1):
                values = difference.group.values, difference.baseline.values
                pairs = differences(*values) if difference.matched else []
                _draw_row(axes[1], row, pairs, difference.value, difference.interval)
            axes[1].set_xlabel(f"difference from {groups[0]}, with {COVERAGE:.0%} interval")
            axes[1].tick_params(left=False)
        for panel in axes:
            panel.grid(axis="x", linewidth=0.3)
            panel.set_axisbelow(True)
    return figure


def _draw_row(axes: Axes, row: int, values: Sequence[float], mean: float, interval: Interval | None) -> None:
    """Draw a row: dots below a mean with its interval."""
    color = PALETTE[row % len(PALETTE)]
    axes.scatter(values, [row + SPREAD] * len(values), s=14, color=color, alpha=0.6, linewidths=0)
    if interval is not None:
        axes.plot(interval, [row, row], color=color, linewidth=2, solid_capstyle="round")
    axes.scatter([mean], [row], s=30, color=color, marker="D", edgecolors="white", linewidths=0.8, zorder=3)
