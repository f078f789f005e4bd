"""Page of a sweep: the trials, the importance of the settings, parallel coordinates and the best experiment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_tfm.plots.style import PALETTE
from lightning_tfm.reporting.charts import MAX_LABEL_WIDTH, make_chart
from lightning_tfm.reporting.collect import Json
from lightning_tfm.reporting.page import render_template
from lightning_tfm.sweeps import Outcome, Specification, summarize
from lightning_tfm.sweeps.specification import Range, Values
from lightning_tfm.sweeps.trials import Point

BEST = 0.1
"""Share of the trials that the charts highlight, of which the importances are computed, too."""

STATES = ("finished", "not reached", "pruned", "failed")
SHAPES = ["circle", "square", "triangle-down", "cross"]
"""States of trials, and their symbols."""

SCALE_LABELS = 6
"""Maximum number of labels at an axis of the parallel coordinates."""


def render_sweep(
    name: str,
    specification: Specification,
    outcomes: Sequence[Outcome],
    weights: Mapping[str, float],
    curves: Mapping[int, Sequence[Point]],
    best: str,
) -> str:
    """Return the HTML page of a sweep.

    Args:
        name: the name of the sweep.
        specification: the specification of the sweep.
        outcomes: the outcomes of the trials, from the best to the worst.
        weights: the importances of the settings.
        curves: the validations of each trial, by number.
        best: the YAML of the best experiment; empty if no trial has finished.
    """
    objective = specification.objective
    number = max(1, math.ceil(BEST * len(outcomes)))
    groups = {outcome.number: "best tenth" if rank < number else "others" for rank, outcome in enumerate(outcomes)}
    charts = [
        _history(specification, outcomes),
        _curves(specification, outcomes, curves, groups),
        _parallel(specification, outcomes, groups),
        _importance(specification, weights),
    ]
    states = {state: sum(outcome.state == state for outcome in outcomes) for state in STATES}
    rows = [
        [
            rank,
            outcome.number,
            summarize(objective, outcome),
            *(_text(outcome.settings[key]) for key in specification.search),
        ]
        for rank, outcome in enumerate(outcomes, start=1)
    ]
    return render_template(
        "sweep.html",
        [chart for chart in charts if chart is not None],
        title=name,
        objective=objective.description,
        experiment=specification.experiment,
        result=summarize(objective, outcomes[0]),
        best_trial=outcomes[0],
        states=", ".join(f"{count:,} {state}" for state, count in states.items() if count),
        columns=["rank", "trial", "result", *specification.short_names.values()],
        rows=rows,
        failures=[outcome for outcome in outcomes if outcome.message],
        best=best,
    )


def _texts(specification: Specification, outcome: Outcome) -> list[str]:
    """Return the searched settings of a trial as texts."""
    return [_text(outcome.settings[name]) for name in specification.search]


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _history(specification: Specification, outcomes: Sequence[Outcome]) -> Json | None:
    """Draw the value of each trial; of trials without a value, the metric."""
    import altair

    states, legend = list(STATES), altair.Legend(orient="top", columns=2)
    title = specification.objective.metric if specification.objective.reach is None else "steps"
    points = []
    for outcome in sorted(outcomes, key=lambda outcome: outcome.number):
        value = outcome.metric if specification.objective.reach is None else float(outcome.steps)
        if value is not None:
            points.append({"trial": outcome.number, "value": value, "state": outcome.state})
    if not points:
        return None
    shown = (
        altair.Chart(altair.Data(values=points))
        .mark_point(filled=True, size=60, opacity=0.9)
        .encode(
            x=altair.X("trial:Q", axis=altair.Axis(tickMinStep=1, format="d")),
            y=altair.Y("value:Q", title=title, scale=altair.Scale(zero=False)),
            color=altair.Color(
                "state:N", title=None, scale=altair.Scale(domain=states, range=list(PALETTE[:4])), legend=legend
            ),
            shape=altair.Shape("state:N", title=None, scale=altair.Scale(domain=states, range=SHAPES), legend=legend),
            tooltip=["trial:Q", "state:N", altair.Tooltip("value:Q", format=".5g")],
        )
        .properties(width="container", height=260)
    )
    rows = [[point["trial"], point["state"], point["value"]] for point in points]
    return make_chart("history", f"Trials, by {title} at their end", shown, ["trial", "state", title], rows)


def _group_color() -> Any:
    """Return the encoding that highlights the best trials."""
    import altair

    scale = altair.Scale(domain=["best tenth", "others"], range=[PALETTE[0], "#8c959f"])
    return altair.Color("group:N", title=None, scale=scale, legend=altair.Legend(orient="top"))


def _curves(
    specification: Specification,
    outcomes: Sequence[Outcome],
    curves: Mapping[int, Sequence[Point]],
    groups: Mapping[int, str],
) -> Json | None:
    """Draw the metric of each trial by step, up to the step that its outcome depends on."""
    import altair

    points = [
        {"trial": outcome.number, "group": groups[outcome.number], "step": point.steps, "value": point.metric}
        for outcome in reversed(outcomes)  # the best are drawn last
        for point in curves[outcome.number]
        if point.steps <= outcome.steps and math.isfinite(point.metric)
    ]
    if not points:
        return None
    base = altair.Chart(altair.Data(values=points)).encode(
        x=altair.X("step:Q", axis=altair.Axis(tickMinStep=1, format=",d")),
        y=altair.Y("value:Q", title=specification.objective.metric, scale=altair.Scale(zero=False)),
        detail="trial:N",
        color=_group_color(),
        tooltip=["trial:N", altair.Tooltip("step:Q", format=",d"), altair.Tooltip("value:Q", format=".5g")],
    )
    shown = (base.mark_line(opacity=0.7) + base.mark_circle(size=24)).properties(width="container", height=260)
    ends = [[outcome.number, outcome.steps, "" if outcome.metric is None else outcome.metric] for outcome in outcomes]
    return make_chart(
        "curves", "Validations", shown, ["trial", "steps", f"best {specification.objective.metric}"], ends
    )


def _parallel(specification: Specification, outcomes: Sequence[Outcome], groups: Mapping[int, str]) -> Json | None:
    """Draw each trial as a line across the axes of the settings and its rank."""
    import altair

    names = specification.short_names
    axes = [*names.values(), "rank"]
    lines, labels = [], []
    for rank, outcome in reversed(list(enumerate(outcomes))):
        places = {names[name]: _position(space, outcome.settings[name]) for name, space in specification.search.items()}
        places["rank"] = 1 - rank / max(1, len(outcomes) - 1)
        texts = {names[name]: _text(value) for name, value in outcome.settings.items()} | {"rank": str(rank + 1)}
        lines += [
            {
                "trial": outcome.number,
                "group": groups[outcome.number],
                "axis": axis,
                "place": places[axis],
                "value": texts[axis],
            }
            for axis in axes
        ]
    for name, space in specification.search.items():
        labels += [{"axis": names[name], "place": place, "text": text} for text, place in _labels(space)]
    labels += [{"axis": "rank", "place": 1, "text": "1"}, {"axis": "rank", "place": 0, "text": str(len(outcomes))}]
    x = altair.X(
        "axis:N",
        sort=axes,
        title=None,
        scale=altair.Scale(type="point", padding=0.3),
        axis=altair.Axis(labelAngle=-30, labelLimit=MAX_LABEL_WIDTH, grid=True),
    )
    y = altair.Y("place:Q", axis=None, scale=altair.Scale(domain=[-0.04, 1.08]))
    base = altair.Chart(altair.Data(values=lines)).encode(x=x, y=y, detail="trial:N")
    opacity = altair.condition("datum.group == 'best tenth'", altair.value(1), altair.value(0.35))
    width = altair.condition("datum.group == 'best tenth'", altair.value(2.2), altair.value(1))
    drawn = base.mark_line().encode(
        color=_group_color(), opacity=opacity, strokeWidth=width, tooltip=["trial:N", "axis:N", "value:N"]
    )
    texts = (
        altair.Chart(altair.Data(values=labels))
        .mark_text(align="left", dx=5, dy=-7, fontSize=11)
        .encode(x=x, y=y, text="text:N")
    )
    shown = (drawn + texts).properties(width="container", height=320)
    rows = [[rank, outcome.number, *_texts(specification, outcome)] for rank, outcome in enumerate(outcomes, start=1)]
    return make_chart("parallel", "Parallel coordinates", shown, ["rank", "trial", *names.values()], rows)


def _position(space: Range | Values, value: Any) -> float:
    """Return the position of a value on its axis, from 0 to 1."""
    if isinstance(space, Range):
        low, high = (math.log(bound) if space.log else bound for bound in (space.min, space.max))
        return ((math.log(value) if space.log else value) - low) / (high - low)
    return space.values.index(value) / max(1, len(space.values) - 1)


def _labels(space: Range | Values) -> list[tuple[str, float]]:
    """Return the labels of an axis with their positions."""
    values = space.grid if space.grid and len(space.grid) <= SCALE_LABELS else space.bounds
    return [(_text(value), _position(space, value)) for value in values]


def _importance(specification: Specification, weights: Mapping[str, float]) -> Json | None:
    import altair

    if not weights:
        return None
    values = [{"setting": specification.short_names[name], "importance": weight} for name, weight in weights.items()]
    shown = (
        altair.Chart(altair.Data(values=values))
        .mark_bar(color=PALETTE[0])
        .encode(
            y=altair.Y("setting:N", sort=None, title=None, axis=altair.Axis(labelLimit=MAX_LABEL_WIDTH)),
            x=altair.X("importance:Q", scale=altair.Scale(domain=[0, 1])),
            tooltip=["setting:N", altair.Tooltip("importance:Q", format=".3f")],
        )
        .properties(width="container", height=max(60, 30 * len(values)))
    )
    rows = [list(value.values()) for value in values]
    return make_chart("importance", "Importance for the best tenth (PED-ANOVA)", shown, ["setting", "importance"], rows)
