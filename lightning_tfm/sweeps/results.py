"""Results of a sweep: the ranking of its trials, the importance of the settings, and the best experiment."""

from __future__ import annotations

import copy
import csv
import io
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from lightning_tfm.sweeps.specification import Objective, Specification
from lightning_tfm.sweeps.trials import Outcome, frozen_trial
from lightning_tfm.system.terminal import format_value

MIN_TRIALS = 10
"""Number of trials below which importances say nothing."""


def ranked(specification: Specification, outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Sort outcomes from the best to the worst: finished trials by value, others by steps and metric, last the rest.

    The rest are trials that failed, or have no finite metric.

    Args:
        specification: the specification of the sweep.
        outcomes: the outcomes; of equal ones, the trial with the smaller number is first.
    """
    sign = specification.objective.sign

    def key(outcome: Outcome) -> tuple[float, ...]:
        metric = math.inf if outcome.metric is None else sign * outcome.metric
        if outcome.value is None:
            is_last = outcome.state == "failed" or outcome.metric is None
            return 2 if is_last else 1, -outcome.steps, metric, outcome.number
        value = outcome.value * (sign if specification.objective.reach is None else 1)
        return 0, value, metric, outcome.number

    return sorted(outcomes, key=key)


def summarize(objective: Objective, outcome: Outcome) -> str:
    """Return the value of a trial, or why it has none, in words."""
    if outcome.value is not None:
        return f"{outcome.value:,.0f} steps" if objective.reach is not None else format_value(outcome.value)
    if outcome.metric is None:
        return "not finite" if outcome.state == "finished" else outcome.state
    if outcome.state == "failed":
        return f"failed at step {outcome.steps:,}"
    return f"{outcome.state}, {format_value(outcome.metric)} at step {outcome.steps:,}"


def importances(specification: Specification, outcomes: Iterable[Outcome]) -> dict[str, float]:
    """Return the importance of each searched setting for being among the best tenth, from 0 to 1, largest first.

    Args:
        specification: the specification of the sweep.
        outcomes: the outcomes of all trials. Only their ranks matter, so trials that were pruned count, too.

    Returns:
        The importances by PED-ANOVA (Watanabe et al. 2023), which sum to 1; empty for fewer than MIN_TRIALS trials, or
        if the best tenth does not differ from the others.
    """
    import optuna

    ordered = ranked(specification, outcomes)
    if len(ordered) < MIN_TRIALS:
        return {}
    study = optuna.create_study()
    distributions = {name: space.distribution() for name, space in specification.search.items()}
    for rank, outcome in enumerate(ordered):
        study.add_trial(
            optuna.trial.create_trial(value=float(rank), params=outcome.settings, distributions=distributions)
        )
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    total = sum(found.values())
    if not total > 0 or not math.isfinite(total):
        return {}
    return {name: value / total for name, value in sorted(found.items(), key=lambda item: -item[1])}


def table(specification: Specification, outcomes: Iterable[Outcome]) -> str:
    """Return the ranked trials as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["rank", "trial", "state", "value", "metric", "steps", *specification.search, "message"])
    for rank, outcome in enumerate(ranked(specification, outcomes), start=1):
        facts = [outcome.state, outcome.value, outcome.metric, outcome.steps]
        settings = [outcome.settings[name] for name in specification.search]
        writer.writerow([rank, outcome.number, *facts, *settings, outcome.message])
    return text.getvalue()


def best_experiment(experiment: dict[str, Any], config: dict[str, Any], settings: dict[str, Any]) -> str:
    """Return the YAML of an experiment with other settings.

    Args:
        experiment: the content of the experiment's YAML file.
        config: all settings of the experiment, with those that have their default values.
        settings: the settings to replace, by their names on the command line, with or without `init_args`.
    """
    changed = copy.deepcopy(experiment)
    for name, value in settings.items():
        node, known = changed, config
        *groups, last = full_name(config, name)
        for group in groups:
            known = known[group]
            if not isinstance(node.get(group), dict):
                node[group] = {"class_path": node[group]} if isinstance(node.get(group), str) else {}
            node = node[group]
            if "class_path" in known:
                node.setdefault("class_path", known["class_path"])
        node[last] = value
    return yaml.safe_dump(changed, sort_keys=False, allow_unicode=True, width=120)


def full_name(config: dict[str, Any], name: str) -> list[str]:
    """Return the parts of a setting's name, with the `init_args` that the command line may omit.

    Raises:
        KeyError: if there is no such setting.
    """
    parts: list[str] = []
    node: Any = config
    for part in name.split("."):
        if isinstance(node, dict) and part not in node and "class_path" in node:
            parts.append("init_args")
            node = node.get("init_args") or {}
        if not isinstance(node, dict) or part not in node:
            raise KeyError(part)
        parts.append(part)
        node = node[part]
    return parts


def save_study(specification: Specification, outcomes: dict[int, Outcome], path: Path) -> None:
    """Save the decided trials as a study in a journal file for Optuna's own tools, such as its dashboard.

    Args:
        specification: the specification of the sweep.
        outcomes: the outcomes by number.
        path: the file, which is replaced.
    """
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    beside = path.with_name(path.name + ".part")
    beside.unlink(missing_ok=True)
    study = optuna.create_study(storage=JournalStorage(JournalFileBackend(str(beside))), study_name=path.parent.name)
    study.add_trials([frozen_trial(specification, outcomes[number]) for number in sorted(outcomes)])
    beside.replace(path)
