"""LSTM encoder-decoder with additive attention (Bahdanau et al. 2015)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from lightning_tfm.layers import (
    LSTM,
    AdditiveAttention,
    Dropout,
    Linear,
    LocationAwareAttention,
    MonotonicAttention,
)
from lightning_tfm.networks.network import Seq2SeqNetwork, State
from lightning_tfm.tokenization import PAD


class AttentionLSTM(Seq2SeqNetwork):
    """LSTM encoder-decoder with additive attention (Bahdanau et al. 2015).

    A bidirectional LSTM encodes the source. An LSTM decodes the target from the previous token and the context. The
    network has no positions, so sequences may have any length.

    Args:
        vocab_size: number of ids, shared by source and target.
        d_model: width of the embeddings, of each encoder direction, of the decoder and of the attention.
        dropout: dropout on embeddings and before the output layer.
        attention: "additive", "location_aware" (Chorowski et al. 2015), which reads the previous attention weights, or
            "monotonic" (Raffel et al. 2017), which attends to one token and only moves from left to right. Its moves
            depend on the previous token, and not on the hidden state, which drifts in long sequences.
    """

    is_traceable = False  # the decoder is a Python loop over its steps

    def __init__(
        self,
        vocab_size: int,
        d_model: int = 64,
        dropout: float = 0.0,
        attention: Literal["additive", "location_aware", "monotonic"] = "additive",
    ) -> None:
        super().__init__(locals())
        self.source_embedding = nn.Embedding(vocab_size, d_model)
        self.target_embedding = nn.Embedding(vocab_size, d_model)
        self.dropout = Dropout(dropout)
        self.encoder_forward = LSTM(d_model, d_model, batch_first=True)
        self.encoder_backward = LSTM(d_model, d_model, batch_first=True)
        self.start = Linear(d_model, 2 * d_model)  # initial hidden and cell state of the decoder
        self.is_monotonic = attention == "monotonic"
        self.attention: AdditiveAttention | MonotonicAttention
        if self.is_monotonic:
            self.attention = MonotonicAttention(4 * d_model, 2 * d_model, d_model)
        else:
            kind = {"additive": AdditiveAttention, "location_aware": LocationAwareAttention}[attention]
            self.attention = kind(d_model, 2 * d_model, d_model)
        self.decoder_token = Linear(d_model, 4 * d_model)  # gates of the cell, from the previous token ...
        self.decoder_state = Linear(3 * d_model, 4 * d_model, bias=False)  # ... and from context and hidden state
        self.readout = Linear(3 * d_model, d_model)
        self.head = Linear(d_model, vocab_size)

    def check_lengths(self, source_length: int, target_length: int) -> None:
        """Accept sequences of any length."""

    def encode(self, source: Tensor) -> State:
        mask = source != PAD  # (B, S)
        lengths = mask.sum(1, keepdim=True)
        x = self.dropout(self.source_embedding(source))  # (B, S, D)
        # The index reverses the tokens of each row and keeps the padding in place. Packed sequences would do the same,
        # but do not use the fast CPU kernel.
        steps = torch.arange(source.size(1), device=source.device)
        turned = torch.where(mask, lengths - 1 - steps, steps).unsqueeze(-1)  # (B, S, 1)
        rightwards, _ = self.encoder_forward(x)
        leftwards, _ = self.encoder_backward(x.gather(1, turned.expand_as(x)))
        leftwards = leftwards.gather(1, turned.expand_as(leftwards))
        memory = torch.cat((rightwards, leftwards), dim=-1)  # (B, S, 2D)
        hidden, cell = torch.tanh(self.start(leftwards[:, 0])).chunk(2, dim=-1)  # (Bahdanau et al., A.2.2)
        weights = torch.zeros_like(memory[..., 0])  # of the step before the first (B, S)
        return hidden, cell, weights, self.attention.k_proj(memory), memory, mask

    def _cell(self, token_gates: Tensor, context: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """Compute one LSTM step.

        Args:
            token_gates: the contribution of the previous token to the gates (B, 4D).
            context: the context (B, 2D).
            hidden: the hidden state (B, D).
            cell: the cell state (B, D).

        Returns:
            The next hidden state and cell state, (B, D) each.
        """
        # Unlike in nn.LSTMCell, token_gates is computed once for all steps. All four gates are a single product.
        gates = token_gates + self.decoder_state(torch.cat((context, hidden), dim=-1))
        forget_in_out, candidate = gates.split((3 * hidden.size(-1), hidden.size(-1)), dim=-1)
        forget, input, output = forget_in_out.sigmoid().chunk(3, dim=-1)
        cell = forget * cell + input * candidate.tanh()
        return output * cell.tanh(), cell

    def _logits(self, hidden: Tensor, context: Tensor) -> Tensor:
        features = torch.tanh(self.readout(torch.cat((hidden, context), dim=-1)))
        return self.head(self.dropout(features))

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        hidden, cell, weights, keys, memory, mask = self.encode(source)
        # The loop contains only the recurrent operations; the others are batched over all steps.
        token_gates = self.decoder_token(self.dropout(self.target_embedding(target_in)))  # (B, T, 4D)
        hiddens, contexts = [], []
        for gates in token_gates.unbind(1):
            query = gates if self.is_monotonic else hidden
            context, weights = self.attention(query, keys, memory, mask, weights)
            hidden, cell = self._cell(gates, context, hidden, cell)
            hiddens.append(hidden)
            contexts.append(context)
        return self._logits(torch.stack(hiddens, dim=1), torch.stack(contexts, dim=1))  # (B, T, V)

    def decode_step(self, token: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, cell, weights, keys, memory, mask = state
        token_gates = self.decoder_token(self.dropout(self.target_embedding(token)))
        query = token_gates if self.is_monotonic else hidden
        context, weights = self.attention(query, keys, memory, mask, weights)
        hidden, cell = self._cell(token_gates, context, hidden, cell)
        return self._logits(hidden, context), (hidden, cell, weights, keys, memory, mask)
