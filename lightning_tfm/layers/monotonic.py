"""Monotonic attention, which moves over the keys from left to right.

Shapes: batch B, queries T, keys S, width D, heads H. Masks are boolean and True where a query may attend.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_tfm.layers.additive import AdditiveScores
from lightning_tfm.layers.attention import Attention, KVCache, check_num_heads, join_heads, split_heads
from lightning_tfm.layers.cpu import Linear
from lightning_tfm.layers.positions import FreqsCis
from lightning_tfm.layers.precision import at_least_float32


def monotonic_weights(query: Tensor, key: Tensor, mask: Tensor, previous: Tensor, training: bool) -> Tensor:
    """Return the weights (..., T, S) of monotonic attention (Raffel et al. 2017).

    A query attends to one key. The first query attends to the first key, and each further one stays there or advances
    to the next key. The logit of advancing is the sum of the logits of the query and of the attended key.

    Args:
        query: the logits (..., T) of the queries.
        key: the logits (..., S) of the keys.
        mask: the mask, broadcastable to (..., S), True at keys that are not padding.
        previous: the weights (..., S) of the query before the first, which get no gradient; 0 if there is none.
        training: whether to return the expected weights, with noise in the logits that makes the probabilities of
            advancing nearly 0 or 1, instead of those of the more probable choices.
    """
    # Rounding errors of half precision would accumulate over the steps.
    query, key, previous = (at_least_float32(x) for x in (query, key, previous.detach()))
    can_advance = (mask & F.pad(mask[..., 1:], (0, 1))).to(key.dtype)  # except from the last key
    if training:
        return cast(Tensor, _ExpectedWeights.apply(query + torch.randn_like(query), key, can_advance, previous))
    return _follow(query, key, can_advance, previous, lambda logits: (logits > 0).to(key.dtype))[0]


def _follow(
    query: Tensor, key: Tensor, can_advance: Tensor, previous: Tensor, probability: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the weights (..., T, S) of all queries, and the probabilities (..., T, 1) of advancing before them."""
    start = F.pad(1 - previous.sum(-1, keepdim=True), (0, key.size(-1) - 1))  # the first key, for the first query
    weights: list[Tensor] = []
    advances: list[Tensor] = []
    for logits in query.unsqueeze(-1).unbind(-2):  # (..., 1)
        advance = probability(logits + (previous * key).sum(-1, keepdim=True))
        movable = previous * can_advance
        previous = torch.addcmul(previous, advance, movable.roll(1, -1) - movable)
        if not weights:
            previous = previous + start
        weights.append(previous)
        advances.append(advance)
    return torch.stack(weights, dim=-2), torch.stack(advances, dim=-2)


