"""Comparison of groups of runs with several seeds: statistics, tables and a figure."""

from lightning_tfm.comparison.groups import find_groups, group_runs, read_run
from lightning_tfm.comparison.results import Comparison, compare

__all__ = ["Comparison", "compare", "find_groups", "group_runs", "read_run"]
