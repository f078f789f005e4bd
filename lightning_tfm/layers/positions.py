"""Position schemes: the ways in which a Transformer encodes the order of its tokens.

A network numbers its tokens (`Positions.number_pair` or `number_sequence`), and passes the resulting positions to the
methods of its scheme, which change the embeddings, the queries and keys, or the attention scores.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_tfm.errors import UserError
from lightning_tfm.layers.precision import at_least_float32

PositionScheme = Literal["sinusoidal", "learned", "rotary", "alibi", "none", "randomized", "coupled"]
"""Names of the position schemes, see `position_scheme`."""

FreqsCis = Tensor
"""Rotations e^(i angle) of queries and keys: complex (1, T, D/(2H)), or (B, 1, T, D/(2H)) if rows differ."""


class Positions(nn.Module):
    """Base class of position schemes, and the scheme without positions (Kazemnejad et al. 2023).

    Attributes:
        couples: whether tokens of source and target with the same index share a position.
    """

    couples: ClassVar[bool] = False

    def number(self, indices: Tensor, rows: int, count: int) -> Tensor:
        """Return the positions (T), or (B, T) if rows differ, of tokens; some schemes draw them at random in training.

        The tokens of B rows have indices (T) or (B, T), all of which are below `count`.
        """
        return indices

    def number_pair(self, source_length: int, target_length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions of a source and of a target that are separate sequences, see `number`.

        The number of rows and the device are those of `like` (B, ...).
        """
        source, target = (
            self.number(torch.arange(length, device=like.device), like.size(0), length)
            for length in (source_length, target_length)
        )
        return source, target

    def number_sequence(self, real: Tensor, target_length: int) -> Tensor:
        """Return the positions (S + T) or (B, S + T) of a source and a target that follows it, see `number`.

        The mask (B, S) of the source is False at padding, which has no position.
        """
        B, S = real.shape
        indices = torch.arange(S + target_length, device=real.device)
        if S > 0:
            indices = torch.where(indices < S, indices, indices - S + self.target_start(real).unsqueeze(1))
        return self.number(indices, B, self.span(S, target_length))

    def target_start(self, real: Tensor) -> Tensor:
        """Return the index (B) of the first token of a target that follows a source with the mask (B, S)."""
        return real.sum(1)

    def span(self, source_length: int, target_length: int) -> int:
        """Return the number of positions of a source and a target that follows it."""
        return source_length + target_length

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the embeddings x (B, T, D), with encodings of their positions if the scheme adds them."""
        return x

    def rotations(self, positions: Tensor) -> FreqsCis | None:
        """Return the rotations of queries and keys at positions (T) or (B, T); None if the scheme does not rotate."""
        return None

    def mask(self, queries: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return the mask of an attention layer, with biases of the scores if the scheme has them.

        The positions of queries are (T) or (B, T), and those of keys (S) or (B, S). The boolean mask is broadcastable
        to (B, H, T, S); None for a causal mask. The result is `mask` itself, or a mask (B, H, T, S) with the biases,
        and -inf where a query may not attend.
        """
        return mask

    def table(self) -> Tensor | None:
        """Return the encodings (positions, width) for a picture; None if the scheme has none."""
        return None


class SinusoidalPositions(Positions):
    """Sinusoidal positional encodings (Vaswani et al. 2017, 3.5).

    PE(p, 2i) = sin(p / 10000^(2i/D)) and PE(p, 2i+1) = cos(p / 10000^(2i/D)), where D is d_model.
    """

    encodings: Tensor

    def __init__(self, max_length: int, d_model: int) -> None:
        super().__init__()
        position = torch.arange(max_length).unsqueeze(1)
        angle = position * torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        encodings = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)[:, :d_model]
        self.register_buffer("encodings", encodings, persistent=False)  # constant, so not in checkpoints

    def forward(self, positions: Tensor) -> Tensor:
        """Return the encodings (..., D) of positions (...)."""
        return F.embedding(positions, self.encodings)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self(positions)

    def table(self) -> Tensor | None:
        return self.encodings


class LearnedPositions(Positions, nn.Embedding):
    """Learned positional encodings, which map positions (...) to encodings (..., D)."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=math.sqrt(0.5))  # the root mean square of the sinusoids

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self(positions)

    def table(self) -> Tensor | None:
        return self.weight


class RotaryPositions(Positions):
    """Rotary positional encodings (Su et al. 2021, 3.2.2).

    Queries and keys are rotated, so their dot product depends on the distance between their positions. Elements 2i and
    2i + 1 of a head form a complex number, rotated by the angle p / base^(2i/d) at position p. The base is 10000 in the
    paper. The width d of a head, `d_head`, must be even.

    Raises:
        UserError: if d_head is odd, or base is not positive.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, max_length: int, d_head: int, base: float = 10000.0) -> None:
        super().__init__()
        if d_head % 2:
            raise UserError(
                "d_head, by default d_model / num_heads, must be even for rotary positions, "
                f"but is {d_head}; try {d_head + 1}"
            )
        if not 0 < base < math.inf:
            raise UserError(f"rotary_base must be above 0 and finite, but is {base}; try 10000")
        angles = torch.outer(torch.arange(max_length), base ** -(torch.arange(0, d_head, 2) / d_head))
        self.register_buffer("cos", angles.cos(), persistent=False)  # real, since `.to(dtype)` drops imaginary parts
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotations(self, positions: Tensor) -> FreqsCis | None:
        """Return the rotations (1, T, d/2) of positions (T), or (B, 1, T, d/2) of positions (B, T)."""
        cos, sin = (F.embedding(positions, part).unsqueeze(-3) for part in (self.cos, self.sin))  # broadcast over heads
        # Half precision has no complex products.
        return torch.complex(at_least_float32(cos), at_least_float32(sin))

    def table(self) -> Tensor | None:
        return torch.cat((self.cos, self.sin), dim=-1)


