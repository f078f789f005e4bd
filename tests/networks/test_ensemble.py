"""Ensembles of all networks, compared with the mean of the probabilities of their members."""

import json

import pytest
import torch

from lightning_tfm.checkpoint.content import ENSEMBLE
from lightning_tfm.errors import UserError
from lightning_tfm.inference.decoding import beam_search
from lightning_tfm.layers import attention_maps
from lightning_tfm.layers.losses import sequence_nll
from lightning_tfm.networks import GPT, AttentionLSTM, Ensemble, Transformer
from lightning_tfm.tokenization import BOS, EOS, PAD
from support.networks import NETWORKS, VOCAB_SIZE, joined, randomize, step_by_step

MIXED = "Transformer", "GPT", "AttentionLSTM lstm hard_monotonic", "Transformer pointer_generator", "LinearTransformer"


@pytest.fixture(params=[*NETWORKS, MIXED], ids=str)
def ensemble(request):
    """Return an ensemble of two networks of a kind, for each kind, and one of networks of different classes."""
    names = [request.param] * 2 if isinstance(request.param, str) else request.param
    torch.manual_seed(1)
    return joined(*(randomize(NETWORKS[name]()) for name in names))


def mean(ensemble, *batch):
    """Return the mean of the probabilities (B, T, V) of the members."""
    return sum(member(*batch).double().softmax(-1) for member in ensemble.members) / len(ensemble.members)


@torch.no_grad()
def test_probabilities_are_the_mean_of_those_of_the_members(ensemble, batch):
    source, _ = batch
    expected, whole = mean(ensemble, *batch), ensemble(*batch)
    torch.testing.assert_close(whole.double().exp(), expected, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(step_by_step(ensemble, *batch).double().exp(), expected, atol=1e-5, rtol=1e-4)
    assert ensemble.logits(*batch, ensemble.encode(source)).equal(whole)
    first, second = (member(*batch).softmax(-1) for member in ensemble.members[:2])
    assert not torch.allclose(first, second, atol=1e-3), "the members differ"


@torch.no_grad()
@pytest.mark.parametrize("number", [1, 3])
def test_an_ensemble_of_equal_members_equals_the_member(network, number, batch):
    expected = network(*batch).log_softmax(-1)
    ensemble = joined(*[network] * number)
    torch.testing.assert_close(ensemble(*batch), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(step_by_step(ensemble, *batch), expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_beam_search_scores_by_the_mean_probabilities(ensemble, batch):
    """The scores would differ if the states of a member were reordered unlike the prefixes."""
    source, _ = batch
    outputs, scores = beam_search(ensemble.decode_step, ensemble.encode(source), 6, 4, n_best=2)
    for tokens, score in zip(outputs.unbind(1), scores.unbind(1), strict=True):
        target_in = torch.cat((torch.full_like(tokens[:, :1], BOS), tokens[:, :-1]), dim=1)
        target_in = target_in.masked_fill(target_in == EOS, PAD)
        log_probs = -sequence_nll(mean(ensemble, source, target_in).log(), tokens) / (tokens != PAD).sum(1)
        torch.testing.assert_close(score.double(), log_probs, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_plain_values_build_the_same_ensemble(ensemble, batch):
    assert f"{Ensemble.__module__}.{Ensemble.__qualname__}" == ENSEMBLE
    twin = Ensemble(**json.loads(json.dumps(ensemble.hyper_parameters))).eval()
    assert not twin(*batch).equal(ensemble(*batch))
    twin.load_state_dict(ensemble.state_dict())
    assert twin(*batch).equal(ensemble(*batch))
    assert twin.hyper_parameters == ensemble.hyper_parameters


@torch.no_grad()
def test_attention_over_the_source_is_that_of_the_members(ensemble, batch):
    source, _ = batch
    with attention_maps(ensemble) as maps:
        ensemble(*batch)
    found = ensemble.source_attention(maps, source)
    expected = {}
    for index, member in enumerate(ensemble.members):
        with attention_maps(member) as own:
            member(*batch)
        sides = {f"members.{index}.{name}": member.side(name) for name in own}
        assert sides == {name: ensemble.side(name) for name in sides}
        expected |= {f"members.{index}.{k}": v for k, v in member.source_attention(own, source).items()}
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in found)


def test_the_shortest_member_limits_the_lengths():
    sizes = {"d_model": 16, "num_heads": 2, "num_layers": 1}
    members = AttentionLSTM(11, 16), Transformer(11, max_length=9, **sizes), GPT(11, max_length=12, **sizes)
    ensemble = joined(*members)
    assert ensemble.max_length == 9
    assert ensemble.max_lengths(4) == (8, 4)
    ensemble.check_lengths(8, 4)
    for lengths, match in (((10, 1), "source has 10 tokens.* max_length 9"), ((8, 5), r"8 \+ 5 .* max_length 12")):
        with pytest.raises(UserError, match=match):
            ensemble.check_lengths(*lengths)
    assert joined(AttentionLSTM(11, 16)).max_lengths(4) == (None, None)


def test_members_are_completed_from_the_data():
    class Data:
        vocab_size, max_source_length, max_target_length, target_ids = 11, 7, 5, (4, 5)

    sizes = {"d_model": 16, "num_heads": 2, "num_layers": 1}
    specifications = [
        {"class_path": "lightning_tfm.networks.GPT", "init_args": sizes | {"max_length": None}},
        {"class_path": "lightning_tfm.networks.Transformer", "init_args": sizes | {"max_length": 9}},
        {"class_path": "lightning_tfm.networks.AttentionLSTM"},
        {"class_path": "lightning_tfm.networks.AttentionLSTM", "init_args": {"outputs": "targets"}},
    ]
    ensemble = Ensemble.from_data(Data(), members=specifications)
    assert [member.max_length for member in ensemble.members] == [12, 9, None, None]
    assert [member.hyper_parameters.get("target_ids") for member in ensemble.members[2:]] == [None, [4, 5]]
    assert {member.hyper_parameters["vocab_size"] for member in ensemble.members} == {11}


LSTM = {"class_path": "lightning_tfm.networks.AttentionLSTM", "init_args": {"vocab_size": 12, "d_model": 8}}


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([], "members must have at least one network"),
        ([LSTM], f"vocab_size must be that of all members, but is {VOCAB_SIZE}, and a member has 12"),
        ([{"class_path": "torch.nn.Linear", "init_args": {}}], "members must be networks .* 'torch.nn.Linear'"),
        ([{"class_path": "lightning_tfm.networks.EncoderClassifier"}], "members must be networks .*Classifier"),
        ([{"class_path": "lightning_tfm.networks.CausalNetwork"}], "members must be networks .*CausalNetwork"),
        ([{"class_path": ENSEMBLE, "init_args": {}}], "members must be networks .*Ensemble"),
        ([{}], "members must be networks .* 'None'"),
    ],
)
def test_invalid_members_are_refused(members, message):
    with pytest.raises(UserError, match=message):
        Ensemble(VOCAB_SIZE, members)


def test_an_ensemble_has_no_output_layer():
    with pytest.raises(UserError, match="one output layer, but an Ensemble"):
        _ = joined(AttentionLSTM(VOCAB_SIZE, 8)).head
