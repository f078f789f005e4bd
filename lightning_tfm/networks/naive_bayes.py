"""What words and pairs of words say of a text's class, by counting."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_tfm.tokenizer import PAD, UNKNOWN_ID

FIRST, SECOND, PRIME = 1_640_531_527, 1_013_904_223, 2**31 - 1
"""The hash of a pair: its words times these, their sum modulo the prime."""


class NaiveBayes(nn.Module):
    """Naive Bayes over the presence of words and of word pairs in a text.

    On short texts it is hard to beat, and its errors differ from those of a network (Wang & Manning 2012).

    Args:
        vocab_size: number of ids of words.
        num_pairs: how many ids pairs of words share, by their hashes.
        num_classes: number of classes.
    """

    def __init__(self, vocab_size: int, num_pairs: int, num_classes: int) -> None:
        super().__init__()
        self.vocab_size, self.num_pairs = vocab_size, num_pairs
        # Of texts that have a word or a pair, and of all texts: integers, which no precision rounds.
        self.register_buffer("counts", torch.zeros(vocab_size + num_pairs, num_classes, dtype=torch.long))
        self.register_buffer("texts", torch.zeros(num_classes, dtype=torch.long))

    def _features(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Words (B, S) to ids of words and pairs (B, 2S - 1), and which of these are to be counted."""
        known = (words != PAD) & (words != UNKNOWN_ID)
        pairs = (words[:, :-1] * FIRST + words[:, 1:] * SECOND) % PRIME % self.num_pairs + self.vocab_size
        pairs = torch.where(known[:, :-1] & known[:, 1:], pairs, PAD)
        features = torch.cat((torch.where(known, words, PAD), pairs), dim=1).sort(dim=1).values
        is_first = F.pad(features[:, 1:] != features[:, :-1], (1, 0), value=True)
        return features, is_first & (features != PAD)

    def count(self, words: Tensor, label: Tensor) -> None:
        """Takes texts (B, S) and their classes (B) into account."""
        features, counted = self._features(words)
        labels = label.unsqueeze(1).expand_as(features)
        self.counts.index_put_((features[counted], labels[counted]), self.counts.new_ones(()), accumulate=True)
        self.texts += torch.bincount(label, minlength=len(self.texts))

    def forward(self, words: Tensor) -> Tensor:
        """Return log p(class) + sum of log p(feature | class) over the features of texts (B, S): (B, C), float32."""
        features, counted = self._features(words)
        counts = self.counts[features].float()  # (B, 2S - 1, C)
        counted = counted & (counts.sum(-1) > 0)  # a feature of no training text says nothing
        texts = self.texts.float()
        # Smoothed as if each class had one more text with the feature, or a part of one, by the share of its texts.
        likelihood = counts / texts.clamp(min=1) + len(texts) / texts.sum().clamp(min=1)
        prior = (texts + 1) / (texts.sum() + len(texts))
        return prior.log() + (likelihood.log() * counted.unsqueeze(-1)).sum(1)
