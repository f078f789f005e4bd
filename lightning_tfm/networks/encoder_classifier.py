"""Transformer encoder for text classification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_tfm.errors import UserError
from lightning_tfm.layers import Dropout, LearnedPositions, TransformerLayer, check_dropout
from lightning_tfm.networks.naive_bayes import NaiveBayes
from lightning_tfm.networks.network import DataProperties, TextNetwork, check_max_length
from lightning_tfm.tokenization import PAD, UNKNOWN_ID

NAIVE_BAYES_SHARE = 2 / 3
"""Share of the naive Bayes classifier in the mean of the log probabilities."""


class EncoderClassifier(TextNetwork):
    """Transformer encoder that classifies a text by the mean of its encoded tokens.

    Args:
        vocab_size: number of ids.
        num_classes: number of classes.
        max_length: maximum length of a text in tokens, the number of learned positions; if null, `fit` infers it from
            the data.
        d_model: width.
        num_heads: number of attention heads; must divide d_model.
        num_layers: number of encoder layers.
        d_ff: width of the hidden layer of the feed-forward network.
        d_classifier: width of the hidden layer between the mean and the classes.
        dropout: dropout on embeddings, on the output of each sub-layer, on the mean and on the hidden layer.
        word_dropout: fraction of tokens replaced by the unknown token in training (Iyyer et al. 2015).
        num_bigram_buckets: number of bigram ids of a `NaiveBayes` that is averaged with the network; null disables it.
        naive_bayes_weight: constant to which the weights of its features are regularized; it should be smaller for
            longer texts, and 0 for logistic regression.
        norm: layer norm before each sub-layer ("pre") or after each residual sum ("post").
    """

    least: ClassVar[Mapping[str, int]] = {"naive_bayes_weight": 0}

    def __init__(
        self,
        vocab_size: int,
        num_classes: int,
        max_length: int | None = None,
        d_model: int = 32,
        num_heads: int = 2,
        num_layers: int = 1,
        d_ff: int = 32,
        d_classifier: int = 20,
        dropout: float = 0.1,
        word_dropout: float = 0.0,
        num_bigram_buckets: int | None = None,
        naive_bayes_weight: float = 0.3,
        norm: Literal["pre", "post"] = "post",
    ) -> None:
        super().__init__()
        self.max_length = check_max_length(max_length)
        check_dropout("word_dropout", word_dropout)
        self.word_dropout = word_dropout
        self.embedding = nn.EmbeddingBag(vocab_size, d_model, mode="sum", padding_idx=PAD)
        self.positions = LearnedPositions(self.max_length, d_model)
        for table in (self.embedding, self.positions):  # small, so the first updates have an effect
            nn.init.normal_(table.weight, std=0.02)
        self.dropout = Dropout(dropout)
        self.encoder = nn.ModuleList(
            TransformerLayer(d_model, num_heads, d_ff, dropout, norm, nn.ReLU(inplace=True)) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(d_model) if norm == "pre" else nn.Identity()
        self.hidden = nn.Sequential(nn.Linear(d_model, d_classifier), nn.ReLU(), Dropout(dropout))
        self.head = nn.Linear(d_classifier, num_classes)
        self.naive_bayes = (
            None
            if num_bigram_buckets is None
            else NaiveBayes(vocab_size, num_bigram_buckets, num_classes, naive_bayes_weight)
        )

    @classmethod
    def data_settings(cls, data: DataProperties) -> dict[str, Any]:
        num_classes = getattr(data, "num_classes", None)
        if num_classes is None:
            raise UserError(
                f"EncoderClassifier needs texts with labels, but {type(data).__name__} has none; try Sentiment"
            )
        return super().data_settings(data) | {"num_classes": num_classes}

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits (B, C) of the classes.

        Args:
            text: the ids (B, S), right-padded with PAD, or (B, S, G) with G ids per token.

        Note:
            With a `NaiveBayes`, these are the weighted mean log probabilities of both models in evaluation, and the
            logits of the network in training, since the `NaiveBayes` has been fitted to the same texts.
        """
        self.check_lengths(text.size(1))
        text = text.view(*text.shape[:2], -1)  # (B, S, G)
        real = text[..., 0] != PAD  # (B, S)
        if self.training and self.word_dropout:
            draws = torch.rand(real.shape, dtype=torch.float32, device=text.device)  # half precision would round them
            text = drop_words(text, (draws < self.word_dropout) & real)
        x = self.embedding(text.flatten(0, 1)).unflatten(0, real.shape)
        x = x + self.positions(torch.arange(text.size(1), device=text.device))
        x = self.dropout(x)  # (B, S, D)
        for layer in self.encoder:
            x = layer(x, real[:, None, None])
        x = self.norm(x) * real.unsqueeze(-1)
        mean = x.sum(1) / real.sum(1, keepdim=True).clamp(min=1)  # (B, D)
        logits = self.head(self.hidden(self.dropout(mean)))
        if self.naive_bayes is None or self.training:
            return logits
        log_probs = self.naive_bayes(text).log_softmax(-1)
        return (1 - NAIVE_BAYES_SHARE) * logits.log_softmax(-1) + NAIVE_BAYES_SHARE * log_probs


def drop_words(text: Tensor, dropped: Tensor) -> Tensor:
    """Replace the dropped (B, S) tokens of a text (B, S, G), with G ids per token, by the unknown token."""
    unknown = F.pad(text.new_tensor([UNKNOWN_ID]), (0, text.size(2) - 1), value=PAD)  # (G)
    return torch.where(dropped.unsqueeze(-1), unknown, text)
