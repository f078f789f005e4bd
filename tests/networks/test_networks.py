"""Properties of every network."""

from __future__ import annotations

import inspect
from copy import deepcopy

import pytest
import torch
from torch import nn

from lightning_tfm.errors import UserError
from lightning_tfm.inference.decoding import decode, reorder_state
from lightning_tfm.layers import Attention, Linear, attention_maps, quantize
from lightning_tfm.layers.losses import token_nll
from lightning_tfm.networks import GPT, AttentionLSTM, EncoderClassifier, Transformer
from lightning_tfm.networks.linear_transformer import LinearAttention
from lightning_tfm.networks.naive_bayes import NaiveBayes
from lightning_tfm.tokenization import BOS, EOS, PAD
from support.networks import VOCAB_SIZE, minimize, step_by_step


def test_the_side_of_an_attention_layer_gives_the_shape_of_its_weights(network, batch):
    S, T = (ids.size(1) for ids in batch)
    sides = {(S, S): "encoder", (T, T): "target", (T, S): "source", (S + T, S + T): "sequence"}
    with attention_maps(network) as maps, torch.no_grad():
        network(*batch)
    assert {name: network.side(name) for name in maps} == {name: sides[maps[name].shape[2:]] for name in maps}


def test_logits_do_not_depend_on_later_inputs(network, batch):
    """The gradient of the logits of step t is zero for the embeddings of later inputs, but not for its own."""
    source, target_in = batch
    T = target_in.size(1)
    embedded = []

    def record(module, args, output):
        if args[0].size(-1) >= T and args[0].dim() == 2 and args[0][:, -T:].equal(target_in):
            output.retain_grad()
            embedded.append(output)

    for module in network.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(record)
    logits = network(source, target_in)
    (embedding,) = embedded
    for t in range(T):
        embedding.grad = None
        logits[:, t].square().sum().backward(retain_graph=True)
        gradient = embedding.grad[:, -T:].abs().sum(dim=(0, 2))  # (T)
        assert gradient[t] > 0
        assert gradient[t + 1 :].eq(0).all()


def test_padding_does_not_change_the_logits(network, batch):
    """A pair has the same logits alone and in a padded batch."""
    source, target_in = batch
    together = network(source, target_in)
    for row in range(len(source)):
        S, T = (source[row] != PAD).sum(), (target_in[row] != PAD).sum()
        alone = network(source[row : row + 1, :S], target_in[row : row + 1, :T])
        torch.testing.assert_close(together[row, :T], alone[0], atol=1e-5, rtol=1e-4)


def test_logits_of_an_encoded_source_equal_forward(network, batch):
    """Both step by step, up to rounding, and in parallel, to the bit."""
    source, target_in = batch
    expected = network(source, target_in)
    torch.testing.assert_close(step_by_step(network, *batch), expected, atol=1e-5, rtol=1e-4)
    assert network.logits(source, target_in, network.encode(source)).equal(expected)


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
    actual, _ = network.decode_step(target_in[rows, 3], reorder_state(state, rows))
    expected, _ = network.decode_step(target_in[rows, 3], selected)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_recurrent_layers_get_contiguous_states(network, batch):
    """cuDNN refuses others."""
    inputs = []
    for layer in network.modules():
        if isinstance(layer, nn.RNNBase):
            layer.register_forward_pre_hook(lambda _, arguments: inputs.extend(arguments[1:]))
    network(*batch)
    step_by_step(network, *batch)
    states = [state for states in inputs for state in (states if isinstance(states, tuple) else [states])]
    assert all(state.is_contiguous() for state in states)


def test_one_batch_can_be_overfitted(network, batch):
    source, target_in = batch
    target_out = torch.cat((target_in[:, 1:], target_in.new_full((len(target_in), 1), PAD)), dim=1)
    target_out[torch.arange(len(target_in)), (target_in != PAD).sum(1) - 1] = EOS
    torch.manual_seed(0)
    network = type(network)(**network.hyper_parameters | {"dropout": 0.0})
    loss = minimize(lambda: token_nll(network(source, target_in), target_out), network)
    assert loss / (target_out != PAD).sum() < 0.05


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
    with pytest.raises(UserError, match=r"num_registers .* at least 0, but is -1"):
        WithRegisters(11, -1)


