"""Results of a sweep, which is a study of Optuna: the ranking of its trials, and a page with charts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lightning_tfm.reporting.page import render_template

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

STATES = ("finished", "pruned", "failed")

MIN_TRIALS = 10
"""Minimum number of finished trials for which importances are computed."""


def ranked(study: Study) -> list[FrozenTrial]:
    """Return the ended trials from the best to the worst: finished ones, pruned ones, and failed ones at the end.

    Note:
        Pruned trials are sorted by the number of their validations, then by their best one. Trials that Optuna calls
        failed are left out: they were lost, and are retried.
    """

    def key(trial: FrozenTrial) -> tuple[float, ...]:
        value, sign = best_value(study, trial), 1 if study.direction.name == "MINIMIZE" else -1
        validations = len(trial.intermediate_values) if state_of(trial) == "pruned" else 0
        cost = math.inf if value is None else sign * value
        return STATES.index(state_of(trial)), -validations, cost, trial.number

    trials = study.get_trials(deepcopy=False)
    return sorted((trial for trial in trials if trial.state.name in ("COMPLETE", "PRUNED")), key=key)


def state_of(trial: FrozenTrial) -> str:
    """Return the state of an ended trial, one of STATES."""
    return "failed" if "error" in trial.user_attrs else "finished" if trial.state.name == "COMPLETE" else "pruned"


def best_value(study: Study, trial: FrozenTrial) -> float | None:
    """Return the best validation of a trial; None if there was none with a finite value."""
    values = filter(math.isfinite, trial.intermediate_values.values())
    return (min if study.direction.name == "MINIMIZE" else max)(values, default=None)


def short_names(trial: FrozenTrial) -> dict[str, str]:
    """Return the last part of the name of each searched setting, or the whole name if several have this part."""
    names = [name for name, space in trial.distributions.items() if not space.single()]
    last = [name.rpartition(".")[2] for name in names]
    return {name: part if last.count(part) == 1 else name for name, part in zip(names, last, strict=True)}


def trial_table(study: Study) -> tuple[list[str], list[list[Any]]]:
    """Return the columns and the rows of a table of the ended trials, from the best to the worst."""
    trials, rows = ranked(study), []
    names = short_names(trials[0])
    for rank, trial in enumerate(trials, start=1):
        facts = [trial.user_attrs["index"], state_of(trial), best_value(study, trial)]
        settings = [trial.user_attrs["settings"][name] for name in names]
        rows.append([rank, *facts, len(trial.intermediate_values), *settings])
    return ["rank", "trial", "state", "best value", "validations", *names.values()], rows


def as_text(value: Any) -> str:
    """Return a value of the table in a few characters."""
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def render_sweep(study: Study, name: str, metric: str, command: str) -> str:
    """Return the HTML page of a sweep.

    Args:
        study: the study, with at least one ended trial.
        name: the name of the sweep.
        metric: the name of the metric.
        command: the command that trains the best trial.
    """
    from optuna.importance import get_param_importances

    from lightning_tfm.reporting.charts import draw_trials  # slow to import

    trials, (columns, rows) = ranked(study), trial_table(study)
    states, names = [row[2] for row in rows], short_names(trials[0])
    curves = [
        {"trial": trial.user_attrs["index"], "state": state_of(trial), "x": step + 1, "y": value}
        for trial in reversed(trials)  # the best are drawn last
        for step, value in trial.intermediate_values.items()
        if math.isfinite(value)
    ]
    charts = [draw_trials("validations", "validation", metric, curves, STATES, has_lines=True)]
    for index, setting in [(1, None), *enumerate(names, start=5)]:
        points = [dict(zip(["trial", "state", "x", "y"], (*row[1:3], row[index], row[3]), strict=True)) for row in rows]
        points = [point for point in points if point["y"] is not None]
        is_log = getattr(trials[0].distributions.get(str(setting)), "log", False)
        charts.append(draw_trials(f"by-{index}", columns[index], metric, points, STATES, is_log))
    has_enough = states.count("finished") >= MIN_TRIALS
    importances = get_param_importances(study, params=list(names)) if has_enough else {}
    return render_template(
        "sweep_page.html",
        charts if curves else [],
        title=name,
        objective=f"{study.direction.name.lower()} {metric}",
        states=", ".join(f"{states.count(state)} {state}" for state in STATES if state in states),
        importances=", ".join(f"{names[name]} {weight:.2f}" for name, weight in importances.items()),
        command=command,
        columns=columns,
        rows=[list(map(as_text, row)) for row in rows],
        failures=[trial.user_attrs for trial in trials if "error" in trial.user_attrs],
    )
