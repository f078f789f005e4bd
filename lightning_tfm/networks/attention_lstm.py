"""Recurrent encoder-decoder with additive attention (Bahdanau et al. 2015)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_tfm.errors import UserError
from lightning_tfm.layers import (
    LSTM,
    AdditiveAttention,
    Dropout,
    HardMonotonicAttention,
    Linear,
    LocationAwareAttention,
    MonotonicAttention,
    PointerGenerator,
    at_least_float32,
    lstm_with_attention,
    matmul_without_autocast,
)
from lightning_tfm.networks.network import DataProperties, Memory, Seq2SeqNetwork, State, complete
from lightning_tfm.system.private import has_forward_hooks
from lightning_tfm.tokenization import EOS, PAD

Recurrent = tuple[Tensor, ...]
"""State of a recurrent cell: the hidden state (B, D), and the cell state (B, D) of an LSTM."""


class AttentionLSTM(Seq2SeqNetwork):
    """LSTM or GRU encoder-decoder with additive attention (Bahdanau et al. 2015).

    A bidirectional recurrent network encodes the source. Another one decodes the target from the previous token and the
    context. The network has no positions, so sequences may have any length.

    Args:
        vocab_size: number of ids, shared by source and target.
        d_model: width of each encoder direction, of the decoder and of the attention.
        dropout: dropout on embeddings and before the output layer.
        attention: "additive", "location_aware" (Chorowski et al. 2015), which reads the previous attention weights, or
            "monotonic" (Raffel et al. 2017), which attends to one token and only moves from left to right. Its moves
            depend on the previous token, and not on the hidden state, which drifts in long sequences. So the weights
            are computed first, and the decoder is a recurrent layer over all tokens.
            "hard_monotonic" (Wu & Cotterell 2019) may also skip tokens. Its probabilities are the sums over all
            alignments, for which it computes V logits for each pair of a source and a target token; its decoder reads
            no context.
        cell: the recurrent cell, "lstm", or "gru" as in the paper.
        pointer_generator: whether the decoder can copy tokens of the source (See et al. 2017).
        d_embedding: width of the embeddings; null for d_model.
        features_encoder: how the features of a source are encoded. If null, they are tokens of the source, which follow
            the others. "linear" removes them from the source, and adds the sum of their embeddings to the embedding of
            each token of source and target, so that each step of the decoder reads them.
        feature_ids: ids of the features; if null, `fit` infers them from the data.
        outputs: the tokens that the output layer scores: "all", or "targets" for EOS and the tokens of the training
            targets. Other tokens have the smallest positive probability.
        target_ids: ids of the tokens of the training targets; if null, `fit` infers them from the data.

    Note:
        With features_encoder, EOS moves to the place of the first feature, also in the attention weights. With outputs
        "targets", label smoothing adds a constant to the training loss.
    """

    is_feature: Tensor
    output_index: Tensor | None
    is_traceable = False  # it loops over the tokens

    def __init__(
        self,
        vocab_size: int,
        d_model: int = 64,
        dropout: float = 0.0,
        attention: Literal["additive", "location_aware", "monotonic", "hard_monotonic"] = "additive",
        cell: Literal["lstm", "gru"] = "lstm",
        pointer_generator: bool = False,
        d_embedding: int | None = None,
        features_encoder: Literal["linear"] | None = None,
        feature_ids: Sequence[int] | None = None,
        outputs: Literal["all", "targets"] = "all",
        target_ids: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        d_embedding = d_model if d_embedding is None else d_embedding
        self.source_embedding = nn.Embedding(vocab_size, d_embedding)
        self.target_embedding = nn.Embedding(vocab_size, d_embedding)
        self.dropout = Dropout(dropout)
        layer = {"lstm": LSTM, "gru": nn.GRU}[cell]
        self.encoder_forward = layer(d_embedding, d_model, batch_first=True)
        self.encoder_backward = layer(d_embedding, d_model, batch_first=True)
        self.encoder_states = nn.Identity()  # a hook point
        self.num_states = 2 if cell == "lstm" else 1
        self.start = Linear(d_model, self.num_states * d_model)  # initial states of the decoder
        self.attention: AdditiveAttention | MonotonicAttention | HardMonotonicAttention
        if attention == "monotonic":
            self.attention = MonotonicAttention(d_embedding, 2 * d_model)
            # From the previous token and the context.
            self.decoder = layer(d_embedding + 2 * d_model, d_model, batch_first=True)
        elif attention == "hard_monotonic":
            self.attention = HardMonotonicAttention(d_model, 2 * d_model, d_model)
            self.decoder = layer(d_embedding, d_model, batch_first=True)  # from the previous token
            self.memory_readout = Linear(2 * d_model, d_model, bias=False)
        else:
            kinds = {"additive": AdditiveAttention, "location_aware": LocationAwareAttention}
            self.attention = kinds[attention](d_model, 2 * d_model, d_model)
            # The gates and the candidate of the cell, from the previous token, and from context and hidden state.
            if cell == "lstm":
                self.decoder_token = Linear(d_embedding, 4 * d_model)
                self.decoder_state = Linear(3 * d_model, 4 * d_model, bias=False)
            else:
                self.decoder_token = Linear(d_embedding, 3 * d_model)
                self.decoder_state = Linear(3 * d_model, 2 * d_model, bias=False)
                self.decoder_candidate = Linear(3 * d_model, d_model, bias=False)
        self.readout = Linear((1 if attention == "hard_monotonic" else 3) * d_model, d_model)
        output_index, num_outputs = None, vocab_size
        if outputs == "targets":
            if pointer_generator or not target_ids:
                reason = "with pointer_generator" if pointer_generator else "for data with unknown target_ids"
                raise UserError(f"outputs must be all {reason}, but is targets; leave it out")
            ids = sorted({EOS, *target_ids})
            num_outputs = len(ids)
            # The output of each id; the number of outputs if it has none.
            output_index = torch.full((vocab_size,), num_outputs)
            output_index[ids] = torch.arange(num_outputs)
        self.register_buffer("output_index", output_index, persistent=False)
        self.head = Linear(d_model, num_outputs)
        if pointer_generator and attention == "hard_monotonic":
            raise UserError("pointer_generator must be false for attention hard_monotonic, but is true; try additive")
        self.pointer = PointerGenerator(3 * d_model + d_embedding) if pointer_generator else None
        self.feature_embedding: nn.Embedding | None = None
        if features_encoder is not None:
            if not feature_ids:
                raise UserError(
                    f"features_encoder must be null for sources without features, but is {features_encoder}; leave it "
                    "out, or select a column of features, as with data.features"
                )
            self.feature_embedding = nn.Embedding(vocab_size, d_embedding)
            is_feature = torch.zeros(vocab_size, dtype=torch.bool)
            is_feature[[*feature_ids]] = True
            self.register_buffer("is_feature", is_feature, persistent=False)

    @classmethod
    def data_settings(cls, data: DataProperties) -> dict[str, Any]:
        ids = getattr(data, "feature_ids", ())
        return super().data_settings(data) | ({"feature_ids": [*ids]} if ids else {})

    @classmethod
    def complete_settings(cls, data: DataProperties, settings: dict[str, Any]) -> dict[str, Any]:
        settings = super().complete_settings(data, settings)
        if settings.get("outputs") != "targets":
            return settings
        return complete(settings, {"target_ids": [*getattr(data, "target_ids", ())]})

    def random_ids(self, rows: int, length: int, generator: torch.Generator, ids_per_token: int = 1) -> Tensor:
        ids = super().random_ids(rows, length, generator, ids_per_token)
        if self.feature_embedding is not None:  # a source also has a token that is no feature, at least EOS
            ids[:, 0] = ids[:, 0].masked_fill(self.is_feature[ids[:, 0]], EOS)
        return ids

    def _of_all_ids(self, log_probs: Tensor) -> Tensor:
        """Return the log probabilities (..., V) of all ids, given those of the outputs."""
        if self.output_index is None:
            return log_probs
        never = math.log(torch.finfo(log_probs.dtype).tiny)
        return F.pad(log_probs, (0, 1), value=never).index_select(-1, self.output_index)

    def _split(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Return the source (B, S) without its features, and the sum (B, 1, d_embedding) of their embeddings."""
        assert self.feature_embedding is not None
        is_feature = self.is_feature[source]
        features = (self.feature_embedding(source) * is_feature.unsqueeze(2)).sum(1, keepdim=True)
        # Tokens move to the left in place of the features, which move to a column that is removed.
        places = torch.where(is_feature, source.size(1), (~is_feature).cumsum(1) - 1)
        tokens = F.pad(torch.full_like(source, PAD), (0, 1)).scatter(1, places, source)
        return tokens[:, :-1], features

    def encode(self, source: Tensor) -> State:
        features: list[Tensor] = []
        if self.feature_embedding is not None:
            source, *features = self._split(source)
        mask = source != PAD  # (B, S)
        lengths = mask.sum(1, keepdim=True)
        x = self.dropout(sum(features, start=self.source_embedding(source)))  # (B, S, d_embedding)
        # The index reverses the tokens of each row and keeps the padding in place. Packed sequences would do the same,
        # but do not use the fast CPU kernel, and `gather` takes several times as long.
        steps = torch.arange(source.size(1), device=source.device)
        turned = torch.where(mask, lengths - 1 - steps, steps)  # (B, S)
        first = source.size(1) * torch.arange(source.size(0), device=source.device)  # of each row, in the flat batch
        order = (first.unsqueeze(1) + turned).flatten()  # (B * S)
        rightwards, _ = self.encoder_forward(x)
        leftwards, _ = self.encoder_backward(x.flatten(0, 1).index_select(0, order).view_as(x))
        leftwards = leftwards.flatten(0, 1).index_select(0, order).view_as(leftwards)
        memory = self.encoder_states(torch.cat((rightwards, leftwards), dim=-1))  # (B, S, 2D)
        recurrent = torch.tanh(self.start(leftwards[:, 0])).chunk(self.num_states, dim=-1)  # (Bahdanau et al., A.2.2)
        keys = self.attention.k_proj(memory)
        if isinstance(self.attention, HardMonotonicAttention):
            # The weights before the first step, and the probabilities of the token at each position.
            start = self.attention.start(mask)
            previous: State = (start, start.new_ones(*source.shape, self.head.out_features))
            memory = self.memory_readout(memory)
        else:
            previous = torch.zeros_like(memory[..., 0])  # (B, S), before the first step
        return recurrent, previous, Memory((keys, memory, source, *features))

    def _cell(self, token_gates: Tensor, context: Tensor, recurrent: Recurrent) -> Recurrent:
        """Return the next state of the cell, (Bahdanau et al., A.2.2) for a GRU.

        The previous token contributes token_gates (B, 4D), of a GRU (B, 3D), to the gates. The context (B, 2D) has
        width 0 for hard monotonic attention.
        """
        # Unlike in nn.LSTMCell, token_gates is computed once for all steps. The four gates of an LSTM are one product.
        hidden = recurrent[0]
        inputs = torch.cat((context, hidden), dim=-1)
        if len(recurrent) == 1:
            gates, candidate = token_gates.split((2 * hidden.size(-1), hidden.size(-1)), dim=-1)
            update, reset = (gates + self.decoder_state(inputs)).sigmoid().chunk(2, dim=-1)
            candidate = candidate + self.decoder_candidate(torch.cat((context, reset * hidden), dim=-1))
            return (hidden + update * (candidate.tanh() - hidden),)
        gates = token_gates + self.decoder_state(inputs)
        forget_in_out, candidate = gates.split((3 * hidden.size(-1), hidden.size(-1)), dim=-1)
        forget, input, output = forget_in_out.sigmoid().chunk(3, dim=-1)
        cell = forget * recurrent[1] + input * candidate.tanh()
        return output * cell.tanh(), cell

    def _logits(self, hidden: Tensor, context: Tensor) -> Tensor:
        features = torch.tanh(self.readout(torch.cat((hidden, context), dim=-1)))
        logits = self.head(self.dropout(features))
        return logits if self.output_index is None else self._of_all_ids(at_least_float32(logits).log_softmax(-1))

    def _is_fused(self) -> bool:
        """Return whether the decoder is computed by `lstm_with_attention`, which has a hand-written backward pass.

        Note:
            Otherwise, the loop calls the attention layer in each step, so that hooks can record its weights.
        """
        if type(self.attention) is not AdditiveAttention or self.num_states == 1:
            return False
        return self.training and not has_forward_hooks(self.attention) and not torch.compiler.is_compiling()

    def _decode(self, target_in: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the logits (B, T, V) after each token of target_in (B, T), and the state after the last one."""
        recurrent, weights, (keys, memory, source, *features) = state
        embedded = self.dropout(sum(features, start=self.target_embedding(target_in)))  # (B, T, d_embedding)
        if isinstance(self.attention, HardMonotonicAttention):
            return self._decode_marginal(target_in, embedded, state)
        mask = source != PAD
        if isinstance(self.attention, MonotonicAttention):
            contexts, maps = self.attention(embedded, keys, memory, mask, weights)
            hiddens, recurrent = self._run(torch.cat((embedded, contexts), dim=-1), recurrent)
            weights = maps[:, -1]
        elif self._is_fused():
            hidden, cell = recurrent
            hiddens, contexts, maps, cell = lstm_with_attention(
                self.decoder_token(embedded),
                keys,
                memory,
                mask,
                hidden,
                cell,
                self.attention.q_proj.weight,
                self.attention.energy.weight,
                self.decoder_state.weight,
            )
            recurrent, weights = (hiddens[:, -1], cell), maps[:, -1]
        else:
            # The loop contains only the recurrent operations; the others are batched over all tokens.
            steps = []
            for gates in self.decoder_token(embedded).unbind(1):  # (B, 4D), of a GRU (B, 3D)
                context, weights = self.attention(recurrent[0], keys, memory, mask, weights)
                recurrent = self._cell(gates, context, recurrent)
                steps.append((recurrent[0], context, weights))
            hiddens, contexts, maps = (torch.stack(parts, dim=1) for parts in zip(*steps, strict=True))
        logits = self._logits(hiddens, contexts)
        if self.pointer is not None:
            logits = self.pointer(logits, torch.cat((contexts, hiddens, embedded), dim=-1), maps, source)
        return logits, (recurrent, weights, state[2])

    def _run(self, inputs: Tensor, recurrent: Recurrent) -> tuple[Tensor, Recurrent]:
        """Return the hidden states (B, T, D) of the decoder for inputs independent of them, and its last state."""
        initial = tuple(part[None].contiguous() for part in recurrent)  # as cuDNN requires
        hiddens, last = self.decoder(inputs, initial if len(initial) == 2 else initial[0])
        return hiddens, tuple(part[0] for part in (last if len(initial) == 2 else (last,)))

    def _decode_marginal(self, target_in: Tensor, embedded: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the log probabilities (B, T, V) after each token of target_in (B, T), summed over all alignments.

        The second result is the state after the last token.
        """
        assert isinstance(self.attention, HardMonotonicAttention)
        recurrent, (previous, emission), (keys, memory, source, *_) = state
        hiddens, recurrent = self._run(embedded, recurrent)
        features = torch.tanh(self.readout(hiddens).unsqueeze(2) + memory.unsqueeze(1))  # (B, T, S, D)
        emissions = at_least_float32(self.head(self.dropout(features))).softmax(-1)  # (B, T, S, V)
        # The probabilities of each token of target_in in the step before it. A slice of the result is cheaper than one
        # of the emissions.
        first = self._probabilities(emission.unsqueeze(1), target_in[:, :1])
        tokens = torch.cat((first, self._probabilities(emissions, target_in.roll(-1, 1))[:, :-1]), dim=1)  # (B, T, S)
        weights = self.attention(hiddens, keys, source != PAD, previous, tokens)  # (B, T, S)
        probs = matmul_without_autocast(weights.unsqueeze(2), emissions).squeeze(2)  # (B, T, V)
        log_probs = self._of_all_ids(probs.clamp(min=torch.finfo(probs.dtype).tiny).log())
        return log_probs, (recurrent, (weights[:, -1], emissions[:, -1]), state[2])

    def _probabilities(self, emissions: Tensor, ids: Tensor) -> Tensor:
        """Return the probabilities (B, T, S) of ids (B, T), given those of all outputs (B, T, S, V)."""
        outputs = ids if self.output_index is None else self.output_index[ids]
        last = emissions.size(3) - 1
        index = outputs.clamp(max=last)[:, :, None, None].expand(*emissions.shape[:3], 1)
        return emissions.gather(3, index).squeeze(3).masked_fill((outputs > last).unsqueeze(2), 0)

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        return self._decode(target_in, self.encode(source))[0]

    def decode_step(self, token: Tensor, state: State) -> tuple[Tensor, State]:
        logits, state = self._decode(token.unsqueeze(1), state)
        return logits.squeeze(1), state

    def logits(self, source: Tensor, target_in: Tensor, state: State) -> Tensor:
        return self._decode(target_in, state)[0]
