"""GPT, a decoder-only Transformer (Radford et al. 2019), also with the settings of its successors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from lightning_tfm.errors import UserError
from lightning_tfm.layers import (
    Activation,
    Dropout,
    FreqsCis,
    LayerCache,
    Linear,
    NormType,
    PositionScheme,
    SelfAttention,
    TransformerLayer,
    activation_function,
    add_lora,
    causal_mask,
    check_num_heads,
    merge_lora,
    norm_layer,
    position_scheme,
)
from lightning_tfm.networks.network import CausalNetwork, State, check_max_length
from lightning_tfm.tokenization import NUM_SPECIAL, PAD

LOWEST = torch.finfo(torch.bfloat16).min / 2
"""Logit bias of ids with probability 0, far below all logits but finite in float32 and bfloat16."""


def default_d_ff(d_model: int, activation: Activation) -> int:
    """Return the width of the hidden layer of the feed-forward network if `d_ff` of `GPT` is null."""
    return 8 * math.ceil(d_model / 3) if activation == "swiglu" else 4 * d_model


class GPT(CausalNetwork):
    """Decoder-only Transformer, which reads a pair as one sequence `source EOS BOS target`, or a text without a source.

    Args:
        vocab_size: number of ids.
        d_model: width.
        num_heads: number of attention heads; must divide d_model unless d_head is set.
        num_layers: number of layers.
        dropout: dropout on embeddings and on the output of each sub-layer.
        max_length: maximum length of a sequence in tokens, source and target together, or of each of them with coupled
            positions; if null, `fit` infers it from the data.
        bias: whether linear layers and norms have a bias.
        activation: "relu", "gelu" (Hendrycks & Gimpel 2016), "gelu_tanh", its tanh approximation of GPT-2, which is
            twice as slow on a CPU, "relu_squared" (So et al. 2021) or "swiglu" (Shazeer 2020).
        text_only: whether PAD, BOS and EOS have probability 0, as required by the weights of GPT-2, which has none.
        positions: the position scheme, "learned" in GPT-2; see `position_scheme`.
        rotary_base: base of the wavelengths of rotary positions, 10000 in Su et al. (2021); a larger one distinguishes
            positions at larger distances.
        d_ff: width of the hidden layer of the feed-forward network; if null, 4 x d_model or, with "swiglu", 8/3 x
            d_model rounded up to a multiple of 8, so that its three matrices have as many weights (Shazeer 2020).
        d_head: width of an attention head; if null, d_model / num_heads.
        num_kv_heads: number of heads of keys and values, which must divide num_heads (grouped-query attention, Ainslie
            et al. 2023); if null, num_heads. It divides the size of the cache in decoding.
        qk_norm: whether queries and keys are normalized before their rotation (QK-norm, Henry et al. 2020), by an
            RMSNorm whose weight all heads of a layer share.
        norm_type: "layer" for layer norm (Ba et al. 2016), or "rms" for RMSNorm (Zhang & Sennrich 2019).
        norm_eps: epsilon of all norms.
        window: number of tokens to which a token attends in each layer, itself and those before it (sliding window
            attention, Beltagy et al. 2020); if null, all.
        tie_embeddings: whether the embedding and the output layer share their weights (Press & Wolf 2017).
        logit_cap: bound c of the logits, c tanh(logits / c) (Gemma Team 2024); if null, none.
        lora_rank: rank of the trained updates of the linear layers, whose own weights are frozen, as are all others
            (LoRA, Hu et al. 2022); if null, all weights are trained.

    Note:
        A window hides keys, but their attention scores are computed and the cache keeps them.
    """

    least: ClassVar[Mapping[str, int]] = {"norm_eps": 0, "rotary_base": 0, "logit_cap": 0}
    special_bias: Tensor | None

    def __init__(
        self,
        vocab_size: int,
        d_model: int = 128,
        num_heads: int = 4,
        num_layers: int = 4,
        dropout: float = 0.0,
        max_length: int | None = None,
        bias: bool = True,
        activation: Activation = "gelu",
        text_only: bool = False,
        positions: PositionScheme = "learned",
        rotary_base: float = 10000.0,
        d_ff: int | None = None,
        d_head: int | None = None,
        num_kv_heads: int | None = None,
        qk_norm: bool = False,
        norm_type: NormType = "layer",
        norm_eps: float = 1e-5,
        window: int | None = None,
        tie_embeddings: bool = True,
        logit_cap: float | None = None,
        lora_rank: int | None = None,
    ) -> None:
        super().__init__()
        if d_head is None:
            check_num_heads(d_model, num_heads)
        if logit_cap is not None and not 0 < logit_cap < math.inf:
            raise UserError(f"logit_cap must be above 0 and finite, but is {logit_cap}; try 30 or null")
        self.max_length = check_max_length(max_length)
        self.window, self.logit_cap = window, logit_cap
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.positions = position_scheme(positions, self.max_length, d_model, num_heads, d_head, rotary_base)
        # Coupled positions do not tell source from target, so these have segment embeddings (Devlin et al. 2019).
        self.segments = nn.Embedding(2, d_model) if self.positions.couples else None
        self.dropout = Dropout(dropout)
        if d_ff is None:
            d_ff = default_d_ff(d_model, activation)
        new_norm = partial(norm_layer, norm_type, bias=bias, eps=norm_eps)
        eps = norm_eps if qk_norm else None
        attention = partial(SelfAttention, num_kv_heads=num_kv_heads, d_head=d_head, qk_norm_eps=eps)
        new_layer = partial(
            TransformerLayer, d_model, num_heads, d_ff, dropout, "pre", activation_function(activation), bias,
            new_norm=new_norm, new_self_attention=attention,
        )  # fmt: skip
        self.layers = nn.ModuleList(new_layer() for _ in range(num_layers))
        self.norm = new_norm(d_model)
        self.head = Linear(d_model, vocab_size, bias=False)
        if tie_embeddings:
            self.head.weight = self.embedding.weight
        special_bias = torch.zeros(vocab_size).index_fill(0, torch.arange(NUM_SPECIAL), LOWEST) if text_only else None
        self.register_buffer("special_bias", special_bias, persistent=False)
        self.apply(self._initialize)
        # Scaled to keep the variance of the residual sum of 2 x num_layers sub-layers (GPT-2, 2.3).
        for layer in cast(Iterable[TransformerLayer], self.layers):
            for last in (layer.self_attention.out_proj, cast(Linear, layer.feed_forward[2])):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * num_layers))
        if lora_rank is not None:
            add_lora(self, self.layers, lora_rank)

    def merge_lora(self) -> None:
        """Add the updates of `lora_rank`, if any, to the weights of their layers, all of which are trained again."""
        merge_lora(self)
        self.requires_grad_(True)
        self.hyper_parameters = self.hyper_parameters | {"lora_rank": None}

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def span(self, source_length: int, target_length: int) -> int:
        return self.positions.span(source_length, target_length)

    def max_lengths(self, target_length: int) -> tuple[int, int]:
        return (self.max_length, target_length) if self.positions.couples else super().max_lengths(target_length)

    def _logits(self, x: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states (..., D)."""
        logits = self.head(self.norm(x))
        if self.logit_cap is not None:
            logits = self.logit_cap * (logits / self.logit_cap).tanh()
        return logits if self.special_bias is None else logits + self.special_bias

    def _within_window(self, mask: Tensor | None, real: Tensor) -> Tensor | None:
        """Return a mask that also hides the keys before the window; unchanged without a window.

        Args:
            mask: the mask (B, 1, T, S) of the last T of S tokens; None for a causal mask, which hides padding on the
                right.
            real: the mask (B, S) of the tokens, False at padding, which does not count.
        """
        if self.window is None:
            return mask
        S = real.size(1)
        if mask is None:
            mask, indices = causal_mask(S, S, real.device), torch.arange(S, device=real.device).unsqueeze(0)
        else:
            indices = real.cumsum(1)
        distances = indices[:, -mask.size(-2) :, None] - indices[:, None]  # (B, T, S)
        return mask & (distances < self.window).unsqueeze(1)

    def _embed(self, tokens: Tensor, positions: Tensor, source_length: int) -> tuple[Tensor, FreqsCis | None]:
        """Return the embeddings (B, T, D) of tokens (B, T) at positions (T) or (B, T), and the rotations, if any.

        The first source_length columns are those of the source, the others those of the target.
        """
        x = self.positions.embed(self.embedding(tokens), positions)
        if self.segments is not None:
            x = x + self.segments((torch.arange(tokens.size(1), device=tokens.device) >= source_length).long())
        return self.dropout(x), self.positions.rotations(positions)

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        S, T = source.size(1), target_in.size(1)
        self.check_lengths(S, T)
        real = source != PAD
        positions = self.positions.number_sequence(real, T)
        x, freqs_cis = self._embed(torch.cat((source, target_in), dim=1), positions, S)  # (B, S + T, D)
        real = nn.functional.pad(real, (0, T), value=True)
        mask = None
        if S > 0:  # otherwise, a causal mask hides padding on the right
            mask = causal_mask(S + T, S + T, source.device) & real[:, None, None]
        mask = self.positions.mask(positions, positions, self._within_window(mask, real))
        for layer in self.layers:
            x = layer(x, mask, mask is None, freqs_cis)
        return self._logits(x[:, S:])  # (B, T, V)

    def encode(self, source: Tensor) -> State:
        S = source.size(1)
        self.check_lengths(S, 0)
        real = source != PAD
        positions = torch.arange(S, device=source.device)
        x, freqs_cis = self._embed(source, positions, S)
        mask = self._within_window(None, real)  # causal, which hides padding on the right
        mask = self.positions.mask(positions, positions, mask)
        x, caches = self._step(x, [None] * len(self.layers), mask, freqs_cis)
        return caches, real, self.positions.target_start(real)

    def decode_step(self, token: Tensor, state: State) -> tuple[Tensor, State]:
        caches, real, position = state
        if not self.positions.couples:  # whose target length is unknown here
            self.check_lengths(real.size(1), 1)
        real = nn.functional.pad(real, (0, 1), value=True)  # (B, keys so far)
        x, freqs_cis = self._embed(token.unsqueeze(1), position.unsqueeze(1), 0)  # (B, 1, D)
        mask = self._within_window(real[:, None, None], real)
        mask = self.positions.mask(position.unsqueeze(1), real.cumsum(1) - 1, mask)
        x, caches = self._step(x, caches, mask, freqs_cis)
        return self._logits(x).squeeze(1), (caches, real, position + 1)

    def _step(
        self, x: Tensor, caches: Sequence[LayerCache | None], mask: Tensor | None, freqs_cis: FreqsCis | None
    ) -> tuple[Tensor, tuple[LayerCache, ...]]:
        """Return the output (B, T, D) and the caches of all layers, see `TransformerLayer.step`."""
        extended = []
        for layer, cache in zip(cast(Iterable[TransformerLayer], self.layers), caches, strict=True):
            x, cache = layer.step(x, cache, mask, freqs_cis)
            extended.append(cache)
        return x, tuple(extended)
