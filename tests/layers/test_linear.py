"""Linear layers in float32 and int8."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_tfm.layers import Int8Linear, Linear


@pytest.mark.parametrize("cuts", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("d_in", "d_out"), [(384, 1152), (64, 32), (400, 401), (512, 1024)])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 3), (4, 0), ()])
def test_linear_equals_torch_for_any_number_of_rows(shape, d_in, d_out, bias, cuts, monkeypatch):
    """Compare both code paths, which sum in another order."""
    monkeypatch.setattr(Linear, "SPLITS_MATRICES", cuts)
    layer, x = Linear(d_in, d_out, bias=bias), torch.randn(*shape, d_in, requires_grad=True)
    theirs = nn.Linear(d_in, d_out, bias=bias)
    theirs.load_state_dict(layer.state_dict())
    ours, expected = layer(x), theirs(x)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    weights = torch.randn_like(expected)
    gradients = torch.autograd.grad((ours * weights).sum(), [x, *layer.parameters()])
    expected_gradients = torch.autograd.grad((expected * weights).sum(), [x, *theirs.parameters()])
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 3), (4, 0)])
def test_an_int8_linear_layer_is_exact_up_to_its_rounding(shape, bias):
    layer, x = Linear(64, 32, bias=bias), torch.randn(*shape, 64)
    with torch.no_grad():
        layer.weight[0] *= 1e-3  # has a scale of its own
    x_level = (x.max() - x.min()) / 127 if x.numel() else torch.tensor(0.0)  # 7 bits, with a rounded zero point
    half_level = layer.weight.abs().amax(1) / 127 / 2
    bound = x_level * layer.weight.abs().sum(1) + half_level * (x.abs().sum(-1, keepdim=True) + 64 * x_level)
    outputs = Int8Linear(layer)(x)
    assert outputs.shape == (*shape, 32)
    assert ((outputs - layer(x)).abs() <= 1.01 * bound).all()


def test_an_int8_linear_layer_can_have_zero_weights():
    layer = Linear(3, 2)
    with torch.no_grad():
        layer.weight[0] = 0.0
    assert Int8Linear(layer)(torch.ones(1, 3))[0, 0] == layer.bias[0]
