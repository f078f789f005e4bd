"""Additive attention (Bahdanau et al. 2015).

Shapes: batch B, keys S, widths D of the query, E of the memory and A of the hidden layer. Masks are boolean.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lightning_tfm.layers.attention import Attention
from lightning_tfm.layers.cpu import Linear


class AdditiveScores(Attention):
    """Base class of attentions with scores v^T tanh(W_q q + W_k k) (Bahdanau et al. 2015, A.1.2)."""

    def __init__(self, d_query: int, d_memory: int, d_attention: int) -> None:
        super().__init__()
        self.q_proj = Linear(d_query, d_attention, bias=False)
        self.k_proj = Linear(d_memory, d_attention)
        self.energy = Linear(d_attention, 1, bias=False)

    def _activate(self, inputs: Tensor) -> Tensor:
        """Return the hidden layer (..., A), from (0, 1), of its inputs (..., A)."""
        # tanh z = 2 sigmoid(2z) - 1; the constant cancels in the softmax. On a CPU, sigmoid is five times as fast.
        # `lstm_with_attention` computes the same scores.
        return torch.sigmoid(2 * inputs)

    def _scores(self, hidden: Tensor) -> Tensor:
        """Return the scores (..., S), up to a constant, of the hidden layer (..., S, A)."""
        return (2 * self.energy(hidden)).squeeze(-1)


class AdditiveAttention(AdditiveScores):
    """Additive attention (Bahdanau et al. 2015).

    Args:
        d_query: width D of the queries.
        d_memory: width E of the memory.
        d_attention: width A of the hidden layer.
    """

    def _inputs(self, query: Tensor, keys: Tensor, previous: Tensor) -> Tensor:
        """Return the inputs (B, S, A) of the hidden layer."""
        return self.q_proj(query).unsqueeze(1) + keys

    def _weights(self, query: Tensor, keys: Tensor, mask: Tensor, previous: Tensor) -> Tensor:
        scores = self._scores(self._activate(self._inputs(query, keys, previous)))
        return scores.masked_fill(~mask, -math.inf).softmax(-1)  # (B, S)

    def _attend(self, weights: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the context (B, E) of weights (B, S), and these weights."""
        return (weights.unsqueeze(1) @ memory).squeeze(1), weights

    def forward(
        self, query: Tensor, keys: Tensor, memory: Tensor, mask: Tensor, previous: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attend from one query to the memory.

        Args:
            query: the query (B, D).
            keys: the keys `self.k_proj(memory)` (B, S, A), computed once for all decoding steps.
            memory: the memory (B, S, E).
            mask: the mask (B, S), True at memory positions that are not padding.
            previous: the weights (B, S) of the previous query; 0 for the first query.

        Returns:
            The context (B, E), and the weights (B, S).
        """
        return self._attend(self._weights(query, keys, mask, previous), memory)

    def weights(self, query: Tensor, keys: Tensor, memory: Tensor, mask: Tensor, previous: Tensor) -> Tensor:
        return self._weights(query, keys, mask, previous)[:, None, None]  # one head, one query

    def with_weights(
        self, weights: Tensor, query: Tensor, keys: Tensor, memory: Tensor, mask: Tensor, previous: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self._attend(weights[:, 0, 0], memory)


class LocationAwareAttention(AdditiveAttention):
    """Additive attention that reads the previous weights around each key (Chorowski et al. 2015, 2.2).

    The scores are v^T tanh(W_q q + W_k k + U f), where f are the outputs of FILTERS convolutions of the previous
    weights with a kernel of width KERNEL. The arguments are those of `AdditiveAttention`.
    """

    FILTERS = 10
    KERNEL = 5

    def __init__(self, d_query: int, d_memory: int, d_attention: int) -> None:
        super().__init__(d_query, d_memory, d_attention)
        self.filters = nn.Conv1d(1, self.FILTERS, self.KERNEL, padding=self.KERNEL // 2, bias=False)
        self.location_proj = Linear(self.FILTERS, d_attention, bias=False)

    def _inputs(self, query: Tensor, keys: Tensor, previous: Tensor) -> Tensor:
        location = self.location_proj(self.filters(previous.unsqueeze(1)).transpose(1, 2))  # (B, S, A)
        return super()._inputs(query, keys, previous) + location
