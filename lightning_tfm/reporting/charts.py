"""Charts of a report: learning curves, exact match by category and by length, confusion matrices, attention heads."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, Literal

from lightning_tfm.plots.style import PALETTE
from lightning_tfm.reporting.collect import Json, RunPage
from lightning_tfm.runs.record import HEADLINES

SCHEME: Literal["blues"] = "blues"
"""Vega color scheme for values from 0 to 1, the same as `lightning_tfm.plots.style.HEAT`."""

MAX_LABEL_WIDTH = 150
"""Maximum width of axis and legend labels, in pixels; a chart must fit into 360 pixels."""

LINE_LENGTH = 24
"""Length of the lines in a legend, in pixels, which must show the dashes."""


LENGTH = re.compile(r"0*(\d+) (\w+)")
"""Category of all pairs of a length, such as "14 symbols"."""


def draw_charts(runs: Sequence[RunPage]) -> list[Json]:
    """Return the charts for runs of one task, each with its data as a table."""
    charts = (_curves(runs), _categories(runs), _lengths(runs), _confusion(runs), _heads(runs))
    return [chart for chart in charts if chart is not None]


def make_chart(id: str, title: str, chart: Any, columns: list[str], rows: list[list[Any]]) -> Json:
    """Return a chart and its data as a table, for users of screen readers and keyboards."""
    spec = chart.to_dict() | {"description": title}  # for screen readers
    cells = [[f"{cell:.5g}" if isinstance(cell, float) else cell for cell in row] for row in rows]
    return {"id": id, "title": title, "spec": spec, "columns": columns, "rows": cells, "notes": []}


def _choice(names: list[str], label: str) -> Any:
    """Return a parameter with a drop-down menu."""
    import altair

    return altair.param(name=label, value=names[0], bind=altair.binding_select(options=names, name=label))


def _distinguish(runs: Sequence[RunPage], *, bars: bool = False) -> Json:
    """Return the encodings that distinguish runs, with a legend if there are several runs.

    Args:
        runs: the runs.
        bars: whether the marks are bars, otherwise lines.

    Note:
        From the seventh run on, colors repeat, lines are dashed, and bars are pale with a dashed outline.
    """
    import altair

    symbol = (
        {"symbolType": "square"} if bars else {"symbolType": "stroke", "symbolSize": LINE_LENGTH**2, "symbolOpacity": 1}
    )
    legend = altair.Legend(orient="top", direction="vertical", labelLimit=2 * MAX_LABEL_WIDTH, **symbol)

    def encode(channel: Any, values: list[Any]) -> Any:
        """Return an encoding with a value for each run."""
        scale = altair.Scale(type="ordinal", domain=[run.name for run in runs], range=values)
        return channel("run:N", scale=scale, legend=legend if len(runs) > 1 else None, title=None)

    colors = [PALETTE[number % len(PALETTE)] for number in range(len(runs))]
    rounds = [number // len(PALETTE) for number in range(len(runs))]  # how often the colors were used up before
    encodings = {"color": encode(altair.Color, colors)}
    if rounds[-1]:
        dashes = [[8, 3] + [2, 3] * (number - 1) if number else [1, 0] for number in rounds]
        encodings["strokeDash"] = encode(altair.StrokeDash, dashes)
    if rounds[-1] and bars:
        fills = [f"{color}66" if number else color for color, number in zip(colors, rounds, strict=True)]
        encodings |= {"color": encode(altair.Color, fills), "stroke": encode(altair.Stroke, colors)}
    return encodings


def _height(rows: int, step: int) -> int:
    """Return the height, in pixels, of a chart with one row per category.

    Note:
        Vega-Lite can compute the height from the step, but logs a warning if the width is set by the page.
    """
    return max(48, rows * step)


def _by_interest(runs: Sequence[RunPage], names: set[str]) -> list[str]:
    """Sort metrics for a menu, starting with those that all runs have."""

    def key(name: str) -> tuple[int, int, str]:
        missing = sum(name not in run.curves for run in runs)
        return missing, HEADLINES.index(name) if name in HEADLINES else len(HEADLINES), name

    return sorted(names, key=key)


def _curves(runs: Sequence[RunPage]) -> Json | None:
    import altair

    points: list[Json] = [
        {"run": run.name, "metric": name, "step": step, "value": value}
        for run in runs
        for name, curve in run.curves.items()
        if "/alignment/" not in name
        for step, value in curve
    ]
    if not points:
        return None
    names = _by_interest(runs, {point["metric"] for point in points})
    metric = _choice(names, "metric")
    curves = altair.Chart(altair.Data(values=points)).encode(
        # tickMinStep alone does not prevent ticks between whole steps
        x=altair.X(
            "step:Q", axis=altair.Axis(tickMinStep=1, labelExpr="datum.value % 1 ? '' : format(datum.value, ',d')")
        ),
        y=altair.Y("value:Q", title=None, scale=altair.Scale(zero=False)),
        **_distinguish(runs),
        tooltip=["run:N", altair.Tooltip("step:Q", format=",d"), altair.Tooltip("value:Q", format=".5g")],
    )
    layers = (curves.mark_line() + curves.mark_circle(size=36)).add_params(metric)
    filtered = layers.transform_filter("datum.metric == metric").properties(width="container", height=280)
    ends = [[name, *(run.curves[name][-1][1] if name in run.curves else "" for run in runs)] for name in names]
    chart = make_chart("curves", "Learning curves", filtered, ["last value of", *(run.name for run in runs)], ends)
    chart["notes"] = [
        f"{run.name}: {number:,} {'value' if number == 1 else 'values'} of {name} not finite"
        for run in runs
        for name, number in run.non_finite.items()
    ]
    return chart


def _categories(runs: Sequence[RunPage]) -> Json | None:
    import altair

    categories = [category | {"run": run.name} for run in runs for category in run.categories]
    if not categories:
        return None
    splits = Counter((category["run"], category["split"]) for category in categories)
    most = max(splits.values())
    chosen = _choice(list(dict.fromkeys(category["split"] for category in categories)), "split")
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
        .add_params(chosen)
        .transform_filter("datum.split == split")
        .properties(width="container", height=_height(most * (1 + len(runs)), 12))
    )
    columns = ["run", "split", "category", "exact match", "loss", "pairs"]
    rows = [[category[column] for column in columns] for category in categories]
    return make_chart("categories", "Exact match by category", bars, columns, rows)


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
    import altair

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
    points = [
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
    lines = (curves.mark_line() + curves.mark_circle(size=36)).properties(width="container", height=280)
    rows = [list(point.values()) for point in points]
    return make_chart("lengths", "Exact match by length", lines, ["run", unit, "exact match", "pairs"], rows)


def _confusion(runs: Sequence[RunPage]) -> Json | None:
    import altair

    counts = [count | {"run": run.name} for run in runs for count in run.confusion]
    if not counts:
        return None
    chosen = _choice(list(dict.fromkeys(count["run"] for count in counts)), "run")
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
        tooltip=[
            "true:N",
            "predicted:N",
            altair.Tooltip("count:Q", format=",d"),
            altair.Tooltip("share:Q", format=".2%"),
        ],
    )
    numbers = base.mark_text(fontSize=14).encode(
        text=altair.Text("count:Q", format=",d"),
        color=altair.condition("datum.share > 0.5", altair.value("white"), altair.value("black")),
    )
    matrix = (
        (cells + numbers)
        .add_params(chosen)
        .properties(width="container", height=_height(len({count["true"] for count in counts}), 48))
    )
    columns = ["run", "true", "predicted", "count"]
    return make_chart(
        "confusion", "Confusion matrix", matrix, columns, [[count[column] for column in columns] for count in counts]
    )


def _heads(runs: Sequence[RunPage]) -> Json | None:
    import altair

    scores: list[Json] = []
    for run in runs:
        for name, curve in run.curves.items():
            if "/alignment/" in name:
                layer, head, score = name.split("/alignment/")[1].rsplit("/", 2)
                number = head.removeprefix("head_")
                scores.append({"run": run.name, "layer": layer, "head": number, "score": score, "value": curve[-1][1]})
    if not scores:
        return None
    run, score = (_choice(list(dict.fromkeys(row[name] for row in scores)), name) for name in ("run", "score"))
    heads = (
        altair.Chart(altair.Data(values=scores))
        .mark_rect()
        .encode(
            x=altair.X("head:N", title="head", axis=altair.Axis(labelAngle=0)),
            y=altair.Y("layer:N", title=None, sort=None, axis=altair.Axis(labelLimit=MAX_LABEL_WIDTH)),
            color=altair.Color(
                "value:Q",
                title=None,
                scale=altair.Scale(scheme=SCHEME, zero=True),  # equal scores have a range, too
                legend=altair.Legend(format=".3~g"),
            ),
            tooltip=["layer:N", "head:N", altair.Tooltip("value:Q", format=".3f")],
        )
        .add_params(run, score)
        .transform_filter("datum.score == score && datum.run == run")
        .properties(width="container", height=_height(len({row["layer"] for row in scores}), 24))
    )
    title = "Attention against the gold alignment, at the last validation"
    rows = [list(row.values()) for row in scores]
    return make_chart("heads", title, heads, ["run", "layer", "head", "score", "value"], rows)
