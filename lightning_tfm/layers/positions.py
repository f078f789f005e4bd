"""Positional encodings: sinusoidal, learned and rotary."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_tfm.errors import UserError

FreqsCis = Tensor
"""Rotations e^(i angle) of queries and keys: complex (1, T, D/(2H)), or (B, 1, T, D/(2H)) if rows differ."""


class SinusoidalPositions(nn.Module):
    """Sinusoidal positional encodings (Vaswani et al. 2017, 3.5).

    PE(p, 2i) = sin(p / 10000^(2i/D)) and PE(p, 2i+1) = cos(p / 10000^(2i/D)).

    Args:
        max_length: number of positions.
        d_model: width D.
    """

    table: Tensor

    def __init__(self, max_length: int, d_model: int) -> None:
        super().__init__()
        position = torch.arange(max_length).unsqueeze(1)
        angle = position * torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        table = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)[:, :d_model]
        self.register_buffer("table", table, persistent=False)  # constant, so not in checkpoints

    def forward(self, positions: Tensor) -> Tensor:
        """Return the encodings (..., D) of positions (...)."""
        return self.table[positions]


class LearnedPositions(nn.Embedding):
    """Learned positional encodings, which map positions (...) to encodings (..., D)."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=math.sqrt(0.5))  # the root mean square of the sinusoids


class RotaryPositions(nn.Module):
    """Rotary positional encodings (Su et al. 2021, 3.2.2).

    Queries and keys are rotated, so their dot product depends on the distance between their positions. Elements 2i and
    2i + 1 of a head of width d form a complex number, rotated by the angle p / 10000^(2i/d) at position p.

    Args:
        max_length: number of positions.
        d_head: width d of a head; must be even.

    Raises:
        UserError: if d_head is odd.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, max_length: int, d_head: int) -> None:
        super().__init__()
        if d_head % 2:
            raise UserError(f"d_model / num_heads must be even for rotary positions, but is {d_head}; try {d_head + 1}")
        angles = torch.outer(torch.arange(max_length), 10000.0 ** -(torch.arange(0, d_head, 2) / d_head))
        self.register_buffer("cos", angles.cos(), persistent=False)  # real, since `.to(dtype)` drops imaginary parts
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, positions: Tensor) -> FreqsCis:
        """Return the rotations (1, T, d/2) of positions (T), or (B, 1, T, d/2) of positions (B, T)."""
        cos, sin = (part[positions].unsqueeze(-3) for part in (self.cos, self.sin))  # broadcast over heads
        wide = torch.promote_types(cos.dtype, torch.float32)  # half precision has no complex products
        cos, sin = cos.to(wide), sin.to(wide)
        return torch.complex(cos, sin)


def apply_rotary(x: Tensor, freqs_cis: FreqsCis) -> Tensor:
    """Rotate queries or keys.

    Args:
        x: the queries or keys (B, H, T, D/H).
        freqs_cis: the rotations, see `RotaryPositions`.
    """
    # Use one complex product: real products of strided tensors took a sixth of the step of a small model on a CPU.
    wide = torch.promote_types(x.dtype, torch.float32)
    numbers = torch.view_as_complex(x.to(wide).unflatten(-1, (-1, 2)))  # (B, H, T, D/2H)
    return torch.view_as_real(numbers * freqs_cis).flatten(-2).type_as(x)


def positional_encoding(kind: Literal["sinusoidal", "learned"], max_length: int, d_model: int) -> nn.Module:
    """Return a positional encoding for positions 0 to max_length - 1."""
    return {"sinusoidal": SinusoidalPositions, "learned": LearnedPositions}[kind](max_length, d_model)