class _ExpectedWeights(torch.autograd.Function):
    """The recurrence of expected weights, whose gradient takes a fraction of the time of autograd's."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, can_advance: Tensor, previous: Tensor) -> Tensor:
        weights, advances = _follow(query, key, can_advance, previous, torch.sigmoid)
        ctx.save_for_backward(key, can_advance, previous, weights, advances)
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        key, can_advance, previous, weights, advances = ctx.saved_tensors
        before = torch.cat((previous.unsqueeze(-2), weights[..., :-1, :]), dim=-2)
        slopes = advances * (1 - advances)
        total = torch.zeros_like(previous)
        steps = []
        for step in reversed(range(weights.size(-2))):
            total = gradient[..., step, :] + total
            moved = can_advance * (total.roll(-1, -1) - total)
            d_logit = slopes[..., step, :] * (before[..., step, :] * moved).sum(-1, keepdim=True)
            total = total.addcmul(advances[..., step, :], moved).addcmul(d_logit, key)
            steps.append(d_logit)
        d_logits = torch.stack(steps[::-1], dim=-2)  # (..., T, 1)
        return d_logits.squeeze(-1), (d_logits * before).sum(-2), None, None


def _edit_by_query(
    weights: Callable[..., Tensor], edit: Callable[[Tensor], Tensor], previous: Tensor, *queries: Tensor
) -> Tensor:
    """Return edited weights (B, H, T, S); each query starts from the edited weights of the previous query.

    Args:
        weights: the function from the weights (B, H, S) before a query and the parts of this query, each (B, 1, .), to
            its weights (B, H, 1, S).
        edit: the function from the weights of one query to those that replace them.
        previous: the weights (B, H, S) of the query before the first; 0 if there is none.
        queries: the parts of the queries, each (B, T, .).
    """
    edited = []
    for query in zip(*(part.split(1, dim=1) for part in queries), strict=True):
        edited.append(edit(weights(previous, *query)))
        previous = edited[-1].squeeze(2)
    return torch.cat(edited, dim=2)


class MonotonicAttention(Attention):
    """Monotonic attention, see `monotonic_weights`.

    Its queries must not depend on its results, so that it attends from all of them in one call.
    `HardMonotonicAttention` may also skip keys.

    Args:
        d_query: width D of the queries.
        d_memory: width E of the memory.
    """

    def __init__(self, d_query: int, d_memory: int) -> None:
        super().__init__()
        self.q_proj = Linear(d_query, 1)
        self.k_proj = Linear(d_memory, 1, bias=False)

    def forward(
        self, query: Tensor, keys: Tensor, memory: Tensor, mask: Tensor, previous: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attend from the queries to the memory.

        Args:
            query: the queries (B, T, D).
            keys: the keys `self.k_proj(memory)` (B, S, 1), computed once for all decoding steps.
            memory: the memory (B, S, E).
            mask: the mask (B, S), True at memory positions that are not padding.
            previous: the weights (B, S) of the query before the first; 0 if there is none.

        Returns:
            The contexts (B, T, E), and the weights (B, T, S).
        """
        return self.with_weights(self.weights(query, keys, memory, mask, previous), query, keys, memory, mask, previous)

    def weights(self, query: Tensor, keys: Tensor, memory: Tensor, mask: Tensor, previous: Tensor) -> Tensor:
        logits = self.q_proj(query).squeeze(-1)
        return monotonic_weights(logits, keys.squeeze(-1), mask, previous, self.training).unsqueeze(1)  # one head

    def with_weights(
        self, weights: Tensor, query: Tensor, keys: Tensor, memory: Tensor, mask: Tensor, previous: Tensor
    ) -> tuple[Tensor, Tensor]:
        weights = weights.squeeze(1)
        return weights.to(memory.dtype) @ memory, weights

    def edited_weights(
        self,
        edit: Callable[[Tensor], Tensor],
        query: Tensor,
        keys: Tensor,
        memory: Tensor,
        mask: Tensor,
        previous: Tensor,
    ) -> Tensor:
        def weights(previous: Tensor, query: Tensor) -> Tensor:
            return self.weights(query, keys, memory, mask, previous.squeeze(1))

        return _edit_by_query(weights, edit, previous.unsqueeze(1), query)