class RandomizedPositions(RotaryPositions):
    """Randomized rotary positions (Ruoss et al. 2023).

    In training, the tokens of each row have the positions of a random subset of all positions, in ascending order, so
    that short rows train the positions of long ones. In evaluation, they have the first positions.
    """

    def number(self, indices: Tensor, rows: int, count: int) -> Tensor:
        if not self.training:
            return indices
        keys = torch.rand(rows, self.cos.size(0), dtype=torch.float32, device=indices.device)
        subset = keys.topk(count, sorted=False).indices.sort(dim=1).values  # (B, count)
        return subset.gather(1, indices.expand(rows, -1))


class CoupledPositions(RandomizedPositions):
    """Position coupling (Cho et al. 2024) of randomized rotary positions, for targets aligned with their sources.

    Tokens of source and target with the same index have the same position. Unlike here, the positions of the paper are
    learned vectors, and consecutive from a random offset.
    """

    couples = True

    def number_pair(self, source_length: int, target_length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        count = self.span(source_length, target_length)
        positions = self.number(torch.arange(count, device=like.device), like.size(0), count)
        return positions[..., :source_length], positions[..., :target_length]

    def target_start(self, real: Tensor) -> Tensor:
        return real.new_zeros(real.size(0), dtype=torch.long)

    def span(self, source_length: int, target_length: int) -> int:
        return max(source_length, target_length)


class AlibiPositions(Positions):
    """Attention with linear biases, ALiBi (Press et al. 2022).

    The score of head h is lowered by the distance between query and key, times a slope. With a power of two of heads H,
    the slopes are 2^(-8 h / H) for h from 1 to H; other numbers of heads take every second slope of 2H heads as well.
    """

    UNDIVIDED = "positions alibi, whose biases are not divided"
    """Why tensor parallelism does not divide a network with this layer."""

    slopes: Tensor

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        power = 2 ** int(math.log2(num_heads))
        exponents = [8 * head / power for head in range(1, power + 1)]
        exponents += [4 * head / power for head in range(1, 2 * power, 2)][: num_heads - power]
        slopes = torch.tensor([2.0**-exponent for exponent in exponents])
        self.register_buffer("slopes", slopes, persistent=False)

    def mask(self, queries: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor | None:
        difference = (queries.unsqueeze(-1) - keys.unsqueeze(-2)).unsqueeze(-3)  # (1, T, S) or (B, 1, T, S)
        bias = -difference.abs() * self.slopes[:, None, None]  # (..., H, T, S)
        return bias.masked_fill(~(difference >= 0 if mask is None else mask), -math.inf)


def apply_rotary(x: Tensor, freqs_cis: FreqsCis | None) -> Tensor:
    """Rotate queries or keys (B, H, T, D/H), see `Positions.rotations`; return them unchanged without rotations."""
    if freqs_cis is None:
        return x
    # Use one complex product: real products of strided tensors took a sixth of the step of a small model on a CPU.
    numbers = torch.view_as_complex(at_least_float32(x).unflatten(-1, (-1, 2)))  # (B, H, T, D/2H)
    return torch.view_as_real(numbers * freqs_cis).flatten(-2).type_as(x)


def position_scheme(
    name: PositionScheme,
    max_length: int,
    d_model: int,
    num_heads: int,
    d_head: int | None = None,
    rotary_base: float = 10000.0,
) -> Positions:
    """Return a position scheme for positions 0 to max_length - 1.

    Args:
        name: the name of the scheme.
        max_length: the number of positions.
        d_model: the width of the embeddings.
        num_heads: the number of attention heads.
        d_head: the width of a head; None for d_model / num_heads.
        rotary_base: the base of the rotary schemes, see `RotaryPositions`.

    Raises:
        UserError: if there is no scheme of this name, or it cannot have these settings.
    """
    if rotary_base != 10000 and name not in ("rotary", "randomized", "coupled"):
        raise UserError(
            f"rotary_base must be 10000 with positions {name}, which are not rotary, but is {rotary_base}; "
            "set positions to rotary"
        )
    match name:
        case "sinusoidal":
            return SinusoidalPositions(max_length, d_model)
        case "learned":
            return LearnedPositions(max_length, d_model)
        case "rotary" | "randomized" | "coupled":
            rotary = {"rotary": RotaryPositions, "randomized": RandomizedPositions, "coupled": CoupledPositions}
            return rotary[name](max_length, d_model // num_heads if d_head is None else d_head, rotary_base)
        case "alibi":
            return AlibiPositions(num_heads)
        case "none":
            return Positions()
    raise UserError(f"positions must be the name of a position scheme, but is {name!r}; try rotary")
