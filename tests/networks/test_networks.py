"""Properties of every network, and each layer compared with an independent implementation."""

from __future__ import annotations

import inspect
import itertools
import math
from copy import deepcopy

import pytest
import torch
import transformers
from torch import nn

from lightning_tfm.checkpoint import averaging
from lightning_tfm.checkpoint.averaging import average_checkpoints
from lightning_tfm.errors import UserError
from lightning_tfm.inference.decoding import continue_text, decode, reorder_state
from lightning_tfm.layers import (
    AdditiveAttention,
    AlibiPositions,
    Attention,
    CoupledPositions,
    CrossAttention,
    Dropout,
    Int8Linear,
    Linear,
    LocationAwareAttention,
    MonotonicAttention,
    PointerGenerator,
    Positions,
    RandomizedPositions,
    RotaryPositions,
    SelfAttention,
    SinusoidalPositions,
    TransformerLayer,
    apply_rotary,
    attention_maps,
    causal_mask,
    lstm_with_attention,
    monotonic_weights,
    quantize,
)
from lightning_tfm.layers.losses import token_nll
from lightning_tfm.networks import GPT, AttentionLSTM, EncoderClassifier, Transformer
from lightning_tfm.networks.gpt2 import from_huggingface
from lightning_tfm.networks.linear_attention import LinearAttention
from lightning_tfm.networks.naive_bayes import INITIAL_WEIGHT, PENALTY, NaiveBayes
from lightning_tfm.tokenization import BOS, EOS, PAD, UNKNOWN_ID
from support.networks import VOCAB_SIZE


def test_logits_do_not_depend_on_later_inputs(network, batch):
    """The gradient of the logits of step t is zero for the embeddings of later inputs, but not for its own."""
    source, target_in = batch
    T = target_in.size(1)
    embedded = []

    def remember(module, args, output):
        if args[0].size(-1) >= T and args[0].dim() == 2 and args[0][:, -T:].equal(target_in):
            output.retain_grad()
            embedded.append(output)

    for module in network.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(remember)
    logits = network(source, target_in)
    (embedding,) = embedded
    for t in range(T):
        embedding.grad = None
        logits[:, t].square().sum().backward(retain_graph=True)
        on_inputs = embedding.grad[:, -T:].abs().sum(dim=(0, 2))  # (T)
        assert on_inputs[t] > 0
        assert on_inputs[t + 1 :].eq(0).all()


def test_padding_does_not_change_the_logits(network, batch):
    """A pair has the same logits alone and in a padded batch."""
    source, target_in = batch
    together = network(source, target_in)
    for row in range(len(source)):
        S, T = (source[row] != PAD).sum(), (target_in[row] != PAD).sum()
        alone = network(source[row : row + 1, :S], target_in[row : row + 1, :T])
        torch.testing.assert_close(together[row, :T], alone[0], atol=1e-5, rtol=1e-4)


def test_logits_depend_on_their_own_source_only(network, batch):
    source, target_in = batch
    other = source.clone()
    other[0, 0] = 3 if source[0, 0] != 3 else 4
    difference = (network(source, target_in) - network(other, target_in)).abs().amax(dim=(1, 2))
    assert difference[0] > 1e-3
    assert difference[1:].eq(0).all()


def step_by_step(network, source, target_in):
    """Return the logits (B, T, V) of `decode_step` for each token."""
    state = network.encode(source)
    steps = []
    for token in target_in.unbind(1):
        logits, state = network.decode_step(token, state)
        steps.append(logits)
    return torch.stack(steps, dim=1)


def test_decode_step_equals_forward(network, batch):
    torch.testing.assert_close(step_by_step(network, *batch), network(*batch), atol=1e-5, rtol=1e-4)


def test_logits_of_an_encoded_source_equal_forward(network, batch):
    source, target_in = batch
    assert network.logits(source, target_in, network.encode(source)).equal(network(source, target_in))


@pytest.mark.parametrize("base", [Transformer, AttentionLSTM])
def test_a_subclass_with_another_forward_is_evaluated_by_it(base):
    class Scaled(base):
        def forward(self, source, target_in):
            return 2 * super().forward(source, target_in)

    network = Scaled(VOCAB_SIZE, d_model=16, **({"max_length": 8} if base is Transformer else {})).eval()
    source, target_in = torch.tensor([[4, EOS]]), torch.tensor([[BOS, 4]])
    assert network.logits(source, target_in, network.encode(source)).equal(network(source, target_in))


def test_training_calls_each_layer_of_a_pointer_generator_as_a_module():
    """Activation checkpointing and FSDP rely on it."""
    network = Transformer(VOCAB_SIZE, d_model=16, max_length=8, pointer_generator=True)
    called = []
    for layer in network.decoder:
        layer.register_forward_hook(lambda layer, *_: called.append(layer))
    network(torch.tensor([[4, EOS]]), torch.tensor([[BOS, 4]]))
    assert called == [*network.decoder]


def test_rows_of_a_state_can_be_selected_at_any_step(network, batch):
    """Beam search relies on this: selected rows continue as if they had always been one batch."""
    source, target_in = batch
    rows = torch.tensor([2, 0, 0, 4])
    state, selected = network.encode(source), network.encode(source[rows])
    for token in target_in[:, :3].unbind(1):
        _, state = network.decode_step(token, state)
        _, selected = network.decode_step(token[rows], selected)
    ours, _ = network.decode_step(target_in[rows, 3], reorder_state(state, rows))
    theirs, _ = network.decode_step(target_in[rows, 3], selected)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_recurrent_layers_get_contiguous_states(network, batch):
    """cuDNN refuses others."""
    given = []
    for layer in network.modules():
        if isinstance(layer, nn.RNNBase):
            layer.register_forward_pre_hook(lambda _, arguments: given.extend(arguments[1:]))
    network(*batch)
    step_by_step(network, *batch)
    states = [state for one in given for state in (one if isinstance(one, tuple) else [one])]
    assert all(state.is_contiguous() for state in states)