class MonotonicCrossAttention(Attention):
    """Multi-head cross-attention, each head of which is a monotonic attention, see `monotonic_weights`.

    The arguments are those of `SelfAttention`.
    """

    UNDIVIDED = "cross_attention monotonic, whose heads are not divided"  # by tensor parallelism

    def __init__(self, d_model: int, num_heads: int, bias: bool = True) -> None:
        super().__init__()
        check_num_heads(d_model, num_heads)
        self.num_heads = num_heads
        self.q_proj = Linear(d_model, num_heads, bias=bias)
        self.k_proj = Linear(d_model, num_heads, bias=bias)
        self.v_proj = Linear(d_model, d_model, bias=bias)
        self.out_proj = Linear(d_model, d_model, bias=bias)

    def project_memory(self, memory: Tensor, freqs_cis: FreqsCis | None = None) -> KVCache:
        """Return the keys (B, H, S, 1) and values (B, H, S, D/H) of the memory (B, S, D), see `CrossAttention`.

        The weights do not depend on positions, so the rotations are ignored.
        """
        key, value = (split_heads(projection(memory), self.num_heads)[0] for projection in (self.k_proj, self.v_proj))
        return key, value

    def forward(
        self, x: Tensor, memory: KVCache, mask: Tensor, previous: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the context (B, T, D) of x over the memory, and the weights (B, H, T, S).

        Args:
            x: the input (B, T, D).
            memory: the keys and values of the memory, see `project_memory`.
            mask: the mask (B, 1, 1, S), True at memory positions that are not padding.
            previous: the weights (B, H, S) of the query before the first; None if there is none.
        """
        return self.with_weights(self.weights(x, memory, mask, previous), x, memory, mask, previous)

    def weights(self, x: Tensor, memory: KVCache, mask: Tensor, previous: Tensor | None = None) -> Tensor:
        key = memory[0].squeeze(-1)  # (B, H, S)
        attended = torch.zeros_like(key) if previous is None else previous
        query = self.q_proj(x).transpose(1, 2)  # (B, H, T)
        return monotonic_weights(query, key, mask.squeeze(2), attended, self.training)

    def with_weights(
        self, weights: Tensor, x: Tensor, memory: KVCache, mask: Tensor, previous: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.out_proj(join_heads(weights.to(memory[1].dtype) @ memory[1])), weights

    def edited_weights(
        self,
        edit: Callable[[Tensor], Tensor],
        x: Tensor,
        memory: KVCache,
        mask: Tensor,
        previous: Tensor | None = None,
    ) -> Tensor:
        if previous is None:
            previous = torch.zeros_like(memory[0].squeeze(-1))
        return _edit_by_query(lambda before, row: self.weights(row, memory, mask, before), edit, previous, x)


class HardMonotonicAttention(AdditiveScores):
    """Hard monotonic attention, whose alignments are marginalized exactly (Wu & Cotterell 2019).

    Each query attends to one key, the key of the previous query or a later one. The probability of a key is the softmax
    over these keys of the sum of an additive score and a score of its distance from the attended key. This is the
    paper's model of order 1: the scores of the distances depend on the query and the attended key. Distances of
    `MAX_DISTANCE` and more have the same score. The arguments are those of `AdditiveAttention`.
    """

    MAX_DISTANCE = 4

    NEVER = -1e4
    """Score of padding: finite, so that the softmax is defined if all keys are padding."""

    LEAST = 1e-20
    """Minimum of the probabilities of tokens relative to the largest, which bounds the gradient of the posterior."""

    def __init__(self, d_query: int, d_memory: int, d_attention: int) -> None:
        super().__init__(d_query, d_memory, d_attention)
        self.distance = Linear(d_attention, self.MAX_DISTANCE + 1)

    def start(self, mask: Tensor) -> Tensor:
        """Return the weights (B, S) before the first query, which may attend to all keys of mask (B, S)."""
        zeros = torch.zeros(mask.shape, device=mask.device)
        return F.pad(zeros[:, 1:], (1, 0), value=1)

    def forward(self, query: Tensor, keys: Tensor, mask: Tensor, previous: Tensor, tokens: Tensor) -> Tensor:
        """Return the weights (B, T, S): the probabilities that a query attends to a key, given all tokens before it.

        The forward algorithm (Wu & Cotterell 2019, equation 8), divided by the probability of the tokens so far.

        Args:
            query: the queries (B, T, D).
            keys: the keys `self.k_proj(memory)` (B, S, A).
            mask: the mask (B, S), True at keys that are not padding.
            previous: the weights (B, S) of the query before the first; see `start`.
            tokens: the probability (B, T, S) of the token before each query, if the query before attended to a key.
        """
        return self._weights(query, keys, mask, previous, tokens)

    def _transitions(self, query: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """Return the probability (B, T, S, S) of moving from each key to each key before a query."""
        hidden = self._activate(self.q_proj(query).unsqueeze(2) + keys.unsqueeze(1))  # (B, T, S, A)
        scores = at_least_float32(self._scores(hidden)).masked_fill(~mask.unsqueeze(1), self.NEVER)  # (B, T, S)
        places = torch.arange(mask.size(1), device=mask.device)
        distances = places - places.unsqueeze(1)  # (S, S), from a key to a key
        index = distances.clamp(0, self.MAX_DISTANCE).expand(*scores.shape, -1)
        scores = scores.unsqueeze(2) + at_least_float32(self.distance(hidden)).gather(3, index)
        return scores.masked_fill(distances < 0, -math.inf).softmax(3)

    def _weights(self, query: Tensor, keys: Tensor, mask: Tensor, previous: Tensor, tokens: Tensor) -> Tensor:
        # Only the ratios of the probabilities matter. With a maximum of 1, their products with the weights do not
        # underflow.
        tiny = torch.finfo(tokens.dtype).tiny
        tokens = (tokens / tokens.amax(2, keepdim=True).clamp(min=tiny)).clamp(min=self.LEAST)
        weights = []
        for transition, token in zip(self._transitions(query, keys, mask).unbind(1), tokens.unbind(1), strict=True):
            joint = previous * token  # (B, S)
            posterior = joint / joint.sum(1, keepdim=True).clamp(min=tiny)
            previous = (posterior.unsqueeze(2) * transition).sum(1)  # not a product of matrices, which autocast rounds
            weights.append(previous)
        return torch.stack(weights, dim=1)

    def weights(self, query: Tensor, keys: Tensor, mask: Tensor, previous: Tensor, tokens: Tensor) -> Tensor:
        return self._weights(query, keys, mask, previous, tokens).unsqueeze(1)  # one head

    def with_weights(
        self, weights: Tensor, query: Tensor, keys: Tensor, mask: Tensor, previous: Tensor, tokens: Tensor
    ) -> Tensor:
        return at_least_float32(weights).squeeze(1)

    def edited_weights(
        self,
        edit: Callable[[Tensor], Tensor],
        query: Tensor,
        keys: Tensor,
        mask: Tensor,
        previous: Tensor,
        tokens: Tensor,
    ) -> Tensor:
        def weights(previous: Tensor, query: Tensor, token: Tensor) -> Tensor:
            return self.weights(query, keys, mask, previous.squeeze(1), token)

        return _edit_by_query(weights, edit, previous.unsqueeze(1), query, tokens)
