"""A Transformer encoder that says which class a text is of."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_tfm.errors import UserError
from lightning_tfm.layers import Dropout, TransformerLayer, check_heads
from lightning_tfm.networks.naive_bayes import NaiveBayes
from lightning_tfm.networks.network import Network
from lightning_tfm.tokenizer import PAD, UNKNOWN_ID


class EncoderClassifier(Network):
    """Reads a text, and takes the mean of what the encoder says of its tokens.

    Args:
        vocab_size: number of ids.
        num_classes: number of classes.
        d_model: width.
        num_heads: attention heads; must divide d_model.
        num_layers: layers of the encoder.
        d_ff: width inside the feed-forward.
        d_hidden: width of the layer between the mean and the classes.
        dropout: on embeddings, on each sub-layer's output, on the mean and on the hidden layer.
        embedding_dropout: on embeddings, where it is another.
        word_dropout: share of the tokens that are taken for unknown in training (Iyyer et al. 2015).
        num_pairs: ids of pairs of words in a NaiveBayes, which answers beside the network; None for the network alone.
        text_length: longest text, in tokens; its positions are learned.
        norm: before each sub-layer ("pre") or after each sum ("post").
    """

    def __init__(
        self,
        vocab_size: int,
        num_classes: int,
        text_length: int,
        d_model: int = 32,
        num_heads: int = 2,
        num_layers: int = 1,
        d_ff: int = 32,
        d_hidden: int = 20,
        dropout: float = 0.1,
        embedding_dropout: float | None = None,
        word_dropout: float = 0.0,
        num_pairs: int | None = None,
        norm: Literal["pre", "post"] = "post",
    ) -> None:
        super().__init__(
            vocab_size=vocab_size,
            num_classes=num_classes,
            text_length=text_length,
            d_model=d_model,
            num_heads=num_heads,
            num_layers=num_layers,
            d_ff=d_ff,
            d_hidden=d_hidden,
            dropout=dropout,
            embedding_dropout=embedding_dropout,
            word_dropout=word_dropout,
            num_pairs=num_pairs,
            norm=norm,
        )
        check_heads(d_model, num_heads)
        self.max_length = text_length
        self.word_dropout = word_dropout
        self.embedding = nn.EmbeddingBag(vocab_size, d_model, mode="sum", padding_idx=PAD)
        self.positions = nn.Embedding(text_length, d_model)
        for table in (self.embedding, self.positions):  # small, so that what is learned of a word is heard at once
            nn.init.normal_(table.weight, std=0.02)
        self.embedding_dropout = Dropout(dropout if embedding_dropout is None else embedding_dropout)
        self.dropout = Dropout(dropout)
        self.encoder = nn.ModuleList(
            TransformerLayer(d_model, num_heads, d_ff, dropout, norm, nn.ReLU(inplace=True)) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(d_model) if norm == "pre" else nn.Identity()
        self.hidden = nn.Sequential(nn.Linear(d_model, d_hidden), nn.ReLU(), Dropout(dropout))
        self.head = nn.Linear(d_hidden, num_classes)
        self.naive_bayes = None if num_pairs is None else NaiveBayes(vocab_size, num_pairs, num_classes)

    def check_lengths(self, source_length: int, target_length: int = 0) -> None:
        if source_length > self.max_length:
            raise UserError(
                f"the longest text has {source_length} tokens, but the model's positions end at text_length "
                f"{self.max_length}; try text_length {source_length}"
            )

    def forward(self, text: Tensor) -> Tensor:
        """Logits (B, C) of the classes of text (B, S), right-padded with PAD; of (B, S, G) where a token has G ids.

        With a NaiveBayes, which is not trained, they are the mean of both in evaluation, and the network's in training.
        """
        self.check_lengths(text.size(1))
        text = text.view(*text.shape[:2], -1)  # (B, S, G)
        words = text[..., 0]
        real = words != PAD  # (B, S)
        if self.training and self.word_dropout:
            dropped = (torch.rand(real.shape, device=text.device) < self.word_dropout) & real
            unknown = F.pad(text.new_tensor([UNKNOWN_ID]), (0, text.size(2) - 1), value=PAD)  # (G)
            text = torch.where(dropped.unsqueeze(-1), unknown, text)
        x = self.embedding(text.flatten(0, 1)).unflatten(0, real.shape)
        x = x + self.positions(torch.arange(text.size(1), device=text.device))
        x = self.embedding_dropout(x)  # (B, S, D)
        for layer in self.encoder:
            x, _ = layer(x, real[:, None, None])
        x = self.norm(x) * real.unsqueeze(-1)
        mean = x.sum(1) / real.sum(1, keepdim=True).clamp(min=1)  # (B, D)
        logits = self.head(self.hidden(self.dropout(mean)))
        if self.naive_bayes is None or self.training:
            return logits
        return (logits.log_softmax(-1) + self.naive_bayes(words).log_softmax(-1)) / 2
