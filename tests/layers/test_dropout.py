"""Dropout: its probability, its scale and its stream of bits."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_tfm.layers import Dropout

EDGES = [1e-300, 1e-9, 2.0**-18, 2.0**-17, 1e-5, 1e-4]
EDGES += [1 - p for p in (1e-4, 1e-5, 1e-6, 2.0**-16, 2.0**-17, 2.0**-53)]


@pytest.mark.parametrize("p", [*EDGES, *torch.linspace(0.01, 0.99, 15).tolist()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_dropout_scales_by_its_rounded_probability(p, dtype):
    rounded = min(round(p * 2**16), 2**16 - 2) / 2**16
    x = torch.rand(300_001).to(dtype)
    y = Dropout(p)(x)
    assert y.isfinite().all()
    kept = y != 0
    torch.testing.assert_close(y[kept], (x[kept].double() / (1 - rounded)).to(dtype))
    deviation = math.sqrt(rounded * (1 - rounded) / len(x))
    assert kept.double().mean().item() == pytest.approx(1 - rounded, abs=5 * deviation)
    assert abs(rounded - p) <= 2**-15


@pytest.mark.parametrize("p", [0.05, 0.1, 0.2, 0.25, 0.3, 0.5, 0.9])
def test_dropout_uses_a_fixed_stream_of_bits(p):
    """Each unit has 16 bits of its own, which must not change between versions, since a resumed run drops the same."""
    x = torch.randn(7, 143)
    torch.manual_seed(1)
    y = Dropout(p)(x)
    torch.manual_seed(1)
    bits = torch.empty(251, dtype=torch.int64).random_(-(2**63), None).view(torch.int16)[: 7 * 143].view(7, 143)
    threshold = round(p * 2**16)
    assert y.equal(x * ((bits >= threshold - 2**15).float() * (2**16 / (2**16 - threshold))))
