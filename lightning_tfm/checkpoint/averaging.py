"""Averaging of the weights of several checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_tfm.checkpoint.content import read
from lightning_tfm.errors import UserError

KEPT = (
    *("format_version", "pytorch-lightning_version", "epoch", "global_step", "loops", "experiment"),
    *("hyper_parameters", "hparams_name", "longest_source", "shortest_source", "alignment_head"),
)
"""Entries that an average, or an ensemble, copies from the first checkpoint."""


def check_parts(
    first: dict[str, Any], other: dict[str, Any], paths: tuple[str | Path, str | Path], parts: Sequence[str]
) -> None:
    """Raise UserError if two checkpoints differ in one of some hyper-parameters."""
    for part in parts:
        if other["hyper_parameters"].get(part) != first["hyper_parameters"].get(part):
            raise UserError(
                f"all checkpoints must have the same {part}, but {str(paths[0])!r} and {str(paths[1])!r} differ"
            )


def average_checkpoints(paths: Sequence[str | Path]) -> dict[str, Any]:
    """Return the content of a checkpoint with the mean weights of several checkpoints, without training state.

    All entries except the weights come from the first checkpoint.

    Raises:
        UserError: if `read` fails, or the checkpoints differ in class, network, vocabulary or labels.
    """
    first = read(paths[0])
    total = {name: weight.double() for name, weight in first["state_dict"].items()}
    for path in paths[1:]:
        other = read(path)
        check_parts(first, other, (paths[0], path), ("class_path", "network", "tokenizer", "labels"))
        for name, weight in other["state_dict"].items():
            # This is not in place, since tied float64 weights share their memory.
            total[name] = total[name] + weight.double()
    weights = {name: (total[name] / len(paths)).to(weight.dtype) for name, weight in first["state_dict"].items()}
    return {name: first[name] for name in KEPT if name in first} | {"state_dict": weights, "callbacks": {}}
