"""Naive Bayes classifier over words and bigrams."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_tfm.tokenization import PAD, UNKNOWN_ID

FIRST, SECOND, PRIME = 1_640_531_527, 1_013_904_223, 2**31 - 1
"""Constants of the hash of a bigram: (first id * FIRST + second id * SECOND) % PRIME."""


class NaiveBayes(nn.Module):
    """Naive Bayes classifier over the presence of words and bigrams in a text.

    It is a strong baseline on short texts, whose errors differ from the errors of a network (Wang & Manning 2012). If
    tokens also have the ids of their n-grams, the first n-gram of each word is another feature. It is the beginning of
    the word, which an unknown word such as `watchable` shares with known words such as `watched`.

    Args:
        vocab_size: number of ids of words and n-grams.
        num_bigram_buckets: number of ids to which bigrams are hashed.
        num_classes: number of classes.
    """

    counts: Tensor
    texts: Tensor

    def __init__(self, vocab_size: int, num_bigram_buckets: int, num_classes: int) -> None:
        super().__init__()
        self.vocab_size, self.num_bigram_buckets = vocab_size, num_bigram_buckets
        # Number of texts with a feature, and of all texts, by class; integers are not rounded in half precision.
        self.register_buffer("counts", torch.zeros(vocab_size + num_bigram_buckets, num_classes, dtype=torch.long))
        self.register_buffer("texts", torch.zeros(num_classes, dtype=torch.long))

    def _features(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sorted ids (B, N) of the features of texts, and a mask of their first occurrences.

        Args:
            text: the ids (B, S), right-padded with PAD, or (B, S, G) with G ids per token.
        """
        text = text.view(*text.shape[:2], -1)  # (B, S, G)
        words, beginnings = text[..., 0], text[..., 1:2].flatten(1)  # (B, S) and (B, S or 0)
        known = (words != PAD) & (words != UNKNOWN_ID)
        pairs = (words[:, :-1] * FIRST + words[:, 1:] * SECOND) % PRIME % self.num_bigram_buckets + self.vocab_size
        pairs = torch.where(known[:, :-1] & known[:, 1:], pairs, PAD)
        features = torch.cat((torch.where(known, words, PAD), beginnings, pairs), dim=1).sort(dim=1).values
        is_first = F.pad(features[:, 1:] != features[:, :-1], (1, 0), value=True)
        return features, is_first & (features != PAD)

    def count(self, text: Tensor, label: Tensor) -> None:
        """Update the counts with texts.

        Args:
            text: the ids (B, S), right-padded with PAD, or (B, S, G) with G ids per token.
            label: the classes (B).
        """
        features, counted = self._features(text)
        labels = label.unsqueeze(1).expand_as(features)
        self.counts.index_put_((features[counted], labels[counted]), self.counts.new_ones(()), accumulate=True)
        self.texts += torch.bincount(label, minlength=len(self.texts))

    def forward(self, text: Tensor) -> Tensor:
        """Return log p(class) + sum of log p(feature | class) over the features of texts, in float32 (B, C).

        Args:
            text: the ids (B, S), right-padded with PAD, or (B, S, G) with G ids per token.
        """
        features, counted = self._features(text)
        counts = self.counts[features].float()  # (B, N, C)
        counted = counted & (counts.sum(-1) > 0)  # ignore features that occur in no training text
        texts = self.texts.float()
        # Additive smoothing: C pseudo-texts with the feature, divided among the classes in proportion to their size.
        likelihood = counts / texts.clamp(min=1) + len(texts) / texts.sum().clamp(min=1)
        prior = (texts + 1) / (texts.sum() + len(texts))
        return prior.log() + (likelihood.log() * counted.unsqueeze(-1)).sum(1)
