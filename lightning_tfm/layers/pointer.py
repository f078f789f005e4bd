"""Pointer-generator, which copies tokens of the source."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_tfm.layers.cpu import Linear
from lightning_tfm.layers.precision import at_least_float32


class PointerGenerator(nn.Module):
    """Mixture of generating a token and copying one of the source (See et al. 2017, equations 8 and 9).

    The probability of a token is p_gen P_vocab + (1 - p_gen) times the attention to its positions in the source, where
    p_gen = sigmoid(w^T features + b).

    Note:
        Words that are not in the vocabulary are copied as the unknown token, which `Seq2SeqPredictor.copy_unknown`
        replaces, in place of the extended vocabulary of See et al.
    """

    UNDIVIDED = "pointer_generator, which reads the weights of all heads"  # by tensor parallelism

    def __init__(self, d_features: int) -> None:
        super().__init__()
        self.generation = Linear(d_features, 1)

    def forward(self, logits: Tensor, features: Tensor, weights: Tensor, source: Tensor) -> Tensor:
        """Return the log probabilities of the mixture (B, T, V).

        Args:
            logits: the logits of P_vocab (B, T, V).
            features: the features (B, T, d_features).
            weights: the attention weights over the source (B, T, S).
            source: the ids of the source (B, S), from the vocabulary of the target.
        """
        gate, logits, weights = map(at_least_float32, (self.generation(features), logits, weights))
        copied = torch.zeros_like(logits).scatter_add(-1, source.unsqueeze(1).expand(weights.shape), weights)
        # A token that is not in the source has a probability of 0, whose logarithm has no gradient.
        log_copied = copied.clamp(min=torch.finfo(copied.dtype).tiny).log()
        return torch.logaddexp(F.logsigmoid(gate) + logits.log_softmax(-1), F.logsigmoid(-gate) + log_copied)