def test_dropout_is_active_in_training_only(network, batch):
    assert network(*batch).equal(network(*batch))
    network.train()
    assert not network(*batch).equal(network(*batch))


@pytest.mark.parametrize("dropout", [1e-9, 0.999999])
def test_logits_are_finite_with_extreme_dropout(dropout):
    source, target_in = torch.randint(3, VOCAB_SIZE, (5, 7)), torch.randint(3, VOCAB_SIZE, (5, 6))
    networks = [cls(VOCAB_SIZE, 16, dropout=dropout, max_length=16) for cls in (Transformer, GPT)]
    networks.append(AttentionLSTM(VOCAB_SIZE, 16, dropout=dropout))
    classifier = EncoderClassifier(VOCAB_SIZE, 3, 9, 16, dropout=dropout, word_dropout=dropout)
    for logits in (*(network.train()(source, target_in) for network in networks), classifier.train()(source)):
        assert logits.isfinite().all()


def test_attention_maps_are_distributions_over_real_tokens(network, batch):
    """They are recorded in training mode, too."""
    source, target_in = batch
    with attention_maps(network.train()) as training:
        network(source, target_in)
    with attention_maps(network.eval()) as maps:
        logits = network(source, target_in)
    assert logits.equal(network(source, target_in))
    assert not any(module._forward_hooks for module in network.modules())
    assert {name: weights.shape for name, weights in training.items()} == {name: w.shape for name, w in maps.items()}
    assert len(maps) == sum(isinstance(module, Attention) for module in network.modules())
    S, T = source.size(1), target_in.size(1)
    padding = (source == PAD)[:, None, None]
    for name, weights in maps.items():
        assert weights.min() >= 0, name
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
        if weights.size(-1) >= S:  # attention over the source, or over source and target
            over_source = weights[..., :S]
            assert over_source[padding.expand_as(over_source)].eq(0).all(), name
        if weights.size(-1) != S and weights.size(-1) == weights.size(-2):  # self-attention of the decoder
            assert weights.triu(1).eq(0).all(), name
        assert weights.size(-2) in (S, T, S + T), name
    over_source = network.source_attention(maps, source)
    assert over_source
    is_in_reach = torch.arange(T) + 1 < (getattr(network, "window", None) or T + 1)  # the last token of the source
    for weights in over_source.values():
        assert weights.shape[2:] == (T, S)
        torch.testing.assert_close(weights.sum(-1), is_in_reach.float().expand_as(weights.sum(-1)))
        assert weights[padding.expand_as(weights)].eq(0).all()


def test_attention_maps_are_collected_while_decoding(network, batch):
    """The joined maps of single steps equal the maps of the parallel forward pass."""
    source, target_in = batch
    with attention_maps(network) as whole:
        network(source, target_in)
    # The state of linear attention has a constant size, and thus no weight for each key.
    if any(isinstance(layer, LinearAttention) for layer in network.modules()):
        with pytest.raises(UserError, match="not in decode_step"), attention_maps(network):
            step_by_step(network, source, target_in)
        return
    with attention_maps(network) as joined:
        step_by_step(network, source, target_in)
    assert set(joined) == set(whole)
    steps = target_in.size(1)
    for name, weights in whole.items():
        torch.testing.assert_close(joined[name][:, :, -steps:], weights[:, :, -steps:], atol=1e-5, rtol=1e-4)


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


@torch.no_grad()
def test_a_quantized_network_computes_nearly_the_same(network, batch):
    expected = network(*batch)
    quantize(network)
    assert not any(isinstance(module, Linear) for module in network.modules())
    assert (network(*batch) - expected).norm() <= 0.05 * expected.norm()
    real = batch[1] != PAD
    error = (step_by_step(network, *batch) - expected)[real].norm()
    assert error <= 0.05 * expected[real].norm()


