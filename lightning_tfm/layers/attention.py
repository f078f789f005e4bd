"""Attention layers, and a context manager that records their attention weights.

Shapes: batch B, queries T, keys S, width D, heads H. Masks are boolean and True where a query may attend.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from lightning_tfm.errors import UserError
from lightning_tfm.layers.cpu import Linear
from lightning_tfm.layers.norms import HeadNorm
from lightning_tfm.layers.positions import FreqsCis, apply_rotary

KVCache = tuple[Tensor, Tensor]
"""KV cache of an attention layer of a decoder: the keys and the values, (B, H, S, D/H) each.

With grouped-query attention, H is the number of heads of keys and values.
"""


class Attention(nn.Module, ABC):
    """Base class of attention layers.

    Attributes:
        num_heads: number of heads.
        over_memory: whether keys come from the encoder's output instead of the queries' own sequence.
        head_group: the processes among which the heads are divided; None if this process has all heads.

    Note:
        `forward` may use a fused kernel that never materializes the attention weights; `weights` computes them, and
        `with_weights` uses given ones.
    """

    num_heads: int = 1
    over_memory: ClassVar[bool] = True
    head_group: ProcessGroup | None = None

    @abstractmethod
    def weights(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the attention weights (B, H, T, S) that `forward` uses for the same arguments.

        H counts the heads of this process.
        """

    @abstractmethod
    def with_weights(self, weights: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the result of `forward` for the same arguments, with given attention weights (B, H, T, S)."""

    def edited_weights(self, edit: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Return the attention weights (B, H, T, S) of `forward` for the same arguments, edited by a function.

        A subclass in which the weights of a query depend on those of the previous query calls the function for one
        query at a time.
        """
        return edit(self.weights(*args, **kwargs))

    def all_weights(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the attention weights (B, H, T, S) of all heads; called by all processes of `head_group`."""
        weights = self.weights(*args, **kwargs)
        if self.head_group is None:
            return weights
        parts = [torch.empty_like(weights) for _ in range(self.head_group.size())]
        torch.distributed.all_gather(parts, weights.contiguous(), self.head_group)
        return torch.cat(parts, dim=1)


def run_eagerly() -> AbstractContextManager[Any]:
    """Return a context in which compiled networks run eagerly, with hooks."""
    # Without torch._dynamo, which is slow to import, there is no compiled network.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def attention_layers(network: nn.Module) -> dict[str, Attention]:
    """Return the attention layers of a network by name."""
    return {name: layer for name, layer in network.named_modules() if isinstance(layer, Attention)}


@contextmanager
def attention_maps(network: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Record the attention weights of every attention layer of a network that runs within the context.

    Forward hooks repeat each call with `Attention.weights`, which is slow but exact. The weights of repeated calls, one
    per decoding step, are concatenated along T.

    Yields:
        The weights (B, H, T, S) by layer name; the dictionary is filled on exit.

    Note:
        A compiled network runs eagerly within the context, since compiled code skips the hooks.
    """
    calls: dict[str, list[Tensor]] = defaultdict(list)
    maps: dict[str, Tensor] = {}

    def hook_for(name: str) -> Callable[[Attention, tuple[Any, ...], dict[str, Any], Any], None]:
        return lambda layer, args, kwargs, _: calls[name].append(layer.all_weights(*args, **kwargs))

    handles = [
        layer.register_forward_hook(hook_for(name), with_kwargs=True)
        for name, layer in attention_layers(network).items()
    ]
    try:
        with run_eagerly():
            yield maps
        for name, steps in calls.items():
            keys = max(step.size(-1) for step in steps)  # a KV cache grows every step
            maps[name] = torch.cat([F.pad(step, (0, keys - step.size(-1))) for step in steps], dim=2)
    finally:
        for handle in handles:
            handle.remove()


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return the causal mask (T, S), True up to the position of each query; the last query attends to all keys."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def scaled_dot_product_weights(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool = False) -> Tensor:
    """Return the attention weights softmax(Q K^T / sqrt(D/H)) (B, H, T, S) (Vaswani et al. 2017, equation 1).

    Args:
        query: the queries (B, H, T, D/H).
        key: the keys (B, H, S, D/H).
        mask: the mask, broadcastable to (B, H, T, S), or biases of the scores; None to attend to all keys.
        is_causal: whether to use the causal mask instead of `mask`.
    """
    scores = (query / math.sqrt(query.size(-1))) @ key.transpose(-2, -1)  # products of unscaled queries can overflow
    if is_causal:
        mask = causal_mask(query.size(-2), key.size(-2), query.device)
    if mask is not None and mask.dtype == torch.bool:
        # Not -inf: a query that may attend to no key has a finite context, as with the fused kernel. Half of the lowest
        # number, so that adding a score does not overflow. On a CPU, an addition is faster than masked_fill.
        hidden = torch.finfo(scores.dtype).min / 2
        scores += torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask, hidden)
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1)


