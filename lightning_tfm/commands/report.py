"""`lightning-tfm report`: runs as one page that needs no network."""

from __future__ import annotations

import base64
import csv
import itertools
import json
import math
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_tfm.callbacks.predictions import is_of_a_kind
from lightning_tfm.checkpoint import load
from lightning_tfm.commands.parser import CommandParser
from lightning_tfm.configuration import read_yaml
from lightning_tfm.data import Pair
from lightning_tfm.errors import UserError, say
from lightning_tfm.files import write_text
from lightning_tfm.inspection import Look, looks, window_looks

PREDICTIONS = 500
"""Of each run: those of the largest loss first, the others spread over the test."""

EXAMPLES = 6
"""Of each run, whose attention is shown: so many of the largest loss, and as many that are typical."""

WANTED = ("val/bleu", "val/exact_match", "val/accuracy", "val/loss")
"""The first of these that a run has logged is the curve that is shown first."""

POINTS = 1_200
"""Of the curves of a metric, over all runs."""

LONG = 80
"""Characters of a text by which an example is chosen."""

LIMIT = 5_000_000
"""Bytes of a page."""

FIELDS = ("set", "source", "target", "answer", "right", "nll", "kind", "alignment")
"""Fields of each line of predictions.jsonl."""

Json = dict[str, Any]


