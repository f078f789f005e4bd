"""The papers' parts: attention, positional encodings, feed-forward, Add & Norm, and the layer made of them.

Shapes: B batch, T queries, S keys, D width, H heads. Masks are boolean, True where a query may attend.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_tfm.errors import UserError

KeyValue = tuple[Tensor, Tensor]
"""Keys and values of one attention layer, (B, H, S, D/H) each: what a decoder keeps between its steps."""

Rotation = Tensor
"""What queries and keys are turned by: e^(i angle), complex (B or 1, 1, T, D/2H)."""


def _reads_in_one_thread() -> bool:
    """Whether BLAS takes one thread for a matrix times a vector: MKL does, on processors that are not Intel's."""
    cpuinfo = Path("/proc/cpuinfo")  # Linux has it
    return torch.backends.mkl.is_available() and cpuinfo.exists() and b"GenuineIntel" not in cpuinfo.read_bytes()


class Linear(nn.Linear):
    """As torch's, and fast for one row as well, which is what a model has that writes one sequence.

    A matrix times a vector is bound by memory. On Intel's processors MKL shares it out among the threads, at twice the
    speed of what is done here; on others it reads the matrix in one thread, at a third of what a core can read (torch
    2.13 on an AMD EPYC). There it is cut into four matrices: a batch of products, which all threads share, is four
    times as fast on two cores. Small matrices stay in the cache, where it makes no difference.
    """

    CACHED = 2**17  # weights
    CUTS = _reads_in_one_thread()

    def forward(self, x: Tensor) -> Tensor:
        plain = not self.CUTS or x.numel() != self.in_features or self.weight.numel() < self.CACHED or x.is_cuda
        if plain or self.out_features % 4 or torch.compiler.is_exporting():
            return F.linear(x, self.weight, self.bias)
        column = x.reshape(1, -1).t().expand(4, -1, 1)  # not as a view(-1, 1): by its strides BLAS would be slow again
        y = torch.bmm(self.weight.unflatten(0, (4, -1)), column).view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


class Attention(nn.Module, ABC):
    """Anything that attends. `forward` takes the fast path, which may never form the weights."""

    @abstractmethod
    def weights(self, *args: object, **kwargs: object) -> Tensor:
        """The weights that `forward` uses when it is given the same arguments, (B, H, T, S), written out."""


