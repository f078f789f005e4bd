"""Decoder of an LSTM with additive attention over all steps, with a gradient computed by hand.

Shapes: batch B, steps T, memory positions S, widths D of the LSTM, E of the memory and A of the attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_tfm.layers.attention import at_least_float32


def lstm_with_attention(
    token_gates: Tensor,
    keys: Tensor,
    memory: Tensor,
    mask: Tensor,
    hidden: Tensor,
    cell: Tensor,
    query_weight: Tensor,
    energy_weight: Tensor,
    state_weight: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the hidden states (B, T, D), contexts (B, T, E), weights (B, T, S) and the last cell state (B, D).

    In each step, `AdditiveAttention` attends from the hidden state to the memory. The cell then computes forget, input
    and output gate and candidate, in this order, from the token, the context and the hidden state.

    Args:
        token_gates: the contributions of the previous tokens to the gates and the candidate (B, T, 4D).
        keys: the keys (B, S, A) of the memory.
        memory: the memory (B, S, E).
        mask: the mask (B, S), True at memory positions that are not padding.
        hidden: the initial hidden state (B, D).
        cell: the initial cell state (B, D).
        query_weight: the projection (A, D) of the queries.
        energy_weight: the vector (1, A) of the scores.
        state_weight: the contributions (4D, E + D) of context and hidden state.

    Note:
        The result is that of a loop over the layers, in fewer operations. The backward pass computes step by step only
        what depends on the next step: derivatives of activations are computed for all steps before, and gradients of
        weights, keys and memory for all steps after. In half precision, it is computed in float32, since rounding
        errors add up over the steps. Second derivatives are not supported.
    """
    tensors = token_gates, keys, memory, hidden, cell, query_weight, energy_weight, state_weight
    with torch.autocast(token_gates.device.type, enabled=False):
        results = _LSTMWithAttention.apply(mask, *(at_least_float32(tensor) for tensor in tensors))
    hiddens, contexts, weights, cell = (result.to(token_gates.dtype) for result in results)
    return hiddens, contexts, weights, cell


