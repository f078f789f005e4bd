"""Charts of a report: learning curves, exact match by length, confusion matrices, scores and ablations of heads."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, Literal

import altair

from lightning_tfm.inference.attention_maps import MAX_POSITIONS, visible
from lightning_tfm.plots.style import PALETTE
from lightning_tfm.reporting.collect import Json, RunPage, find_branch
from lightning_tfm.runs.record import HEAD_SCORES, HEADLINES

SCHEME: Literal["blues"] = "blues"
"""Vega color scheme for values from 0 to 1, the same as `lightning_tfm.plots.style.HEAT`."""

MAX_LABEL_WIDTH = 150
"""Maximum width of axis and legend labels, in pixels; a chart must fit into 360 pixels."""

LINE_LENGTH = 24
"""Length of the lines in a legend, in pixels, which must show the dashes."""

HEIGHT = 200
"""Height of a chart with curves, in pixels."""

TICKS = 5
"""Approximate number of ticks of an axis."""

LOSSES = ("val/loss", "train/loss")
"""Metrics whose curves come first."""

SHOWN_CURVES = 4
"""Number of metrics whose curves are shown at first."""

WHOLE_STEPS = "datum.value % 1 ? '' : format(datum.value, ',d')"
"""Labels of an axis of steps; tickMinStep alone does not prevent ticks between whole steps."""

BINS = 6
"""Maximum number of bins of the lengths of sources, which hold about equally many sources."""

LENGTH = re.compile(r"0*(\d+) (\w+)")
"""Category of all pairs of a length, such as "14 symbols"."""


def draw_charts(runs: Sequence[RunPage]) -> list[Json]:
    """Return the charts for runs of one task, each with its data as a table."""
    others = (
        _lengths(runs) or _source_lengths(runs),
        _confusion(runs),
        _head_scores(runs),
        _ablations(runs),
        _texts(runs),
    )
    return [*_curves(runs), *(chart for chart in others if chart is not None)]


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
    return {"id": id, "title": title, "spec": spec, "columns": columns or [*rows[0]], "rows": cells}


def _menu(rows: Sequence[Json], column: str) -> Any:
    """Return a parameter with a drop-down menu of the values in a column, if there are several."""
    names = list(dict.fromkeys(row[column] for row in rows))
    menu: Json = {"bind": altair.binding_select(options=names, name=f"{column} ")} if len(names) > 1 else {}
    return altair.param(name=column, value=names[0], **menu)


def _by_group(runs: Sequence[RunPage]) -> Json:
    """Return the encodings that distinguish groups of runs, with a legend if there are several.

    Note:
        From the seventh group on, colors repeat, and lines are dashed.
    """
    groups = list(dict.fromkeys(run.group for run in runs))
    symbol: Json = {"symbolType": "stroke", "symbolSize": LINE_LENGTH**2, "symbolOpacity": 1}
    legend = altair.Legend(orient="top", direction="vertical", labelLimit=2 * MAX_LABEL_WIDTH, **symbol)

    def encode(channel: Any, values: list[Any]) -> Any:
        """Return an encoding with a value for each group."""
        scale = altair.Scale(type="ordinal", domain=groups, range=values)
        return channel("group:N", scale=scale, legend=legend if len(groups) > 1 else None, title=None)

    rounds = [number // len(PALETTE) for number in range(len(groups))]  # how often the colors were used up before
    return {
        "color": encode(altair.Color, [PALETTE[number % len(PALETTE)] for number in range(len(groups))]),
        "strokeDash": encode(
            altair.StrokeDash, [[8, 3] + [2, 3] * (number - 1) if number else [1, 0] for number in rounds]
        ),
        "detail": "run:N",
    }


def _step_axis() -> Any:
    return altair.X("step:Q", axis=altair.Axis(tickMinStep=1, tickCount=TICKS, labelExpr=WHOLE_STEPS))


def _by_interest(runs: Sequence[RunPage], names: set[str]) -> list[str]:
    """Sort metrics: the losses first, then those of interest, those of the validations, and others."""

    def key(name: str) -> tuple[int, int, int, str]:
        first = [*LOSSES, *HEADLINES]
        missing = sum(name not in run.curves for run in runs)
        kind = 0 if name.startswith("val/") else 1 if name.startswith("train/") else 2
        return missing, first.index(name) if name in first else len(first), kind, name

    return sorted(names, key=key)


def _curves(runs: Sequence[RunPage]) -> list[Json]:
    """Return a chart of each metric that has more than one value, the loss first.

    The curve of a fork begins at the last value of the run that was forked, if this run is shown, too.
    """
    runs = [*runs, *(fork for run in runs for fork in run.forks)]
    folders = {run.run.folder.resolve() for run in runs}
    branches = {run.name: branch[1] for run in runs if (branch := find_branch(run.run, folders))}
    logged = {name for run in runs for name in run.curves if "/alignment/" not in name}
    names = _by_interest(runs, {name for name in logged if not name.startswith(HEAD_SCORES)})
    return [chart for number, name in enumerate(names) if (chart := _curve(runs, branches, name, number))]


def _curve(runs: Sequence[RunPage], branches: Mapping[str, int], name: str, number: int) -> Json | None:
    points: list[Json] = []
    for run in runs:
        curve = run.curves.get(name, [])
        first = bisect_right(curve, branches.get(run.name, 0), key=itemgetter(0)) - 1
        for step, value in curve[max(first, 0) :]:
            points.append({"run": run.name, "group": run.group, "step": step, "value": value})
    if len({point["step"] for point in points}) < 2:
        return None
    curves = altair.Chart(altair.Data(values=points)).encode(
        x=_step_axis(),
        y=altair.Y("value:Q", title=name, scale=altair.Scale(zero=False), axis=altair.Axis(tickCount=TICKS)),
        **_by_group(runs),
        tooltip=["run:N", altair.Tooltip("step:Q", format=",d"), altair.Tooltip("value:Q", format=".5g")],
    )
    has_few = len(points) <= 40 * len(runs)
    layers = curves.mark_line() + curves.mark_circle(size=30 if has_few else 0)
    ends = [{"run": run.name, "last value": run.curves[name][-1][1]} for run in runs if name in run.curves]
    chart = make_chart(f"curves-{number}", name, layers, HEIGHT, ends)
    return chart | {"is_curve": True, "is_further": number >= SHOWN_CURVES}


def _spread(lengths: Sequence[int]) -> list[int]:
    """Return at most 8 of the given lengths, in ascending order, for the ticks of a logarithmic axis."""
    ratio = (lengths[-1] / lengths[0]) ** (1 / 7)
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
    if len({length for _, length in pairs}) < 2:
        return None
    groups = {run.name: run.group for run in runs}
    points: list[Json] = [
        {"run": name, "group": groups[name], unit: length, "exact match": correct[name, length] / total, "pairs": total}
        for (name, length), total in sorted(pairs.items(), key=lambda item: item[0][1])
    ]
    axis = altair.Axis(format="d", values=_spread(sorted({length for _, length in pairs})))
    x = altair.X(f"{unit}:Q", scale=altair.Scale(type="log", base=2, nice=False), axis=axis)
    return _length_chart(runs, points, x)


def _source_lengths(runs: Sequence[RunPage]) -> Json | None:
    """Return the exact match by length of the source in tokens, in bins, over all splits."""
    lengths = sorted(length for run in runs for length, _ in run.lengths)
    if not lengths:
        return None
    bounds = sorted({lengths[len(lengths) * number // BINS - 1] for number in range(1, BINS + 1)})
    names: dict[int, str] = {}  # by the largest length of a bin
    for first, last in zip([lengths[0], *(bound + 1 for bound in bounds)], bounds, strict=False):
        names[last] = str(last) if first == last else f"{first}\N{EN DASH}{last}"
    if len(names) < 2:
        return None
    points: list[Json] = []
    for run in runs:
        by_bin: dict[int, list[bool]] = defaultdict(list)
        for length, is_correct in run.lengths:
            by_bin[bounds[bisect_left(bounds, length)]].append(is_correct)
        for last, correct in sorted(by_bin.items()):
            share = {"exact match": sum(correct) / len(correct), "pairs": len(correct)}
            points.append({"run": run.name, "group": run.group, "tokens": names[last]} | share)
    x = altair.X("tokens:N", title="tokens of the source", sort=[*names.values()], axis=altair.Axis(labelAngle=0))
    return _length_chart(runs, points, x)


def _length_chart(runs: Sequence[RunPage], points: list[Json], x: Any) -> Json:
    """Return a chart of the exact match of groups of runs by length.

    Args:
        runs: the runs.
        points: the points, with the run, its group, the length, the exact match and the number of pairs.
        x: the encoding of the length.
    """
    rows = [{name: value for name, value in point.items() if name != "group"} for point in points]
    curves = altair.Chart(altair.Data(values=points)).encode(
        x=x,
        y=altair.Y("exact match:Q", scale=altair.Scale(domain=[0, 1]), axis=altair.Axis(tickCount=TICKS)),
        **_by_group(runs),
        tooltip=["run:N", x.shorthand, altair.Tooltip("exact match:Q", format=".4f"), "pairs:Q"],
    )
    lines = curves.mark_line() + curves.mark_circle(size=36)
    return make_chart("lengths", "Exact match by length", lines, HEIGHT, rows)


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
    legend = altair.Legend(orient="top", direction="vertical", labelLimit=2 * MAX_LABEL_WIDTH, symbolType="stroke")
    layers = list(dict.fromkeys(point["layer"] for point in points))
    colors = altair.Scale(domain=layers, range=[PALETTE[number % len(PALETTE)] for number in range(len(layers))])
    lines = (
        altair.Chart(altair.Data(values=points))
        .mark_line(point=True)
        .encode(
            x=_step_axis(),
            y=altair.Y("value:Q", title="score", axis=altair.Axis(tickCount=TICKS)),
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
