"""Attributions in every network, against independent answers."""

from __future__ import annotations

import pytest
import torch

from lightning_tfm.data import Batch
from lightning_tfm.errors import UserError
from lightning_tfm.inference.loading import load
from lightning_tfm.insight import Sample, attribution
from lightning_tfm.insight.attribution import (
    direct_logit_attribution,
    integrated_gradients,
    logit_lens,
    occlusion,
    patching,
)
from lightning_tfm.insight.interventions import components, interventions
from lightning_tfm.insight.sample import log_probabilities, logits_of
from lightning_tfm.insight.texts import as_sample
from lightning_tfm.layers import MonotonicAttention
from lightning_tfm.layers.monotonic import MonotonicCrossAttention
from lightning_tfm.networks import GPT, CausalNetwork, EncoderClassifier, Seq2SeqNetwork
from lightning_tfm.runs.record import Run
from lightning_tfm.tokenization import EOS, NUM_SPECIAL, PAD, UNKNOWN_ID
from support.experiments import trained_run
from support.networks import VOCAB_SIZE, tiny


@pytest.fixture
def sample(network, batch):
    source, target_in = batch
    target_out = torch.cat((target_in[:, 1:], torch.full_like(target_in[:, :1], PAD)), 1)
    target_out[torch.arange(len(batch[0])), (target_in != PAD).sum(1) - 1] = EOS
    return Sample.of(Batch(source, target_in, target_out, torch.arange(len(source))), network)


def has_layers(network):
    return any(component.kind == "layer" for component in components(network))


def test_the_lens_of_the_last_layer_is_the_output(network, sample):
    lens = list(logit_lens(network, sample.inputs).values())
    assert bool(lens) == (has_layers(network) and getattr(network, "pointer", None) is None)
    if lens:
        assert lens[-1].equal(logits_of(network, sample.inputs))
        assert not lens[0].equal(lens[-1])


