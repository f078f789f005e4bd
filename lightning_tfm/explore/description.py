"""Description of a model: its task, its parts, and the results of `inspect`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_tfm.explore.answers import Answers
from lightning_tfm.explore.changes import SWITCHABLE
from lightning_tfm.insight import components
from lightning_tfm.layers import attention_layers
from lightning_tfm.networks.linear_transformer import LinearAttention
from lightning_tfm.runs.inspection import Inspection, NetworkRecord, PartRecord
from lightning_tfm.runs.record import Run

CHANGES = ("off_heads", "off_components", "drawn", "patched")
"""Kinds of changes to a network."""

EXAMPLES = 10
"""Maximum number of test texts that are tried as an example."""


def describe_model(
    answers: Answers, path: Path | None, settings: Sequence[str] = (), inspection: NetworkRecord | None = None
) -> dict[str, Any]:
    """Return the description of a model.

    Args:
        answers: the answers of the model.
        path: the path of its checkpoint; None without one.
        settings: the arguments of `test` with which its data are loaded.
        inspection: the results of `inspect_network`; None for those of the checkpoint's run, if any.

    Raises:
        UserError: if a file of the checkpoint's run is damaged.
    """
    predictor, network = answers.predictor, answers.network
    attention = attention_layers(network)
    source_length, target_length = answers.max_lengths()
    run = None if path is None else Run.of(path)
    run = run if run is not None and run.exists else None
    if inspection is None and run is not None and path is not None:
        inspection = _inspection(run, path)
    return {
        "network": type(network).__name__,
        "task": predictor.task,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "example": "" if run is None else _example(answers, run),
        **_expressions(answers, path, settings),
        "max_source_length": source_length,
        "max_target_length": target_length,
        "components": [
            {"name": part.name, "kind": part.kind, "heads": part.num_heads, "switchable": part.kind in SWITCHABLE}
            for part in components(network)
        ],
        "attention": [
            {"layer": name, "heads": layer.num_heads, "side": network.side(name)} for name, layer in attention.items()
        ],
        # The states of linear attention have no keys.
        "drawable": [name for name, layer in attention.items() if not isinstance(layer, LinearAttention)],
        "heads": [
            {"name": head["name"], "scores": head["scores"], "role": head["role"], **_without(head)}
            for head in (inspection["heads"] if inspection else ())
        ],
        "parts": [
            {"name": part["name"], **_without(part)} for part in (inspection["components"] if inspection else ())
        ],
        "labels": getattr(predictor, "labels", []),
        "vocabulary": predictor.tokenizer.fingerprint,
        "changes": [*CHANGES],
    }


def _inspection(run: Run, path: Path) -> Inspection | None:
    """Return the results of `inspect` for a checkpoint of a run; None if it has not been inspected since it changed."""
    inspection = run.inspection
    if inspection is None or Path(inspection["checkpoint"]).name != path.name:
        return None
    return inspection if run.inspection_path.stat().st_mtime >= path.stat().st_mtime else None


def _without(part: PartRecord) -> dict[str, float | None]:
    """Return the mean effects of the mean ablation of a part; None if it was not ablated."""
    without = part["without"].get("mean")
    return {
        "loss_increase": None if without is None else without["loss_increase"][0],
        "exact_match_decrease": None if without is None else without["exact_match_decrease"][0],
    }


def _example(answers: Answers, run: Run) -> str:
    """Return a test text of a run that the model can answer; empty if there is none."""
    examples: Sequence[Mapping[str, Any]] = run.first_predictions(EXAMPLES) or run.examples[:EXAMPLES]
    for example in examples:
        text = answers.question(example.get("source", example.get("text", "")))
        if answers.can_answer(text):
            return text
    return ""


def _expressions(answers: Answers, path: Path | None, settings: Sequence[str]) -> dict[str, str]:
    """Return the Python expressions of a model and of its data; without a checkpoint, names to be defined."""
    if path is None:
        return {"load": "predictor", "data": "data"}
    classes = (type(answers.network), type(answers.predictor))
    packages = sorted({cls.__module__.split(".")[0] for cls in classes} - {"lightning_tfm"})
    literal = json.dumps(str(path), ensure_ascii=False)
    trusted = f", trust_packages={packages}" if packages else ""
    return {"load": f"load({literal}{trusted})", "data": f"data_of_checkpoint({literal}, {[*settings]})"}
