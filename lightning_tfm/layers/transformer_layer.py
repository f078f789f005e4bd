"""Layer of Transformer encoders and decoders, and its sub-layers.

Shapes: batch B, queries T, keys S, width D, heads H. Masks are boolean and True where a query may attend.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from lightning_tfm.layers.attention import CrossAttention, KVCache, MonotonicCrossAttention, SelfAttention
from lightning_tfm.layers.cpu import Dropout, Linear
from lightning_tfm.layers.positions import FreqsCis

CrossAttentionKind = Literal["dot_product", "monotonic"]
"""Cross-attention of a layer: `CrossAttention` or `MonotonicCrossAttention`."""


class FeedForward(nn.Sequential):
    """Position-wise feed-forward network W_2 f(W_1 x + b_1) + b_2 (Vaswani et al. 2017, equation 2).

    Args:
        d_model: width of input and output.
        d_ff: width of the hidden layer.
        activation: the activation f.
        bias: whether the linear layers have a bias.
    """

    def __init__(self, d_model: int, d_ff: int, activation: nn.Module, bias: bool = True) -> None:
        super().__init__(Linear(d_model, d_ff, bias=bias), activation, Linear(d_ff, d_model, bias=bias))


class AddNorm(nn.Module):
    """Residual connection and layer norm of a sub-layer.

    Post-norm is LayerNorm(x + Sublayer(x)), as in the paper (Vaswani et al. 2017, 3.1). Pre-norm is
    x + Sublayer(LayerNorm(x)) and trains without a long warm-up (Xiong et al. 2020).

    Args:
        d_model: width D.
        norm: "pre" or "post".
        dropout: dropout on the output of the sub-layer.
        bias: whether the norm has a bias.
    """

    def __init__(self, d_model: int, norm: Literal["pre", "post"], dropout: float, bias: bool = True) -> None:
        super().__init__()
        self.is_pre = norm == "pre"
        self.norm = nn.LayerNorm(d_model, bias=bias)
        self.dropout = Dropout(dropout)

    def before(self, x: Tensor) -> Tensor:
        """Return the input of the sub-layer for x (B, T, D)."""
        return self.norm(x) if self.is_pre else x

    def forward(self, x: Tensor, update: Tensor) -> Tensor:
        """Return the sum of x and the output of the sub-layer, normalized if post-norm.

        Args:
            x: the input of the residual connection (B, T, D).
            update: the output of the sub-layer (B, T, D).
        """
        x = x + self.dropout(update)
        return x if self.is_pre else self.norm(x)


class TransformerLayer(nn.Module):
    """Transformer layer of self-attention, optional cross-attention and a feed-forward network.

    Args:
        d_model: width D.
        num_heads: number of heads H; must divide d_model.
        d_ff: width of the hidden layer of the feed-forward network.
        dropout: dropout on the output of each sub-layer.
        norm: "pre" or "post", see `AddNorm`.
        activation: activation of the feed-forward network.
        bias: whether linear layers and norms have a bias.
        cross_attention: how the layer attends to an encoder; None without an encoder.
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
    ) -> None:
        super().__init__()
        self.self_attention = SelfAttention(d_model, num_heads, bias)
        self.add_self = AddNorm(d_model, norm, dropout, bias)
        if cross_attention is not None:
            kinds: dict[str, type[CrossAttention | MonotonicCrossAttention]] = {
                "dot_product": CrossAttention,
                "monotonic": MonotonicCrossAttention,
            }
            self.cross_attention = kinds[cross_attention](d_model, num_heads, bias)
            self.add_cross = AddNorm(d_model, norm, dropout, bias)
        self.feed_forward = FeedForward(d_model, d_ff, activation, bias)
        self.add_feed_forward = AddNorm(d_model, norm, dropout, bias)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
        past: KVCache | None = None,
        memory: KVCache | None = None,
        memory_mask: Tensor | None = None,
        freqs_cis: FreqsCis | None = None,
        need_weights: bool = False,
        previous: Tensor | None = None,
    ) -> tuple[Tensor, KVCache, Tensor | None]:
        """Apply the layer.

        Args:
            x: the input (B, T, D).
            mask: the mask of the self-attention, see `SelfAttention.forward`.
            is_causal: whether the self-attention is causal.
            past: the KV cache of the self-attention from earlier calls.
            memory: the keys and values of the encoder's output, see `CrossAttention.project_memory`; None without an
                encoder.
            memory_mask: the mask of the cross-attention, see `CrossAttention.forward`.
            freqs_cis: the rotations of the positions of x, see `Positions.rotations`.
            need_weights: whether to return the weights of the cross-attention, which dot-product attention otherwise
                does not compute.
            previous: the weights (B, H, S) of a monotonic cross-attention for the last query of earlier calls.

        Returns:
            The output (B, T, D), the KV cache of the self-attention for the next call, and the weights of the
            cross-attention (B, H, T, S); None unless `need_weights` or it is monotonic.
        """
        context, past = self.self_attention(self.add_self.before(x), mask, is_causal, past, freqs_cis)
        x = self.add_self(x, context)
        weights = None
        if memory is not None:
            assert memory_mask is not None
            query = self.add_cross.before(x)
            if isinstance(self.cross_attention, MonotonicCrossAttention):
                context, weights = self.cross_attention(query, memory, memory_mask, previous)
            else:
                context = self.cross_attention(query, memory, memory_mask, freqs_cis)
                if need_weights:
                    weights = self.cross_attention.weights(query, memory, memory_mask, freqs_cis)
            x = self.add_cross(x, context)
        return self.add_feed_forward(x, self.feed_forward(self.add_feed_forward.before(x))), past, weights