def test_one_batch_can_be_overfitted(network, batch):
    source, target_in = batch
    target_out = torch.cat((target_in[:, 1:], target_in.new_full((len(target_in), 1), PAD)), dim=1)
    target_out[torch.arange(len(target_in)), (target_in != PAD).sum(1) - 1] = EOS
    tokens = (target_out != PAD).sum()
    torch.manual_seed(0)
    network = type(network)(**network.hyper_parameters | {"dropout": 0.0})
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(150):
        loss = token_nll(network(source, target_in), target_out) / tokens
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05


def test_hyper_parameters_build_the_same_network(network, batch):
    assert set(network.hyper_parameters) == set(inspect.signature(type(network)).parameters)
    twin = type(network)(**network.hyper_parameters).eval()
    assert not twin(*batch).equal(network(*batch))
    twin.load_state_dict(network.state_dict())
    assert twin(*batch).equal(network(*batch))


def test_arguments_of_a_subclass_are_recorded_and_bounded():
    class WithRegisters(GPT):
        least = {"num_registers": 0}  # noqa: RUF012

        def __init__(self, vocab_size, num_registers=2):
            width = 8  # is no argument
            super().__init__(vocab_size, width, 2, 1, max_length=9)

    assert WithRegisters(11, 0).hyper_parameters == {"vocab_size": 11, "num_registers": 0}
    assert WithRegisters(vocab_size=11).hyper_parameters == {"vocab_size": 11, "num_registers": 2}
    with pytest.raises(UserError, match="num_registers must be at least 0, but is -1"):
        WithRegisters(11, -1)


def test_dropout_is_active_in_training_only(network, batch):
    assert network(*batch).equal(network(*batch))
    network.train()
    assert not network(*batch).equal(network(*batch))


EDGES = [
    1e-300,
    1e-9,
    2.0**-18,
    2.0**-17,
    1e-5,
    1e-4,
    0.9999,
    0.99999,
    1 - 2.0**-16,
    1 - 2.0**-17,
    0.999999,
    1 - 2.0**-53,
]


@pytest.mark.parametrize("p", [*EDGES, *torch.linspace(0.01, 0.99, 15).tolist()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_dropout_scales_by_its_rounded_probability(p, dtype):
    rounded = min(round(p * 2**16), 2**16 - 2) / 2**16
    x = torch.rand(300_001).to(dtype)
    y = Dropout(p)(x)
    assert y.isfinite().all()
    kept = y != 0
    torch.testing.assert_close(y[kept], (x[kept].double() / (1 - rounded)).to(dtype))
    deviation = math.sqrt(rounded * (1 - rounded) / len(x))
    assert kept.double().mean().item() == pytest.approx(1 - rounded, abs=5 * deviation)
    assert abs(rounded - p) <= 2**-15


@pytest.mark.parametrize("p", [0.05, 0.1, 0.2, 0.25, 0.3, 0.5, 0.9])
def test_dropout_uses_a_fixed_stream_of_bits(p):
    """A resumed run must drop the same units, so the stream of bits must not change between versions."""
    x = torch.randn(7, 143)
    torch.manual_seed(1)
    y = Dropout(p)(x)
    torch.manual_seed(1)
    bits = torch.empty(251, dtype=torch.int64).random_(-(2**63), None).view(torch.int16)[: 7 * 143].view(7, 143)
    threshold = round(p * 2**16)
    assert y.equal(x * ((bits >= threshold - 2**15).float() * (2**16 / (2**16 - threshold))))


@pytest.mark.parametrize("dropout", [1e-9, 0.999999])
def test_logits_are_finite_with_extreme_dropout(dropout):
    source, target_in = torch.randint(3, VOCAB_SIZE, (5, 7)), torch.randint(3, VOCAB_SIZE, (5, 6))
    networks = [cls(VOCAB_SIZE, 16, dropout=dropout, max_length=16) for cls in (Transformer, GPT)]
    networks.append(AttentionLSTM(VOCAB_SIZE, 16, dropout=dropout))
    classifier = EncoderClassifier(VOCAB_SIZE, 3, 9, 16, dropout=dropout, word_dropout=dropout)
    for logits in (*(network.train()(source, target_in) for network in networks), classifier.train()(source)):
        assert logits.isfinite().all()


def test_attention_maps_are_also_recorded_in_training_mode(network, batch):
    layers = []
    for training in (False, True):
        with attention_maps(network.train(training)) as maps:
            network(*batch)
        layers.append({name: weights.shape for name, weights in maps.items()})
    assert layers[0] == layers[1]


def test_attention_maps_are_distributions_over_real_tokens(network, batch):
    source, target_in = batch
    with attention_maps(network) as maps:
        logits = network(source, target_in)
    assert logits.equal(network(source, target_in))
    assert len(maps) == sum(isinstance(module, Attention) for module in network.modules())
    S, T = source.size(1), target_in.size(1)
    for name, weights in maps.items():
        assert weights.min() >= 0, name
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
        if weights.size(-1) >= S:  # attention over the source, or over source and target
            assert (
                weights[..., :S]
                .movedim(1, 2)[(source == PAD)[:, None, None].expand(-1, weights.size(2), weights.size(1), S)]
                .eq(0)
                .all()
            ), name
        if weights.size(-1) != S and weights.size(-1) == weights.size(-2):  # self-attention of the decoder
            assert weights.triu(1).eq(0).all(), name
        assert weights.size(-2) in (S, T, S + T), name
    assert not any(module._forward_hooks for module in network.modules())


@pytest.mark.parametrize("cuts", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("d_in", "d_out"), [(384, 1152), (64, 32), (400, 401), (512, 1024)])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 3), (4, 0), ()])
def test_linear_equals_torch_for_any_number_of_rows(shape, d_in, d_out, bias, cuts, monkeypatch):
    """Compare both code paths, which sum in another order."""
    monkeypatch.setattr(Linear, "SPLITS_MATRICES", cuts)
    layer, x = Linear(d_in, d_out, bias=bias), torch.randn(*shape, d_in, requires_grad=True)
    theirs = nn.Linear(d_in, d_out, bias=bias)
    theirs.load_state_dict(layer.state_dict())
    ours, expected = layer(x), theirs(x)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    weights = torch.randn_like(expected)
    for mine, other in zip(
        torch.autograd.grad((ours * weights).sum(), [x, *layer.parameters()]),
        torch.autograd.grad((expected * weights).sum(), [x, *theirs.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 3), (4, 0)])
