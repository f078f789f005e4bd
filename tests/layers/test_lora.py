"""Low-rank adaptation of linear layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from lightning_tfm.distributed.parallel import check_tensor_parallel
from lightning_tfm.errors import UserError
from lightning_tfm.layers import Linear, LoRALinear, quantize
from lightning_tfm.networks import GPT
from lightning_tfm.networks.huggingface import to_huggingface
from support.networks import LLAMA, QWEN3, randomize

SETTINGS = {"GPT-2": {}, "Llama": LLAMA, "Qwen 3": QWEN3}


def pair(settings, rank):
    """Return a random GPT and the same with LoRA, whose updates are 0."""
    base = randomize(GPT(11, 16, 4, 2, max_length=9, **settings)).double().eval()
    network = GPT(**base.hyper_parameters | {"lora_rank": rank}).double().eval()
    missing, unexpected = network.load_state_dict(base.state_dict(), strict=False)
    assert not unexpected
    assert all(".lora_" in name for name in missing)
    return base, network


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_only_the_updates_are_trained(settings):
    base, network = pair(settings, 3)
    tokens = torch.randint(0, 11, (2, 9))
    assert network(tokens[:, :0], tokens).equal(base(tokens[:, :0], tokens)), "the updates are 0 at first"
    shapes = {name: [*weight.shape] for name, weight in network.named_parameters() if weight.requires_grad}
    linear = {name: layer for name, layer in network.layers.named_modules() if isinstance(layer, nn.Linear)}
    assert shapes == {
        f"layers.{name}.lora_{part}": shape
        for name, layer in linear.items()
        for part, shape in (("a", [3, layer.in_features]), ("b", [layer.out_features, 3]))
    }
    network(tokens[:, :0], tokens).logsumexp(-1).sum().backward()
    trained = {name for name, weight in network.named_parameters() if weight.grad is not None}
    assert trained == shapes.keys()


class Update(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.update = layer.lora_b.detach() @ layer.lora_a.detach()

    def forward(self, weight):
        return weight + self.update


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@torch.no_grad()
def test_updates_are_added_to_the_weights(settings):
    """The outputs are those of weights W + B A, given by torch's parametrization or merged."""
    base, network = pair(settings, 3)
    for name, layer in network.named_modules():
        if isinstance(layer, LoRALinear):
            nn.init.normal_(layer.lora_b)
            parametrize.register_parametrization(base.get_submodule(name), "weight", Update(layer))
    tokens = torch.randint(0, 11, (2, 9))
    expected = base(tokens[:, :0], tokens)
    torch.testing.assert_close(network(tokens[:, :0], tokens), expected, rtol=0, atol=1e-10)
    with pytest.raises(UserError, match="lora_rank must be null for --format huggingface"):
        to_huggingface(network)
    network.merge_lora()
    torch.testing.assert_close(network(tokens[:, :0], tokens), expected, rtol=0, atol=1e-10)
    assert not any(isinstance(layer, LoRALinear) for layer in network.modules())
    assert all(weight.requires_grad for weight in network.parameters())
    again = GPT(**network.hyper_parameters).double()
    assert {type(layer) for layer in again.modules()} == {type(layer) for layer in network.modules()}
    again.load_state_dict(network.state_dict())


def test_updates_are_not_divided_by_tensor_parallelism():
    with pytest.raises(UserError, match="tensor_parallel_size must be 1 for lora_rank"):
        check_tensor_parallel(GPT(11, 16, 4, 2, max_length=9, lora_rank=3), 2)


@torch.no_grad()
def test_quantization_keeps_the_updates():
    network = GPT(11, 16, 4, 2, max_length=9, lora_rank=3).eval()
    for name, weight in network.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(weight)
    tokens = torch.randint(0, 11, (2, 9))
    expected = network(tokens[:, :0], tokens)
    quantize(network)
    assert (network(tokens[:, :0], tokens) - expected).norm() <= 0.05 * expected.norm()


def test_gradients_are_those_of_the_matrices():
    torch.manual_seed(0)
    layer = LoRALinear(Linear(4, 5).double(), 2).double()
    nn.init.normal_(layer.lora_b)
    x = torch.randn(3, 4, dtype=torch.float64)

    def output(a, b):
        return torch.func.functional_call(layer, {"lora_a": a, "lora_b": b}, x)

    assert torch.autograd.gradcheck(output, (layer.lora_a, layer.lora_b))
