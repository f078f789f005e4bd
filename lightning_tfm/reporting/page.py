"""Rendering of collected runs as an HTML page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning_tfm.comparison.paired_tests import by_example
from lightning_tfm.comparison.statistics import COVERAGE, proportion_interval
from lightning_tfm.plots.style import PALETTE
from lightning_tfm.reporting.collect import Json, RunPage, shown
from lightning_tfm.reporting.inspection import further_tables, sentences, summary, tables
from lightning_tfm.reporting.verdict import compare_pages
from lightning_tfm.runs.record import Run

SHOWN_CATEGORIES = 8
"""Number of categories that are shown at first; if there are more, those with the lowest exact match."""

MAX_DISAGREEMENTS = 100
"""Maximum number of examples shown on which two systems disagree."""


def render(pages: Sequence[RunPage], explorer: str = "") -> str:
    """Return the HTML page of runs, with the page of the explorer of their networks in it, if any."""
    from markupsafe import Markup

    from lightning_tfm.explore.page import MARKUP, script  # slow to import
    from lightning_tfm.reporting.charts import draw_charts

    def key(page: RunPage) -> tuple[str, str]:
        return page.task, page.data

    groups: list[Json] = []
    disagreements: list[Json] = []
    colors: dict[str, str] = {}
    for number, ((task, _), members) in enumerate(groupby(sorted(pages, key=key), key=key)):
        group = list(members)
        compared = compare_pages(group)
        charts = draw_charts(group)
        for chart in charts if number else ():
            chart["id"] += f"-{number}"  # ids must be unique on the page
        notes = [
            f"{page.name}: {count:,} {'value' if count == 1 else 'values'} of {name} not finite"
            for page in group
            for name, count in page.non_finite.items()
        ]
        header, *rows = _categories(group) or [[]]
        categories = {"header": header, "rows": rows[:SHOWN_CATEGORIES], "further": rows[SHOWN_CATEGORIES:]}
        found = {"task": task, "charts": charts, "notes": notes, "categories": categories}
        groups.append(found | compared)
        systems = list(dict.fromkeys(page.group for page in group))
        if len(systems) > 1:
            colors |= {name: PALETTE[place % len(PALETTE)] for place, name in enumerate(systems)}
            disagreements += _disagreements(group)
    names = [page.name for page in pages]
    settings = [page.settings for page in pages]
    values = {name: [each.get(name, "") for each in settings] for name in sorted(set().union(*settings))}
    return render_template(
        "page.html",
        [chart for group in groups for chart in group["charts"]],
        {"runs": [_content(page) for page in pages], "disagreements": disagreements, "explorer": explorer},
        script=Markup(MARKUP.sub(r"\\x3C", script(str(Path(__file__).with_name("report.js"))))),
        title=pages[0].name if len(pages) == 1 else f"{len(pages)} runs",
        groups=groups,
        colors=colors,
        names=names,
        alignments=_alignments(pages),
        results=_results(pages[0]) if len(pages) == 1 else _by_run(pages, True),
        facts=_by_run(pages, False)[1:],
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
        has_errors=any(not line["correct"] for page in pages for line in page.run.predictions),
        has_disagreements=bool(disagreements),
        has_explorer=explorer != "",
        inputs=[
            [page.name, row["input"], f"no output: {row['note']}" if row["note"] else row["output"]]
            for page in pages
            for row in page.inputs
        ],
    )


def _by_run(pages: Sequence[RunPage], are_metrics: bool) -> list[list[str]]:
    """Return the metrics of the tests, or the other facts, with a column for each run."""
    names = dict.fromkeys(name for page in pages for name in page.facts if ("/" in name) == are_metrics)
    rows = [[name, *(page.facts.get(name, "") for page in pages)] for name in names]
    return [["", *(page.name for page in pages)], *rows] if rows else []


def _results(page: RunPage) -> list[list[str]]:
    """Return the metrics of a run, with a row for each test set."""
    by_split: dict[str, dict[str, str]] = {}
    for name, value in page.facts.items():
        if "/" in name:
            split, _, metric = name.rpartition("/")
            by_split.setdefault(split, {})[metric] = value
    metrics = list(dict.fromkeys(metric for values in by_split.values() for metric in values))
    rows = [[split, *(values.get(metric, "") for metric in metrics)] for split, values in by_split.items()]
    return [["", *(metric.replace("_", " ") for metric in metrics)], *rows] if rows else []


def _categories(pages: Sequence[RunPage]) -> list[list[str]]:
    """Return the exact match of each category as the mean of each group or, of one run, with its interval and errors.

    If there are more than SHOWN_CATEGORIES, those with the lowest exact match are first.
    """
    cells: dict[tuple[str, str], dict[str, list[Json]]] = {}
    for page in pages:
        for category in page.categories:
            key = category["split"], category["category"]
            cells.setdefault(key, {}).setdefault(page.group, []).append(category)
    if not cells:
        return []
    groups = list(dict.fromkeys(page.group for page in pages))
    has_splits, is_single = len({split for split, _ in cells}) > 1, len(pages) == 1
    has_ser = is_single and any(category["ser"] is not None for category in pages[0].categories)
    header = [
        "category",
        *(["split"] if has_splits else []),
        "examples",
        *(["exact match", f"{COVERAGE:.0%} interval", *(["SER"] if has_ser else []), "loss"] if is_single else groups),
    ]
    rows = []
    ordered = [*cells.items()]
    if len(cells) > SHOWN_CATEGORIES:
        ordered.sort(key=lambda item: fmean(each["exact match"] for found in item[1].values() for each in found))
    for (split, name), by_group in ordered:
        means = [
            f"{100 * fmean(each['exact match'] for each in by_group[group]):.1f}%" if group in by_group else ""
            for group in groups
        ]
        first = next(iter(by_group.values()))[0]
        further = [_interval(first), *([_ser(first)] if has_ser else []), first["loss"]] if is_single else []
        rows.append([name, *([split] if has_splits else []), f"{first['pairs']:,}", *means, *further])
    return [header, *rows]


def _interval(category: Json) -> str:
    """Return the interval of the exact match of a category."""
    low, high = proportion_interval(round(category["exact match"] * category["pairs"]), category["pairs"])
    return f"{100 * low:.1f} to {100 * high:.1f}%"


def _ser(category: Json) -> str:
    value = category["ser"]
    return "" if value is None else f"{100 * value:.1f}%"


def _alignments(pages: Sequence[RunPage]) -> list[list[str]]:
    """Return how well each head agrees with the gold alignment at the last validation."""
    scores: dict[tuple[str, str], dict[str, str]] = {}
    for page in pages:
        for name, curve in page.curves.items():
            if "/alignment/" in name:
                head, _, score = name.split("/alignment/")[1].rpartition("/")
                scores.setdefault((page.name, head), {})[score] = f"{curve[-1][1]:.3f}"
    if not scores:
        return []
    names = list(dict.fromkeys(name for values in scores.values() for name in values))
    several = len(pages) > 1
    rows = [
        [
            *([run] if several else []),
            head.replace("/", ", ").replace("_", " "),
            *(values.get(name, "") for name in names),
        ]
        for (run, head), values in scores.items()
    ]
    return [[*(["run"] if several else []), "head", *(name.replace("_", " ") for name in names)], *rows]


def _disagreements(pages: Sequence[RunPage]) -> list[Json]:
    """Return examples on which the first runs of the first group and of another one disagree, for each other group."""
    firsts: dict[str, RunPage] = {}
    for page in pages:
        firsts.setdefault(page.group, page)
    baseline, *others = firsts.values()
    found = []
    for other in others:
        pair = baseline, other
        first, second = (by_example(page.run, page.split) for page in pair)
        lines = [(line, second[key]) for key, line in first.items() if key in second]
        lines = [each for each in lines if each[0]["correct"] != each[1]["correct"]]
        if lines:
            right = sum(line["correct"] for line, _ in lines)
            rows = [
                {"source": a["source"], "target": a["target"], "predictions": [shown(a), shown(b)]}
                for a, b in lines[:MAX_DISAGREEMENTS]
            ]
            names = [page.name for page in pair]
            found.append({"names": names, "counts": [right, len(lines) - right], "rows": rows})
    return found


def _content(page: RunPage) -> Json:
    """Return what the scripts of the page show of a run."""
    predictions = page.run.predictions
    return {
        "name": page.name,
        "split": page.split,
        "tested": len(predictions),
        "wrong": sum(not line["correct"] for line in predictions),
        "predictions": page.predictions,
        "confused": page.confused,
        "attention": page.attention,
        "history": page.history,
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

    from lightning_tfm.explore.page import style  # slow to import

    data = {**(data or {}), "charts": [{"id": chart["id"], "spec": chart["spec"]} for chart in charts]}
    # "</script" would end the script element, and "<!--" would start a comment in it.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    bundle = vl_convert.javascript_bundle("globalThis.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script")
    templates = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
    content |= {"style": Markup(style() + Path(__file__).with_name("report.css").read_text(encoding="utf-8"))}
    return templates.get_template(name).render(**content, charts=charts, data=Markup(text), bundle=Markup(bundle))
