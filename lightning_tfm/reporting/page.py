"""Rendering of collected runs as an HTML page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from lightning_tfm.reporting.charts import draw_charts
from lightning_tfm.reporting.collect import Json
from lightning_tfm.reporting.verdict import compare_seeds, result, verdict

OMITTED = (
    "settings",
    "curves",
    "non_finite",
    "categories",
    "outcomes",
    "confusion",
    "headline",
    "checkpoint",
    "folder",
    "record",
    "data",
)
"""Content of a run that is rendered in charts and tables, or not shown."""


def render(runs: list[Json]) -> str:
    """Return the HTML page of runs, as returned by `collect_run`."""

    def key(run: Json) -> tuple[str, str]:
        return run["task"], run["data"]

    groups: list[Json] = []
    for number, ((task, _), members) in enumerate(groupby(sorted(runs, key=key), key=key)):
        group = list(members)
        charts = draw_charts(group)
        for chart in charts if number else ():
            chart["id"] += f"-{number}"  # ids must be unique on the page
        results = [{"name": run["name"], "text": result(run)} for run in group]
        seeds = compare_seeds(group)
        found = seeds["verdict"] if seeds else verdict(group)
        groups.append({"task": task, "verdict": found, "seeds": seeds, "results": results, "charts": charts})
    different = [
        name
        for name in sorted({name for run in runs for name in run["settings"]})
        if len({run["settings"].get(name) for run in runs}) > 1
    ]
    data = {
        "runs": [{name: value for name, value in run.items() if name not in OMITTED} for run in runs],
        "differences": [
            {"setting": name, "values": [run["settings"].get(name, "") for run in runs]} for name in different
        ],
    }
    title = runs[0]["name"] if len(runs) == 1 else f"{len(runs)} runs"
    charts = [chart for group in groups for chart in group["charts"]]
    return render_template("page.html", charts, data, title=title, groups=groups)


def render_template(name: str, charts: Sequence[Json], data: Json | None = None, **content: Any) -> str:
    """Return an HTML page with charts, and with what draws them.

    Args:
        name: the name of the template in this package.
        charts: the charts.
        data: further content for the scripts of the page.
        content: the content of the template.
    """
    import jinja2
    import vl_convert
    from markupsafe import Markup

    data = {**(data or {}), "charts": [{"id": chart["id"], "spec": chart["spec"]} for chart in charts]}
    # "</script" would end the script element, and "<!--" would start a comment in it.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    bundle = vl_convert.javascript_bundle("globalThis.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script")
    templates = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
    return templates.get_template(name).render(**content, charts=charts, data=Markup(text), bundle=Markup(bundle))
