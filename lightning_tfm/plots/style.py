"""Colors and style of all plots and charts."""

from __future__ import annotations

from typing import Any

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
"""Colors of series, distinguishable for color-blind readers (Okabe and Ito 2008)."""

HIGHLIGHT = "#d55e00"
"""Color of highlighted elements, such as the gold alignment."""

HEAT = "Blues"
"""matplotlib color map and Vega color scheme for values from 0 to 1."""

STYLE: dict[Any, Any] = {
    "axes.labelsize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 8,
    "figure.titlesize": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "pdf.fonttype": 42,  # TrueType, which journals require; matplotlib's default, Type 3, cannot be edited
    "svg.fonttype": "none",  # text, which can be searched and edited, in place of outlines
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}
"""matplotlib settings for `rc_context`."""

COLUMNS = {1: 3.25, 2: 6.75}
"""Widths of figures of one and of two columns of a publication, in inches."""

PAPER: dict[Any, Any] = STYLE | {name: 7 for name in ("font.size", *STYLE) if name.endswith("size")}
"""matplotlib settings for a figure of a publication, which is not scaled; sizes are in points."""