def _steps(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return an iterator over the steps of tensors (T, ...)."""
    return zip(*(tensor.unbind() for tensor in tensors), strict=True)


class _LSTMWithAttention(torch.autograd.Function):
    """The loop of `lstm_with_attention`, whose tensors of all steps are (T, B, ...)."""

    @staticmethod
    def forward(
        ctx: Any,
        mask: Tensor,
        token_gates: Tensor,
        keys: Tensor,
        memory: Tensor,
        hidden: Tensor,
        cell: Tensor,
        query_weight: Tensor,
        energy_weight: Tensor,
        state_weight: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        B, T, _ = token_gates.shape
        S, A, E, D = keys.size(1), keys.size(2), memory.size(2), hidden.size(1)
        new = token_gates.new_empty
        # The factors of the scores 2v sigmoid(2z), see `AdditiveScores`.
        keys, vector = 2 * keys, 2 * energy_weight.view(-1)
        biases = keys.new_zeros(B, S).masked_fill_(~mask, -math.inf)
        hidden_weight = torch.cat((2 * query_weight, state_weight[:, E:])).t()  # (D, A + 4D)
        context_weight = state_weight[:, :E].t()  # (E, 4D)

        # The queries, and the gates without the context, to which the loop adds the hidden state.
        projections = torch.cat((token_gates.new_zeros(T, B, A), token_gates.transpose(0, 1)), dim=-1)
        sigmoids, weights, contexts, gates = new(T, B, S, A), new(T, B, 1, S), new(T, B, 1, E), new(T, B, 4 * D)
        hiddens, cells, tanhs = new(T + 1, B, D), new(T + 1, B, D), new(T, B, D)
        hiddens[0], cells[0] = hidden, cell
        scores = new(B, 1, S)
        for (
            (projection, query, contribution),
            (sigmoid, rows, weight, context, context_row),
            (gate, forget_in_out, forget, input, output, candidate),
            (hidden, cell, tanh, next_hidden, next_cell),
        ) in zip(
            _steps(projections, projections[:, :, None, :A], projections[:, :, A:]),
            _steps(sigmoids, sigmoids.view(T, B * S, A), weights, contexts, contexts.view(T, B, E)),
            _steps(gates, gates[..., : 3 * D], *gates.chunk(4, dim=-1)),
            _steps(hiddens[:-1], cells[:-1], tanhs, hiddens[1:], cells[1:]),
            strict=True,
        ):
            projection.addmm_(hidden, hidden_weight)
            torch.add(keys, query, out=sigmoid).sigmoid_()
            torch.addmv(biases.view(-1), rows, vector, out=scores.view(-1))
            torch.softmax(scores, dim=-1, out=weight)
            torch.bmm(weight, memory, out=context)
            torch.addmm(contribution, context_row, context_weight, out=gate)
            forget_in_out.sigmoid_()
            candidate.tanh_()
            torch.mul(forget, cell, out=next_cell).addcmul_(input, candidate)
            torch.tanh(next_cell, out=tanh)
            torch.mul(output, tanh, out=next_hidden)

        ctx.save_for_backward(
            memory, query_weight, energy_weight, state_weight,
            sigmoids, weights, contexts, gates, hiddens, cells, tanhs,
        )  # fmt: skip
        ctx.set_materialize_grads(False)
        hiddens, contexts, weights = hiddens[1:], contexts.squeeze(2), weights.squeeze(2)
        return hiddens.transpose(0, 1), contexts.transpose(0, 1), weights.transpose(0, 1), cells[-1]

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        d_hiddens: Tensor | None,
        d_contexts: Tensor | None,
        d_weights: Tensor | None,
        d_cell: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        memory, query_weight, energy_weight, state_weight = ctx.saved_tensors[:4]
        sigmoids, weights, contexts, gates, hiddens, cells, tanhs = ctx.saved_tensors[4:]
        T, B, S, A = sigmoids.shape
        D, E = hiddens.size(2), contexts.size(3)
        new = sigmoids.new_empty
        _, input, output, candidate = gates.chunk(4, dim=-1)

        # The derivatives of the hidden state by the cell, of both by gates and candidate, and of the scores by keys.
        slopes = torch.ops.aten.tanh_backward(output, tanhs)
        gate_slopes = torch.cat((cells[:-1], candidate, tanhs), dim=-1)
        gate_slopes = torch.ops.aten.sigmoid_backward(gate_slopes, gates[..., : 3 * D])
        gate_slopes = torch.cat((gate_slopes, torch.ops.aten.tanh_backward(input, candidate)), dim=-1).view(T, B, 4, D)
        score_slopes = torch.ops.aten.sigmoid_backward((4 * energy_weight).expand_as(sigmoids), sigmoids)

        # The gradients of contexts and of the hidden states before each step, to which the loop adds.
        d_inputs = memory.new_zeros(T + 1, B, E + D)
        if d_hiddens is not None:
            d_inputs[1:, :, E:] = d_hiddens.transpose(0, 1)
        if d_contexts is not None:
            d_inputs[:-1, :, :E] = d_contexts.transpose(0, 1)
        d_attended = weights.new_zeros(T, B, 1, S)
        if d_weights is not None:
            d_attended[:, :, 0] = d_weights.transpose(0, 1)
        d_hidden = d_inputs[-1, :, E:]
        d_cell = torch.zeros_like(d_hidden) if d_cell is None else d_cell
        d_gates, d_scores, d_queries = torch.empty_like(gates), torch.empty_like(weights), new(T, B, 1, A)
        by_width = memory.mT.contiguous()  # (B, E, S)
        loop = zip(
            _steps(slopes, gate_slopes, gates[..., :D]),
            _steps(d_gates, d_gates.view(T, B, 4, D)),
            _steps(d_inputs[:-1], d_inputs[:-1, :, None, :E], d_inputs[:-1, :, E:]),
            _steps(weights, d_attended, d_scores, score_slopes, d_queries, d_queries.view(T, B, A)),
            strict=True,
        )
        for (
            (slope, gate_slope, forget),
            (d_gate, d_gate_parts),
            (d_input, d_context, d_before),
            (weight, d_weight, d_score, score_slope, d_query, d_query_row),
        ) in reversed(list(loop)):
            d_cell = torch.addcmul(d_cell, d_hidden, slope)
            torch.mul(torch.stack((d_cell, d_cell, d_hidden, d_cell), dim=1), gate_slope, out=d_gate_parts)
            d_input.addmm_(d_gate, state_weight)
            d_weight.baddbmm_(d_context, by_width)
            torch._softmax_backward_data(d_weight, weight, -1, weight.dtype, grad_input=d_score)
            torch.bmm(d_score, score_slope, out=d_query)
            d_hidden = d_before.addmm_(d_query_row, query_weight)
            d_cell = d_cell * forget

        before = hiddens[:-1].flatten(0, 1)  # (T * B, D)
        d_keys = score_slopes.mul_(d_scores.view(T, B, S, 1)).sum(0)
        d_memory = weights.squeeze(2).permute(1, 2, 0) @ d_inputs[:-1, :, :E].transpose(0, 1)
        d_query_weight = d_queries.view(T * B, A).t() @ before
        d_energy_weight = 2 * d_scores.view(1, -1) @ sigmoids.view(-1, A)
        d_state_weight = d_gates.flatten(0, 1).t() @ torch.cat((contexts.view(T * B, E), before), dim=-1)
        d_token_gates = d_gates.transpose(0, 1)
        gradients = d_query_weight, d_energy_weight, d_state_weight
        return None, d_token_gates, d_keys, d_memory, d_hidden, d_cell, *gradients
