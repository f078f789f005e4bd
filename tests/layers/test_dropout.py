"""Dropout against the binomial distribution."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_tfm.layers import Dropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_zeroes_with_its_probability_and_keeps_the_mean(p):
    torch.manual_seed(0)
    dropout, x = Dropout(p), torch.ones(1001, 999)  # not a multiple of the four values drawn together
    y = dropout(x)
    zeroed = (y == 0).double().mean().item()
    deviation = math.sqrt(p * (1 - p) / x.numel())
    assert zeroed == pytest.approx(p, abs=5 * deviation)
    assert y.unique().tolist() == pytest.approx([0, 1 / (1 - p)], rel=1e-4)
    # Neighbors, which share 64 random bits, are independent.
    together = ((y[:, 1:] == 0) & (y[:, :-1] == 0)).double().mean().item()
    assert together == pytest.approx(p * p, abs=5 * math.sqrt(p * p * (1 - p * p) / y[:, 1:].numel()) + 1e-3)
    torch.manual_seed(0)
    assert dropout(x).equal(y)
    assert not dropout(x).equal(y)
    assert dropout.eval()(x) is x
