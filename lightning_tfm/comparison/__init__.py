"""Comparison of groups of runs with several seeds: statistics, tables and a figure."""

from lightning_tfm.comparison.groups import Group, find_groups, group_runs, is_readable
from lightning_tfm.comparison.results import Comparison, compare

__all__ = ["Comparison", "Group", "compare", "find_groups", "group_runs", "is_readable"]
