"""Comparison of groups of runs with several seeds: statistics, tables and a figure."""

from lightning_tfm.comparison.results import Comparison, compare
from lightning_tfm.comparison.runs import find_groups, group_runs, read_run

__all__ = ["Comparison", "compare", "find_groups", "group_runs", "read_run"]