def report(arguments: list[str]) -> int:
    """Writes the page."""
    options = _parse(arguments)
    folders = [Path(run) for run in options.runs]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError("RUN must name each run once, but one comes twice; leave it out")
    names = _names(folders)
    points = POINTS // len(folders)
    runs = [_run(folder, name, points, options.allow) for folder, name in zip(folders, names, strict=True)]
    text, halved = page(runs), 0
    while len(text.encode()) > LIMIT:
        if not any(run["predictions"] or run["attention"] for run in runs):
            raise UserError(f"RUN must be so few that a page is below {LIMIT:,} bytes, but are {len(runs)}; try fewer")
        for run, part in itertools.product(runs, ("predictions", "attention")):
            run[part] = run[part][: len(run[part]) // 2]
        text, halved = page(runs), halved + 1
    if halved:
        say(f"a page holds {LIMIT:,} bytes: it shows one of {2**halved} of the predictions and of the attention")
    write_text(options.output, text)
    print(options.output)
    return 0


def _parse(arguments: list[str]) -> Namespace:
    parser = CommandParser(
        "lightning-tfm report",
        description="Show runs on one page: settings, curves, errors and attention. It needs no network.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="the folder of a run, as runs/date_gpt/version_0")
    parser.add_argument("--output", type=Path, default=Path("report.html"), metavar="FILE", help="default: report.html")
    parser.add_allow()
    options = parser.parse_args(arguments)
    for run in options.runs:
        if not (Path(run) / "config.yaml").is_file():
            raise UserError(
                f"RUN must be the folder of a run, which holds its config.yaml, but {run!r} does not; "
                "try runs/NAME/version_0"
            )
    if options.output.is_dir():
        raise UserError(f"--output must be a file, but {str(options.output)!r} is a folder; try report.html")
    if not options.output.resolve().parent.is_dir():
        raise UserError(f"--output must lie in a folder that exists, but {str(options.output.parent)!r} does not")
    return options


def _names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart, of two parts at least."""
    paths = [folder.resolve().parts for folder in folders]
    for parts in range(2, max(map(len, paths)) + 1):
        names = ["/".join(path[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def _run(folder: Path, name: str, points: int, allow: Sequence[str]) -> Json:
    """Return what the page shows of a run; what the run has not written (yet) is left out.

    Args:
        folder: the run's.
        name: the run's name on the page.
        points: the number of points in its curves.
        allow: the packages behind `--allow`.
    """
    settings = read_yaml(folder / "config.yaml", "RUN")
    predictions = _predictions(folder / "predictions.jsonl")
    checkpoints = [folder / "checkpoints" / f"{name}.ckpt" for name in ("best", "last")]
    return {
        "name": name,
        "facts": _facts(folder),
        "config": (folder / "config.yaml").read_text(encoding="utf-8"),
        "settings": _flat(settings),
        "curves": _curves(folder / "metrics.csv", points),
        "kinds": _kinds(predictions),
        "tested": len(predictions),
        "wrong": sum(not line["right"] for line in predictions),
        "predictions": [_told(line) for line in _shown(predictions, PREDICTIONS)],
        "attention": list(
            _attention(
                next(filter(Path.is_file, checkpoints), None),
                predictions,
                _windows(folder / "attention/windows.json"),
                allow,
            )
        ),
    }


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise UserError, with the file's name, where it does not hold what fit has written."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError):
        raise UserError(
            f"RUN must hold the files that fit has written, but {str(path)!r} is damaged; delete it to leave it out"
        ) from None


def _facts(folder: Path) -> dict[str, str]:
    facts: dict[str, str] = {}
    summary, provenance = folder / "summary.json", folder / "provenance.json"
    if summary.is_file():
        with _reading(summary):
            told = json.loads(summary.read_text(encoding="utf-8"))
            facts |= {f"test/{name}": f"{value:.4f}" for name, value in told["test"].items() if not is_of_a_kind(name)}
            facts |= {
                "training": f"{told['train_seconds']:,.0f} s",
                "samples per second": f"{told['samples_per_second']:,.0f}",
                "steps": f"{told['steps']:,}",
                "parameters": f"{told['parameters']:,}",
                "seed": str(told["seed"]),
            }
    if provenance.is_file():
        with _reading(provenance):
            starts = json.loads(provenance.read_text(encoding="utf-8"))
            first, last = starts[0], starts[-1]
            dirty = " and changes" if last["git"].get("dirty") else ""
            facts |= {
                "begun": first["time"],
                "commit": (last["git"]["commit"] or "unknown")[:10] + dirty,
                "processor": ", ".join(dict.fromkeys([last["hardware"]["processor"], *last["hardware"]["gpus"]])),
                "torch": last["versions"]["torch"],
            }
    return facts


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    """A nested configuration by dotted names; what a list holds, by its place."""
    if isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        value = dict(enumerate(value))
    if isinstance(value, dict) and value:
        return {k: v for name, inner in value.items() for k, v in _flat(inner, f"{prefix}.{name}".strip(".")).items()}
    return {prefix: json.dumps(value, ensure_ascii=False)}


def _curves(path: Path, number: int) -> dict[str, list[tuple[int, float]]]:
    """Metric -> (step, value), about so many of them, the last one always."""
    curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
    if path.is_file():
        with _reading(path):
            *lines, _ = path.read_text(encoding="utf-8").split("\n")  # the last may be written only in part, in a run
            for row in csv.DictReader(lines):
                for name, value in row.items():
                    if name in ("step", "epoch") or name.startswith("test/"):
                        continue
                    if value and math.isfinite(float(value)):
                        curves[name].append((int(row["step"]), float(value)))
    return {name: points[:: -max(1, len(points) // number)][::-1] for name, points in curves.items()}


def _predictions(path: Path) -> list[Json]:
    if not path.is_file():
        return []
    with _reading(path):
        # str.splitlines would also part a line at U+0085, which data may hold
        *lines, _ = path.read_text(encoding="utf-8").split("\n")
        return [{name: line[name] for name in FIELDS} | line for line in map(json.loads, lines)]


def _windows(path: Path) -> list[list[int]]:
    if not path.is_file():
        return []
    with _reading(path):
        return [list(map(int, ids)) for ids in json.loads(path.read_text(encoding="utf-8"))]


def _shown(predictions: list[Json], number: int) -> list[Json]:
    """Half of so many are those of the largest loss, the others stand for the rest; the largest loss first."""
    by_loss = sorted(predictions, key=lambda line: -line["nll"])
    worst, rest = by_loss[: number // 2], by_loss[number // 2 :]
    others = min(len(rest), number - len(worst))
    return worst + [rest[place * len(rest) // others] for place in range(others)]


def _told(line: Json) -> Json:
    told = {name: line[name] for name in ("set", "source", "target", "answer", "right", "nll", "kind")}
    told |= {"probability": line["probability"]} if "probability" in line else {}
    return told if math.isfinite(told["nll"]) else told | {"nll": None}  # which JSON has no word for


def _kinds(predictions: list[Json]) -> list[Json]:
    by_kind: dict[tuple[str, str], list[Json]] = defaultdict(list)
    for line in predictions:
        if line["kind"] is not None:
            by_kind[line["set"], line["kind"]].append(line)
    return [
        {
            "set": name,
            "kind": kind,
            "exact match": sum(line["right"] for line in lines) / len(lines),
            "loss": f"{sum(line['nll'] for line in lines) / len(lines):.4f}",  # a word, where it is not finite
            "pairs": len(lines),
        }
        for (name, kind), lines in sorted(by_kind.items())
    ]


def _attention(
    checkpoint: Path | None, predictions: list[Json], windows: list[list[int]], allow: Sequence[str]
) -> Iterator[Json]:
    """Yield the attention weights of all layers, for a few examples or for the windows of a text."""
    if checkpoint is None or not (predictions or windows):
        return
    try:
        network, tokenizer, *_ = load(checkpoint, allow)
    except UserError as error:  # a network of a package that is not allowed, or a damaged file: show the rest
        say(f"no attention of {checkpoint}: {error}")
        return
    for line in _shown(predictions, 2 * EXAMPLES):
        pair = Pair(line["source"], line["target"], line["alignment"])
        mark = "\N{CHECK MARK}" if line["right"] else "\N{BALLOT X}"
        title = f"{mark} {_short(line['source'])} \N{RIGHTWARDS ARROW} {_short(line['answer'])}"
        found = sorted(looks(network, tokenizer, pair), key=lambda look: not look.gold)  # what has a right answer first
        yield _told(line) | {"title": title, "layers": [_layer(look.first()) for look in found]}
    for ids in windows:
        found = window_looks(network, tokenizer, ids)
        yield {"title": _short(tokenizer.decode(ids).strip()), "layers": [_layer(look.first()) for look in found]}


def _short(text: str) -> str:
    """The beginning of a long text, for a menu."""
    return text if len(text) <= LONG else f"{text[:LONG]}..."


def _layer(look: Look) -> Json:
    """A layer's weights, as bytes: 255 is 1."""
    return {
        "name": look.layer,
        "heads": look.weights.size(0),
        "queries": look.queries,
        "keys": look.keys,
        "gold": look.gold,
        "weights": base64.b64encode((look.weights * 255).round().to(torch.uint8).numpy().tobytes()).decode(),
    }


def page(runs: list[Json]) -> str:
    """The page of the runs, as HTML."""
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
            {name: value for name, value in run.items() if name not in ("settings", "curves", "kinds")} for run in runs
        ],
        "differences": [
            {"setting": name, "values": [run["settings"].get(name, "") for run in runs]} for name in different
        ],
        "charts": [{"id": chart["id"], "spec": chart["spec"]} for chart in charts],
    }
    # What ends a script, or begins a comment in it, must not stand in one.
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
    """Learning curves, exact match by kind, and the scores of attention heads, where there are any."""
    import altair

    order = [run["name"] for run in runs]
    legend = altair.Legend(orient="top", labelLimit=0) if len(runs) > 1 else None
    color = altair.Color("run:N", sort=order, legend=legend, title=None)
    charts = []

    def add(id: str, title: str, chart: Any, columns: list[str], rows: list[list[Any]]) -> None:
        """A chart, and what it shows as a table, for those who cannot see or point."""
        spec = chart.to_dict() | {"description": title}  # read aloud
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
        names = [name for name in WANTED if name in names] + [name for name in names if name not in WANTED]
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

    kinds = [kind | {"run": run["name"]} for run in runs for kind in run["kinds"]]
    if kinds:
        sets = list(dict.fromkeys(kind["set"] for kind in kinds))
        chosen = choice(sets, "set")
        bars = (
            altair.Chart(altair.Data(values=kinds), width=620)
            .mark_bar()
            .encode(
                y=altair.Y("kind:N", title=None, axis=altair.Axis(labelLimit=0)),
                yOffset=altair.YOffset("run:N", sort=order),
                x=altair.X("exact match:Q", scale=altair.Scale(domain=[0, 1])),
                color=color,
                tooltip=[
                    "run:N",
                    "kind:N",
                    altair.Tooltip("exact match:Q", format=".4f"),
                    "loss:N",
                    "pairs:Q",
                ],
            )
            .add_params(chosen)
            .transform_filter("datum.set == set")
        )
        columns = ["run", "set", "kind", "exact match", "loss", "pairs"]
        rows = [[kind[column] for column in columns] for kind in kinds]
        add("kinds", "Exact match by kind", bars, columns, rows)

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
