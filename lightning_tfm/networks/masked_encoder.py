"""Transformer encoder that predicts masked tokens, as in BERT (Devlin et al. 2019)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from lightning_tfm.layers import Dropout, LearnedPositions, Linear, TransformerLayer
from lightning_tfm.networks.network import TextNetwork, check_max_length
from lightning_tfm.tokenization import PAD


class MaskedEncoder(TextNetwork):
    """Transformer encoder with an output layer over the vocabulary at each position.

    Args:
        vocab_size: number of ids.
        d_model: width; the hidden layer of the feed-forward network is 4 times as wide.
        num_heads: number of attention heads; must divide d_model.
        num_layers: number of layers.
        dropout: dropout on embeddings and on the output of each sub-layer.
        max_length: maximum length of a text in tokens; if null, `fit` infers it from the data.
        norm: layer norm before each sub-layer ("pre") or after each residual sum ("post").
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int = 128,
        num_heads: int = 4,
        num_layers: int = 4,
        dropout: float = 0.0,
        max_length: int | None = None,
        norm: Literal["pre", "post"] = "pre",
    ) -> None:
        super().__init__()
        self.max_length = check_max_length(max_length)
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.positions = LearnedPositions(self.max_length, d_model)
        self.dropout = Dropout(dropout)
        self.encoder = nn.ModuleList(
            TransformerLayer(d_model, num_heads, 4 * d_model, dropout, norm, nn.GELU()) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(d_model) if norm == "pre" else nn.Identity()
        self.head = Linear(d_model, vocab_size, bias=False)
        self.head.weight = self.embedding.weight  # tied (Press & Wolf 2017)
        for table in (self.embedding, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits (B, T, V) of the token at each position of text (B, T), right-padded with PAD."""
        self.check_lengths(text.size(1))
        x = self.dropout(self.embedding(text) + self.positions(torch.arange(text.size(1), device=text.device)))
        real = (text != PAD)[:, None, None]  # (B, 1, 1, T)
        for layer in self.encoder:
            x = layer(x, real)
        return self.head(self.norm(x))
