"""Collection of the content of a report from the folders of runs."""

from __future__ import annotations

import base64
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_tfm.attention_maps import AttentionMap
from lightning_tfm.callbacks.predictions import is_per_category
from lightning_tfm.configuration import flatten, read_yaml
from lightning_tfm.errors import UserError, rank_zero_print
from lightning_tfm.files import read_metrics
from lightning_tfm.loading import load

PREDICTIONS = 500
"""Predictions shown of each run: one half has the largest losses, the other is spread over the rest by loss."""

EXAMPLES = 6
"""Examples of each run whose attention is shown: this many with the largest losses, and as many typical ones."""

MAX_TITLE_LENGTH = 80
"""Longest source or prediction shown in a title, in characters."""

FIELDS = ("split", "source", "target", "prediction", "correct", "nll", "category", "alignment")
"""Fields of each line of predictions.jsonl."""

Json = dict[str, Any]


def run_names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest suffixes of the paths, of two parts or more, that are unique."""
    paths = [folder.resolve().parts for folder in folders]
    for parts in range(2, max(map(len, paths)) + 1):
        names = ["/".join(path[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def collect_run(folder: Path, name: str, points: int, trust_packages: Sequence[str]) -> Json:
    """Return the content of the page for a run, without the parts whose files are missing.

    Args:
        folder: the run's folder.
        name: the run's name on the page.
        points: the approximate number of points in each curve.
        trust_packages: the packages named by `--trust-package`.
    """
    settings = read_yaml(folder / "config.yaml", "RUN")
    predictions = _predictions(folder / "predictions.jsonl")
    checkpoints = [folder / "checkpoints" / f"{name}.ckpt" for name in ("best", "last")]
    return {
        "name": name,
        "facts": _facts(folder),
        "config": (folder / "config.yaml").read_text(encoding="utf-8"),
        "settings": {name: json.dumps(value, ensure_ascii=False) for name, value in flatten(settings).items()},
        "curves": _curves(folder / "metrics.csv", points),
        "categories": _per_category(predictions),
        "tested": len(predictions),
        "wrong": sum(not line["correct"] for line in predictions),
        "predictions": [_plain(line) for line in _shown(predictions, PREDICTIONS)],
        "attention": list(
            _attention(
                next(filter(Path.is_file, checkpoints), None),
                predictions,
                _examples(folder / "attention/examples.json"),
                trust_packages,
            )
        ),
    }


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise UserError, with the file's name, if the file does not have the format that fit writes."""
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
            results = json.loads(summary.read_text(encoding="utf-8"))
            metrics = {
                f"{part}/{name}": value for part in ("test", "val") for name, value in results.get(part, {}).items()
            }
            facts |= {name: f"{value:.4f}" for name, value in metrics.items() if not is_per_category(name)}
            if "train_seconds" in results:
                facts |= {
                    "training": f"{results['train_seconds']:,.0f} s",
                    "samples per second": f"{results['samples_per_second']:,.0f}",
                }
            facts |= {
                "steps": f"{results['steps']:,}",
                "parameters": f"{results['parameters']:,}",
                "seed": str(results["seed"]),
            }
    if provenance.is_file():
        with _reading(provenance):
            starts = json.loads(provenance.read_text(encoding="utf-8"))
            first, last = starts[0], starts[-1]
            dirty = " and changes" if last["git"].get("dirty") else ""
            facts |= {
                "started": first["time"],
                "commit": (last["git"]["commit"] or "unknown")[:10] + dirty,
                "processor": ", ".join(dict.fromkeys([last["hardware"]["processor"], *last["hardware"]["gpus"]])),
                "torch": last["versions"]["torch"],
            }
    return facts


def _curves(path: Path, number: int) -> dict[str, list[tuple[int, float]]]:
    """Return about `number` points (step, value) of each metric, always including the last one."""
    curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
    if path.is_file():
        with _reading(path):
            for row in read_metrics(path):
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
        # str.splitlines would also split at U+0085, which the data can contain.
        *lines, _ = path.read_text(encoding="utf-8").split("\n")
        return [{name: line[name] for name in FIELDS} | line for line in map(json.loads, lines)]


def _examples(path: Path) -> list[Json]:
    """Read the examples whose attention was drawn after the test."""
    if not path.is_file():
        return []
    with _reading(path):
        return [dict(content) for content in json.loads(path.read_text(encoding="utf-8"))]


def _shown(predictions: list[Json], number: int) -> list[Json]:
    """Return `number` predictions by decreasing loss: half with the largest losses, half spread over the rest."""
    by_loss = sorted(predictions, key=lambda line: -line["nll"])
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
        for (name, category), lines in sorted(by_category.items())
    ]


def _attention(
    checkpoint: Path | None, predictions: list[Json], examples: list[Json], trust_packages: Sequence[str]
) -> Iterator[Json]:
    """Yield the attention weights of all layers for a few examples.

    Args:
        checkpoint: the path of the checkpoint, if there is one.
        predictions: the predictions of the test.
        examples: the examples whose attention was drawn after the test; used if there are no predictions.
        trust_packages: the packages named by `--trust-package`.
    """
    if checkpoint is None or not (predictions or examples):
        return
    try:
        module = load(checkpoint, trust_packages)
    except UserError as error:  # an untrusted package or a damaged file must not prevent the rest of the page
        rank_zero_print(f"cannot show the attention of {checkpoint}: {error}")
        return
    for line in _shown(predictions, 2 * EXAMPLES):
        mark = "\N{CHECK MARK}" if line["correct"] else "\N{BALLOT X}"
        title = f"{mark} {_short(line['source'])} \N{RIGHTWARDS ARROW} {_short(line['prediction'])}"
        layers = sorted(module.attention(line), key=lambda layer: not layer.gold)  # with a gold alignment first
        yield _plain(line) | {"title": title, "layers": [_layer(layer.cropped()) for layer in layers]}
    for content in [] if predictions else examples:
        drawn = [_layer(layer.cropped()) for layer in module.attention(content)]
        yield {"title": _short(str(content.get("text", ""))), "layers": drawn}


def _short(text: str) -> str:
    """Truncate a text for a menu."""
    return text if len(text) <= MAX_TITLE_LENGTH else f"{text[:MAX_TITLE_LENGTH]}..."


def _layer(layer: AttentionMap) -> Json:
    """Return a layer with its weights as bytes in base64, where 255 is a weight of 1."""
    return {
        "name": layer.layer,
        "heads": layer.weights.size(0),
        "queries": layer.queries,
        "keys": layer.keys,
        "gold": layer.gold,
        "weights": base64.b64encode((layer.weights * 255).round().to(torch.uint8).numpy().tobytes()).decode(),
    }
