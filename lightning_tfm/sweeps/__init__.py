"""Searches over settings: their specification, their trials, and the results."""

from lightning_tfm.sweeps.results import best_experiment, full_name, importances, ranked, save_study, summarize, table
from lightning_tfm.sweeps.specification import Asha, Objective, Specification, read_specification
from lightning_tfm.sweeps.trials import Outcome, Trials, trial_name

__all__ = [
    "Asha",
    "Objective",
    "Outcome",
    "Specification",
    "Trials",
    "best_experiment",
    "full_name",
    "importances",
    "ranked",
    "read_specification",
    "save_study",
    "summarize",
    "table",
    "trial_name",
]
