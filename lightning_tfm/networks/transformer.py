"""Encoder-decoder Transformer (Vaswani et al. 2017)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from lightning_tfm.layers import (
    Activation,
    CrossAttentionKind,
    Dropout,
    KVCache,
    LayerCache,
    Linear,
    NormType,
    PointerGenerator,
    PositionScheme,
    TransformerLayer,
    activation_function,
    check_num_heads,
    norm_layer,
    position_scheme,
)
from lightning_tfm.networks.network import DataProperties, Memory, Seq2SeqNetwork, State, check_max_length
from lightning_tfm.tokenization import PAD


class Transformer(Seq2SeqNetwork):
    """Encoder-decoder Transformer (Vaswani et al. 2017).

    Args:
        vocab_size: number of ids, shared by source and target.
        d_model: width.
        num_heads: number of attention heads; must divide d_model.
        num_layers: number of layers in each of the encoder and the decoder.
        d_ff: width of the hidden layer of the feed-forward network; 4 x d_model in the paper.
        dropout: dropout on embeddings and on the output of each sub-layer, as in the paper (5.4).
        max_length: maximum length of a source and of a target in tokens; if null, `fit` infers it from the data.
        norm: norm before each sub-layer ("pre") or after each residual sum ("post", as in the paper).
        positions: the position scheme, "sinusoidal" in the paper; see `position_scheme`. Source and target are both
            numbered from 0.
        tie_embeddings: whether both embeddings and the output layer share their weights, as in the paper (3.4).
        pointer_generator: whether the decoder can copy tokens of the source (See et al. 2017), by the mean weights of
            the heads of its last cross-attention.
        cross_attention: "dot_product", as in the paper, or "monotonic", whose heads attend to one token each and only
            move from left to right (Raffel et al. 2017), by a loop over the target.
        activation: activation of the feed-forward network: "relu", as in the paper, "gelu" (Hendrycks & Gimpel 2016),
            "gelu_tanh", its tanh approximation, "relu_squared" (So et al. 2021) or "swiglu" (Shazeer 2020), which adds
            half as many weights to the feed-forward network unless d_ff is 2/3 as large.
        norm_type: "layer" for layer norm, as in the paper, or "rms" for RMSNorm (Zhang & Sennrich 2019).
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int = 128,
        num_heads: int = 8,
        num_layers: int = 2,
        d_ff: int = 512,
        dropout: float = 0.1,
        max_length: int | None = None,
        norm: Literal["pre", "post"] = "pre",
        positions: PositionScheme = "sinusoidal",
        tie_embeddings: bool = False,
        pointer_generator: bool = False,
        cross_attention: CrossAttentionKind = "dot_product",
        activation: Activation = "relu",
        norm_type: NormType = "layer",
    ) -> None:
        super().__init__()
        check_num_heads(d_model, num_heads)
        self.max_length = check_max_length(max_length)
        self.scale = math.sqrt(d_model)  # scales embeddings to the size of the positional encodings (3.4)

        new_norm = partial(norm_layer, norm_type)

        def layer(cross_attention: CrossAttentionKind | None, keeps_weights: bool = False) -> TransformerLayer:
            function = activation_function(activation)
            parts = cross_attention, keeps_weights, new_norm
            return TransformerLayer(d_model, num_heads, d_ff, dropout, norm, function, True, *parts)

        def last_norm() -> nn.Module:  # a pre-norm stack ends with an unnormalized sum
            return new_norm(d_model) if norm == "pre" else nn.Identity()

        self.source_embedding = nn.Embedding(vocab_size, d_model)
        self.target_embedding = nn.Embedding(vocab_size, d_model)
        self.source_positions = position_scheme(positions, self.max_length, d_model, num_heads)
        self.target_positions = self.source_positions
        if positions == "learned":
            self.target_positions = position_scheme(positions, self.max_length, d_model, num_heads)
        self.dropout = Dropout(dropout)
        self.encoder, self.encoder_norm = nn.ModuleList(layer(None) for _ in range(num_layers)), last_norm()
        needed = [pointer_generator and index == num_layers - 1 for index in range(num_layers)]
        self.decoder, self.decoder_norm = nn.ModuleList(layer(cross_attention, keeps) for keeps in needed), last_norm()
        self.head = Linear(d_model, vocab_size, bias=False)
        # With a small standard deviation, embeddings do not dominate the positions.
        for embedding in (self.source_embedding, self.target_embedding):
            nn.init.normal_(embedding.weight, std=0.02)
        if tie_embeddings:
            self.source_embedding.weight = self.target_embedding.weight
            self.head.weight = self.target_embedding.weight
        # Of the output and the input of the decoder; the output contains the context.
        self.pointer = PointerGenerator(2 * d_model) if pointer_generator else None
        self.is_monotonic = cross_attention == "monotonic"
        self.is_traceable = not self.is_monotonic

    @classmethod
    def data_settings(cls, data: DataProperties) -> dict[str, Any]:
        longest = max(data.max_source_length, data.max_target_length)
        return super().data_settings(data) | {"max_length": longest}

    def _encode(self, source: Tensor, positions: Tensor) -> tuple[KVCache, ...]:
        """Return the keys and values of the source for each decoder layer."""
        real = (source != PAD)[:, None, None]
        x = self.source_positions.embed(self.source_embedding(source) * self.scale, positions)
        x, rotations = self.dropout(x), self.source_positions.rotations(positions)  # (B, S, D)
        mask = self.source_positions.mask(positions, positions, real)
        for layer in self.encoder:
            x = layer(x, mask, freqs_cis=rotations)
        memory = self.encoder_norm(x)
        layers = cast(Iterable[TransformerLayer], self.decoder)
        return tuple(layer.cross_attention.project_memory(memory, rotations) for layer in layers)

    def _decode(
        self,
        target: Tensor,
        positions: Tensor,
        source: Tensor,
        source_positions: Tensor,
        memories: tuple[KVCache, ...],
        caches: tuple[LayerCache, ...] | None = None,
    ) -> tuple[Tensor, tuple[LayerCache, ...]]:
        """Return the logits (B, T, V) after each token of target (B, T), and the caches of all layers.

        The positions are those of the cached tokens and of these tokens. The memories are the keys and values of the
        source (B, S) for each layer. Whole sequences have no caches.
        """
        own, scheme = positions[..., -target.size(1) :], self.target_positions
        embedded = scheme.embed(self.target_embedding(target) * self.scale, own)
        embedded, rotations = self.dropout(embedded), scheme.rotations(own)  # (B, T, D)
        mask = scheme.mask(own, positions, None)  # causal, which hides padding on the right
        real = (source != PAD)[:, None, None]
        memory_mask = real if self.is_monotonic else scheme.mask(own, source_positions, real)
        x, extended = embedded, []
        layers = cast(Iterable[TransformerLayer], self.decoder)
        for layer, memory, cache in zip(layers, memories, caches or [None] * len(memories), strict=True):
            if caches is not None:
                x, cache = layer.step(x, cache, mask, rotations, memory, memory_mask)
                extended.append(cache)
            elif layer.keeps_weights:
                x, cache = layer(x, mask, mask is None, rotations, memory, memory_mask)
                extended.append(cache)
            else:
                x = layer(x, mask, mask is None, rotations, memory, memory_mask)
        x = self.decoder_norm(x)
        logits = self.head(x)
        if self.pointer is not None:
            weights = extended[-1][-1].mean(1)  # (B, T, S)
            logits = self.pointer(logits, torch.cat((x, embedded), dim=-1), weights, source)
        return logits, tuple(extended)

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        S, T = source.size(1), target_in.size(1)
        self.check_lengths(S, T)
        source_positions, positions = self.source_positions.number_pair(S, T, source)
        memories = self._encode(source, source_positions)
        return self._decode(target_in, positions, source, source_positions, memories)[0]

    def encode(self, source: Tensor) -> State:
        self.check_lengths(source.size(1), 0)
        memories = self._encode(source, torch.arange(source.size(1), device=source.device))
        empty = memories[0][1][:, :, :0]  # (B, H, 0, D/H)
        weights = torch.zeros_like(memories[0][1][..., :1]).mT  # (B, H, 1, S); no token is attended to yet
        caches: tuple[LayerCache, ...] = tuple(
            (empty, empty, weights) if self.is_monotonic or layer.keeps_weights else (empty, empty)
            for layer in cast(Iterable[TransformerLayer], self.decoder)
        )
        return caches, Memory((memories, source))

    def decode_step(self, token: Tensor, state: State) -> tuple[Tensor, State]:
        caches, (memories, source) = state
        length = caches[0][0].size(2) + 1
        self.check_lengths(0, length)
        positions, source_positions = (torch.arange(size, device=token.device) for size in (length, source.size(1)))
        logits, caches = self._decode(token.unsqueeze(1), positions, source, source_positions, memories, caches)
        return logits.squeeze(1), (caches, state[1])

    def logits(self, source: Tensor, target_in: Tensor, state: State) -> Tensor:
        _, (memories, _) = state
        source_positions, positions = self.source_positions.number_pair(source.size(1), target_in.size(1), source)
        return self._decode(target_in, positions, source, source_positions, memories)[0]
