"""Averaged checkpoints."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from lightning_tfm.checkpoint import averaging
from lightning_tfm.checkpoint.averaging import average_checkpoints


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_averaged_checkpoints_have_the_mean_weights(network, dtype, monkeypatch):
    """Tied weights share their memory under two names."""
    contents = {}
    for name in "abc":
        for parameter in network.to(dtype).parameters():
            nn.init.normal_(parameter)
        contents[name] = {"state_dict": deepcopy(network.state_dict()), "hyper_parameters": {}}
    expected = {
        name: torch.stack([content["state_dict"][name] for content in contents.values()]).double().mean(0).to(weight)
        for name, weight in contents["a"]["state_dict"].items()
    }
    monkeypatch.setattr(averaging, "read", contents.__getitem__)
    torch.testing.assert_close(average_checkpoints("abc")["state_dict"], expected)
