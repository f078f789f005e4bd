"""Rendering of collected runs as one HTML page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_tfm.catalog import HEADLINES
from lightning_tfm.reporting.collect import Json


def render(runs: list[Json]) -> str:
    """Return the HTML page of the runs, as `collect_run` returns them."""
    import jinja2
    import vl_convert
    from markupsafe import Markup

    charts = _charts(runs)
    different = [
        name
        for name in sorted({name for run in runs for name in run["settings"]})
        if len({run["settings"].get(name) for run in runs}) > 1
    ]
    data = {
        "runs": [
            {name: value for name, value in run.items() if name not in ("settings", "curves", "categories")}
            for run in runs
        ],
        "differences": [
            {"setting": name, "values": [run["settings"].get(name, "") for run in runs]} for name in different
        ],
        "charts": [{"id": chart["id"], "spec": chart["spec"]} for chart in charts],
    }
    # "</script" would end the script element, and "<!--" would begin a comment in it.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    bundle = vl_convert.javascript_bundle("globalThis.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script")
    template = jinja2.Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"), autoescape=True)
    return template.render(
        title=", ".join(run["name"] for run in runs),
        charts=charts,
        data=Markup(text),
        bundle=Markup(bundle),
    )


def _charts(runs: list[Json]) -> list[Json]:
    """Return charts of the learning curves, the exact match by category and the scores of attention heads, if any."""
    import altair

    order = [run["name"] for run in runs]
    legend = altair.Legend(orient="top", labelLimit=0) if len(runs) > 1 else None
    color = altair.Color("run:N", sort=order, legend=legend, title=None)
    charts = []

    def add(id: str, title: str, chart: Any, columns: list[str], rows: list[list[Any]]) -> None:
        """Add a chart, with its data as a table for readers who cannot see it or use a pointer."""
        spec = chart.to_dict() | {"description": title}  # for screen readers
        cells = [[f"{cell:.4g}" if isinstance(cell, float) else cell for cell in row] for row in rows]
        charts.append({"id": id, "title": title, "spec": spec, "columns": columns, "rows": cells})

    def choice(names: list[str], label: str) -> Any:
        return altair.param(name=label, value=names[0], bind=altair.binding_select(options=names, name=label))

    points = [
        {"run": run["name"], "metric": name, "step": step, "value": value}
        for run in runs
        for name, curve in run["curves"].items()
        if "/alignment/" not in name
        for step, value in curve
    ]
    if points:
        names = sorted({point["metric"] for point in points})
        names = [name for name in HEADLINES if name in names] + [name for name in names if name not in HEADLINES]
        metric = choice(names, "metric")
        curves = altair.Chart(altair.Data(values=points), width=820, height=280).encode(
            x=altair.X("step:Q"),
            y=altair.Y("value:Q", title=None, scale=altair.Scale(zero=False)),
            color=color,
            tooltip=["run:N", "step:Q", altair.Tooltip("value:Q", format=".5g")],
        )
        curves = (curves.mark_line() + curves.mark_circle(size=36)).add_params(metric)
        ends = [
            [name, *(run["curves"][name][-1][1] if name in run["curves"] else "" for run in runs)] for name in names
        ]
        columns = ["last value of", *order]
        add("curves", "Learning curves", curves.transform_filter("datum.metric == metric"), columns, ends)

    categories = [category | {"run": run["name"]} for run in runs for category in run["categories"]]
    if categories:
        splits = list(dict.fromkeys(category["split"] for category in categories))
        chosen = choice(splits, "split")
        bars = (
            altair.Chart(altair.Data(values=categories), width=620)
            .mark_bar()
            .encode(
                y=altair.Y("category:N", title=None, axis=altair.Axis(labelLimit=0)),
                yOffset=altair.YOffset("run:N", sort=order),
                x=altair.X("exact match:Q", scale=altair.Scale(domain=[0, 1])),
                color=color,
                tooltip=[
                    "run:N",
                    "category:N",
                    altair.Tooltip("exact match:Q", format=".4f"),
                    "loss:N",
                    "pairs:Q",
                ],
            )
            .add_params(chosen)
            .transform_filter("datum.split == split")
        )
        columns = ["run", "split", "category", "exact match", "loss", "pairs"]
        rows = [[category[column] for column in columns] for category in categories]
        add("categories", "Exact match by category", bars, columns, rows)

    scores = []
    for run in runs:
        for name, curve in run["curves"].items():
            if "/alignment/" in name:
                layer, head, score = name.split("/alignment/")[1].rsplit("/", 2)
                layer = f"{run['name']}: {layer}" if len(runs) > 1 else layer
                scores.append({"layer": layer, "head": head, "score": score, "value": curve[-1][1]})
    if scores:
        score = choice(["accuracy", "error_rate", "entropy"], "score")
        heads = (
            altair.Chart(altair.Data(values=scores))
            .mark_rect()
            .encode(
                x=altair.X("head:N", title=None),
                y=altair.Y("layer:N", title=None, sort=None, axis=altair.Axis(labelLimit=0)),
                color=altair.Color("value:Q", title=None, scale=altair.Scale(scheme="blues")),
                tooltip=["layer:N", "head:N", altair.Tooltip("value:Q", format=".3f")],
            )
            .add_params(score)
            .transform_filter("datum.score == score")
        )
        rows = [list(score.values()) for score in scores]
        title = "Attention against the gold alignment, at the last validation"
        add("heads", title, heads, ["layer", "head", "score", "value"], rows)
    return charts