@contextmanager
def attention_maps(network: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Collects what every attention layer looks at while the network runs.

    The yielded dictionary is filled when the block ends: layer name -> weights (B, H, T, S). The layers know
    nothing of it: a hook repeats each call on the slow, exact path. Calls for one step each, as decoding makes
    them, are joined along T. A compiled network runs as it was written meanwhile, for it would leave hooks out.
    """
    calls: dict[str, list[Tensor]] = defaultdict(list)
    maps: dict[str, Tensor] = {}

    def hook_for(name: str):
        return lambda layer, args, kwargs, _: calls[name].append(layer.weights(*args, **kwargs))

    handles = [
        layer.register_forward_hook(hook_for(name), with_kwargs=True)
        for name, layer in network.named_modules()
        if isinstance(layer, Attention)
    ]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield maps
        for name, steps in calls.items():
            keys = max(step.size(-1) for step in steps)  # a decoder's own keys grow from step to step
            maps[name] = torch.cat([F.pad(step, (0, keys - step.size(-1))) for step in steps], dim=2)
    finally:
        for handle in handles:
            handle.remove()


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """(T, S), True up to a query's own position; the last query sees every key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def scaled_dot_product_weights(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool = False) -> Tensor:
    """softmax(Q K^T / sqrt(D/H)), (B, H, T, S) (Vaswani et al. 2017, equation 1)."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))
    if is_causal:
        mask = causal_mask(query.size(-2), key.size(-2), query.device)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(-1)


def check_heads(d_model: int, num_heads: int) -> None:
    """Raises UserError unless the heads share the width evenly."""
    if num_heads < 1 or d_model < num_heads or d_model % num_heads:
        below = max(1, d_model // max(1, num_heads)) * num_heads
        raise UserError(
            f"d_model must be divisible by num_heads ({num_heads}), but is {d_model}; "
            f"try {below} or {below + num_heads}"
        )


def split_heads(projected: Tensor, parts: int, num_heads: int) -> list[Tensor]:
    """(B, T, parts * D) -> so many tensors of (B, H, T, D/H), of the heads of each part."""
    # Parts first: of heads that are split all at once, the gradients are copied once more on their way back.
    return [part.unflatten(-1, (num_heads, -1)).transpose(1, 2) for part in projected.chunk(parts, dim=-1)]


class SelfAttention(Attention):
    """Multi-head attention of a sequence over itself (Vaswani et al. 2017, 3.2.2)."""

    def __init__(self, d_model: int, num_heads: int, bias: bool = True) -> None:
        super().__init__()
        check_heads(d_model, num_heads)
        self.num_heads = num_heads
        self.query_key_value = Linear(d_model, 3 * d_model, bias=bias)  # one product for all three: fewer, larger
        self.output = Linear(d_model, d_model, bias=bias)

    def _project(self, x: Tensor, past: KeyValue | None, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = split_heads(self.query_key_value(x), 3, self.num_heads)
        if rotation is not None:
            query, key = rotated(query, rotation), rotated(key, rotation)  # keys are kept as they are turned
        if past is not None:
            key, value = torch.cat((past[0], key), dim=2), torch.cat((past[1], value), dim=2)
        return query, key, value

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
        past: KeyValue | None = None,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, KeyValue]:
        """Attends from x to the past, if any, and to x itself.

        Args:
            x: (B, T, D).
            mask: what each query may attend to, broadcastable to (B, H, T, S), S counting the past.
            is_causal: attend to no later position; needs no mask, and takes no past.
            past: the keys and values of earlier calls.
            rotation: of the positions of x, see RotaryPositions.

        Returns:
            the context (B, T, D), and the keys and values for the next call.
        """
        assert not (is_causal and past is not None)
        query, key, value = self._project(x, past, rotation)
        # One kernel, which keeps no weights (B, H, T, S) for the way back: dropout on them would have them written out.
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal)
        return self.output(context.transpose(1, 2).flatten(2)), (key, value)

    def weights(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
        past: KeyValue | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        query, key, _ = self._project(x, past, rotation)
        return scaled_dot_product_weights(query, key, mask, is_causal)


class CrossAttention(Attention):
    """Multi-head attention of a decoder over the encoder's output, its memory."""

    def __init__(self, d_model: int, num_heads: int, bias: bool = True) -> None:
        super().__init__()
        check_heads(d_model, num_heads)
        self.num_heads = num_heads
        self.query = Linear(d_model, d_model, bias=bias)
        self.key_value = Linear(d_model, 2 * d_model, bias=bias)
        self.output = Linear(d_model, d_model, bias=bias)

    def project_memory(self, memory: Tensor) -> KeyValue:
        """Keys and values of the memory (B, S, D): computed once, however many steps the decoder takes."""
        key, value = split_heads(self.key_value(memory), 2, self.num_heads)
        return key, value

    def _split_query(self, x: Tensor) -> Tensor:
        return split_heads(self.query(x), 1, self.num_heads)[0]

    def forward(self, x: Tensor, memory: KeyValue, mask: Tensor) -> Tensor:
        """Context (B, T, D) of x (B, T, D) over the projected memory; mask is (B, 1, 1, S)."""
        context = F.scaled_dot_product_attention(self._split_query(x), *memory, attn_mask=mask)
        return self.output(context.transpose(1, 2).flatten(2))

    def weights(self, x: Tensor, memory: KeyValue, mask: Tensor) -> Tensor:
        return scaled_dot_product_weights(self._split_query(x), memory[0], mask)


class AdditiveAttention(Attention):
    """v^T tanh(W_q q + W_k k) (Bahdanau et al. 2015, A.1.2)."""

    def __init__(self, d_query: int, d_memory: int, d_attention: int) -> None:
        super().__init__()
        self.query = Linear(d_query, d_attention, bias=False)
        self.key = Linear(d_memory, d_attention)
        self.energy = Linear(d_attention, 1, bias=False)

    def _weights(self, query: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        # tanh z = 2 sigmoid(2z) - 1, and softmax does not see the - 1. On a CPU sigmoid is five times as fast as tanh.
        hidden = torch.sigmoid(2 * (self.query(query).unsqueeze(1) + keys))  # (B, S, A)
        return (2 * self.energy(hidden)).squeeze(-1).masked_fill(~mask, -math.inf).softmax(-1)  # (B, S)

    def forward(self, query: Tensor, keys: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Context (B, E) of one query (B, D) over memory (B, S, E).

        Args:
            keys: `self.key(memory)`, (B, S, A): projected once, however many steps the decoder takes.
            mask: (B, S), True at real positions of the memory.
        """
        weights = self._weights(query, keys, mask)
        return (weights.unsqueeze(1) @ memory).squeeze(1)

    def weights(self, query: Tensor, keys: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        return self._weights(query, keys, mask)[:, None, None]  # one head, one query


class SinusoidalPositions(nn.Module):
    """PE(p, 2i) = sin(p / 10000^(2i/D)), PE(p, 2i+1) = cos of the same (Vaswani et al. 2017, 3.5)."""

    def __init__(self, max_length: int, d_model: int) -> None:
        super().__init__()
        position = torch.arange(max_length).unsqueeze(1)
        angle = position * torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        table = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)[:, :d_model]
        self.register_buffer("table", table, persistent=False)  # not learned, so not in a checkpoint

    def forward(self, positions: Tensor) -> Tensor:
        """Positions (...) -> encodings (..., D)."""
        return self.table[positions]


class LearnedPositions(nn.Embedding):
    """One learned vector a position; positions (...) -> encodings (..., D)."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=math.sqrt(0.5))  # as loud as the sinusoids are


class RotaryPositions(nn.Module):
    """Turns queries and keys, so that their product tells how far apart they stand (Su et al. 2021, 3.2.2).

    Values 2i and 2i + 1 of a head's d are a complex number, which at position p is turned by p / 10000^(2i/d).
    """

    def __init__(self, max_length: int, d_head: int) -> None:
        super().__init__()
        if d_head % 2:
            raise UserError(f"d_model / num_heads must be even for rotary positions, but is {d_head}; try {d_head + 1}")
        angles = torch.outer(torch.arange(max_length), 10000.0 ** -(torch.arange(0, d_head, 2) / d_head))
        self.register_buffer("cos", angles.cos(), persistent=False)  # apart, for `.to(dtype)` keeps no imaginary part
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, positions: Tensor) -> Rotation:
        """Of positions (T), or (B, T) where each row has its own."""
        cos, sin = (part[positions].unsqueeze(-3) for part in (self.cos, self.sin))  # alike for all heads
        wide = torch.promote_types(cos.dtype, torch.float32)  # half precision has no complex products
        cos, sin = cos.to(wide), sin.to(wide)
        return torch.complex(cos, sin)


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """Queries or keys (B, H, T, D/H), turned."""
    # One complex product: as real ones, on parts that lie apart, turning took a sixth of a small model's step on a CPU.
    wide = torch.promote_types(x.dtype, torch.float32)
    numbers = torch.view_as_complex(x.to(wide).unflatten(-1, (-1, 2)))  # (B, H, T, D/2H)
    return torch.view_as_real(numbers * rotation).flatten(-2).type_as(x)


def positional_encoding(kind: Literal["sinusoidal", "learned"], max_length: int, d_model: int) -> nn.Module:
    """The encoding of that kind for positions 0 .. max_length - 1."""
    return {"sinusoidal": SinusoidalPositions, "learned": LearnedPositions}[kind](max_length, d_model)


class FeedForward(nn.Sequential):
    """W_2 f(W_1 x + b_1) + b_2, the same at each position (Vaswani et al. 2017, equation 2)."""

    def __init__(self, d_model: int, d_ff: int, activation: nn.Module, bias: bool = True) -> None:
        super().__init__(Linear(d_model, d_ff, bias=bias), activation, Linear(d_ff, d_model, bias=bias))


class Dropout(nn.Module):
    """Zeroes values with probability p while training, and scales the others by 1 / (1 - p) (Srivastava et al. 2014).

    On a CPU torch's own draws one number a value, one after the other, which takes longer than the product that
    it follows. Here 64 random bits decide on four values, 16 each: p is rounded to a multiple of 2^-16 below 1.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        assert 0 <= p < 1
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """(...) -> (...)."""
        if not self.training or self.p == 0:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.p)
        zeroed = min(round(self.p * 2**16), 2**16 - 1)  # of the 2^16 values that 16 bits can have
        bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
        kept = (bits[: x.numel()] >= zeroed - 2**15).view(x.shape)
        return x * kept.to(x.dtype).mul_(2**16 / (2**16 - zeroed))


class AddNorm(nn.Module):
    """The residual connection round a sub-layer and its norm, after the sum (post) or before the sub-layer (pre).

    Post-norm is the paper's, LayerNorm(x + Sublayer(x)) (Vaswani et al. 2017, 3.1); pre-norm, x +
    Sublayer(LayerNorm(x)), trains without a long warm-up (Xiong et al. 2020).
    """

    def __init__(self, d_model: int, norm: Literal["pre", "post"], dropout: float, bias: bool = True) -> None:
        super().__init__()
        self.is_pre = norm == "pre"
        self.norm = nn.LayerNorm(d_model, bias=bias)
        self.dropout = Dropout(dropout)

    def before(self, x: Tensor) -> Tensor:
        """What the sub-layer sees."""
        return self.norm(x) if self.is_pre else x

    def forward(self, x: Tensor, update: Tensor) -> Tensor:
        """The sum of x and the sub-layer's output."""
        x = x + self.dropout(update)
        return x if self.is_pre else self.norm(x)


class TransformerLayer(nn.Module):
    """Self-attention, cross-attention where there is an encoder to look at, feed-forward."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        dropout: float,
        norm: Literal["pre", "post"],
        activation: nn.Module,
        bias: bool = True,
        has_memory: bool = False,
    ) -> None:
        super().__init__()
        self.self_attention = SelfAttention(d_model, num_heads, bias)
        self.add_self = AddNorm(d_model, norm, dropout, bias)
        if has_memory:
            self.cross_attention = CrossAttention(d_model, num_heads, bias)
            self.add_cross = AddNorm(d_model, norm, dropout, bias)
        self.feed_forward = FeedForward(d_model, d_ff, activation, bias)
        self.add_feed_forward = AddNorm(d_model, norm, dropout, bias)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
        past: KeyValue | None = None,
        memory: KeyValue | None = None,
        memory_mask: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, KeyValue]:
        """(B, T, D) -> (B, T, D), and the keys and values of the self-attention for the next call."""
        context, past = self.self_attention(self.add_self.before(x), mask, is_causal, past, rotation)
        x = self.add_self(x, context)
        if memory is not None:
            x = self.add_cross(x, self.cross_attention(self.add_cross.before(x), memory, memory_mask))
        return self.add_feed_forward(x, self.feed_forward(self.add_feed_forward.before(x))), past
