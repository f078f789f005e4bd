"""Attention layers compared with torch and with their formulas."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from lightning_tfm.layers import (
    AdditiveAttention,
    Attention,
    CrossAttention,
    HardMonotonicAttention,
    LocationAwareAttention,
    MonotonicAttention,
    MonotonicCrossAttention,
    PointerGenerator,
    SelfAttention,
    TransformerLayer,
    causal_mask,
    lstm_with_attention,
    monotonic_weights,
)
from lightning_tfm.networks import LinearTransformer
from lightning_tfm.networks.linear_transformer import LinearAttention
from lightning_tfm.tokenization import EOS, PAD
from support.networks import randomize, step_by_step


@pytest.mark.parametrize("masking", ["is_causal", "causal mask", "random mask"])
def test_self_attention_equals_torch(masking):
    """The outputs of the fused kernel and the weights are those of torch."""
    ours, theirs = SelfAttention(16, 4), nn.MultiheadAttention(16, 4, batch_first=True)
    theirs.in_proj_weight.data, theirs.in_proj_bias.data = ours.qkv_proj.weight, ours.qkv_proj.bias
    theirs.out_proj.weight.data, theirs.out_proj.bias.data = ours.out_proj.weight, ours.out_proj.bias
    x = torch.randn(3, 6, 16)
    mask = (causal_mask(6, 6, x.device) if "causal" in masking else torch.rand(3, 1, 6, 6) < 0.7) | (
        torch.arange(6) == 0
    )
    all_heads = mask.expand(3, 4, 6, 6).flatten(0, 1)
    expected, expected_weights = theirs(x, x, x, attn_mask=~all_heads, average_attn_weights=False)
    masks = (None, True) if masking == "is_causal" else (mask, False)
    torch.testing.assert_close(ours(x, *masks)[0], expected)
    torch.testing.assert_close(ours.weights(x, *masks), expected_weights)


def test_cross_attention_equals_torch():
    ours, theirs = CrossAttention(16, 4), nn.MultiheadAttention(16, 4, batch_first=True)
    theirs.in_proj_weight.data = torch.cat((ours.q_proj.weight, ours.kv_proj.weight))
    theirs.in_proj_bias.data = torch.cat((ours.q_proj.bias, ours.kv_proj.bias))
    theirs.out_proj.weight.data, theirs.out_proj.bias.data = ours.out_proj.weight, ours.out_proj.bias
    x, memory = torch.randn(3, 5, 16), torch.randn(3, 6, 16)
    mask = torch.arange(6) < torch.tensor([6, 2, 1])[:, None]
    expected, expected_weights = theirs(x, memory, memory, key_padding_mask=~mask, average_attn_weights=False)
    inputs = x, ours.project_memory(memory), mask[:, None, None]
    torch.testing.assert_close(ours(*inputs), expected)
    torch.testing.assert_close(ours.weights(*inputs), expected_weights)


NAMES = [
    *(("self_attention.qkv_proj.", "self_attn.in_proj_"), ("self_attention.out_proj", "self_attn.out_proj")),
    *(("cross_attention.out_proj", "multihead_attn.out_proj"), ("feed_forward.0", "linear1")),
    *(("feed_forward.2", "linear2"), ("add_self.norm", "norm1"), ("add_cross.norm", "norm2")),
]
"""The beginnings of the names of our weights, and those of torch."""


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("cross_attention", [False, True])
def test_transformer_layer_equals_torch(norm, cross_attention):
    ours = TransformerLayer(16, 4, 32, 0.0, norm, nn.ReLU(), cross_attention="dot_product" if cross_attention else None)
    cls = nn.TransformerDecoderLayer if cross_attention else nn.TransformerEncoderLayer
    theirs = cls(16, 4, 32, dropout=0.0, batch_first=True, norm_first=norm == "pre")
    state = randomize(ours).state_dict()
    if cross_attention:
        for kind in ("weight", "bias"):
            query, keys = (state.pop(f"cross_attention.{name}.{kind}") for name in ("q_proj", "kv_proj"))
            state[f"multihead_attn.in_proj_{kind}"] = torch.cat((query, keys))
    for name, other in (*NAMES, ("add_feed_forward.norm", "norm3" if cross_attention else "norm2")):
        state = {key.replace(name, other) if key.startswith(name) else key: value for key, value in state.items()}
    theirs.load_state_dict(state)
    x, memory = torch.randn(3, 5, 16), torch.randn(3, 6, 16)
    if cross_attention:
        keys = {"memory": ours.cross_attention.project_memory(memory), "memory_mask": torch.ones(3, 1, 1, 6).bool()}
        actual = ours(x, is_causal=True, **keys)
        expected = theirs(x, memory, tgt_mask=~causal_mask(5, 5, x.device))
    else:
        actual, expected = ours(x), theirs(x)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("cls", [AdditiveAttention, LocationAwareAttention])
def test_additive_attention_equals_its_formula(cls):
    layer = cls(4, 6, 5)
    query, memory, previous = torch.randn(2, 4), torch.randn(2, 7, 6), torch.rand(2, 7).softmax(-1)
    inputs = query, layer.k_proj(memory), memory, torch.arange(7) < torch.tensor([7, 5])[:, None], previous
    context, weights = layer(*inputs)
    padded = nn.functional.pad(previous, (2, 2))
    for b, length in enumerate((7, 5)):
        energies = []
        for s in range(length):
            hidden = layer.q_proj.weight @ query[b] + layer.k_proj(memory[b, s])
            if cls is LocationAwareAttention:
                hidden += layer.location_proj.weight @ (layer.filters.weight[:, 0] @ padded[b, s : s + 5])
            energies.append(layer.energy.weight[0] @ torch.tanh(hidden))
        alpha = torch.stack(energies).softmax(0)
        torch.testing.assert_close(weights[b, :length], alpha)
        torch.testing.assert_close(layer.weights(*inputs)[b, 0, 0, :length], alpha)
        torch.testing.assert_close(context[b], alpha @ memory[b, :length])


def test_an_attention_with_its_own_weights_equals_forward(network, batch):
    """In all networks, also with a cache."""
    called = set()

    def compare(layer, args, kwargs, result):
        called.add(layer)
        given = layer.with_weights(layer.weights(*args, **kwargs), *args, **kwargs)
        torch.testing.assert_close(given, result, atol=1e-5, rtol=1e-4)

    layers = {module for module in network.modules() if isinstance(module, Attention)}
    for layer in layers:
        layer.register_forward_hook(compare, with_kwargs=True)
    network(*batch)
    assert called == layers
    if not isinstance(network, LinearTransformer):  # has no weights in decode_step
        called.clear()
        step_by_step(network, *batch)
        assert called == layers


@pytest.mark.parametrize("cls", [SelfAttention, CrossAttention, MonotonicCrossAttention, LinearAttention])
def test_the_context_of_given_weights_equals_its_formula(cls):
    layer = randomize(cls(16, 4))
    memory, weights = torch.randn(3, 6, 16), torch.rand(3, 4, 5, 6)
    x = torch.randn(3, 5, 16)
    if cls in (SelfAttention, LinearAttention):
        x, weights = memory, torch.rand(3, 4, 6, 6)
        value = nn.functional.linear(memory, layer.qkv_proj.weight[32:], layer.qkv_proj.bias[32:])
        actual, _ = layer.with_weights(weights, x, *[torch.ones(3, 6).bool()] * (cls is LinearAttention))
    elif cls is CrossAttention:
        value = nn.functional.linear(memory, layer.kv_proj.weight[16:], layer.kv_proj.bias[16:])
        actual = layer.with_weights(weights, x, layer.project_memory(memory), torch.ones(3, 1, 1, 6).bool())
    else:
        value = layer.v_proj(memory)
        actual, returned = layer.with_weights(weights, x, layer.project_memory(memory), torch.ones(3, 1, 1, 6).bool())
        assert returned.equal(weights)
    expected = layer.out_proj.bias
    for head in range(4):
        part = slice(4 * head, 4 * head + 4)
        context = torch.einsum("bts,bsd->btd", weights[:, head], value[..., part])
        expected = expected + context @ layer.out_proj.weight[:, part].T
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_single_headed_attention_returns_the_given_weights():
    memory, mask, previous = torch.randn(2, 7, 6), torch.ones(2, 7).bool(), torch.zeros(2, 7)
    weights = torch.rand(2, 1, 3, 7)
    expected = torch.einsum("bts,bse->bte", weights[:, 0], memory)
    layer = MonotonicAttention(4, 6)
    context, returned = layer.with_weights(weights, torch.randn(2, 3, 4), layer.k_proj(memory), memory, mask, previous)
    torch.testing.assert_close(context, expected)
    assert returned.equal(weights[:, 0])
    for cls in (AdditiveAttention, LocationAwareAttention):
        layer = cls(4, 6, 5)
        inputs = torch.randn(2, 4), layer.k_proj(memory), memory, mask, previous
        context, returned = layer.with_weights(weights[:, :, :1], *inputs)
        torch.testing.assert_close(context, expected[:, 0])
        assert returned.equal(weights[:, 0, 0])


def test_hard_monotonic_attention_returns_the_given_weights_in_float32():
    layer, mask = HardMonotonicAttention(4, 6, 5), torch.ones(2, 3).bool()
    weights = torch.tensor([[0.0, 0.25, 0.75], [0.0, 0.0, 1.0]])
    inputs = torch.randn(2, 1, 4), torch.randn(2, 3, 5), mask, layer.start(mask), torch.ones(2, 1, 3)
    for dtype in (torch.float32, torch.bfloat16):
        returned = layer.with_weights(weights.to(dtype)[:, None, None], *inputs)
        assert returned.dtype == torch.float32
        assert returned[:, 0].equal(weights)


def test_monotonic_attention_is_hard_in_evaluation():
    """In training, the weights are the distribution of an alignment that stays or advances; then, its mode."""
    layer, memory = MonotonicAttention(4, 6), torch.randn(3, 5, 6)
    mask = torch.arange(5) < torch.tensor([5, 3, 1])[:, None]
    keys, soft, hard = layer.k_proj(memory), torch.zeros(3, 5), torch.zeros(3, 5)
    place = torch.tensor([-1, -1, -1])
    for step in range(6):
        query = 3 * torch.randn(3, 1, 4)
        context, weights = layer.train()(query, keys, memory, mask, soft)
        soft = weights[:, 0]
        torch.testing.assert_close(soft.sum(1), torch.ones(3))
        assert soft[:, step + 1 :].eq(0).all()
        assert soft[~mask].eq(0).all()
        torch.testing.assert_close(context[:, 0], (soft[..., None] * memory).sum(1))
        attended = keys[torch.arange(3), place.clamp(min=0)]
        goes = (layer.q_proj(query[:, 0]) + attended).squeeze(1) > 0
        place = torch.where((place < 0) | goes, place + 1, place).clamp(max=mask.sum(1) - 1)
        _, weights = layer.eval()(query, keys, memory, mask, hard)
        hard = weights[:, 0]
        assert hard.equal(torch.eye(5)[place])
    _, weights = layer.train()(torch.randn(3, 6, 4), keys, memory, mask, torch.zeros(3, 5))
    torch.testing.assert_close(weights.sum(2), torch.ones(3, 6))
    assert weights.triu(1).eq(0).all()
    assert weights[:, 0, 0].eq(1).all()


@pytest.mark.parametrize("starts", [True, False])
def test_gradients_of_monotonic_attention(starts):
    """The gradients are those of finite differences, also if keys are padding and the queries continue earlier ones."""
    query, key = (torch.randn(3, 2, size, dtype=torch.float64, requires_grad=True) for size in (4, 5))
    mask = (torch.arange(5) < torch.tensor([5, 3, 1])[:, None]).unsqueeze(1)
    previous = torch.zeros(3, 2, 5, dtype=torch.float64)
    if not starts:
        previous[..., 0] = 1

    def weights(query, key):
        torch.manual_seed(0)  # of the noise
        return monotonic_weights(query, key, mask, previous, training=True)

    assert torch.autograd.gradcheck(weights, (query, key))


@pytest.mark.parametrize("sizes", [(3, 4, 5), (1, 1, 1)])
def test_gradients_of_the_lstm_with_attention(sizes):
    """They equal finite differences, for each result alone and if memory positions are padding."""
    B, T, S = sizes
    D, A, E = 2, 3, 5
    shapes = ((B, T, 4 * D), (B, S, A), (B, S, E), (B, D), (B, D), (A, D), (1, A), (4 * D, E + D))
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    mask = torch.arange(S) < torch.tensor([5, 3, 1])[:B, None]
    assert torch.autograd.gradcheck(lambda *rest: lstm_with_attention(*rest[:3], mask, *rest[3:]), tensors)


def test_pointer_generator_equals_its_formula():
    pointer, source = PointerGenerator(4), torch.tensor([[3, 4, 3, EOS], [5, EOS, PAD, PAD]])
    logits, features = torch.randn(2, 3, 7), torch.randn(2, 3, 4)
    weights = torch.randn(2, 3, 4).masked_fill((source == PAD)[:, None], -math.inf).softmax(-1)
    actual = pointer(logits, features, weights, source)
    for b, t, token in itertools.product(range(2), range(3), range(7)):
        p_gen = torch.sigmoid(pointer.generation.weight[0] @ features[b, t] + pointer.generation.bias[0])
        copied = sum(weights[b, t, s] for s in range(4) if source[b, s] == token)
        expected = p_gen * logits[b, t].softmax(0)[token] + (1 - p_gen) * copied
        torch.testing.assert_close(actual[b, t, token].exp(), expected)
