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
    AlibiPositions,
    CoupledPositions,
    FreqsCis,
    LearnedPositions,
    Positions,
    PositionScheme,
    RandomizedPositions,
    RotaryPositions,
    SinusoidalPositions,
    apply_rotary,
    position_scheme,
)
from lightning_tfm.layers.transformer import AddNorm, FeedForward, TransformerLayer

__all__ = [
    "AddNorm",
    "AdditiveAttention",
    "AlibiPositions",
    "Attention",
    "CoupledPositions",
    "CrossAttention",
    "Dropout",
    "FeedForward",
    "FreqsCis",
    "KVCache",
    "LearnedPositions",
    "Linear",
    "PositionScheme",
    "Positions",
    "RandomizedPositions",
    "RotaryPositions",
    "SelfAttention",
    "SinusoidalPositions",
    "TransformerLayer",
    "apply_rotary",
    "attention_maps",
    "causal_mask",
    "check_num_heads",
    "position_scheme",
    "scaled_dot_product_weights",
    "split_heads",
]
