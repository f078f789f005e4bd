"""Causal Transformer with linear attention (Katharopoulos et al. 2020)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_tfm.errors import UserError
from lightning_tfm.layers import (
    AddNorm,
    Attention,
    Dropout,
    FeedForward,
    Linear,
    check_num_heads,
    join_heads,
    position_scheme,
    split_heads,
)
from lightning_tfm.networks.network import CausalNetwork, State, check_max_length
from lightning_tfm.tokenization import PAD

CHUNK = 64
"""Number of tokens whose weights are computed at once; earlier tokens are summarized in the state."""


class LinearAttention(Attention):
    """Causal attention with weights phi(q) phi(k)^T, where phi(x) = elu(x) + 1, at a cost linear in the length.

    The keys and values before a token are summarized in a state of constant size: the sum of phi(k)^T v, and the sum
    of phi(k), which normalizes the weights.
    """

    over_memory = False

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        check_num_heads(d_model, num_heads)
        self.num_heads = num_heads
        self.qkv_proj = Linear(d_model, 3 * d_model)
        self.out_proj = Linear(d_model, d_model)

    def _project(self, x: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return phi(q), phi(k) and v, (B, H, T, D/H) each; phi(k) is 0 at padding."""
        query, key, value = self.qkv_proj(x).chunk(3, dim=-1)
        features = F.elu(query) + 1, (F.elu(key) + 1) * real.unsqueeze(-1), value  # (B, T, D) each
        query, key, value = (split_heads(part, self.num_heads)[0] for part in features)
        return query, key, value

    def forward(self, x: Tensor, real: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Return the context (B, T, D) of x (B, T, D), and the state after these tokens, which follow those of `state`.

        The mask `real` (B, T) is False at padding.
        """
        query, key, value = self._project(x, real)
        if state is None:
            batch, heads, _, width = key.shape
            state = key.new_zeros(batch, heads, width, width), key.new_zeros(batch, heads, width)
        key_values, keys = state  # (B, H, D/H, D/H), (B, H, D/H)
        contexts = []
        for q, k, v in zip(*(part.split(CHUNK, dim=2) for part in (query, key, value)), strict=True):
            weights = (q @ k.transpose(-2, -1)).tril()  # (B, H, C, C)
            total = weights.sum(-1) + (q @ keys.unsqueeze(-1)).squeeze(-1)
            context = weights @ v + q @ key_values
            context = context / total.clamp(min=1e-6).unsqueeze(-1)  # (B, H, C, D/H)
            contexts.append(join_heads(context))  # (B, C, D)
            key_values = key_values + k.transpose(-2, -1) @ v
            keys = keys + k.sum(2)
        return self.out_proj(torch.cat(contexts, dim=1)), (key_values, keys)

    def weights(self, x: Tensor, real: Tensor, state: State | None = None) -> Tensor:
        """Return the weights (B, H, T, T) of a call without a state, which has sums over the keys, but not the keys."""
        if state is not None:
            raise UserError("attention weights of linear attention can be computed in forward, not in decode_step")
        query, key, _ = self._project(x, real)
        weights = (query @ key.transpose(-2, -1)).tril()
        return weights / weights.sum(-1, keepdim=True).clamp(min=1e-6)

    def with_weights(
        self, weights: Tensor, x: Tensor, real: Tensor, state: State | None = None
    ) -> tuple[Tensor, State]:
        """Return the result of a call without a state, see `weights`."""
        _, key, value = self._project(x, real)
        return self.out_proj(join_heads(weights @ value)), (key.transpose(-2, -1) @ value, key.sum(2))


class LinearAttentionLayer(nn.Module):
    """Linear attention and feed-forward network, each with a residual connection and pre-norm."""

    def __init__(self, d_model: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = LinearAttention(d_model, num_heads)
        self.add_attention = AddNorm(d_model, "pre", dropout)
        self.feed_forward = FeedForward(d_model, 4 * d_model, nn.GELU())
        self.add_feed_forward = AddNorm(d_model, "pre", dropout)

    def forward(self, x: Tensor, real: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Return the output (B, T, D), and the state of the attention."""
        context, state = self.attention(self.add_attention.before(x), real, state)
        x = self.add_attention(x, context)
        return self.add_feed_forward(x, self.feed_forward(self.add_feed_forward.before(x))), state


class LinearTransformer(CausalNetwork):
    """Transformer with linear attention that reads source and target as one sequence, like GPT.

    Args:
        vocab_size: number of ids.
        d_model: width; the hidden layer of the feed-forward network is 4 times as wide.
        num_heads: number of attention heads; must divide d_model.
        num_layers: number of layers.
        dropout: dropout on embeddings and on the output of each sub-layer.
        max_length: maximum length of a sequence in tokens, source and target together; if null, `fit` infers it from
            the data.
        positions: the position scheme: "learned", "sinusoidal" or "none"; see `position_scheme`.
    """

    is_traceable = False  # forward is a Python loop over chunks

    def __init__(
        self,
        vocab_size: int,
        d_model: int = 128,
        num_heads: int = 4,
        num_layers: int = 4,
        dropout: float = 0.0,
        max_length: int | None = None,
        positions: Literal["learned", "sinusoidal", "none"] = "learned",
    ) -> None:
        super().__init__()
        self.max_length = check_max_length(max_length)
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.positions = position_scheme(positions, self.max_length, d_model, num_heads)
        self.dropout = Dropout(dropout)
        self.layers = nn.ModuleList(LinearAttentionLayer(d_model, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(d_model)
        self.head = Linear(d_model, vocab_size, bias=False)
        self.head.weight = self.embedding.weight  # tied (Press & Wolf 2017)
        for table in (self.embedding, self.positions):
            if isinstance(table, nn.Embedding):
                nn.init.normal_(table.weight, std=0.02)

    def _run(self, tokens: Tensor, real: Tensor, start: Tensor, states: State | None) -> tuple[Tensor, State]:
        """Return the features (B, T, D) of tokens (B, T), and the states of all layers after them.

        The mask `real` (B, T) is False at padding, which has no position. `start` (B, 1) is the number of earlier
        tokens without padding, whose states are `states`.
        """
        positions = (start + real.cumsum(1) - 1).clamp(min=0)
        x = self.dropout(self.positions.embed(self.embedding(tokens), positions))
        extended = []
        for index, layer in enumerate(self.layers):
            x, state = layer(x, real, None if states is None else states[index])
            extended.append(state)
        return self.norm(x), tuple(extended)

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        self.check_lengths(source.size(1), target_in.size(1))
        tokens = torch.cat((source, target_in), dim=1)
        real = torch.cat((source != PAD, torch.ones_like(target_in, dtype=torch.bool)), dim=1)
        x, _ = self._run(tokens, real, real.new_zeros(real.size(0), 1, dtype=torch.long), None)
        return self.head(x[:, source.size(1) :])

    def encode(self, source: Tensor) -> State:
        self.check_lengths(source.size(1), 0)
        real = source != PAD
        _, states = self._run(source, real, real.new_zeros(real.size(0), 1, dtype=torch.long), None)
        return states, real.sum(1, keepdim=True)

    def decode_step(self, token: Tensor, state: State) -> tuple[Tensor, State]:
        states, length = state
        real = torch.ones_like(token, dtype=torch.bool).unsqueeze(1)
        x, states = self._run(token.unsqueeze(1), real, length, states)
        return self.head(x).squeeze(1), (states, length + 1)
