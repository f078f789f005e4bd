"""Low-rank adaptation of linear layers (LoRA, Hu et al. 2022)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_tfm.layers.cpu import Linear


class LoRALinear(nn.Linear):
    """Linear layer (W + B A) x + b with frozen W and b and a trained update B A (Hu et al. 2022, equation 3).

    The rank is the number of rows of A. B is 0 at first, so the outputs are those of the given layer, whose W and b it
    shares. The scale of the update, alpha / rank in the paper, is 1.

    Note:
        This is no `Linear`, since `quantize` would replace it by a layer without the update.
    """

    UNDIVIDED = "lora_rank, whose matrices are not divided"  # by tensor parallelism

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_a = nn.Parameter(torch.empty(rank, layer.in_features))
        self.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank))
        nn.init.normal_(self.lora_a, std=1 / math.sqrt(layer.in_features))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (..., out_features) of the inputs (..., in_features)."""
        return super().forward(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)

    @torch.no_grad()
    def merged(self) -> Linear:
        """Return a linear layer with the weights W + B A."""
        layer = Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        layer.weight = nn.Parameter(self.weight + self.lora_b @ self.lora_a)
        layer.bias = self.bias
        return layer


def add_lora(network: nn.Module, part: nn.Module, rank: int) -> None:
    """Freeze a network, and replace all linear layers of a part of it by layers with a trained update."""
    network.requires_grad_(False)
    for parent in [*part.modules()]:
        for name, layer in parent.named_children():
            if isinstance(layer, Linear):
                setattr(parent, name, LoRALinear(layer, rank))


def merge_lora(network: nn.Module) -> None:
    """Replace the layers of `add_lora` by linear layers with the sum of both weights."""
    for parent in [*network.modules()]:
        for name, layer in parent.named_children():
            if isinstance(layer, LoRALinear):
                setattr(parent, name, layer.merged())
