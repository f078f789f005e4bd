"""Weighted naive Bayes classifier over words, their first n-grams, and bigrams."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_tfm.tokenization import PAD, UNKNOWN_ID

FIRST, SECOND, PRIME = 1_640_531_527, 1_013_904_223, 2**31 - 1
"""Constants of the hash of a bigram: (first id * FIRST + second id * SECOND) % PRIME."""

PENALTY, ITERATIONS = 0.3, 20
"""Factor of the penalty on half the squared distance of a weight from the constant, and most iterations of L-BFGS."""

UNIT = 2.0**-16
"""Unit of the stored logits."""


class NaiveBayes(nn.Module):
    """Naive Bayes classifier over the presence of words and bigrams in a text, with a weight for each feature.

    Up to a constant, the logit of a class is log p(class) + sum of weight * log p(feature | class) over the features of
    a text. The weights are fitted by logistic regression, with a penalty on their distance from a constant. This is
    similar to NBSVM, which interpolates the weights of an SVM with a constant (Wang & Manning 2012, 2.3). On short
    texts, it is a strong baseline whose errors differ from those of a network. On long texts, whose words are far from
    independent given the class, the constant should be close to 0, as in the logistic regression of Mesnil et al. 2014.

    If tokens also have the ids of their n-grams, the first n-gram of each word is another feature. It is the beginning
    of the word, which an unknown word such as `watchable` shares with known words such as `watched`.

    Args:
        vocab_size: number of ids of words and n-grams.
        num_bigram_buckets: number of ids to which bigrams are hashed.
        num_classes: number of classes.
        weight: the constant, which is also the weight before the fit.
    """

    prior: Tensor
    scores: Tensor

    def __init__(self, vocab_size: int, num_bigram_buckets: int, num_classes: int, weight: float = 0.3) -> None:
        super().__init__()
        self.vocab_size, self.num_bigram_buckets, self.weight = vocab_size, num_bigram_buckets, weight
        # log p(class), and weight * log p(feature | class) minus its mean over classes, in units of UNIT: integers are
        # not rounded in half precision, and their sums do not depend on the order.
        self.register_buffer("prior", torch.zeros(num_classes, dtype=torch.int))
        self.register_buffer("scores", torch.zeros(vocab_size + num_bigram_buckets, num_classes, dtype=torch.int))

    def _features(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sorted ids (B, N) of the features of texts, see `forward`, and where each occurs first."""
        text = text.view(*text.shape[:2], -1)  # (B, S, G)
        words, beginnings = text[..., 0], text[..., 1:2].flatten(1)  # (B, S) and (B, S or 0)
        is_known = (words != PAD) & (words != UNKNOWN_ID)
        # Keep S columns: with S - 1, torch.export would specialize on texts of two tokens, whose only column is
        # broadcast.
        following, is_bigram = F.pad(words, (0, 1))[:, 1:], is_known & F.pad(is_known, (0, 1))[:, 1:]
        pairs = (words * FIRST + following * SECOND) % PRIME % self.num_bigram_buckets + self.vocab_size
        pairs = torch.where(is_bigram, pairs, PAD)
        features = torch.cat((torch.where(is_known, words, PAD), beginnings, pairs), dim=1).sort(dim=1).values
        is_first = F.pad(features[:, 1:] != features[:, :-1], (1, 0), value=True)
        return features, is_first & (features != PAD)

    def fit(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Count the features of labeled texts, given their ids, see `forward`, and classes (B), and fit the weights."""
        features, sizes, labels = [], [], []
        for text, label in batches:
            ids, counted = self._features(text.to(self.scores.device))
            features.append(ids[counted].int())  # for less memory, as below
            sizes.append(counted.sum(1))
            labels.append(label.to(self.scores.device))
        size, label = torch.cat(sizes), torch.cat(labels)  # (B)
        offsets = (size.cumsum(0) - size).int()  # of the features of each text (B)
        ids, place = torch.cat(features).unique(return_inverse=True)  # (F), and the place in it of each feature (N)

        num_classes = len(self.prior)
        place = place.int()
        pairs = place * num_classes + label.int().repeat_interleave(size)
        counts = torch.bincount(pairs, minlength=len(ids) * num_classes).view(-1, num_classes)  # of texts (F, C)
        del features, pairs
        texts = torch.bincount(label, minlength=num_classes).float()
        prior = ((texts + 1) / (len(label) + num_classes)).log()
        # Additive smoothing: C pseudo-texts with each feature, divided among the classes in proportion to their size.
        evidence = (counts / texts.clamp(min=1) + num_classes / len(label)).log()  # log p(feature | class) (F, C)
        evidence = evidence - evidence.mean(1, keepdim=True)

        weights = torch.full_like(evidence[:, :1], self.weight).requires_grad_()  # (F, 1)
        optimizer = torch.optim.LBFGS([weights], max_iter=ITERATIONS, line_search_fn="strong_wolfe")

        def loss_of_weights() -> Tensor:
            optimizer.zero_grad()
            logits = prior + F.embedding_bag(place, weights * evidence, offsets, mode="sum")  # (B, C)
            loss = F.cross_entropy(logits, label, reduction="sum")
            loss = loss + PENALTY / 2 * (weights - self.weight).square().sum()
            loss.backward()
            return loss

        if len(ids):
            optimizer.step(loss_of_weights)
        self.prior.copy_((prior / UNIT).round())
        self.scores.zero_()[ids] = (weights.detach() * evidence / UNIT).round().int()

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits (B, C) of texts, in float32, given their ids (B, S), or (B, S, G) with G ids per token."""
        features, counted = self._features(text)
        scores = F.embedding(features, self.scores)  # (B, N, C); 0 if the feature is in no training text
        scores = scores * counted.unsqueeze(-1)
        return (self.prior + scores.sum(1)).float() * UNIT
