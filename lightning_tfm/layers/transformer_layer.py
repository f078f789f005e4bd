"""Layer of Transformer encoders and decoders, and its sub-layers.

Shapes: batch B, queries T, keys S, width D, heads H. Masks are boolean and True where a query may attend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_tfm.errors import UserError
from lightning_tfm.layers.attention import CrossAttention, KVCache, SelfAttention
from lightning_tfm.layers.cpu import Dropout, Linear
from lightning_tfm.layers.monotonic import MonotonicCrossAttention
from lightning_tfm.layers.norms import Norm
from lightning_tfm.layers.positions import FreqsCis

LayerCache = tuple[Tensor, ...]
"""Cache of a decoder layer: keys and values of its self-attention (B, H, T, D/H) each.

If the cross-attention is monotonic, or the layer keeps weights, its weights (B, H, T, S) in the last call follow.
"""

CrossAttentionKind = Literal["dot_product", "monotonic"]
"""Cross-attention of a layer: `CrossAttention` or `MonotonicCrossAttention`."""


Activation = Literal["relu", "gelu", "gelu_tanh", "relu_squared", "swiglu"]
"""Names of the activations, see `activation_function`."""


class SquaredReLU(nn.Module):
    """Squared ReLU, max(x, 0)^2 (So et al. 2021)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations of a tensor of any shape."""
        return F.relu(x).square()


class SwiGLU(nn.Module):
    """SwiGLU, x sigmoid(x) y for the halves x and y of an input (Shazeer 2020); x sigmoid(x) is the gate."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations (..., F) of an input (..., 2 F)."""
        gate, linear = x.chunk(2, dim=-1)
        return F.silu(gate) * linear


def activation_function(name: Activation) -> nn.Module:
    """Return an activation of a feed-forward network.

    Args:
        name: "relu"; "gelu" (Hendrycks & Gimpel 2016), or "gelu_tanh", its tanh approximation; "relu_squared", see
            `SquaredReLU`; or "swiglu", see `SwiGLU`.

    Raises:
        UserError: if there is no activation of this name.
    """
    match name:
        case "relu":
            # In place, it saves a write of the widest tensor of a layer, whose sign suffices for the gradient.
            return nn.ReLU(inplace=True)
        case "gelu":
            return nn.GELU()
        case "gelu_tanh":
            return nn.GELU(approximate="tanh")
        case "relu_squared":
            return SquaredReLU()
        case "swiglu":
            return SwiGLU()
    raise UserError(f"activation must be one of {', '.join(get_args(Activation))}, but is {name!r}; try gelu")


class FeedForward(nn.Sequential):
    """Position-wise feed-forward network W_2 f(W_1 x + b_1) + b_2 (Vaswani et al. 2017, equation 2).

    With `SwiGLU`, W_1 computes both of its inputs; the upper half of its rows belongs to the gate, x sigmoid(x).

    Attributes:
        fused: see `SelfAttention`.
    """

    def __init__(self, d_model: int, d_ff: int, activation: nn.Module, bias: bool = True) -> None:
        inputs = (1, 1) if isinstance(activation, SwiGLU) else (1,)
        super().__init__(Linear(d_model, len(inputs) * d_ff, bias=bias), activation, Linear(d_ff, d_model, bias=bias))
        self.fused = ("0", inputs)


class AddNorm(nn.Module):
    """Residual connection and norm of a sub-layer, with dropout on its output.

    Post-norm is Norm(x + Sublayer(x)), as in the paper (Vaswani et al. 2017, 3.1). Pre-norm is x + Sublayer(Norm(x))
    and trains without a long warm-up (Xiong et al. 2020). `new_norm` returns a norm of a width.
    """

    def __init__(
        self,
        d_model: int,
        norm: Literal["pre", "post"],
        dropout: float,
        new_norm: Callable[[int], Norm] = nn.LayerNorm,
    ) -> None:
        super().__init__()
        self.is_pre = norm == "pre"
        self.norm = new_norm(d_model)
        self.dropout = Dropout(dropout)

    def before(self, x: Tensor) -> Tensor:
        """Return the input of the sub-layer for x (B, T, D)."""
        return self.norm(x) if self.is_pre else x

    def forward(self, x: Tensor, update: Tensor) -> Tensor:
        """Return the sum of x and the output of the sub-layer, (B, T, D) each, normalized if post-norm."""
        x = x + self.dropout(update)
        return x if self.is_pre else self.norm(x)