def test_a_network_without_linear_layers_is_not_quantized():
    with pytest.raises(UserError, match=r"--int8 .* NaiveBayes"):
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

    eager, names = passes(), list(network.state_dict())
    network.compile(backend="aot_eager")
    torch.testing.assert_close(passes(), eager)
    assert list(network.state_dict()) == names


def test_tied_embeddings_are_one_matrix():
    tied, untied = (Transformer(11, 16, 4, 1, 32, max_length=8, tie_embeddings=tie) for tie in (True, False))
    assert tied.source_embedding.weight is tied.target_embedding.weight is tied.head.weight
    saved = sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters())
    assert saved == 2 * 11 * 16


def test_source_keys_are_computed_once(batch):
    network = Transformer(11, 16, 4, 2, 32, max_length=12)
    calls = []
    for layer in network.decoder:
        layer.cross_attention.kv_proj.register_forward_hook(lambda *_: calls.append(1))
    decode(network.decode_step, network.encode(batch[0]), 6)
    assert len(calls) == len(network.decoder)


SHORT = {"d_model": 8, "num_heads": 2, "max_length": 9}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AttentionLSTM(11, attention="hard_monotonic", pointer_generator=True), "pointer_.* hard_monotonic"),
        (lambda: AttentionLSTM(11, features_encoder="linear"), "features_encoder must be null .* data.features"),
        (lambda: Transformer(11, 130, 4), r"d_model .* num_heads \(4\), but is 130; try 128 or 132"),
        (lambda: GPT(11, 12, 4, max_length=9, positions="rotary"), "even for rotary positions, but is 3; try 4"),
        (lambda: GPT(11, 3, 4), r"d_model .* num_heads \(4\), but is 3; try 4 or 8"),
        (lambda: GPT(11, **SHORT, d_head=3, positions="rotary"), "d_head, .* even for rotary .*, but is 3; try 4"),
        (lambda: GPT(11, **SHORT, num_kv_heads=4), r"num_kv_heads must divide num_heads \(2\), but is 4; try 2"),
        (lambda: GPT(11, **SHORT, num_kv_heads=0), "num_kv_heads .* at least 1, but is 0"),
        (lambda: GPT(11, **SHORT, window=0), "window .* at least 1, but is 0"),
        (lambda: GPT(11, **SHORT, d_ff=0), "d_ff .* at least 1, but is 0"),
        (lambda: GPT(11, **SHORT, activation="elu"), "activation must be .*, swiglu, but is 'elu'; try gelu"),
        (lambda: GPT(11, **SHORT, norm_type="batch"), "norm_type must be layer or rms, but is 'batch'; try rms"),
        (lambda: GPT(11, **SHORT, norm_eps=0), "norm_eps must be above 0, but is 0; try 1.0e-5"),
        (lambda: GPT(11, **SHORT, logit_cap=-1.0), "logit_cap must be above 0 and finite, but is -1.0; try 30 or null"),
        (
            lambda: GPT(11, **SHORT, positions="rotary", rotary_base=0),
            "rotary_base must be above 0 and finite, but is 0; try 10000",
        ),
        (
            lambda: GPT(11, **SHORT, rotary_base=5e5),
            "rotary_base must be 10000 with positions learned, .* but is 500000.0; set positions to rotary",
        ),
        (lambda: AttentionLSTM(11, 8, dropout=1.0), "dropout .* below 1, but is 1.0"),
        (lambda: GPT(11, 8, 2, num_layers=0), "num_layers .* at least 1, but is 0"),
        (lambda: Transformer(11, **SHORT).check_lengths(10, 3), "source has 10 tokens.* max_length 9"),
        (lambda: Transformer(11, **SHORT).check_lengths(3, 12), "target has 12 tokens.* max_length 9"),
        (lambda: GPT(11, **SHORT).check_lengths(5, 6), r"5 \+ 6 tokens.* max_length 9 positions; try max_length 11"),
    ],
)
def test_invalid_settings_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()
