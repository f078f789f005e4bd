"""Reports of runs as one self-contained HTML page."""

from lightning_tfm.reporting.collect import collect_run, run_names
from lightning_tfm.reporting.page import render
from lightning_tfm.reporting.sweep_page import render_sweep

__all__ = ["collect_run", "render", "render_sweep", "run_names"]
