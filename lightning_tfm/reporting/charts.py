"""Charts of a report: learning curves, exact match by category and by length, confusion matrices, attention heads."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import islice
from typing import Any, Literal

import altair

from lightning_tfm.inference.attention_maps import MAX_POSITIONS, visible
from lightning_tfm.plots.style import PALETTE
from lightning_tfm.reporting.collect import Json, RunPage
from lightning_tfm.runs.record import HEAD_SCORES, HEADLINES

SCHEME: Literal["blues"] = "blues"
"""Vega color scheme for values from 0 to 1, the same as `lightning_tfm.plots.style.HEAT`."""

MAX_LABEL_WIDTH = 150
"""Maximum width of axis and legend labels, in pixels; a chart must fit into 360 pixels."""

LINE_LENGTH = 24
"""Length of the lines in a legend, in pixels, which must show the dashes."""

HEIGHT = 280
"""Height of a chart with curves, in pixels."""

WHOLE_STEPS = "datum.value % 1 ? '' : format(datum.value, ',d')"
"""Labels of an axis of steps; tickMinStep alone does not prevent ticks between whole steps."""

LENGTH = re.compile(r"0*(\d+) (\w+)")
"""Category of all pairs of a length, such as "14 symbols"."""


def draw_charts(runs: Sequence[RunPage]) -> list[Json]:
    """Return the charts for runs of one task, each with its data as a table."""
    of_tests = _curves(runs), _categories(runs), _lengths(runs), _confusion(runs), _heads(runs)
    charts = *of_tests, _head_scores(runs), _ablations(runs), _texts(runs)
    return [chart for chart in charts if chart is not None]


def make_chart(
    id: str, title: str, chart: Any, height: int, rows: Sequence[Json], columns: Sequence[str] | None = None
) -> Json:
    """Return a chart and its data as a table, for users of screen readers and keyboards.

    Args:
        id: the id of the chart on the page.
        title: the title.
        chart: the chart of altair.
        height: its height in pixels; its width is that of the page.
        rows: the rows of the table, by column.
        columns: the names of the columns, if they are not the keys of the rows.

    Note:
        Vega-Lite can compute the height from a step per row, but logs a warning if the width is set by the page.
    """
    spec = chart.properties(width="container", height=max(48, height), description=title).to_dict()
    cells = [[f"{cell:.5g}" if isinstance(cell, float) else cell for cell in row.values()] for row in rows]
    return {"id": id, "title": title, "spec": spec, "columns": columns or [*rows[0]], "rows": cells, "notes": []}


def _menu(rows: Sequence[Json], column: str) -> Any:
    """Return a parameter with a drop-down menu of the values in a column."""
    names = list(dict.fromkeys(row[column] for row in rows))
    return altair.param(name=column, value=names[0], bind=altair.binding_select(options=names, name=column))


def _distinguish(runs: Sequence[RunPage], *, bars: bool = False) -> Json:
    """Return the encodings that distinguish runs, with a legend if there are several runs.

    Args:
        runs: the runs.
        bars: whether the marks are bars, otherwise lines.

    Note:
        From the seventh run on, colors repeat, lines are dashed, and bars are pale with a dashed outline.
    """
    stroke = {"symbolType": "stroke", "symbolSize": LINE_LENGTH**2, "symbolOpacity": 1}
    symbol = {"symbolType": "square"} if bars else stroke
    legend = altair.Legend(orient="top", direction="vertical", labelLimit=2 * MAX_LABEL_WIDTH, **symbol)

    def encode(channel: Any, values: list[Any]) -> Any:
        """Return an encoding with a value for each run."""
        scale = altair.Scale(type="ordinal", domain=[run.name for run in runs], range=values)
        return channel("run:N", scale=scale, legend=legend if len(runs) > 1 else None, title=None)

    colors = [PALETTE[number % len(PALETTE)] for number in range(len(runs))]
    rounds = [number // len(PALETTE) for number in range(len(runs))]  # how often the colors were used up before
    dashes = [[8, 3] + [2, 3] * (number - 1) if number else [1, 0] for number in rounds]
    encodings = {"color": encode(altair.Color, colors), "strokeDash": encode(altair.StrokeDash, dashes)}
    if bars:
        fills = [f"{color}66" if number else color for color, number in zip(colors, rounds, strict=True)]
        encodings |= {"color": encode(altair.Color, fills), "stroke": encode(altair.Stroke, colors)}
    return encodings


def _by_interest(runs: Sequence[RunPage], names: set[str]) -> list[str]:
    """Sort metrics for a menu, starting with those that all runs have."""

    def key(name: str) -> tuple[int, int, str]:
        missing = sum(name not in run.curves for run in runs)
        return missing, HEADLINES.index(name) if name in HEADLINES else len(HEADLINES), name

    return sorted(names, key=key)


def _curves(runs: Sequence[RunPage]) -> Json | None:
    points: list[Json] = [
        {"run": run.name, "metric": name, "step": step, "value": value}
        for run in runs
        for name, curve in run.curves.items()
        if "/alignment/" not in name and not name.startswith(HEAD_SCORES)
        for step, value in curve
    ]
    if not points:
        return None
    names = _by_interest(runs, {point["metric"] for point in points})
    ends: list[Json] = [
        {"last value of": name, **{run.name: run.curves[name][-1][1] if name in run.curves else "" for run in runs}}
        for name in names
    ]
    axis = altair.Axis(tickMinStep=1, labelExpr=WHOLE_STEPS)
    curves = altair.Chart(altair.Data(values=points)).encode(
        x=altair.X("step:Q", axis=axis),
        y=altair.Y("value:Q", title=None, scale=altair.Scale(zero=False)),
        **_distinguish(runs),
        tooltip=["run:N", altair.Tooltip("step:Q", format=",d"), altair.Tooltip("value:Q", format=".5g")],
    )
    layers = (curves.mark_line() + curves.mark_circle(size=36)).transform_filter("datum.metric == metric")
    menu = _menu([{"metric": name} for name in names], "metric")
    chart = make_chart("curves", "Learning curves", layers.add_params(menu), HEIGHT, ends)
    chart["notes"] = [
        f"{run.name}: {number:,} {'value' if number == 1 else 'values'} of {name} not finite"
        for run in runs
        for name, number in run.non_finite.items()
    ]
    return chart


def _categories(runs: Sequence[RunPage]) -> Json | None:
    categories = [{"run": run.name} | category for run in runs for category in run.categories]
    if not categories:
        return None
    splits = Counter((category["run"], category["split"]) for category in categories)
    bars = (
        altair.Chart(altair.Data(values=categories))
        .mark_bar()
        .encode(
            y=altair.Y("category:N", title=None, axis=altair.Axis(labelLimit=MAX_LABEL_WIDTH)),
            yOffset=altair.YOffset("run:N", sort=[run.name for run in runs]),
            x=altair.X("exact match:Q", scale=altair.Scale(domain=[0, 1])),
            **_distinguish(runs, bars=True),
            tooltip=["run:N", "category:N", altair.Tooltip("exact match:Q", format=".4f"), "loss:N", "pairs:Q"],
        )
        .add_params(_menu(categories, "split"))
        .transform_filter("datum.split == split")
    )
    height = max(splits.values()) * (1 + len(runs)) * 12
    return make_chart("categories", "Exact match by category", bars, height, categories)


def _spread(lengths: Sequence[int]) -> list[int]:
    """Return at most 13 of the given lengths, in ascending order, for the ticks of a logarithmic axis."""
    ratio = (lengths[-1] / lengths[0]) ** (1 / 12)
    ticks = [lengths[0]]
    for length in lengths[1:]:
        if length >= ticks[-1] * ratio:
            ticks.append(length)
    return ticks


def _lengths(runs: Sequence[RunPage]) -> Json | None:
    """Return the exact match by length over all splits, if all categories are lengths."""
    correct: dict[tuple[str, int], float] = defaultdict(float)
    pairs: Counter[tuple[str, int]] = Counter()
    units = set()
    for run in runs:
        for category in run.categories:
            if (match := LENGTH.fullmatch(category["category"])) is None:
                return None
            key = run.name, int(match[1])
            correct[key] += category["exact match"] * category["pairs"]
            pairs[key] += category["pairs"]
            units.add(match[2])
    if len(units) != 1:
        return None
    unit: str = units.pop()
    points: list[Json] = [
        {"run": name, unit: length, "exact match": correct[name, length] / total, "pairs": total}
        for (name, length), total in sorted(pairs.items(), key=lambda item: item[0][1])
    ]
    axis = altair.Axis(format="d", values=_spread(sorted({length for _, length in pairs})))
    curves = altair.Chart(altair.Data(values=points)).encode(
        x=altair.X(f"{unit}:Q", scale=altair.Scale(type="log", base=2, nice=False), axis=axis),
        y=altair.Y("exact match:Q", scale=altair.Scale(domain=[0, 1])),
        **_distinguish(runs),
        tooltip=["run:N", f"{unit}:Q", altair.Tooltip("exact match:Q", format=".4f"), "pairs:Q"],
    )
    lines = curves.mark_line() + curves.mark_circle(size=36)
    return make_chart("lengths", "Exact match by length", lines, HEIGHT, points)


def _confusion(runs: Sequence[RunPage]) -> Json | None:
    counts = [{"run": run.name} | count for run in runs for count in run.confusion]
    if not counts:
        return None
    number, share = altair.Tooltip("count:Q", format=",d"), altair.Tooltip("share:Q", format=".2%")
    base = (
        altair.Chart(altair.Data(values=counts))
        .encode(
            x=altair.X("predicted:N", axis=altair.Axis(labelAngle=0, labelLimit=MAX_LABEL_WIDTH)),
            y=altair.Y("true:N", axis=altair.Axis(labelLimit=MAX_LABEL_WIDTH)),
        )
        .transform_filter("datum.run == run")
    )
    cells = base.mark_rect().encode(
        color=altair.Color("share:Q", title="of the row", scale=altair.Scale(scheme=SCHEME, domain=[0, 1])),
        tooltip=["true:N", "predicted:N", number, share],
    )
    numbers = base.mark_text(fontSize=14).encode(
        text=altair.Text("count:Q", format=",d"),
        color=altair.condition("datum.share > 0.5", altair.value("white"), altair.value("black")),
    )
    matrix = (cells + numbers).add_params(_menu(counts, "run"))
    return make_chart("confusion", "Confusion matrix", matrix, 48 * len({count["true"] for count in counts}), counts)


def _heads(runs: Sequence[RunPage]) -> Json | None:
    scores: list[Json] = []
    for run in runs:
        for name, curve in run.curves.items():
            if "/alignment/" in name:
                layer, head, score = name.split("/alignment/")[1].rsplit("/", 2)
                number = head.removeprefix("head_")
                scores.append({"run": run.name, "layer": layer, "head": number, "score": score, "value": curve[-1][1]})
    if not scores:
        return None
    scale = altair.Scale(scheme=SCHEME, zero=True)  # equal scores have a range, too
    heads = (
        altair.Chart(altair.Data(values=scores))
        .mark_rect()
        .encode(
            x=altair.X("head:N", title="head", axis=altair.Axis(labelAngle=0)),
            y=altair.Y("layer:N", title=None, sort=None, axis=altair.Axis(labelLimit=MAX_LABEL_WIDTH)),
            color=altair.Color("value:Q", title=None, scale=scale, legend=altair.Legend(format=".3~g")),
            tooltip=["layer:N", "head:N", altair.Tooltip("value:Q", format=".3f")],
        )
        .add_params(_menu(scores, "run"), _menu(scores, "score"))
        .transform_filter("datum.score == score && datum.run == run")
    )
    title = "Attention against the gold alignment, at the last validation"
    return make_chart("heads", title, heads, 24 * len({row["layer"] for row in scores}), scores)


def _head_scores(runs: Sequence[RunPage]) -> Json | None:
    """Return the scores of each head over the training, if `HeadScores` has logged them."""
    points: list[Json] = []
    for run in runs:
        for path, curve in run.curves.items():
            if path.startswith(HEAD_SCORES):
                layer, head, score = path.removeprefix(HEAD_SCORES).rsplit("/", 2)
                names = {"run": run.name, "score": score, "layer": layer, "head": head.removeprefix("head_")}
                points += [names | {"step": step, "value": value} for step, value in curve]
    if not points:
        return None
    points.sort(key=lambda point: point["score"].startswith(("aer", "entropy")))  # scores that are better if high first
    ends = {tuple(point[key] for key in ("run", "score", "layer", "head")): point["value"] for point in points}
    rows = [dict(zip(("run", "score", "layer", "head", "last value"), (*key, ends[key]), strict=True)) for key in ends]
    axis = altair.Axis(tickMinStep=1, labelExpr=WHOLE_STEPS)
    legend = altair.Legend(orient="top", direction="vertical", labelLimit=2 * MAX_LABEL_WIDTH, symbolType="stroke")
    layers = list(dict.fromkeys(point["layer"] for point in points))
    colors = altair.Scale(domain=layers, range=[PALETTE[number % len(PALETTE)] for number in range(len(layers))])
    lines = (
        altair.Chart(altair.Data(values=points))
        .mark_line(point=True)
        .encode(
            x=altair.X("step:Q", axis=axis),
            y=altair.Y("value:Q", title=None),
            color=altair.Color("layer:N", title=None, scale=colors, legend=legend),
            detail="head:N",
            tooltip=[
                "layer:N",
                "head:N",
                altair.Tooltip("step:Q", format=",d"),
                altair.Tooltip("value:Q", format=".3f"),
            ],
        )
        .add_params(_menu(points, "run"), _menu(points, "score"))
        .transform_filter("datum.score == score && datum.run == run")
    )
    return make_chart("head-scores", "Scores of the heads during training", lines, HEIGHT, rows)


def _ablations(runs: Sequence[RunPage]) -> Json | None:
    """Return the increase of the error rates without each part of the networks that were inspected, by the mean."""
    cells: list[Json] = []
    for run in runs:
        parts = [*run.inspection["heads"], *run.inspection["components"]] if run.inspection else []
        for part in parts:
            ablation = part["without"].get("mean")
            for by, effects in ablation["errors_increase"].items() if ablation else ():
                for target, (mean, low, high) in islice(effects.items(), MAX_POSITIONS):
                    selected = {"run": run.name, "by": by, "without": part["name"], "target": target}
                    cells.append(selected | {"increase": mean, "low": low, "high": high})
    if not cells:
        return None
    return _heat_map("ablations", "Increase of errors without each part", cells, ("target", "without", "increase"))


def _texts(runs: Sequence[RunPage]) -> Json | None:
    """Return what each symbol of an inspected text adds to the log probability of each symbol of its output."""
    cells: list[Json] = [
        {
            "text": f"{run.name}: {text['input']}" if len(runs) > 1 else text["input"],
            "measure": measure,
            "output": f"{row} {visible(output)}",
            "input": f"{column} {visible(symbol)}",
            "nats": values[row - 1][column - 1],
        }
        for run in runs
        for text in (run.inspection["texts"] if run.inspection else ())
        for measure, values in (
            ("integrated gradients", text["integrated_gradients"]),
            ("occlusion", text["occlusion"]),
        )
        for row, output in enumerate(text["target_symbols"][:MAX_POSITIONS], start=1)
        if text["is_target"][row - 1]
        for column, symbol in enumerate(text["input_symbols"][:MAX_POSITIONS], start=1)
    ]
    if not cells:
        return None
    return _heat_map("contributions", "Contributions of the input to each output", cells, ("input", "output", "nats"))


def _heat_map(id: str, title: str, cells: list[Json], axes: tuple[str, str, str]) -> Json:
    """Return a heat map of signed values.

    Args:
        id: the id of the chart on the page.
        title: the title.
        cells: the cells, by column, of which the first two select the cells that are shown.
        axes: the columns of the horizontal axis, the vertical axis and the value.
    """
    x, y, value = axes
    first, second, *columns = cells[0]
    largest = max(abs(cell[value]) for cell in cells) or 1.0
    color = altair.Scale(scheme="redblue", domain=[-largest, largest])
    axis = altair.Axis(labelLimit=MAX_LABEL_WIDTH)
    tooltip = [
        altair.Tooltip(f"{name}:Q", format="+.3f") if isinstance(cells[0][name], float) else f"{name}:N"
        for name in columns
    ]
    chart = (
        altair.Chart(altair.Data(values=cells))
        .mark_rect()
        .encode(
            x=altair.X(f"{x}:N", title=x, sort=None, axis=axis),
            y=altair.Y(f"{y}:N", title=None, sort=None, axis=axis),
            color=altair.Color(f"{value}:Q", scale=color, title=None, legend=altair.Legend(format=".3~g")),
            tooltip=tooltip,
        )
        .add_params(_menu(cells, first), _menu(cells, second))
        .transform_filter(f"datum.{first} == {first} && datum.{second} == {second}")
    )
    return make_chart(id, title, chart, 20 * len({cell[y] for cell in cells}), cells)


def draw_trials(
    id: str,
    x: str,
    metric: str,
    points: list[Json],
    states: Sequence[str],
    is_log: bool = False,
    has_lines: bool = False,
) -> Json:
    """Draw the metric of the trials of a sweep by their number, a setting or a validation.

    Args:
        id: the id of the chart on the page.
        x: the title of the horizontal axis.
        metric: the name of the metric.
        points: the points, as mappings with the trial, its state, x and y.
        states: the names of all states.
        is_log: whether the horizontal axis is logarithmic.
        has_lines: whether the points of a trial are joined.
    """
    values = [point["x"] for point in points]
    is_number = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    scale = (
        altair.Scale(type="log", nice=False) if is_log else altair.Scale(zero=False) if is_number else altair.Scale()
    )
    axis = altair.Axis(tickMinStep=1) if all(type(value) is int for value in values) else altair.Axis()
    colors = altair.Scale(domain=list(states), range=PALETTE[: len(states)])
    base = altair.Chart(altair.Data(values=points)).encode(
        x=altair.X(f"x:{'Q' if is_number else 'N'}", title=x, scale=scale, axis=axis),
        y=altair.Y("y:Q", title=metric, scale=altair.Scale(zero=False)),
        color=altair.Color("state:N", title=None, scale=colors, legend=altair.Legend(orient="top")),
        detail="trial:N",
        tooltip=["trial:N", "state:N", "x:N", altair.Tooltip("y:Q", format=".5g")],
    )
    circles = base.mark_circle(size=40, opacity=0.9)
    chart = base.mark_line(opacity=0.7) + circles if has_lines else circles
    return make_chart(id, f"{metric} by {x}", chart, HEIGHT, points, ["trial", "state", x, metric])
