"""Precision of sums that half precision would round."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32 if it has half precision, unchanged otherwise."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def full_precision_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix product of a and b, which autocast does not round to half precision."""
    if not any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):  # `torch.export` cannot trace the other branch
        return a @ b
    with torch.autocast(a.device.type, enabled=False):
        return a @ b
