"""Collection of the content of a report from the folders of runs."""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from lightning_tfm.comparison import read_run
from lightning_tfm.comparison.examples import outcomes
from lightning_tfm.config.experiments import HEADLINES, format_duration, is_per_category
from lightning_tfm.config.settings import flatten, read_json, read_starts, read_yaml
from lightning_tfm.errors import UserError, rank_zero_print
from lightning_tfm.inference import Predictor, short_title, worst_first
from lightning_tfm.inference.attention_maps import AttentionMap
from lightning_tfm.inference.loading import load
from lightning_tfm.system.files import parse_metrics, relative

PREDICTIONS = 500
"""Maximum number of predictions shown per run: half with the largest losses, half evenly spaced over the others."""

EXAMPLES = 6
"""Number of examples per run with the largest losses, and of typical examples, whose attention is shown."""

MAX_LABELS = 20
"""Maximum number of labels for which a confusion matrix is shown."""

EXAMPLES_FILE = "attention/examples.json"
"""Path of the file with the examples whose attention was plotted after the test, relative to the run's folder."""

FIELDS = ("split", "source", "target", "prediction", "correct", "nll", "category", "alignment")
"""Fields of each line of predictions.jsonl."""

Json = dict[str, Any]


def run_names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest unique suffixes of the paths, with at least two parts each."""
    paths = [folder.resolve().parts for folder in folders]
    for parts in range(2, max(map(len, paths)) + 1):
        names = ["/".join(path[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def collect_run(
    folder: Path, name: str, points: int, trust_packages: Sequence[str], inputs: Sequence[str] = ()
) -> Json:
    """Return the content of the page for a run; content whose file is missing is empty.

    Args:
        folder: the folder of the run.
        name: the name of the run on the page.
        points: the approximate number of points in each curve.
        trust_packages: the trusted packages, see `--trust-package`.
        inputs: texts whose outputs and attention are shown first.

    Raises:
        UserError: if a file of the run is damaged.
    """
    settings = read_yaml(folder / "config.yaml", "RUN")
    predictions = _predictions(folder / "predictions.jsonl")
    summary = _summary(folder / "summary.json")
    shows_attention = inputs or predictions or (folder / EXAMPLES_FILE).is_file()
    checkpoint = _checkpoint(folder, summary)
    module = _load(checkpoint, trust_packages) if checkpoint and shows_attention else None
    curves, non_finite = _curves(folder / "metrics.csv", points)
    split = "val" if "val" in summary else "test"
    examples = [_own_example(module, text) for text in inputs]
    own = [example for example in examples if "note" not in example]
    return {
        "name": name,
        "folder": folder,
        "record": read_run(folder, []),
        "task": _task(settings),
        "data": _fingerprint(folder) if _files(settings) else "",
        "split": split,
        "checkpoint": str(checkpoint.resolve()) if checkpoint else None,
        "headline": _headline(summary),
        "facts": _facts(folder, summary),
        "config": (folder / "config.yaml").read_text(encoding="utf-8"),
        "settings": {name: json.dumps(value, ensure_ascii=False) for name, value in flatten(settings).items()},
        "curves": curves,
        "non_finite": non_finite,
        "categories": _per_category(predictions),
        "tested": len(predictions),
        "wrong": sum(not line["correct"] for line in predictions),
        "outcomes": outcomes(predictions, split),
        "confusion": _confusion(predictions),
        "predictions": [_plain(line) for line in _shown(predictions, PREDICTIONS)],
        "inputs": [
            {"input": text, "output": example.get("output"), "note": example.get("note")}
            for text, example in zip(inputs, examples, strict=True)
        ],
        "attention": []
        if module is None
        else list(_attention(module, own, predictions, _examples(folder / EXAMPLES_FILE))),
    }


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise UserError, with the name of the file, if the file does not have the format written by fit."""
    try:
        yield
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        raise UserError(
            f"RUN must hold the files that fit has written, but {str(path)!r} is damaged; delete it to leave it out"
        ) from None


def _task(settings: Json) -> str:
    """Return the module and the data of a run, such as "Seq2SeqModule on Date" or "Seq2SeqModule on Tsv (test.tsv)"."""
    module, data = (settings.get(key) or {} for key in ("model", "data"))
    named = " on ".join(str(component.get("class_path", "unknown")).rpartition(".")[2] for component in (module, data))
    files = [Path(str(file)).name for file in _files(settings)]
    return f"{named} ({', '.join(files)})" if files else named


def _files(settings: Json) -> list[Any]:
    """Return the paths of the data on which a run is tested; empty if the data are generated or downloaded."""
    arguments = (settings.get("data") or {}).get("init_args") or {}
    tested: Any = next((arguments[name] for name in ("test", "val", "path") if arguments.get(name)), [])
    return tested if isinstance(tested, list) else [tested]