def test_an_int8_linear_layer_is_exact_up_to_its_rounding(shape, bias):
    layer, x = Linear(64, 32, bias=bias), torch.randn(*shape, 64)
    with torch.no_grad():
        layer.weight[0] *= 1e-3  # has a scale of its own
    x_level = (x.max() - x.min()) / 127 if x.numel() else torch.tensor(0.0)  # 7 bits, with a rounded zero point
    half_level = layer.weight.abs().amax(1) / 127 / 2
    bound = x_level * layer.weight.abs().sum(1) + half_level * (x.abs().sum(-1, keepdim=True) + 64 * x_level)
    outputs = Int8Linear(layer)(x)
    assert outputs.shape == (*shape, 32)
    assert ((outputs - layer(x)).abs() <= 1.01 * bound).all()


def test_an_int8_linear_layer_can_have_zero_weights():
    layer = Linear(3, 2)
    with torch.no_grad():
        layer.weight[0] = 0.0
    assert Int8Linear(layer)(torch.ones(1, 3))[0, 0] == layer.bias[0]


@torch.no_grad()
def test_a_quantized_network_computes_nearly_the_same(network, batch):
    network.eval()
    expected = network(*batch)
    quantize(network)
    assert not any(isinstance(module, Linear) for module in network.modules())
    assert (network(*batch) - expected).norm() <= 0.05 * expected.norm()
    real = batch[1] != PAD
    error = (step_by_step(network, *batch) - expected)[real].norm()
    assert error <= 0.05 * expected[real].norm()


def test_a_network_without_linear_layers_is_not_quantized():
    with pytest.raises(UserError, match="--int8 must not be set for NaiveBayes"):
        quantize(NaiveBayes(VOCAB_SIZE, 8, 2))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch reads them itself
def test_a_compiled_network_computes_the_same(network, batch):
    """Logits, gradients and attention are equal; `aot_eager` compiles everything but the machine code."""
    source, target_in = batch

    def passes():
        network.zero_grad()
        logits = network(source, target_in)
        logits.square().mean().backward()
        with attention_maps(network) as maps:
            network(source, target_in)
        return logits, [deepcopy(parameter.grad) for parameter in network.parameters()], maps

    as_written = passes()
    names = list(network.state_dict())
    network.compile(backend="aot_eager")
    torch.testing.assert_close(passes(), as_written)
    assert list(network.state_dict()) == names


@pytest.mark.parametrize("is_causal", [False, True])
def test_self_attention_weights_equal_the_fused_path(is_causal):
    layer = SelfAttention(16, 4)
    x = torch.randn(3, 6, 16)
    mask = None if is_causal else torch.rand(3, 1, 6, 6) < 0.7
    if mask is not None:
        mask[..., 0] = True
    context, (_, value) = layer(x, mask, is_causal)
    by_weights = layer.weights(x, mask, is_causal) @ value
    torch.testing.assert_close(layer.out_proj(by_weights.transpose(1, 2).flatten(2)), context)


def test_cross_attention_weights_equal_the_fused_path():
    layer = CrossAttention(16, 4)
    x, memory = torch.randn(3, 5, 16), layer.project_memory(torch.randn(3, 6, 16))
    mask = torch.arange(6) < torch.tensor([6, 2, 1])[:, None, None, None]
    by_weights = layer.weights(x, memory, mask) @ memory[1]
    torch.testing.assert_close(layer.out_proj(by_weights.transpose(1, 2).flatten(2)), layer(x, memory, mask))


def test_self_attention_equals_torch():
    ours, theirs = SelfAttention(16, 4), nn.MultiheadAttention(16, 4, batch_first=True)
    theirs.in_proj_weight.data, theirs.in_proj_bias.data = ours.qkv_proj.weight, ours.qkv_proj.bias
    theirs.out_proj.weight.data, theirs.out_proj.bias.data = ours.out_proj.weight, ours.out_proj.bias
    x = torch.randn(3, 6, 16)
    mask = causal_mask(6, 6, x.device)
    expected, expected_weights = theirs(x, x, x, attn_mask=~mask, average_attn_weights=False)
    torch.testing.assert_close(ours(x, is_causal=True)[0], expected)
    torch.testing.assert_close(ours(x, mask)[0], expected)
    torch.testing.assert_close(ours.weights(x, is_causal=True), expected_weights)


def test_cross_attention_equals_torch():
    ours, theirs = CrossAttention(16, 4), nn.MultiheadAttention(16, 4, batch_first=True)
    theirs.in_proj_weight.data = torch.cat((ours.q_proj.weight, ours.kv_proj.weight))
    theirs.in_proj_bias.data = torch.cat((ours.q_proj.bias, ours.kv_proj.bias))
    theirs.out_proj.weight.data, theirs.out_proj.bias.data = ours.out_proj.weight, ours.out_proj.bias
    x, memory = torch.randn(3, 5, 16), torch.randn(3, 6, 16)
    real = torch.arange(6) < torch.tensor([6, 2, 1])[:, None]
    expected, _ = theirs(x, memory, memory, key_padding_mask=~real)
    torch.testing.assert_close(ours(x, ours.project_memory(memory), real[:, None, None]), expected)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("cross_attention", [False, True])
