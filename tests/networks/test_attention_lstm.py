"""The LSTM with attention: its cells, its precision and hard monotonic attention."""

from __future__ import annotations

import itertools
import math
from copy import deepcopy

import pytest
import torch
from torch import nn

from lightning_tfm.errors import UserError
from lightning_tfm.layers import HardMonotonicAttention
from lightning_tfm.layers.losses import token_nll
from lightning_tfm.networks import AttentionLSTM
from lightning_tfm.tokenization import BOS, EOS, PAD
from support.networks import VOCAB_SIZE, randomize


@pytest.mark.parametrize("pointer_generator", [False, True])
@pytest.mark.parametrize(
    ("dtype", "autocast", "tolerance"),
    [
        (torch.float64, False, 1e-12),
        (torch.float32, False, 1e-5),
        (torch.float32, True, 0.05),
        (torch.bfloat16, False, 0.05),
        (torch.float16, False, 0.003),
    ],
)
def test_training_equals_evaluation_in_every_precision(dtype, autocast, tolerance, pointer_generator, batch):
    """The loop over the decoder in evaluation mode, in float64, has the same logits and gradients."""
    exact = randomize(AttentionLSTM(VOCAB_SIZE, 16, pointer_generator=pointer_generator))
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
    network = randomize(AttentionLSTM(VOCAB_SIZE, 8, attention="hard_monotonic"), 0.5).double().eval()
    attention = network.attention
    for source, target in (
        ([3, 4, 5, EOS], [6, 7, EOS]),
        ([8, EOS], [3, 3, 3, 4, EOS]),
        ([EOS], [5, EOS]),
        ([3, 4, 5, 6, 7, 8, 9, EOS], [4, 9, EOS]),
    ):
        target_in = torch.tensor([[BOS, *target[:-1]]])
        recurrent, _, (keys, memory, _) = network.encode(torch.tensor([source]))
        S, moves, emissions = len(source), [], []
        for token, output in zip(target_in[0], target, strict=True):
            embedded = network.target_embedding(token[None, None])
            _, states = network.decoder(embedded, tuple(state[None] for state in recurrent))
            recurrent = tuple(state[0] for state in states)
            hidden = attention.q_proj(recurrent[0]) + keys[0]
            energies = attention.energy(torch.tanh(hidden)).squeeze(1)
            distances = attention.distance(torch.sigmoid(2 * hidden))  # from each place
            moves.append(
                [  # from s to s, s + 1, ...
                    torch.stack([energies[s + d] + distances[s, min(d, 4)] for d in range(S - s)]).softmax(0)
                    for s in range(S)
                ]
            )
            features = torch.tanh(network.readout(recurrent[0]) + memory[0])
            emissions.append(network.head(features).softmax(-1)[:, output])
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


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_encoder_equals_a_packed_bidirectional_network(cell, batch):
    source, _ = batch
    ours = AttentionLSTM(11, 16, cell=cell).eval()
    theirs = {"lstm": nn.LSTM, "gru": nn.GRU}[cell](16, 16, batch_first=True, bidirectional=True)
    for name, parameter in theirs.named_parameters():
        direction = ours.encoder_backward if name.endswith("_reverse") else ours.encoder_forward
        parameter.data.copy_(direction.get_parameter(name.removesuffix("_reverse")))
    lengths = (source != PAD).sum(1)
    embedded = ours.source_embedding(source)
    packed = nn.utils.rnn.pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
    expected, _ = nn.utils.rnn.pad_packed_sequence(theirs(packed)[0], batch_first=True)
    *_, (_, memory, _) = ours.encode(source)
    torch.testing.assert_close(memory[source != PAD], expected[source != PAD])


def test_lstm_decoder_cell_equals_torch():
    ours, theirs = AttentionLSTM(11, 16), nn.LSTMCell(16 + 32, 16)

    def reordered(weight):
        forget, input, output, candidate = weight.chunk(4)  # torch has another order
        return torch.cat((input, forget, candidate, output))

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
    w_z, w_r, w = network.decoder_token(y).chunk(3, dim=1)
    c_z, c_r = (c @ weight[:, :8].T for weight in network.decoder_state.weight.chunk(2))
    u_z, u_r = (s @ weight[:, 8:].T for weight in network.decoder_state.weight.chunk(2))
    z, r = torch.sigmoid(w_z + c_z + u_z), torch.sigmoid(w_r + c_r + u_r)
    candidate = network.decoder_candidate.weight
    proposal = torch.tanh(w + (r * s) @ candidate[:, 8:].T + c @ candidate[:, :8].T)
    (actual,) = network._cell(network.decoder_token(y), c, (s,))
    torch.testing.assert_close(actual, (1 - z) * s + z * proposal)


