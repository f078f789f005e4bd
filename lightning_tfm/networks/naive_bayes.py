"""What words and pairs of words say of a text's class, by counting."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_tfm.tokenizer import PAD, UNKNOWN_ID

FIRST, SECOND, PRIME = 1_640_531_527, 1_013_904_223, 2**31 - 1
"""The hash of a pair: its words times these, their sum modulo the prime."""


class NaiveBayes(nn.Module):
    """The log-likelihood of a text's words and of its pairs of neighbours, each counted once, in the texts of a class.

    Of short texts it is hard to beat, and errs on others than a network does (Wang & Manning 2012).

    Args:
        vocab_size: number of ids of words.
        num_pairs: how many ids pairs of words share, by their hashes.
        num_classes: number of classes.
    """

    def __init__(self, vocab_size: int, num_pairs: int, num_classes: int) -> None:
        super().__init__()
        self.vocab_size, self.num_pairs = vocab_size, num_pairs
        self.register_buffer("counts", torch.zeros(vocab_size + num_pairs, num_classes))  # of texts with a word or pair
        self.register_buffer("texts", torch.zeros(num_classes))

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
        """(B, S) -> (B, C), up to what is the same for all classes."""
        features, counted = self._features(words)
        counts = self.counts[features]  # (B, 2S - 1, C)
        counted = counted & (counts.sum(-1) > 0)  # what no text has had says nothing
        # As if each class had one more text with it, or as much of one as it has of the texts.
        share = counts / self.texts.clamp(min=1) + len(self.texts) / self.texts.sum().clamp(min=1)
        return (share.log() * counted.unsqueeze(-1)).sum(1)