def test_transformer_layer_equals_torch(norm, cross_attention):
    ours = TransformerLayer(16, 4, 32, 0.0, norm, nn.ReLU(), cross_attention="dot_product" if cross_attention else None)
    their_class = nn.TransformerDecoderLayer if cross_attention else nn.TransformerEncoderLayer
    theirs = their_class(16, 4, 32, dropout=0.0, batch_first=True, norm_first=norm == "pre")

    def copy(their, our):
        for name, parameter in our.named_parameters():
            parameter.data.normal_()
            their.get_parameter(name).data.copy_(parameter)

    theirs.self_attn.in_proj_weight.data.copy_(ours.self_attention.qkv_proj.weight)
    theirs.self_attn.in_proj_bias.data.copy_(ours.self_attention.qkv_proj.bias)
    copy(theirs.self_attn.out_proj, ours.self_attention.out_proj)
    copy(theirs.norm1, ours.add_self.norm)
    copy(theirs.linear1, ours.feed_forward[0])
    copy(theirs.linear2, ours.feed_forward[2])
    copy(theirs.norm3 if cross_attention else theirs.norm2, ours.add_feed_forward.norm)
    x, memory = torch.randn(3, 5, 16), torch.randn(3, 6, 16)
    if not cross_attention:
        torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-4)
        return
    cross = ours.cross_attention
    theirs.multihead_attn.in_proj_weight.data.copy_(torch.cat((cross.q_proj.weight, cross.kv_proj.weight)))
    theirs.multihead_attn.in_proj_bias.data.copy_(torch.cat((cross.q_proj.bias, cross.kv_proj.bias)))
    copy(theirs.multihead_attn.out_proj, cross.out_proj)
    copy(theirs.norm2, ours.add_cross.norm)
    mask = torch.ones(3, 1, 1, 6, dtype=torch.bool)
    expected = theirs(x, memory, tgt_mask=~causal_mask(5, 5, x.device))
    actual = ours(x, is_causal=True, memory=cross.project_memory(memory), memory_mask=mask)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_additive_attention_equals_its_formula():
    layer = AdditiveAttention(4, 6, 5)
    query, memory = torch.randn(2, 4), torch.randn(2, 3, 6)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    inputs = query, layer.k_proj(memory), memory, mask, torch.zeros(2, 3)
    context, _ = layer(*inputs)
    for b, length in enumerate((3, 2)):
        energies = [
            layer.energy.weight[0] @ torch.tanh(layer.q_proj.weight @ query[b] + layer.k_proj(memory[b, s]))
            for s in range(length)
        ]
        alpha = torch.stack(energies).softmax(0)
        torch.testing.assert_close(context[b], alpha @ memory[b, :length])
        torch.testing.assert_close(layer.weights(*inputs)[b, 0, 0, :length], alpha)


