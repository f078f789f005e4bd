"""Reports of runs as one self-contained HTML page."""

from lightning_tfm.reporting.collect import collect_run, run_names
from lightning_tfm.reporting.page import render

__all__ = ["collect_run", "render", "run_names"]
