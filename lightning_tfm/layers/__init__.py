"""Building blocks of the networks."""

from lightning_tfm.layers.additive import AdditiveAttention, LocationAwareAttention
from lightning_tfm.layers.attention import (
    Attention,
    CrossAttention,
    KVCache,
    SelfAttention,
    attention_layers,
    attention_maps,
    causal_mask,
    check_num_heads,
    join_heads,
    scaled_dot_product_weights,
    split_heads,
)
from lightning_tfm.layers.cpu import LSTM, Dropout, Int8Linear, Linear, check_dropout, quantize
from lightning_tfm.layers.lstm_with_attention import lstm_with_attention
from lightning_tfm.layers.monotonic import (
    HardMonotonicAttention,
    MonotonicAttention,
    MonotonicCrossAttention,
    monotonic_weights,
)
from lightning_tfm.layers.pointer import PointerGenerator
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
from lightning_tfm.layers.precision import at_least_float32
from lightning_tfm.layers.transformer_layer import (
    AddNorm,
    CrossAttentionKind,
    FeedForward,
    LayerCache,
    TransformerLayer,
)

__all__ = [
    "LSTM",
    "AddNorm",
    "AdditiveAttention",
    "AlibiPositions",
    "Attention",
    "CoupledPositions",
    "CrossAttention",
    "CrossAttentionKind",
    "Dropout",
    "FeedForward",
    "FreqsCis",
    "HardMonotonicAttention",
    "Int8Linear",
    "KVCache",
    "LayerCache",
    "LearnedPositions",
    "Linear",
    "LocationAwareAttention",
    "MonotonicAttention",
    "MonotonicCrossAttention",
    "PointerGenerator",
    "PositionScheme",
    "Positions",
    "RandomizedPositions",
    "RotaryPositions",
    "SelfAttention",
    "SinusoidalPositions",
    "TransformerLayer",
    "apply_rotary",
    "at_least_float32",
    "attention_layers",
    "attention_maps",
    "causal_mask",
    "check_dropout",
    "check_num_heads",
    "join_heads",
    "lstm_with_attention",
    "monotonic_weights",
    "position_scheme",
    "quantize",
    "scaled_dot_product_weights",
    "split_heads",
]