@pytest.mark.parametrize("d_model", [8, 7])
def test_sinusoidal_positions_equal_their_formula(d_model):
    encoding = SinusoidalPositions(50, d_model)(torch.arange(50))
    for position in (0, 1, 17, 49):
        for i in range(d_model):
            angle = position / 10000 ** (2 * (i // 2) / d_model)
            expected = math.cos(angle) if i % 2 else math.sin(angle)
            assert encoding[position, i].item() == pytest.approx(expected, abs=1e-4)


def test_rotary_positions_equal_their_formula():
    """Each pair of coordinates is rotated by p theta; dot products depend on distances only."""
    d, positions = 8, torch.tensor([[0, 3, 4], [11, 14, 15]])
    rotary, x = RotaryPositions(16, d), torch.randn(2, 2, 3, d, dtype=torch.float64)
    theta = 10000.0 ** (-2 * torch.arange(d // 2, dtype=torch.float64) / d)
    angle, a, b = positions[:, None, :, None] * theta, x[..., ::2], x[..., 1::2]
    expected = torch.stack((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), dim=-1).flatten(-2)
    torch.testing.assert_close(apply_rotary(x, rotary.rotations(positions)), expected, atol=1e-5, rtol=0)

    x = x[:1].expand_as(x)
    turned = apply_rotary(x, rotary.rotations(positions))
    torch.testing.assert_close(*(turned @ turned.transpose(-1, -2)).unbind(0), atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_heads", [1, 4, 8, 12])
def test_alibi_equals_hugging_face(num_heads):
    build = transformers.models.bloom.modeling_bloom.build_alibi_tensor
    theirs = build(torch.ones(1, 9, dtype=torch.long), num_heads, torch.float32)  # (H, 1, S), for any query
    x = torch.randn(1, num_heads, 9, 9)
    steps = torch.arange(9)
    ours = AlibiPositions(num_heads).mask(steps, steps, None)
    causal = causal_mask(9, 9, x.device)
    torch.testing.assert_close((x + ours).softmax(-1), (x + theirs).masked_fill(~causal, -math.inf).softmax(-1))


@pytest.mark.parametrize("scheme", [RandomizedPositions, CoupledPositions])
def test_randomized_positions_are_ascending_subsets(scheme):
    positions, steps = scheme(30, 8), torch.arange(10)
    drawn = positions.number(steps, 5000, 10)
    assert drawn.diff(dim=1).min() >= 1
    assert drawn.min() == 0
    assert drawn.max() == 29
    counts = drawn.flatten().bincount(minlength=30)
    torch.testing.assert_close(counts / 5000, torch.full((30,), 10 / 30), atol=0.05, rtol=0)  # uniform
    torch.manual_seed(3)
    again = positions.number(steps, 4, 10)
    torch.manual_seed(3)
    assert positions.number(steps, 4, 10).equal(again)
    assert not again[0].equal(again[1])
    assert positions.eval().number(steps, 4, 10).equal(steps)


@pytest.mark.parametrize("scheme", ["rotary", "alibi", "none", "randomized", "coupled"])
@pytest.mark.parametrize("make", [Transformer, GPT])
def test_logits_depend_on_distances_of_positions_only(make, scheme, batch, monkeypatch):
    network = make(VOCAB_SIZE, 16, 4, 2, max_length=30, positions=scheme).eval()
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    expected = network(*batch)
    layer = next(module for module in network.modules() if isinstance(module, Positions))
    monkeypatch.setattr(layer, "number", lambda indices, rows, count: indices + 11)
    torch.testing.assert_close(network(*batch), expected, atol=1e-4, rtol=1e-4)
    monkeypatch.setattr(layer, "number", lambda indices, rows, count: 2 * indices)
    assert network(*batch).allclose(expected, atol=1e-4) == (scheme == "none")


@pytest.mark.parametrize("make", [Transformer, GPT])
def test_coupled_positions_are_shared_by_source_and_target(make, monkeypatch):
    """Each symbol of the target has the position of the symbol of the source with the same index, also if drawn."""
    network = make(VOCAB_SIZE, 16, 4, 1, max_length=30, positions="coupled")
    source = torch.tensor([[3, 4, 5, EOS], [6, EOS, PAD, PAD]])
    target_in = torch.tensor([[1, 3, 4, 5], [1, 6, PAD, PAD]])
    layer = next(module for module in network.modules() if isinstance(module, Positions))
    seen, rotations = [], layer.rotations
    monkeypatch.setattr(layer, "rotations", lambda positions: seen.append(positions) or rotations(positions))
    network(source, target_in)
    ours, theirs = torch.cat(seen, dim=1).split(4, dim=1)
    assert ours.equal(theirs)
    assert not ours[0].equal(torch.arange(4))


def test_location_aware_attention_equals_its_formula():
    layer = LocationAwareAttention(4, 6, 5)
    query, memory, mask = torch.randn(2, 4), torch.randn(2, 7, 6), torch.ones(2, 7, dtype=torch.bool)
    previous = torch.rand(2, 7).softmax(-1)
    context, weights = layer(query, layer.k_proj(memory), memory, mask, previous)
    padded = nn.functional.pad(previous, (2, 2))
    for b in range(2):
        energies = []
        for s in range(7):
            f = layer.filters.weight[:, 0] @ padded[b, s : s + 5]
            hidden = layer.q_proj.weight @ query[b] + layer.k_proj(memory[b, s]) + layer.location_proj.weight @ f
            energies.append(layer.energy.weight[0] @ torch.tanh(hidden))
        alpha = torch.stack(energies).softmax(0)
        torch.testing.assert_close(weights[b], alpha)
        torch.testing.assert_close(context[b], alpha @ memory[b])


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


@pytest.mark.parametrize("pointer_generator", [False, True])
@pytest.mark.parametrize(
    ("dtype", "autocast", "tolerance"),
    [
        (torch.float64, False, 1e-12),
        (torch.float32, False, 1e-5),
        (torch.float32, True, 0.025),
        (torch.bfloat16, False, 0.025),
        (torch.float16, False, 0.003),
    ],
)
def test_attention_lstm_trains_what_it_evaluates_in_every_precision(
    dtype, autocast, tolerance, pointer_generator, batch
):
    """The loop over the decoder in evaluation mode, in float64, has the same logits and gradients."""
    exact = AttentionLSTM(VOCAB_SIZE, 16, pointer_generator=pointer_generator)
    for parameter in exact.parameters():
        nn.init.normal_(parameter, std=0.3)
    trained = deepcopy(exact).to(dtype)
    results = []
    for network, enabled in ((trained.train(), autocast), (exact.double().eval(), False)):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            logits = network(*batch)
            token_nll(logits, batch[1]).backward()
        results.append([logits.detach(), *(parameter.grad for parameter in network.parameters())])
    for result, expected in zip(*results, strict=True):
        assert (result - expected).norm() <= tolerance * expected.norm()


def test_hard_monotonic_attention_sums_over_all_alignments():
    """The probability of a target is the sum over all alignments that never move left, enumerated one by one."""
    network = AttentionLSTM(VOCAB_SIZE, 8, attention="hard_monotonic").double().eval()
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.5)
    attention = network.attention
    for source, target in (([3, 4, 5, EOS], [6, 7, EOS]), ([8, EOS], [3, 3, 3, 4, EOS]), ([EOS], [5, EOS])):
        target_in = torch.tensor([[BOS, *target[:-1]]])
        recurrent, _, (keys, memory, _) = network.encode(torch.tensor([source]))
        S, moves, emissions = len(source), [], []
        for token, output in zip(target_in[0], target, strict=True):
            recurrent = network._cell(
                network.decoder_token(network.target_embedding(token[None])), memory[:, 0, :0], recurrent
            )
            energies = attention.energy(torch.tanh(attention.q_proj(recurrent[0]) + keys[0])).squeeze(1)
            moves.append([energies[s:].softmax(0) for s in range(S)])  # from s to s, s + 1, ...
            features = torch.cat((recurrent[0].expand(S, -1), memory[0]), dim=1)
            emissions.append(network.head(torch.tanh(network.readout(features))).softmax(-1)[:, output])
        expected = 0
        for alignment in itertools.combinations_with_replacement(range(S), len(target)):
            probability, previous = 1, 0
            for place, move, emission in zip(alignment, moves, emissions, strict=True):
                probability, previous = probability * move[previous][place - previous] * emission[place], place
            expected += probability
        log_probs = network(torch.tensor([source]), target_in)[0]
        torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(len(target), dtype=torch.float64))
        actual = log_probs.gather(1, torch.tensor(target)[:, None]).sum()
        torch.testing.assert_close(actual, expected.log(), rtol=1e-9, atol=0)


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


@pytest.mark.parametrize("network", ["Transformer pointer_generator", "AttentionLSTM pointer_generator"], indirect=True)
def test_pointer_generator_copies_by_the_recorded_attention(network, batch):
    """Without generation, the probability of a token is the mean weight of its positions in the last attention."""
    source, target_in = batch
    nn.init.zeros_(network.pointer.generation.weight)
    nn.init.constant_(network.pointer.generation.bias, -50.0)
    with attention_maps(network) as maps:
        probabilities = network(source, target_in).exp()
    *_, weights = network.source_attention(maps, source).values()
    expected = weights.mean(1) @ nn.functional.one_hot(source, VOCAB_SIZE).float()
    torch.testing.assert_close(probabilities, expected)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_encoder_equals_a_packed_bidirectional_network(cell, batch):
    source, _ = batch
    ours = AttentionLSTM(11, 16, cell=cell).eval()
    theirs = {"lstm": nn.LSTM, "gru": nn.GRU}[cell](16, 16, batch_first=True, bidirectional=True)
    for name, parameter in theirs.named_parameters():
        direction = ours.encoder_backward if name.endswith("_reverse") else ours.encoder_forward
        parameter.data.copy_(direction.get_parameter(name.removesuffix("_reverse")))
    lengths = (source != PAD).sum(1)
    packed = nn.utils.rnn.pack_padded_sequence(
        ours.source_embedding(source), lengths, batch_first=True, enforce_sorted=False
    )
    expected, _ = nn.utils.rnn.pad_packed_sequence(theirs(packed)[0], batch_first=True)
    *_, (_, memory, _) = ours.encode(source)
    torch.testing.assert_close(memory[source != PAD], expected[source != PAD])


def test_lstm_decoder_cell_equals_torch():
    ours, theirs = AttentionLSTM(11, 16), nn.LSTMCell(16 + 32, 16)
    forget, input, output, candidate = range(4)  # our order of gates; that of torch is input, forget, candidate, output
    order = [input, forget, candidate, output]

    def reordered(weight):
        return torch.cat([weight.chunk(4)[gate] for gate in order])

    context_and_hidden = reordered(ours.decoder_state.weight)  # (4D, 2D + D)
    theirs.weight_ih.data = torch.cat((reordered(ours.decoder_token.weight), context_and_hidden[:, :32]), dim=1)
    theirs.weight_hh.data = context_and_hidden[:, 32:]
    theirs.bias_ih.data, theirs.bias_hh.data = reordered(ours.decoder_token.bias), torch.zeros(64)
    token, context, hidden, cell = torch.randn(3, 16), torch.randn(3, 32), torch.randn(3, 16), torch.randn(3, 16)
    expected = theirs(torch.cat((token, context), dim=1), (hidden, cell))
    actual = ours._cell(ours.decoder_token(token), context, (hidden, cell))
    torch.testing.assert_close(actual, expected)


def test_gru_decoder_cell_equals_its_formula():
    """Compare with A.2.2 of Bahdanau et al. (2015)."""
    network, y = AttentionLSTM(11, 4, cell="gru"), torch.randn(3, 4)
    c, s = torch.randn(3, 8), torch.randn(3, 4)
    w_z, w_r, w = (
        y @ weight.T + bias
        for weight, bias in zip(network.decoder_token.weight.chunk(3), network.decoder_token.bias.chunk(3), strict=True)
    )
    c_z, c_r = (c @ weight[:, :8].T for weight in network.decoder_state.weight.chunk(2))
    u_z, u_r = (s @ weight[:, 8:].T for weight in network.decoder_state.weight.chunk(2))
    z, r = torch.sigmoid(w_z + c_z + u_z), torch.sigmoid(w_r + c_r + u_r)
    candidate = network.decoder_candidate.weight
    proposal = torch.tanh(w + (r * s) @ candidate[:, 8:].T + c @ candidate[:, :8].T)
    (actual,) = network._cell(network.decoder_token(y), c, (s,))
    torch.testing.assert_close(actual, (1 - z) * s + z * proposal)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-12)], ids=["float32", "float64"]
)
def test_gpt_equals_hugging_face(dtype, tolerance):
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=32, n_layer=3, n_head=4, n_positions=24, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0
    )
    theirs = transformers.GPT2LMHeadModel(config).to(dtype).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    ours = from_huggingface(theirs).eval()
    tokens = torch.randint(0, 50, (3, 24))
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens[:, :0], tokens), expected, atol=tolerance, rtol=tolerance)
    assert sum(p.numel() for p in ours.parameters()) == theirs.num_parameters()