def test_direct_attribution_sums_to_the_logit(network, sample):
    constrained = (getattr(network, name, None) is not None for name in ("pointer", "logit_cap"))
    if not has_layers(network) or any(constrained):
        with pytest.raises(UserError, match="direct logit attribution needs"):
            direct_logit_attribution(network, sample)
        return
    attribution = direct_logit_attribution(network.double(), sample)
    logits = logits_of(network, sample.inputs).gather(-1, sample.targets.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(sum(attribution.values()), logits, rtol=0, atol=1e-10)
    heads = sum(component.num_heads for component in components(network) if component.kind == "attention")
    assert len(attribution) > 2
    assert len(attribution) <= heads + 2 + len(components(network))


@pytest.fixture
def two_sources(sample):
    """Return the inputs of an example, except for its target, and another example with as many tokens."""
    other = sample.rows(slice(0, 1))
    source = other.inputs[0].roll(1, 1).masked_fill(other.inputs[0] == EOS, EOS)
    source[0, 0] = other.inputs[0][0, 2]
    return (source, other.inputs[1]), other


def test_patching_all_positions_gives_the_output_of_the_other(network, two_sources):
    """The state after any layer of one sequence, or after the last layer of an encoder or decoder, determines it."""
    inputs, other = two_sources
    expected = logits_of(network, other.inputs)
    assert not logits_of(network, inputs).equal(expected)
    layers = [component.name for component in components(network) if component.kind == "layer"]
    states = [component.name for component in components(network) if component.kind == "states"]
    last = {name.rpartition(".")[0]: [name] for name in layers}
    for names in [[name] for name in layers] if isinstance(network, CausalNetwork) else [*last.values(), states]:
        with interventions(network) as touch:
            recorded = {name: touch.record(name) for name in names}
            network(*other.inputs)
        with interventions(network) as touch:
            for name, (state,) in recorded.items():
                touch.replace(name, state.squeeze(1) if name == "start" else state)
            patched = logits_of(network, inputs)
        # A pointer copies tokens of its own source, and a decoder reads the features of its own source.
        if names and getattr(network, "pointer", None) is getattr(network, "feature_embedding", None) is None:
            torch.testing.assert_close(patched, expected)


def test_patching_the_only_position_has_an_effect_of_1():
    """A text of one token is determined by the state of any layer."""
    network = tiny(GPT, dropout=0.0)().eval()
    empty, targets = torch.zeros(1, 0, dtype=torch.long), torch.tensor([[5]])
    other = Sample((empty, torch.tensor([[4]])), targets, torch.ones_like(targets, dtype=torch.bool))
    with torch.no_grad():
        network.head.weight.mul_(20)  # for different outputs
    effects = patching(network, (empty, torch.tensor([[3]])), other)
    assert effects.keys() == {"layers.0", "layers.1"}
    for effect in effects.values():
        torch.testing.assert_close(effect, torch.ones(1))


def test_patching_one_position_of_one_layer(network, two_sources, monkeypatch):
    """The effect is that of replacing the state by hand."""
    monkeypatch.setattr(attribution, "LEAST_DIFFERENCE", 0)
    inputs, other = two_sources
    effects = patching(network, inputs, other)
    name = next(iter(effects))

    def log_p(inputs):
        log_p = logits_of(network, inputs).log_softmax(-1).gather(-1, other.targets.unsqueeze(-1)).squeeze(-1)
        return log_p[other.is_target].sum()

    with interventions(network) as touch:
        state = touch.record(name)
        network(*other.inputs)
    position = min(1, state[0].size(1) - 1)

    def patch(output):
        return torch.cat((output[:, :position], state[0][:, position : position + 1], output[:, position + 1 :]), 1)

    with interventions(network) as touch:
        touch.edit(name, patch)
        patched = log_p(inputs)
    expected = (patched - log_p(inputs)) / (log_p(other.inputs) - log_p(inputs))
    torch.testing.assert_close(effects[name][position], expected, rtol=1e-3, atol=1e-4)


def test_patching_needs_different_outputs(batch):
    """The order of the source does not matter to a sum of embeddings."""
    network = SharedEmbedding()
    other = Sample.of(Batch(*batch, batch[1], torch.arange(5)), network).rows(slice(0, 1))
    source, target_in = other.inputs
    inputs = source[:, [1, 0, *range(2, source.size(1))]], target_in
    with pytest.raises(UserError, match="the inputs must have different outputs, but they have equal ones"):
        patching(network, inputs, other)


def test_patching_needs_inputs_of_one_length(network, sample):
    other = sample.rows(slice(0, 1))
    inputs = (other.inputs[0][:, 1:], other.inputs[1])
    with pytest.raises(UserError, match="both inputs must have the same number of tokens, but have 6 and 7"):
        patching(network, inputs, other)


def test_patching_needs_different_inputs(network, sample):
    other = sample.rows(slice(0, 1))
    with pytest.raises(UserError, match="both inputs must differ, but have equal tokens; try another input"):
        patching(network, other.inputs, other)


def test_integrated_gradients_are_complete(network, sample):
    """Their sum is the difference between the log probabilities of the input and those of an embedding of 0."""
    one = sample.rows(slice(0, 1))
    attributions, errors = integrated_gradients(network, one)
    name = "source_embedding" if hasattr(network, "source_embedding") else "embedding"

    def log_p():
        return log_probabilities(logits_of(network, one.inputs), one)[0]

    with torch.no_grad():
        difference = log_p()
        with interventions(network) as touch:
            touch.scale(name, by=0.0)
            difference = difference - log_p()
    error = (attributions.sum(1) - difference).abs()
    torch.testing.assert_close(errors.abs(), error, rtol=1e-4, atol=1e-4)
    is_monotonic = any(isinstance(layer, MonotonicAttention | MonotonicCrossAttention) for layer in network.modules())
    is_steep = isinstance(getattr(network, "norm", None), torch.nn.RMSNorm)  # near an embedding of 0
    if not is_monotonic and not is_steep:
        assert (error <= 0.011 * difference.abs().clamp(min=1)).all()


@pytest.mark.parametrize("name", ["translation_transformer", "translation_attention_lstm", "spelling_gpt"])
def test_integrated_gradients_of_trained_networks_are_complete(name, tmp_path_factory):
    trained = trained_run(name, tmp_path_factory)
    predictor = load(trained / "checkpoints/best.ckpt")
    one = as_sample(predictor.teacher_forced(Run(trained).predictions[0]["source"]))
    attributions, errors = integrated_gradients(predictor.network, one)
    differences = attributions.sum(1) - errors
    assert (errors.abs() <= 0.01 * differences.abs().clamp(min=1)).all()


class SharedEmbedding(Seq2SeqNetwork):
    """Network with one embedding of source and target."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB_SIZE, 8)
        self.head = torch.nn.Linear(8, VOCAB_SIZE)

    def encode(self, source):
        return (self.embedding(source).sum(1),)

    def decode_step(self, token, state):
        return self.head(self.embedding(token) + state[0]), state

    def forward(self, source, target_in):
        return self.head(self.embedding(target_in) + self.encode(source)[0].unsqueeze(1))


def test_attributions_need_separate_embeddings(batch):
    network = SharedEmbedding()
    one = Sample.of(Batch(*batch, batch[1], torch.arange(5)), network).rows(slice(0, 1))
    with pytest.raises(UserError, match="attributions need separate embeddings of source and target"):
        occlusion(network, one)


def test_direct_attribution_of_a_network_of_texts_sums_to_the_logit():
    """Its special tokens have a constant logit."""
    network = tiny(GPT, text_only=True)().eval()
    text = torch.randint(NUM_SPECIAL, VOCAB_SIZE, (2, 6))
    one = Sample((text[:, :0], text[:, :-1]), text[:, 1:], torch.ones(2, 5, dtype=torch.bool))
    logits = logits_of(network, one.inputs).gather(-1, one.targets.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(sum(direct_logit_attribution(network, one).values()), logits)


def test_occlusion_without_a_symbol(network, sample):
    one = sample.rows(slice(0, 1))
    decrease = occlusion(network, one)
    name = "source_embedding" if hasattr(network, "source_embedding") else "embedding"

    def log_p():
        return logits_of(network, one.inputs).log_softmax(-1).gather(-1, one.targets.unsqueeze(-1)).squeeze(-1)[0]

    def occlude(embeddings):
        return embeddings.index_fill(1, torch.tensor([2]), 0)

    with torch.no_grad():
        expected = log_p()
        with interventions(network) as touch:
            touch.edit(name, occlude)
            expected = expected - log_p()
    torch.testing.assert_close(decrease[:, 2], expected)


def test_occlusion_of_a_classifier_includes_naive_bayes():
    """Without its output layer, the encoder has no effect, so only naive Bayes sees that a word is unknown."""
    network = EncoderClassifier(VOCAB_SIZE, 3, 9, 16, 4, 1, 32, num_bigram_buckets=50).eval()
    torch.nn.init.zeros_(network.head.weight)
    network.naive_bayes.scores.random_(-100_000, 100_000)
    text = torch.tensor([[5, 6, 7, 5, 8]])
    sample = Sample((text,), torch.tensor([[2]]), torch.ones(1, 1, dtype=torch.bool))
    (actual,) = occlusion(network, sample)
    others = text.repeat(5, 1).masked_fill(torch.eye(5, dtype=torch.bool), UNKNOWN_ID)
    log_probs = network(torch.cat((text, others))).log_softmax(-1)[:, 2]
    torch.testing.assert_close(actual, log_probs[0] - log_probs[1:])
    assert (actual != 0).all()