class TransformerLayer(nn.Module):
    """Transformer layer of self-attention, optional cross-attention to an encoder and a feed-forward network.

    Args:
        d_model: width D.
        num_heads: number of heads H; must divide d_model.
        d_ff: width of the hidden layer of the feed-forward network.
        dropout: dropout on the output of each sub-layer.
        norm: "pre" or "post", see `AddNorm`.
        activation: activation of the feed-forward network.
        bias: whether linear layers have a bias.
        cross_attention: how the layer attends to an encoder; None without an encoder.
        keeps_weights: whether the cache, which `forward` then returns too, has the weights of dot-product
            cross-attention.
        new_norm: a function that returns a norm of a width.
        new_self_attention: `SelfAttention`, or a function of its first arguments d_model, num_heads and bias.
    """

    COLUMNS = ("self_attention.qkv_proj", "cross_attention.q_proj", "cross_attention.kv_proj", "feed_forward.0")
    """Linear layers whose outputs are divided by tensor parallelism."""

    ROWS = ("self_attention.out_proj", "cross_attention.out_proj", "feed_forward.2")
    """Linear layers whose inputs are divided, and whose outputs are added."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        dropout: float,
        norm: Literal["pre", "post"],
        activation: nn.Module,
        bias: bool = True,
        cross_attention: CrossAttentionKind | None = None,
        keeps_weights: bool = False,
        new_norm: Callable[[int], Norm] = nn.LayerNorm,
        new_self_attention: Callable[[int, int, bool], SelfAttention] = SelfAttention,
    ) -> None:
        super().__init__()
        self.keeps_weights = keeps_weights
        self.self_attention = new_self_attention(d_model, num_heads, bias)
        self.add_self = AddNorm(d_model, norm, dropout, new_norm)
        if cross_attention is not None:
            kinds: dict[str, type[CrossAttention | MonotonicCrossAttention]] = {
                "dot_product": CrossAttention,
                "monotonic": MonotonicCrossAttention,
            }
            self.cross_attention = kinds[cross_attention](d_model, num_heads, bias)
            self.add_cross = AddNorm(d_model, norm, dropout, new_norm)
        self.feed_forward = FeedForward(d_model, d_ff, activation, bias)
        self.add_feed_forward = AddNorm(d_model, norm, dropout, new_norm)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
        freqs_cis: FreqsCis | None = None,
        memory: KVCache | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, LayerCache]:
        """Return the output (B, T, D) for a whole sequence, and the cache if `keeps_weights`.

        Args:
            x: the input (B, T, D).
            mask: the mask of the self-attention, see `SelfAttention.forward`.
            is_causal: whether the self-attention is causal; requires `mask` to be None.
            freqs_cis: the rotations of the positions of x, see `Positions.rotations`.
            memory: the keys and values of the encoder's output, see `CrossAttention.project_memory`; None without an
                encoder.
            memory_mask: the mask of the cross-attention, see `CrossAttention.forward`.
        """
        output, cache = self._compute(x, None, mask, is_causal, freqs_cis, memory, memory_mask)
        return (output, cache) if self.keeps_weights else output

    def step(
        self,
        x: Tensor,
        cache: LayerCache | None,
        mask: Tensor | None = None,
        freqs_cis: FreqsCis | None = None,
        memory: KVCache | None = None,
        memory_mask: Tensor | None = None,
    ) -> tuple[Tensor, LayerCache]:
        """Return the output (B, T, D) for the next tokens (B, T, D) of a sequence, and the cache for the next call.

        The cache is None for the first tokens, which are masked causally without a `mask`. A mask includes the cached
        positions. The other arguments are those of `forward`.
        """
        is_causal = mask is None and cache is None and bool(x.size(1) > 0)  # bool, for torch.export
        return self._compute(x, cache, mask, is_causal, freqs_cis, memory, memory_mask)

    def _compute(
        self,
        x: Tensor,
        cache: LayerCache | None,
        mask: Tensor | None,
        is_causal: bool,
        freqs_cis: FreqsCis | None,
        memory: KVCache | None,
        memory_mask: Tensor | None,
    ) -> tuple[Tensor, LayerCache]:
        new_cache: LayerCache
        past = None if cache is None else (cache[0], cache[1])
        context, new_cache = self.self_attention(self.add_self.before(x), mask, is_causal, past, freqs_cis)
        x = self.add_self(x, context)
        if memory is not None:
            assert memory_mask is not None
            query = self.add_cross.before(x)
            if isinstance(self.cross_attention, MonotonicCrossAttention):
                previous = None if cache is None else cache[2][:, :, -1]
                context, weights = self.cross_attention(query, memory, memory_mask, previous)
                new_cache = *new_cache, weights
            else:
                context = self.cross_attention(query, memory, memory_mask, freqs_cis)
                if self.keeps_weights:
                    new_cache = *new_cache, self.cross_attention.weights(query, memory, memory_mask, freqs_cis)
            x = self.add_cross(x, context)
        return self.add_feed_forward(x, self.feed_forward(self.add_feed_forward.before(x))), new_cache