@pytest.mark.parametrize(
    "change",
    [
        {"activation_function": "relu"},
        {"n_inner": 40},
        {"scale_attn_by_inverse_layer_idx": True},
        {"layer_norm_epsilon": 1e-6},
        {"tie_word_embeddings": False},
    ],
)
def test_unsupported_gpt2_configurations_are_refused(change):
    config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=4, n_positions=24, **change)
    with pytest.raises(UserError, match=f"{next(iter(change))} must be"):
        from_huggingface(transformers.GPT2LMHeadModel(config))


def test_gpt_reads_a_pair_as_one_sequence(batch):
    """The unpadded text `source EOS BOS target` has the same logits as the pair."""
    source, target_in = batch
    gpt = GPT(11, 16, 4, 2, max_length=20).eval()
    nn.init.normal_(gpt.positions.weight)
    pairs = gpt(source, target_in)
    for row in range(len(source)):
        S, T = int((source[row] != PAD).sum()), int((target_in[row] != PAD).sum())
        text = torch.cat((source[row, :S], target_in[row, :T]))[None]
        as_text = gpt(text[:, :0], text)
        torch.testing.assert_close(pairs[row, :T], as_text[0, S:], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_averaged_checkpoints_have_the_mean_weights(network, dtype, monkeypatch):
    """Tied weights share their memory under two names."""
    contents = {}
    for name in "abc":
        for parameter in network.to(dtype).parameters():
            nn.init.normal_(parameter)
        contents[name] = {"state_dict": deepcopy(network.state_dict()), "hyper_parameters": {}}
    expected = {
        name: torch.stack([content["state_dict"][name] for content in contents.values()]).double().mean(0).to(weight)
        for name, weight in contents["a"]["state_dict"].items()
    }
    monkeypatch.setattr(averaging, "read", contents.__getitem__)
    torch.testing.assert_close(average_checkpoints("abc")["state_dict"], expected)


def test_tied_embeddings_are_one_matrix():
    tied, untied = (Transformer(11, 16, 4, 1, 32, max_length=8, tie_embeddings=tie) for tie in (True, False))
    assert tied.source_embedding.weight is tied.target_embedding.weight is tied.head.weight
    saved = sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters())
    assert saved == 2 * 11 * 16


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: AttentionLSTM(11, attention="hard_monotonic", pointer_generator=True),
            "pointer_generator must be false for attention hard_monotonic",
        ),
        (lambda: Transformer(11, 130, 4), r"d_model must be divisible by num_heads \(4\), but is 130; try 128 or 132"),
        (
            lambda: GPT(11, 12, 4, max_length=9, positions="rotary"),
            "must be even for rotary positions, but is 3; try 4",
        ),
        (lambda: GPT(11, 3, 4), r"d_model must be divisible by num_heads \(4\), but is 3; try 4 or 8"),
        (lambda: AttentionLSTM(11, 8, dropout=1.0), "dropout must be at least 0 and below 1, but is 1.0"),
        (lambda: GPT(11, 8, 2, num_layers=0), "num_layers must be at least 1, but is 0"),
        (lambda: Transformer(11, 8, 2, max_length=9).check_lengths(10, 3), "source has 10 tokens.* max_length 9"),
        (lambda: Transformer(11, 8, 2, max_length=9).check_lengths(3, 12), "target has 12 tokens.* max_length 9"),
        (
            lambda: GPT(11, 8, 2, max_length=9).check_lengths(5, 6),
            r"have 5 \+ 6 tokens.* max_length 9 positions; try max_length 11",
        ),
    ],
)
def test_invalid_settings_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_attention_maps_are_collected_while_decoding(network, batch):
    """The joined maps of single steps equal the maps of the parallel forward pass."""
    source, target_in = batch
    with attention_maps(network) as whole:
        network(source, target_in)
    # The state of linear attention has a constant size, and thus no weight for each key.
    if any(isinstance(layer, LinearAttention) for layer in network.modules()):
        with pytest.raises(UserError, match="not in decode_step"), attention_maps(network):
            network.decode_step(target_in[:, 0], network.encode(source))
        return
    with attention_maps(network) as joined:
        state = network.encode(source)
        for token in target_in.unbind(1):
            _, state = network.decode_step(token, state)
    assert set(joined) == set(whole)
    for name, weights in whole.items():
        steps = target_in.size(1)
        torch.testing.assert_close(joined[name][:, :, -steps:], weights[:, :, -steps:], atol=1e-5, rtol=1e-4)