@pytest.mark.parametrize("attention", ["additive", "location_aware", "monotonic", "hard_monotonic"])
def test_embeddings_have_a_width_of_their_own(attention, batch):
    def network(d_embedding):
        torch.manual_seed(0)
        return AttentionLSTM(VOCAB_SIZE, 16, attention=attention, d_embedding=d_embedding).eval()

    assert network(None)(*batch).equal(network(16)(*batch))
    narrow = network(3)
    assert narrow.source_embedding.weight.shape == narrow.target_embedding.weight.shape == (VOCAB_SIZE, 3)
    *_, (_, memory, _) = narrow.encode(batch[0])
    assert memory.size(-1) == (16 if attention == "hard_monotonic" else 2 * 16)


@pytest.mark.parametrize("attention", ["additive", "location_aware", "monotonic", "hard_monotonic"])
@pytest.mark.parametrize("source", [[3, 4, 9, 10, EOS], [3, 4, 10, 9, EOS], [9, 3, 10, 4, EOS, PAD]])
def test_encoded_features_are_part_of_each_embedding(attention, source):
    """The logits are those of the source without features, with the sum of the features added to all embeddings."""
    settings = {"d_model": 8, "attention": attention, "pointer_generator": attention != "hard_monotonic"}
    network = randomize(AttentionLSTM(VOCAB_SIZE, **settings, features_encoder="linear", feature_ids=[9, 10])).eval()
    plain = AttentionLSTM(VOCAB_SIZE, **settings).eval()
    plain.load_state_dict({name: network.state_dict()[name] for name in plain.state_dict()})
    for embedding in (plain.source_embedding, plain.target_embedding):
        embedding.weight.data += network.feature_embedding.weight[[9, 10]].sum(0)
    target_in = torch.tensor([[BOS, 5, 3]])
    expected = plain(torch.tensor([[3, 4, EOS]]), target_in)
    torch.testing.assert_close(network(torch.tensor([source]), target_in), expected)
    (without,) = network(torch.tensor([[3, 4, EOS]]), target_in)
    assert not without.allclose(expected[0])


@pytest.mark.parametrize("attention", ["additive", "location_aware", "monotonic", "hard_monotonic"])
def test_restricted_outputs_are_those_of_a_softmax_over_fewer_tokens(attention):
    """The output layer has the rows of the target ids and EOS; other ids are as good as impossible."""
    ids = [EOS, 4, 5, 7]
    full = randomize(AttentionLSTM(VOCAB_SIZE, 8, attention=attention)).eval()
    network = AttentionLSTM(VOCAB_SIZE, 8, attention=attention, outputs="targets", target_ids=[5, 4, 7]).eval()
    weights = full.state_dict()
    rows = {name: weights[name][ids] for name in ("head.weight", "head.bias")}
    network.load_state_dict(weights | rows)
    with torch.no_grad():  # impossible tokens, by their logits
        full.head.bias.fill_(-1e4)[ids] = rows["head.bias"]
    source, target_in = torch.tensor([[3, 8, 5, EOS]]), torch.tensor([[BOS, 4, 7, 5, 4]])
    log_probs = network(source, target_in)
    torch.testing.assert_close(log_probs[..., ids], full(source, target_in).log_softmax(-1)[..., ids])
    others = [id for id in range(VOCAB_SIZE) if id not in ids]
    assert (log_probs[..., others] == math.log(torch.finfo(torch.float32).tiny)).all()
    assert network(source, torch.tensor([[BOS, 3, 9]])).isfinite().all()  # tokens that no output has


def test_hard_monotonic_attention_is_precise_under_autocast(batch):
    """Its probabilities are summed in float32; only the inputs of the linear layers are rounded."""
    network = randomize(AttentionLSTM(VOCAB_SIZE, 16, attention="hard_monotonic")).eval()
    with torch.autocast("cpu", torch.bfloat16):
        log_probs = network(*batch)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(log_probs.shape[:2]))
    torch.testing.assert_close(log_probs, network(*batch), atol=0.1, rtol=0.1)


def test_gradients_are_finite_if_a_token_is_impossible_where_the_network_attends():
    attention = HardMonotonicAttention(4, 6, 5)
    query, keys, mask = torch.randn(1, 3, 4), torch.randn(1, 2, 5), torch.ones(1, 2).bool()
    tokens = torch.tensor([[[1.0, 1.0], [1e-42, 0.5], [0.0, 0.0]]], requires_grad=True)
    weights = attention(query.requires_grad_(), keys.requires_grad_(), mask, attention.start(mask), tokens)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 3))
    weights[..., 0].sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (query, keys, tokens))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_ids": [3], "pointer_generator": True}, "outputs must be all with pointer_generator, but is targets"),
        ({}, "outputs must be all for data with unknown target_ids, but is targets"),
    ],
)
def test_outputs_of_the_targets_require_their_ids(settings, message):
    with pytest.raises(UserError, match=message):
        AttentionLSTM(VOCAB_SIZE, outputs="targets", **settings)
