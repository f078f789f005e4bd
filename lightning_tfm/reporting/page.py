"""Rendering of collected runs as an HTML page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from lightning_tfm.reporting.collect import Json, RunPage
from lightning_tfm.reporting.inspection import further_tables, sentences, summary, tables
from lightning_tfm.reporting.verdict import compare_pages, result
from lightning_tfm.runs.record import Run


def render(pages: Sequence[RunPage], explorer: str = "") -> str:
    """Return the HTML page of runs, with the page of the explorer of their networks in it, if any."""
    from lightning_tfm.reporting.charts import draw_charts  # slow to import

    def key(page: RunPage) -> tuple[str, str]:
        return page.task, page.data

    groups: list[Json] = []
    for number, ((task, _), members) in enumerate(groupby(sorted(pages, key=key), key=key)):
        group = list(members)
        charts = draw_charts(group)
        for chart in charts if number else ():
            chart["id"] += f"-{number}"  # ids must be unique on the page
        results = [{"name": page.name, "text": result(page)} for page in group]
        groups.append({"task": task, "results": results, "charts": charts} | compare_pages(group))
    metrics_first = sorted(
        dict.fromkeys(name for page in pages for name in page.facts), key=lambda name: "/" not in name
    )
    settings = [page.settings for page in pages]
    values = {name: [each.get(name, "") for each in settings] for name in sorted(set().union(*settings))}
    return render_template(
        "page.html",
        [chart for group in groups for chart in group["charts"]],
        {"runs": [_content(page) for page in pages], "explorer": explorer},
        title=pages[0].name if len(pages) == 1 else f"{len(pages)} runs",
        groups=groups,
        names=[page.name for page in pages],
        facts=[[name, *(page.facts.get(name, "") for page in pages)] for name in metrics_first],
        differences=[[name, *row] for name, row in values.items() if len(set(row)) > 1],
        configs={page.name: (page.run.folder / Run.CONFIG).read_text(encoding="utf-8") for page in pages},
        inspections=[
            {
                "name": page.name,
                "summary": summary(page.inspection),
                "sentences": sentences(page.inspection),
                "tables": [*tables(page.inspection), *further_tables(page.inspection)],
            }
            for page in pages
            if page.inspection
        ],
        has_explorer=explorer != "",
        inputs=[
            [page.name, row["input"], f"no output: {row['note']}" if row["note"] else row["output"]]
            for page in pages
            for row in page.inputs
        ],
    )


def _content(page: RunPage) -> Json:
    """Return what the scripts of the page show of a run."""
    predictions = page.run.predictions
    return {
        "name": page.name,
        "split": page.split,
        "tested": len(predictions),
        "wrong": sum(not line["correct"] for line in predictions),
        "predictions": page.predictions,
        "attention": page.attention,
    }


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