def _fingerprint(folder: Path) -> str:
    """Return the fingerprint of the main test set, which distinguishes files of equal names; empty if unknown."""
    starts = read_starts(folder)
    with _reading(folder / "provenance.json"):
        data = starts[-1]["data_fingerprint"] if starts else {}
        return str(data.get("test", data.get("val", "")))


def _summary(path: Path) -> Json:
    return read_json(path, steps=int, parameters=int, seed=int) if path.is_file() else {}


def _headline(summary: Json) -> tuple[str, float] | None:
    """Return the name and the value of the main metric of the test; None without a test."""
    metrics = summary.get("test") or summary.get("val") or {}
    names = [name.removeprefix("val/") for name in HEADLINES]
    return next(((name, metrics[name]) for name in names if name in metrics), None)


def _facts(folder: Path, summary: Json) -> dict[str, str]:
    facts: dict[str, str] = {}
    if summary:
        with _reading(folder / "summary.json"):
            metrics = {
                f"{split}/{name}": value for split in ("test", "val") for name, value in summary.get(split, {}).items()
            }
            facts |= {name: f"{value:.4f}" for name, value in metrics.items() if not is_per_category(name)}
            if "train_seconds" in summary:
                facts |= {
                    "training": format_duration(summary["train_seconds"]),
                    "samples per second": f"{summary['samples_per_second']:,.0f}",
                }
            if tested := summary.get("checkpoint"):
                facts["tested checkpoint"] = str(tested)
            facts |= {
                "steps": f"{summary['steps']:,}",
                "parameters": f"{summary['parameters']:,}",
                "seed": str(summary["seed"]),
            }
    if starts := read_starts(folder):
        with _reading(folder / "provenance.json"):
            first, last = starts[0], starts[-1]
            dirty = " and changes" if last["git"].get("dirty") else ""
            built = f" at {commit[:10]}" if (commit := (last.get("framework") or {}).get("commit")) else ""
            facts |= {
                "started": datetime.fromisoformat(first["time"]).strftime("%Y-%m-%d %H:%M UTC"),
                "commit": (last["git"]["commit"] or "unknown")[:10] + dirty,
                "processor": ", ".join(dict.fromkeys([last["hardware"]["processor"], *last["hardware"]["gpus"]])),
                "lightning_tfm": last["versions"]["lightning_tfm"] + built,
                "torch": last["versions"]["torch"],
            }
    return facts


