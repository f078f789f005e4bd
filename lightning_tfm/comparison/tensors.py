"""Differences between tensors and between the states of checkpoints, to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import TypedDict

from lightning_tfm.config.settings import flatten


class TensorDifference(TypedDict):
    """Difference between two tensors of the same shape and type.

    Attributes:
        elements: the number of elements.
        differing: the number of those whose bits differ.
        index: the index of the first one.
        values: its two values.
        absolute: the largest absolute difference.
        relative: the largest difference relative to the larger magnitude of an element.
    """

    elements: int
    differing: int
    index: list[int]
    values: tuple[float, float]
    absolute: float
    relative: float


def tensor_difference(first: Tensor, second: Tensor) -> TensorDifference | None:
    """Return the difference between two tensors of the same shape and type; None if their bits are equal."""
    if first.is_complex():  # real and imaginary parts are the last dimension
        first, second = torch.view_as_real(first), torch.view_as_real(second)
    differs = (_bytes(first) != _bytes(second)).unflatten(0, (-1, first.element_size())).any(1)  # (N)
    if not differs.any():
        return None
    x, y = (tensor.flatten()[differs].double() for tensor in (first, second))
    distance, magnitude = (x - y).abs(), torch.maximum(x.abs(), y.abs())
    index = torch.unravel_index(differs.nonzero()[0, 0], first.shape)
    return {
        "elements": first.numel(),
        "differing": int(differs.sum()),
        "index": [int(place) for place in index],
        "values": (x[0].item(), y[0].item()),
        "absolute": distance.max().item(),
        "relative": (distance / magnitude.clamp(min=torch.finfo(torch.float64).tiny)).max().item(),  # 0 and -0 differ
    }


def fingerprint(*tensors: Tensor) -> bytes:
    """Return the SHA-256 of the bytes, shapes and types of tensors.

    Note:
        `torch.hash_tensor`, which combines the elements with XOR, is the same for any order of the elements.
    """
    checksum = hashlib.sha256()
    for tensor in tensors:
        checksum.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        checksum.update(_bytes(tensor).numpy().data)
    return checksum.digest()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


STATES = {"state_dict": "parameters", "averaging_state": "averaging", "optimizer_states": "optimizer state"}
"""Names of the parts of a checkpoint that hold the state of the training, by key."""


def state_fingerprint(checkpoint: Mapping[str, Any]) -> bytes:
    """Return a fingerprint of the state of the training in a checkpoint."""
    values = flatten({key: checkpoint.get(key) for key in STATES})
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in values.items() if name not in tensors}
    return fingerprint(*tensors.values()) + repr((checkpoint["global_step"], [*tensors], others)).encode()


def different_states(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the step, and the values that differ in the parts that both checkpoints have, by part and name.

    A value has its `TensorDifference`, or is given for both checkpoints if it is not a tensor, or its shape, its type
    or the value is missing in one.
    """
    steps = [checkpoint["global_step"] for checkpoint in (first, second)]
    parts = {"step": [{"name": "global_step", "values": steps}] if steps[0] != steps[1] else []}
    for key, part in STATES.items():
        if key in first and key in second:
            values = [flatten(checkpoint[key]) for checkpoint in (first, second)]
            found = {name: difference(*(each.get(name) for each in values)) for name in {**values[0], **values[1]}}
            parts[part] = [{"name": name.removeprefix("network."), **each} for name, each in found.items() if each]
    return parts


def difference(first: Any, second: Any) -> Mapping[str, Any] | None:
    """Return the difference between two values: a `TensorDifference`, or both as `values`; None if they are equal."""
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        pair = [_shape(value) if isinstance(value, Tensor) else value for value in (first, second)]
    elif first.shape == second.shape and first.dtype == second.dtype:
        return tensor_difference(first, second)
    else:
        pair = [_shape(first), _shape(second)]
    return None if pair[0] == pair[1] else {"values": pair}


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
