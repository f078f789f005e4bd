"""Averaging of the weights of several checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_tfm.checkpoint.content import read
from lightning_tfm.errors import UserError


def average_checkpoints(paths: Sequence[str | Path]) -> dict[str, Any]:
    """Return the content of a checkpoint with the mean weights of several checkpoints, without training state.

    Args:
        paths: the paths of the checkpoints; hyper-parameters and step are taken from the first.

    Raises:
        UserError: if `read` fails, or the checkpoints differ in class, network, vocabulary or labels.
    """
    first = read(paths[0])
    total = {name: weight.double() for name, weight in first["state_dict"].items()}
    for path in paths[1:]:
        other = read(path)
        for part in ("class_path", "network", "tokenizer", "labels"):
            if other["hyper_parameters"].get(part) != first["hyper_parameters"].get(part):
                raise UserError(
                    f"all checkpoints must have the same {part}, but {str(paths[0])!r} and {str(path)!r} differ"
                )
        for name, weight in other["state_dict"].items():
            total[name] = total[name] + weight.double()  # not in place: tied float64 weights share their memory
    weights = {name: (total[name] / len(paths)).to(weight.dtype) for name, weight in first["state_dict"].items()}
    kept = (
        "format_version",
        "epoch",
        "global_step",
        "pytorch-lightning_version",
        "hyper_parameters",
        "hparams_name",
        "loops",
        "experiment",
        "longest_source",
        "alignment_head",
    )
    return {name: first[name] for name in kept if name in first} | {"state_dict": weights, "callbacks": {}}