def _curves(path: Path, number: int) -> tuple[dict[str, list[tuple[int, float]]], Counter[str]]:
    """Return about `number` finite points (step, value) of each metric, and the number of points that are not finite.

    The last finite point is always included.
    """
    curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
    non_finite: Counter[str] = Counter()
    if path.is_file():
        with _reading(path):
            rows, damaged = parse_metrics(path)
            if damaged:
                rank_zero_print(f"skipping {damaged} damaged rows of {relative(path)}")
            for row in rows:
                for name, value in row.items():
                    if name in ("step", "epoch") or name.startswith(("test/", "val/final/")):
                        continue
                    if value and math.isfinite(float(value)):
                        curves[name].append((int(row["step"]) + 1, float(value)))  # Lightning counts from 0
                    elif value:
                        non_finite[name] += 1
    thinned = {name: points[:: -max(1, len(points) // number)][::-1] for name, points in curves.items()}
    return thinned, non_finite


def _predictions(path: Path) -> list[Json]:
    if not path.is_file():
        return []
    with _reading(path):
        # str.splitlines would also split at U+0085, which the data may contain.
        *lines, _ = path.read_text(encoding="utf-8").split("\n")
        return [{name: line[name] for name in FIELDS} | line for line in map(json.loads, lines)]


def _examples(path: Path) -> list[Json]:
    """Read the examples whose attention was plotted after the test."""
    if not path.is_file():
        return []
    with _reading(path):
        return [dict(content) for content in json.loads(path.read_text(encoding="utf-8"))]


def _shown(predictions: list[Json], number: int) -> list[Json]:
    """Return up to `number` predictions by decreasing loss: half with the largest losses, half spread over the rest."""
    by_loss = sorted(predictions, key=worst_first)
    worst, rest = by_loss[: number // 2], by_loss[number // 2 :]
    others = min(len(rest), number - len(worst))
    return worst + [rest[index * len(rest) // others] for index in range(others)]


def _plain(line: Json) -> Json:
    plain = {name: line[name] for name in ("split", "source", "target", "prediction", "correct", "nll", "category")}
    plain |= {"probability": line["probability"]} if "probability" in line else {}
    return plain if math.isfinite(plain["nll"]) else plain | {"nll": None}  # JSON has no NaN


def _per_category(predictions: list[Json]) -> list[Json]:
    by_category: dict[tuple[str, str], list[Json]] = defaultdict(list)
    for line in predictions:
        if line["category"] is not None:
            by_category[line["split"], line["category"]].append(line)
    return [
        {
            "split": name,
            "category": category,
            "exact match": sum(line["correct"] for line in lines) / len(lines),
            "loss": f"{sum(line['nll'] for line in lines) / len(lines):.4f}",  # as text, since it may not be finite
            "pairs": len(lines),
        }
        for (name, category), lines in sorted(by_category.items(), key=lambda item: (item[0][0] != "test", item[0]))
    ]


def _confusion(predictions: list[Json]) -> list[Json]:
    """Return the cells of the confusion matrix; empty unless the predictions are at most MAX_LABELS distinct labels."""
    counts = Counter((line["target"], line["prediction"]) for line in predictions if "probability" in line)
    labels = sorted({label for pair in counts for label in pair})
    if len(labels) > MAX_LABELS:
        return []
    totals = {label: max(1, sum(counts[label, other] for other in labels)) for label in labels}
    return [
        {"true": true, "predicted": other, "count": counts[true, other], "share": counts[true, other] / totals[true]}
        for true in labels
        for other in labels
    ]


def _checkpoint(folder: Path, summary: Json) -> Path | None:
    """Return the checkpoint of a run, or that of a later test; None if there is none."""
    checkpoints = [folder / "checkpoints" / f"{name}.ckpt" for name in ("best", "last")]
    if tested := summary.get("checkpoint"):  # by a later test, in the folder where its command ran
        checkpoints += [Path(tested), folder.parent.joinpath(*Path(tested).parts[-3:])]
    return next(filter(Path.is_file, checkpoints), None)


def _load(checkpoint: Path, trust_packages: Sequence[str]) -> Predictor | None:
    """Load the model of a checkpoint; return None, and print a message, if it cannot be loaded."""
    try:
        return load(checkpoint, trust_packages)
    except UserError as error:  # an untrusted package or a damaged file must not prevent the rest of the page
        rank_zero_print(f"cannot show the attention of {checkpoint}: {error}")
        return None


def _own_example(predictor: Predictor | None, text: str) -> Json:
    """Return a text of the user with its output, as an attention example, or with a note if there is no output."""
    if predictor is None:
        return {"source": text, "note": "no checkpoint can be loaded"}
    (prediction,) = predictor.predict([text])
    if prediction.outputs is None or prediction.text is None:
        return {"source": text, "note": prediction.note}
    probability = "" if (value := prediction.outputs[0].probability) is None else f" ({value:.4f})"
    return predictor.example(text, prediction.text) | {"output": f"{prediction.text}{probability}"}


def _attention(predictor: Predictor, own: list[Json], predictions: list[Json], examples: list[Json]) -> Iterator[Json]:
    """Yield the attention weights of all layers for a few examples.

    Args:
        predictor: the model.
        own: the texts of the user.
        predictions: the test predictions.
        examples: the examples whose attention was plotted after the test; used if there are no predictions.
    """
    for content in own:
        title = f"your input: {short_title(content['source'])} \N{RIGHTWARDS ARROW} {short_title(content['output'])}"
        yield from _drawn(predictor, content, {"title": title})
    for line in _shown(predictions, 2 * EXAMPLES):
        mark = "\N{CHECK MARK}" if line["correct"] else "\N{BALLOT X}"
        title = f"{mark} {short_title(line['source'])} \N{RIGHTWARDS ARROW} {short_title(line['prediction'])}"
        yield from _drawn(predictor, line, _plain(line) | {"title": title})
    for content in [] if predictions else examples:
        yield from _drawn(predictor, content, {"title": short_title(str(content.get("text", "")))})


def _drawn(predictor: Predictor, content: Json, described: Json) -> Iterator[Json]:
    """Yield an example with its layers, those with a gold alignment first; nothing, with a message, if it has none."""
    try:
        layers = sorted(predictor.attention(content), key=lambda layer: not layer.gold)
    except UserError as error:  # such as a prediction by another vocabulary, which must not prevent the page
        rank_zero_print(f"cannot show the attention of an example: {error}")
        return
    if layers:
        yield described | {"layers": [_layer(layer.cropped()) for layer in layers]}


def _layer(layer: AttentionMap) -> Json:
    """Return a layer with its weights as base64-encoded bytes, where 255 is a weight of 1."""
    return {
        "name": layer.layer,
        "heads": layer.weights.size(0),
        "queries": layer.queries,
        "keys": layer.keys,
        "gold": layer.gold,
        "predicts": layer.predicts,
        "weights": base64.b64encode((layer.weights * 255).round().to(torch.uint8).numpy().tobytes()).decode(),
    }
