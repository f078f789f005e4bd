"""LSTM decoder with additive attention, with a hand-written backward pass.

Shapes: batch B, steps T, memory positions S, widths D of the LSTM, E of the memory and A of the attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_tfm.layers.precision import at_least_float32
from lightning_tfm.system.private import softmax_backward


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
        The results are those of a loop that calls `AdditiveAttention` and the linear layers, in fewer operations. The
        backward pass computes step by step only what depends on the next step: local derivatives of the gates are
        computed for all steps before, and gradients of weights and memory for all steps after. If the inputs have half
        precision, both passes compute in float32, since rounding errors add up over the steps; weights and cell state
        are returned in float32. Second derivatives and the transforms of `torch.func` are not supported, and hooks of
        the layers are not called.
    """
    tensors = token_gates, keys, memory, hidden, cell, query_weight, energy_weight, state_weight
    with torch.autocast(token_gates.device.type, enabled=False):
        results = _LSTMWithAttention.apply(mask, *(at_least_float32(tensor) for tensor in tensors))
    hiddens, contexts, weights, cell = results
    return hiddens.to(token_gates.dtype), contexts.to(token_gates.dtype), weights, cell


def _steps(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return an iterator over the steps of tensors (T, ...); indexing each step would take longer."""
    return zip(*(tensor.unbind() for tensor in tensors), strict=True)


class _LSTMWithAttention(torch.autograd.Function):
    """The loop of `lstm_with_attention`, whose tensors of all steps are (T, B, ...)."""

    @staticmethod
    def forward(ctx: Any, mask: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        token_gates, keys, memory, hidden, cell, query_weight, energy_weight, state_weight = tensors
        B, T, _ = token_gates.shape
        S, A, E, D = keys.size(1), keys.size(2), memory.size(2), hidden.size(1)
        new = token_gates.new_empty
        # The factors of the scores 2v sigmoid(2z), see `AdditiveScores`.
        keys, vector = 2 * keys, 2 * energy_weight.t()
        mask_bias = keys.new_zeros(B * S, 1).masked_fill_(~mask.reshape(-1, 1), -math.inf)
        hidden_weight = torch.cat((2 * query_weight, state_weight[:, E:])).t()  # (D, A + 4D)
        context_weight = state_weight[:, :E].t()  # (E, 4D)

        # The queries, and the gates without the context, to which the loop adds the hidden state.
        projections = torch.cat((token_gates.new_zeros(T, B, A), token_gates.transpose(0, 1)), dim=-1)
        sigmoids, weights, contexts, gates = new(T, B, S, A), new(T, B, 1, S), new(T, B, 1, E), new(T, B, 4 * D)
        hiddens, cells, tanhs = new(T + 1, B, D), new(T + 1, B, D), new(T, B, D)
        hiddens[0], cells[0] = hidden, cell
        scores = new(B * S, 1)
        for (
            (projection, query, gates_without_context),
            (sigmoid, sigmoid_rows, weight, context, context_row),
            (gate, forget_in_out, forget, input, output, candidate),
            (hidden, cell, tanh, next_hidden, next_cell),
        ) in zip(
            _steps(projections, projections[:, :, None, :A], projections[:, :, A:]),
            _steps(sigmoids, sigmoids.view(T, B * S, A), weights, contexts, contexts.view(T, B, E)),
            _steps(gates, gates[..., : 3 * D], *gates.chunk(4, dim=-1)),
            _steps(hiddens[:-1], cells[:-1], tanhs, hiddens[1:], cells[1:]),
            strict=True,
        ):
            torch.addmm(projection, hidden, hidden_weight, out=projection)
            torch.add(keys, query, out=sigmoid).sigmoid_()
            torch.addmm(mask_bias, sigmoid_rows, vector, out=scores)
            torch.softmax(scores.view(B, 1, S), dim=-1, out=weight)
            torch.bmm(weight, memory, out=context)
            torch.addmm(gates_without_context, context_row, context_weight, out=gate)
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
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        with torch.autocast(saved[0].device.type, enabled=False):
            return None, *_gradients(saved, *gradients)


def _gradients(saved: tuple[Tensor, ...], *gradients: Tensor | None) -> tuple[Tensor, ...]:
    """Return the gradients with respect to the tensors of `_LSTMWithAttention.forward`.

    The weights and the memory are those of `lstm_with_attention`, and `d_` are the gradients of its results, None if
    there is none. The other tensors are those of all steps: the hidden layer of the attention (T, B, S, A), the
    attention weights (T, B, 1, S), the contexts (T, B, 1, E), the gates and the candidate (T, B, 4D), all after their
    activations, hidden and cell states including the initial ones (T + 1, B, D), and tanh of the cell states (T, B, D).
    """
    memory, query_weight, energy_weight, state_weight, sigmoids, weights, contexts, gates, hiddens, cells, tanhs = saved
    d_hiddens, d_contexts, d_weights, d_cell = gradients
    T, B, S, A = sigmoids.shape
    D, E = hiddens.size(2), contexts.size(3)
    _, input, output, candidate = gates.chunk(4, dim=-1)

    # Local derivatives: of the hidden state with respect to the cell (T, B, D), and of cell and hidden state with
    # respect to the inputs of the activations of gates and candidate (T, B, 4D).
    slopes = torch.ops.aten.tanh_backward(output, tanhs)
    gate_slopes = torch.cat((cells[:-1], candidate, tanhs), dim=-1)
    gate_slopes = torch.ops.aten.sigmoid_backward(gate_slopes, gates[..., : 3 * D])
    gate_slopes = torch.cat((gate_slopes, torch.ops.aten.tanh_backward(input, candidate)), dim=-1)

    # The gradients of the context of each step and of the hidden state before it, to which the loop adds.
    d_inputs = memory.new_zeros(T + 1, B, E + D)
    if d_hiddens is not None:
        d_inputs[1:, :, E:] = d_hiddens.transpose(0, 1)
    if d_contexts is not None:
        d_inputs[:-1, :, :E] = d_contexts.transpose(0, 1)
    d_hidden = d_inputs[-1, :, E:]
    d_cell = torch.zeros_like(d_hidden) if d_cell is None else d_cell
    d_weights = weights.new_zeros(T, B, S) if d_weights is None else d_weights.transpose(0, 1).contiguous()
    d_gates, d_scores, d_queries = torch.empty_like(gates), torch.empty_like(weights), weights.new_empty(T, B, 1, A)
    d_keys = torch.zeros_like(sigmoids[0])
    # The derivative of the scores 2v sigmoid(2z) is 4v s (1 - s).
    vector = (4 * energy_weight).expand(B, S, A)
    # The product of a row with a contiguous matrix is several times as fast.
    by_width = memory.mT.contiguous()  # (B, E, S)
    loop = zip(
        _steps(slopes, gate_slopes.view(T, B, 4, D), gates[..., :D]),
        _steps(d_gates, d_gates.view(T, B, 4, D)),
        _steps(d_inputs[:-1], d_inputs[:-1, :, None, :E], d_inputs[:-1, :, E:]),
        _steps(weights, d_weights.unsqueeze(2), d_scores, d_scores.mT),
        _steps(sigmoids, d_queries, d_queries.view(T, B, A)),
        strict=True,
    )
    for (
        (slope, gate_slope, forget),
        (d_gate, d_gate_parts),
        (d_input, d_context, d_before),
        (weight, d_weight, d_score, d_score_column),
        (sigmoid, d_query, d_query_row),
    ) in reversed(list(loop)):
        d_cell = torch.addcmul(d_cell, d_hidden, slope)
        torch.mul(torch.stack((d_cell, d_cell, d_hidden, d_cell), dim=1), gate_slope, out=d_gate_parts)
        torch.addmm(d_input, d_gate, state_weight, out=d_input)
        torch.baddbmm(d_weight, d_context, by_width, out=d_weight)
        softmax_backward(d_weight, weight, into=d_score)
        score_slope = torch.ops.aten.sigmoid_backward(vector, sigmoid)
        torch.bmm(d_score, score_slope, out=d_query)
        d_keys.addcmul_(score_slope, d_score_column)
        d_hidden = torch.addmm(d_before, d_query_row, query_weight, out=d_before)
        d_cell = d_cell * forget

    before = hiddens[:-1].flatten(0, 1)  # (T * B, D)
    d_memory = weights.squeeze(2).permute(1, 2, 0) @ d_inputs[:-1, :, :E].transpose(0, 1)
    d_query_weight = d_queries.view(T * B, A).t() @ before
    d_energy_weight = 2 * d_scores.view(1, -1) @ sigmoids.view(-1, A)
    d_state_weight = d_gates.flatten(0, 1).t() @ torch.cat((contexts.view(T * B, E), before), dim=-1)
    d_token_gates = d_gates.transpose(0, 1)
    return d_token_gates, d_keys, d_memory, d_hidden, d_cell, d_query_weight, d_energy_weight, d_state_weight
