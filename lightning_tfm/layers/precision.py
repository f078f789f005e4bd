"""Precision of sums that half precision would round."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32 if it has half precision, unchanged otherwise."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