MAX_UNFUSED_KEYS = 128
"""Maximum number of keys for which attention is trained without the fused kernel on a CPU in half precision.

Up to about this number, the weights take no more memory than queries, keys and values.
"""


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool = False
) -> Tensor:
    """Return the contexts softmax(Q K^T / sqrt(D/H)) V (B, H, T, D/H) (Vaswani et al. 2017, equation 1).

    The other arguments are those of `scaled_dot_product_weights`.

    Note:
        The fused kernel stores no weights (B, H, T, S) for the backward pass, which dropout on them would need. In half
        precision on a CPU, its backward pass takes several times as long as separate matrix products (torch 2.13), so
        these are used for short sequences.
    """
    is_half = query.element_size() < 4 or torch.is_autocast_enabled("cpu")
    if query.device.type == "cpu" and is_half and query.requires_grad and key.size(2) <= MAX_UNFUSED_KEYS:
        weights = scaled_dot_product_weights(query, key, mask, is_causal)
        return weights.to(value.dtype) @ value
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal)


def check_num_heads(d_model: int, num_heads: int) -> None:
    """Raise UserError if d_model is not divisible by num_heads."""
    if num_heads < 1 or d_model < num_heads or d_model % num_heads:
        below = max(1, d_model // max(1, num_heads)) * num_heads
        raise UserError(
            f"d_model must be divisible by num_heads ({num_heads}), but is {d_model}; "
            f"try {below} or {below + num_heads}"
        )


def split_heads(projected: Tensor, *num_heads: int) -> list[Tensor]:
    """Split projections (B, T, N d) of N heads of width d into parts (B, H, T, d) whose numbers of heads H sum to N."""
    # Split parts before heads: splitting all heads at once would copy the gradients once more in the backward pass.
    d_head = projected.size(-1) // sum(num_heads)
    parts = projected.split([number * d_head for number in num_heads], dim=-1)
    return [part.unflatten(-1, (-1, d_head)).transpose(1, 2) for part in parts]


def join_heads(contexts: Tensor) -> Tensor:
    """Join the contexts (B, H, T, d) of the heads to (B, T, H d), the inverse of `split_heads` for one part."""
    return contexts.transpose(1, 2).flatten(2)


class SelfAttention(Attention):
    """Multi-head self-attention (Vaswani et al. 2017, 3.2.2).

    Args:
        d_model: width D.
        num_heads: number of heads H; must divide d_model unless d_head is given.
        bias: whether the projections have a bias.
        num_kv_heads: number of heads of keys and values, each of which is shared by H / num_kv_heads consecutive heads
            of queries (grouped-query attention, Ainslie et al. 2023); None for H.
        d_head: width of a head; None for D/H.
        qk_norm_eps: epsilon of an RMSNorm of the queries and of the keys of each head, before their rotation (QK-norm,
            Henry et al. 2020, there with a norm of 1); None without these norms.

    Attributes:
        num_kv_heads: number of heads of keys and values.
        fused: name of the linear layer that computes several projections, and their relative sizes.

    Raises:
        UserError: if the numbers of heads do not divide each other or the width.
    """

    over_memory = False

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        bias: bool = True,
        num_kv_heads: int | None = None,
        d_head: int | None = None,
        qk_norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        if d_head is None:
            check_num_heads(d_model, num_heads)
            d_head = d_model // num_heads
        if num_kv_heads is None:
            num_kv_heads = num_heads
        if num_heads % num_kv_heads:
            raise UserError(
                f"num_kv_heads must divide num_heads ({num_heads}), but is {num_kv_heads}; "
                f"try {math.gcd(num_heads, num_kv_heads)}"
            )
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.fused = ("qkv_proj", (num_heads // num_kv_heads, 1, 1))
        # One matrix product instead of three.
        self.qkv_proj = Linear(d_model, (num_heads + 2 * num_kv_heads) * d_head, bias=bias)
        self.out_proj = Linear(num_heads * d_head, d_model, bias=bias)
        self.q_norm, self.k_norm = (
            nn.Identity() if qk_norm_eps is None else HeadNorm(d_head, qk_norm_eps) for _ in range(2)
        )

    def _project(self, x: Tensor, past: KVCache | None, freqs_cis: FreqsCis | None) -> tuple[Tensor, KVCache]:
        """Return the queries, and the KV cache with the keys and values of x."""
        query, key, value = split_heads(self.qkv_proj(x), self.num_heads, self.num_kv_heads, self.num_kv_heads)
        # The cache contains rotated keys.
        query, key = apply_rotary(self.q_norm(query), freqs_cis), apply_rotary(self.k_norm(key), freqs_cis)
        if past is not None:
            key, value = torch.cat((past[0], key), dim=2), torch.cat((past[1], value), dim=2)
        return query, (key, value)

    def _repeat(self, heads: Tensor) -> Tensor:
        """Repeat the keys or values (B, num_kv_heads, S, d) for each head of queries, (B, H, S, d)."""
        if self.num_kv_heads == self.num_heads:
            return heads
        groups = self.num_heads // self.num_kv_heads
        return heads.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
        past: KVCache | None = None,
        freqs_cis: FreqsCis | None = None,
    ) -> tuple[Tensor, KVCache]:
        """Attend from x to the cached positions, if any, and to x itself.

        Args:
            x: the input (B, T, D).
            mask: the positions to which each query may attend, broadcastable to (B, H, T, S), where S includes the
                cache; or biases of the scores, see `Positions.mask`.
            is_causal: whether to mask later positions; requires `mask` and `past` to be None.
            past: the KV cache of earlier calls.
            freqs_cis: the rotations of the positions of x, see `Positions.rotations`.

        Returns:
            The context (B, T, D), and the KV cache for the next call.
        """
        assert not (is_causal and past is not None)
        query, cache = self._project(x, past, freqs_cis)
        key, value = map(self._repeat, cache)
        context = scaled_dot_product_attention(query, key, value, mask, is_causal)
        return self.out_proj(join_heads(context)), cache

    def weights(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
        past: KVCache | None = None,
        freqs_cis: FreqsCis | None = None,
    ) -> Tensor:
        query, (key, _) = self._project(x, past, freqs_cis)
        return scaled_dot_product_weights(query, self._repeat(key), mask, is_causal)

    def with_weights(
        self,
        weights: Tensor,
        x: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
        past: KVCache | None = None,
        freqs_cis: FreqsCis | None = None,
    ) -> tuple[Tensor, KVCache]:
        _, cache = self._project(x, past, freqs_cis)
        value = self._repeat(cache[1])
        return self.out_proj(join_heads(weights.to(value.dtype) @ value)), cache


class CrossAttention(Attention):
    """Multi-head cross-attention of a decoder over the memory, the output of the encoder.

    Args:
        d_model: width D.
        num_heads: number of heads H; must divide d_model.
        bias: whether the projections have a bias.

    Attributes:
        fused: see `SelfAttention`.
    """

    fused = ("kv_proj", (1, 1))

    def __init__(self, d_model: int, num_heads: int, bias: bool = True) -> None:
        super().__init__()
        check_num_heads(d_model, num_heads)
        self.num_heads = num_heads
        self.q_proj = Linear(d_model, d_model, bias=bias)
        self.kv_proj = Linear(d_model, 2 * d_model, bias=bias)
        self.out_proj = Linear(d_model, d_model, bias=bias)

    def project_memory(self, memory: Tensor, freqs_cis: FreqsCis | None = None) -> KVCache:
        """Return the keys and values of the memory (B, S, D), computed once for all decoding steps.

        The rotations are those of the positions of the memory, see `Positions.rotations`.
        """
        key, value = split_heads(self.kv_proj(memory), self.num_heads, self.num_heads)
        return apply_rotary(key, freqs_cis), value

    def _query(self, x: Tensor, freqs_cis: FreqsCis | None) -> Tensor:
        return apply_rotary(split_heads(self.q_proj(x), self.num_heads)[0], freqs_cis)

    def forward(self, x: Tensor, memory: KVCache, mask: Tensor, freqs_cis: FreqsCis | None = None) -> Tensor:
        """Return the context (B, T, D) of x over the memory.

        Args:
            x: the input (B, T, D).
            memory: the keys and values of the memory, see `project_memory`.
            mask: the mask (B, 1, 1, S), True at memory positions that are not padding; or biases of the scores, see
                `Positions.mask`.
            freqs_cis: the rotations of the positions of x, see `Positions.rotations`.
        """
        context = scaled_dot_product_attention(self._query(x, freqs_cis), *memory, mask)
        return self.out_proj(join_heads(context))

    def weights(self, x: Tensor, memory: KVCache, mask: Tensor, freqs_cis: FreqsCis | None = None) -> Tensor:
        return scaled_dot_product_weights(self._query(x, freqs_cis), memory[0], mask)

    def with_weights(
        self, weights: Tensor, x: Tensor, memory: KVCache, mask: Tensor, freqs_cis: FreqsCis | None = None
    ) -> Tensor:
        return self.out_proj(join_heads(weights.to(memory[1].dtype) @ memory[1]))
