"""Building blocks of the networks."""

from lightning_tfm.layers.attention import (
    AdditiveAttention,
    Attention,
    CrossAttention,
    KVCache,
    SelfAttention,
    attention_maps,
    causal_mask,
    check_num_heads,
    scaled_dot_product_weights,
    split_heads,
)
from lightning_tfm.layers.cpu import Dropout, Linear
from lightning_tfm.layers.positions import (
    FreqsCis,
    LearnedPositions,
    RotaryPositions,
    SinusoidalPositions,
    apply_rotary,
    positional_encoding,
)
from lightning_tfm.layers.transformer import AddNorm, FeedForward, TransformerLayer

__all__ = [
    "AddNorm",
    "AdditiveAttention",
    "Attention",
    "CrossAttention",
    "Dropout",
    "FeedForward",
    "FreqsCis",
    "KVCache",
    "LearnedPositions",
    "Linear",
    "RotaryPositions",
    "SelfAttention",
    "SinusoidalPositions",
    "TransformerLayer",
    "apply_rotary",
    "attention_maps",
    "causal_mask",
    "check_num_heads",
    "positional_encoding",
    "scaled_dot_product_weights",
    "split_heads",
]
