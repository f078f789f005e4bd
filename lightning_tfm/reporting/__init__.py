"""Reports of runs as one HTML page that needs no network."""

from lightning_tfm.reporting.collect import collect_run, run_names
from lightning_tfm.reporting.page import render

__all__ = ["collect_run", "render", "run_names"]