def test_source_keys_are_computed_once(batch):
    network = Transformer(11, 16, 4, 2, 32, max_length=12)
    calls = []
    for layer in network.decoder:
        layer.cross_attention.kv_proj.register_forward_hook(lambda *_: calls.append(1))
    decode(network.decode_step, network.encode(batch[0]), 6)
    assert len(calls) == len(network.decoder)


def test_gpt_decodes_without_a_source():
    gpt = GPT(11, 16, 4, 2, max_length=12).eval()
    text = torch.randint(3, 11, (3, 8))
    state = gpt.encode(text[:, :0])
    steps = []
    for token in text.unbind(1):
        logits, state = gpt.decode_step(token, state)
        steps.append(logits)
    torch.testing.assert_close(torch.stack(steps, dim=1), gpt(text[:, :0], text), atol=1e-5, rtol=1e-4)


def test_the_loss_applies_label_smoothing_and_ignores_padding():
    logits, target = torch.randn(2, 3, 5), torch.tensor([[3, 4, 2], [2, PAD, PAD]])
    log_probs = logits.log_softmax(-1)
    expected = sum(-log_probs[b, t, target[b, t]] for b, t in [(0, 0), (0, 1), (0, 2), (1, 0)])
    torch.testing.assert_close(token_nll(logits, target), expected)
    uniform = sum(-log_probs[b, t].mean() for b, t in [(0, 0), (0, 1), (0, 2), (1, 0)])
    torch.testing.assert_close(token_nll(logits, target, 0.1), 0.9 * expected + 0.1 * uniform)


# A classifier


@pytest.fixture(params=["pre", "post"])
def classifier(request):
    network = EncoderClassifier(VOCAB_SIZE, 3, 9, 16, 4, 2, 32, dropout=0.1, word_dropout=0.2, norm=request.param)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return network.eval()


def test_padding_does_not_change_the_logits_of_a_classifier(classifier):
    text = torch.tensor([[3, 4, 5, 6, 7], [8, 9, PAD, PAD, PAD]])
    alone = torch.cat([classifier(text[:1]), classifier(text[1:, :2])])
    torch.testing.assert_close(classifier(text), alone, rtol=1e-5, atol=1e-5)
    wider = torch.nn.functional.pad(text, (0, 3), value=PAD)
    torch.testing.assert_close(classifier(wider), alone, rtol=1e-5, atol=1e-5)


def test_words_are_dropped_in_training_only(classifier):
    text = torch.arange(4, 10).repeat(200, 1)
    read = []
    classifier.embedding.register_forward_hook(lambda layer, args, output: read.append(args[0].view(text.shape)))
    classifier(text)
    assert read[0].equal(text)
    classifier.train()(text)
    dropped = read[1] != text
    assert (read[1][dropped] == 3).all(), "dropped words become the unknown word"
    assert dropped.float().mean() == pytest.approx(0.2, abs=0.04)
    padded = torch.nn.functional.pad(text[:, :2], (0, 4), value=PAD)
    classifier(padded)
    assert (read[2][:, 2:] == PAD).all()


