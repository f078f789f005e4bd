"""Precision of sums that half precision would round."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32 if it has half precision, unchanged otherwise."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def matmul_without_autocast(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices in their own type, also under autocast."""
    if not any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):  # `torch.export` cannot trace the other branch
        return a @ b
    with torch.autocast(a.device.type, enabled=False):
        return a @ b
