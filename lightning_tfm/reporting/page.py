"""Rendering of collected runs as an HTML page."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

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
)
"""Content of a run that is rendered in charts and tables, or not shown."""


def render(runs: list[Json]) -> str:
    """Return the HTML page of runs, as returned by `collect_run`."""
    import jinja2
    import vl_convert
    from markupsafe import Markup

    by_task = groupby(sorted(runs, key=lambda run: run["task"]), key=lambda run: run["task"])
    groups = []
    for number, (task, members) in enumerate(by_task):
        group = list(members)
        charts = draw_charts(group)
        for chart in charts if number else ():
            chart["id"] += f"-{number}"  # ids must be unique on the page
        results = [{"name": run["name"], "text": result(run)} for run in group]
        seeds = compare_seeds(group)
        groups.append({"task": task, "verdict": verdict(group), "seeds": seeds, "results": results, "charts": charts})
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
        "charts": [{"id": chart["id"], "spec": chart["spec"]} for group in groups for chart in group["charts"]],
    }
    # "</script" would end the script element, and "<!--" would start a comment in it.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    bundle = vl_convert.javascript_bundle("globalThis.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script")
    template = jinja2.Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"), autoescape=True)
    return template.render(
        title=runs[0]["name"] if len(runs) == 1 else f"{len(runs)} runs",
        groups=groups,
        data=Markup(text),
        bundle=Markup(bundle),
    )
