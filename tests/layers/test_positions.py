"""Positional encodings compared with their formulas."""

from __future__ import annotations

import math

import pytest
import torch
import transformers

from lightning_tfm.layers import (
    AlibiPositions,
    CoupledPositions,
    Positions,
    RandomizedPositions,
    RotaryPositions,
    SinusoidalPositions,
    apply_rotary,
    causal_mask,
)
from lightning_tfm.networks import GPT, Transformer
from lightning_tfm.tokenization import EOS, PAD
from support.networks import VOCAB_SIZE, randomize


@pytest.mark.parametrize("d_model", [8, 7])
def test_sinusoidal_positions_equal_their_formula(d_model):
    encoding = SinusoidalPositions(50, d_model)(torch.arange(50))
    i = torch.arange(d_model, dtype=torch.float64)
    angle = torch.arange(50)[:, None] / 10000 ** (2 * (i // 2) / d_model)
    torch.testing.assert_close(encoding.double(), torch.where(i % 2 == 1, angle.cos(), angle.sin()), atol=1e-4, rtol=0)


def test_rotary_positions_equal_their_formula():
    """Each pair of coordinates is rotated by p theta; dot products depend on distances only."""
    d, positions = 8, torch.tensor([[0, 3, 4], [11, 14, 15]])
    rotary, x = RotaryPositions(16, d), torch.randn(2, 2, 3, d, dtype=torch.float64)
    theta = 10000.0 ** (-2 * torch.arange(d // 2, dtype=torch.float64) / d)
    angle, a, b = positions[:, None, :, None] * theta, x[..., ::2], x[..., 1::2]
    expected = torch.stack((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), dim=-1).flatten(-2)
    torch.testing.assert_close(apply_rotary(x, rotary.rotations(positions)), expected, atol=1e-5, rtol=0)

    x = x[:1].expand_as(x)
    turned = apply_rotary(x, rotary.rotations(positions))
    torch.testing.assert_close(*(turned @ turned.transpose(-1, -2)).unbind(0), atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_heads", [1, 4, 8, 12])
def test_alibi_equals_hugging_face(num_heads):
    build = transformers.models.bloom.modeling_bloom.build_alibi_tensor
    theirs = build(torch.ones(1, 9, dtype=torch.long), num_heads, torch.float32)  # (H, 1, S), for any query
    x = torch.randn(1, num_heads, 9, 9)
    steps = torch.arange(9)
    ours = AlibiPositions(num_heads).mask(steps, steps, None)
    causal = causal_mask(9, 9, x.device)
    torch.testing.assert_close((x + ours).softmax(-1), (x + theirs).masked_fill(~causal, -math.inf).softmax(-1))


@pytest.mark.parametrize("scheme", [RandomizedPositions, CoupledPositions])
def test_randomized_positions_are_ascending_subsets(scheme):
    positions, steps = scheme(30, 8), torch.arange(10)
    drawn = positions.number(steps, 5000, 10)
    assert drawn.diff(dim=1).min() >= 1
    assert drawn.min() == 0
    assert drawn.max() == 29
    counts = drawn.flatten().bincount(minlength=30)
    torch.testing.assert_close(counts / 5000, torch.full((30,), 10 / 30), atol=0.05, rtol=0)  # uniform
    torch.manual_seed(3)
    again = positions.number(steps, 4, 10)
    torch.manual_seed(3)
    assert positions.number(steps, 4, 10).equal(again)
    assert not again[0].equal(again[1])
    assert positions.eval().number(steps, 4, 10).equal(steps)


@pytest.mark.parametrize("scheme", ["rotary", "alibi", "none", "randomized", "coupled"])
@pytest.mark.parametrize("make", [Transformer, GPT])
def test_logits_depend_on_distances_of_positions_only(make, scheme, batch, monkeypatch):
    network = make(VOCAB_SIZE, 16, 4, 2, max_length=30, positions=scheme).eval()
    randomize(network)
    expected = network(*batch)
    layer = next(module for module in network.modules() if isinstance(module, Positions))
    monkeypatch.setattr(layer, "number", lambda indices, rows, count: indices + 11)
    torch.testing.assert_close(network(*batch), expected, atol=1e-4, rtol=1e-4)
    monkeypatch.setattr(layer, "number", lambda indices, rows, count: 2 * indices)
    assert network(*batch).allclose(expected, atol=1e-4) == (scheme == "none")


@pytest.mark.parametrize("make", [Transformer, GPT])
def test_coupled_positions_are_shared_by_source_and_target(make, monkeypatch):
    """Each symbol of the target has the position of the symbol of the source with the same index, also if drawn."""
    network = make(VOCAB_SIZE, 16, 4, 1, max_length=30, positions="coupled")
    source = torch.tensor([[3, 4, 5, EOS], [6, EOS, PAD, PAD]])
    target_in = torch.tensor([[1, 3, 4, 5], [1, 6, PAD, PAD]])
    layer = next(module for module in network.modules() if isinstance(module, Positions))
    seen, rotations = [], layer.rotations
    monkeypatch.setattr(layer, "rotations", lambda positions: seen.append(positions) or rotations(positions))
    network(source, target_in)
    ours, theirs = torch.cat(seen, dim=1).split(4, dim=1)
    assert ours.equal(theirs)
    assert not ours[0].equal(torch.arange(4))