@pytest.mark.parametrize("ids_per_token", [1, 3])
def test_naive_bayes_fits_weights_of_exact_counts(ids_per_token):
    """The logits equal those of Newton's method in float64; with so many buckets, no two bigrams share one."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(4, 12, (40, 7), generator=generator)
    words[::3, 5:] = PAD
    words[1::4, 2] = UNKNOWN_ID
    label = torch.randint(3, (40,), generator=generator)
    words = torch.cat((words, torch.tensor([[11, 3, 11, 0, 0, 0, 0], [3, 3, 0, 0, 0, 0, 0]])))
    ngrams = torch.randint(12, 20, (*words.shape, 2), generator=generator)
    ngrams[:, 1, 0] = PAD  # a word that is too short for n-grams
    ngrams[-1] = 20  # an n-gram of no training text
    with_ngrams = torch.cat((words.unsqueeze(-1), ngrams.masked_fill(words.unsqueeze(-1) == PAD, PAD)), dim=-1)
    texts = words if ids_per_token == 1 else with_ngrams  # (42, 7) or (42, 7, 3)
    naive_bayes = NaiveBayes(21, 10**6, 3)
    naive_bayes.fit((texts[rows], label[rows]) for rows in torch.arange(40).split(16))

    def features(text):
        known = [word if word not in (PAD, UNKNOWN_ID) else None for word, *_ in text]
        pairs = {(a, b) for a, b in itertools.pairwise(known) if a is not None and b is not None}
        first_ngrams = {ids[1] for ids in text if len(ids) > 1 and ids[1] != PAD}
        return {word for word in known if word is not None} | pairs | first_ngrams

    tokens = texts.view(42, 7, ids_per_token).tolist()
    names = [*set().union(*(features(text) for text in tokens[:40]))]
    present = torch.tensor([[name in features(text) for name in names] for text in tokens]).double()  # (42, F)
    one_hot = torch.nn.functional.one_hot(label, 3).double()
    number = one_hot.sum(0)
    evidence = (present[:40].T @ one_hot / number + 3 / 40).log()  # (F, C)
    prior = ((number + 1) / 43).log()

    def loss_of(weights):
        logits = prior + present[:40] @ (weights.unsqueeze(1) * evidence)
        decay = PENALTY / 2 * (weights - INITIAL_WEIGHT).square().sum()
        return torch.nn.functional.cross_entropy(logits, label, reduction="sum") + decay

    weights = torch.full((len(names),), INITIAL_WEIGHT, dtype=torch.double)
    for _ in range(20):
        gradient = torch.autograd.functional.jacobian(loss_of, weights)
        weights = weights - torch.linalg.solve(torch.autograd.functional.hessian(loss_of, weights), gradient)
    expected = prior + present @ (weights.unsqueeze(1) * evidence)
    actual = naive_bayes(texts).log_softmax(-1).double()
    torch.testing.assert_close(actual, expected.log_softmax(-1), atol=1e-3, rtol=0)
    torch.testing.assert_close(actual[-1], prior.log_softmax(-1), atol=1e-4, rtol=0)


def test_naive_bayes_predicts_the_prior_for_uninformative_words():
    naive_bayes = NaiveBayes(12, 100, 2)
    naive_bayes.fit([(torch.full((50, 3), 5), torch.arange(50) % 10 // 9)])  # 45 texts of one class, 5 of the other
    probabilities = naive_bayes(torch.tensor([[5, 5, 5]])).softmax(-1)
    assert probabilities[0, 0] == pytest.approx(0.9, abs=0.03)


@pytest.mark.parametrize("word", [UNKNOWN_ID, 5])
def test_naive_bayes_predicts_the_prior_for_texts_without_known_words(word):
    naive_bayes = NaiveBayes(12, 100, 3)
    naive_bayes.fit([(torch.full((10, 1), word), torch.arange(10) % 2)])  # no text of the last class
    logits = naive_bayes(torch.tensor([[UNKNOWN_ID, UNKNOWN_ID]]))
    torch.testing.assert_close(logits.softmax(-1), torch.tensor([[6.0, 6.0, 1.0]]) / 13, atol=1e-4, rtol=0)


def test_a_classifier_uses_naive_bayes_in_evaluation_only():
    text, label = torch.randint(4, VOCAB_SIZE, (12, 6)), torch.arange(12) % 3
    network = EncoderClassifier(VOCAB_SIZE, 3, 9, 16, 4, 1, 32, dropout=0.0, num_bigram_buckets=50)
    alone = network.train()(text)
    network.naive_bayes.fit([(text, label)])
    assert network(text).equal(alone)
    both = network.eval()(text).softmax(-1)
    product = alone.softmax(-1) ** (1 / 3) * network.naive_bayes(text).softmax(-1) ** (2 / 3)
    torch.testing.assert_close(both, product / product.sum(-1, keepdim=True))


def test_a_classifier_can_overfit_one_batch(classifier):
    text, label = torch.randint(3, VOCAB_SIZE, (12, 6)), torch.arange(12) % 3
    network = EncoderClassifier(VOCAB_SIZE, 3, 9, 32, 4, 1, 32, dropout=0.0, norm="pre")
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(150):
        loss = torch.nn.functional.cross_entropy(network(text), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert network(text).argmax(1).equal(label)


def test_a_text_longer_than_a_classifiers_positions_is_refused(classifier):
    with pytest.raises(UserError, match="the longest text has 10 tokens, but the model has max_length 9 positions"):
        classifier(torch.full((1, 10), 3))


# Continuing a text


@pytest.mark.parametrize("network", ["GPT", "GPT no_bias", "GPT rotary"], indirect=True)
def test_continuing_a_text_reads_the_context_that_fits(network):
    """Greedy decoding equals recomputation; at the last position, the second half of the context is read again."""
    network = type(network)(**network.hyper_parameters | {"max_length": 8}).eval()
    tokens = torch.tensor([[3, 4, 5]])
    more = continue_text(network.encode, network.decode_step, tokens, 20, 8)
    text = tokens
    while text.size(1) < 23:
        # the first nine tokens are read in full, then the last four and the next five, and so on
        begin = 5 * ((text.size(1) - 9) // 5 + 1) if text.size(1) > 8 else 0
        seen = text[:, begin:]
        with torch.no_grad():
            logits = network(seen[:, :0], seen)[:, -1].clone()
        logits[:, :3] = -math.inf
        text = torch.cat((text, logits.argmax(-1, keepdim=True)), dim=1)
    assert more.equal(text[:, 3:])
