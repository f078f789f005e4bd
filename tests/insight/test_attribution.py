"""Attributions in every network, against independent answers."""

from __future__ import annotations

import pytest
import torch

from lightning_tfm.data import Batch
from lightning_tfm.errors import UserError
from lightning_tfm.insight import Sample
from lightning_tfm.insight.attribution import (
    direct_logit_attribution,
    integrated_gradients,
    logit_lens,
    occlusion,
    patching,
)
from lightning_tfm.insight.interventions import components, interventions
from lightning_tfm.insight.sample import logits_of
from lightning_tfm.layers import MonotonicAttention
from lightning_tfm.layers.monotonic import MonotonicCrossAttention
from lightning_tfm.tokenization import EOS, PAD


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
    assert bool(lens) == has_layers(network)
    if lens:
        assert lens[-1].equal(logits_of(network, sample.inputs))
        assert not lens[0].equal(lens[-1])


def test_direct_attribution_sums_to_the_logit(network, sample):
    is_linear = has_layers(network) and getattr(network, "pointer", None) is None
    if not is_linear:
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


def test_patching_everything_gives_the_output_of_the_other(network, two_sources):
    """The states of all positions determine the output, unless source tokens are copied."""
    inputs, other = two_sources
    expected = logits_of(network, other.inputs)
    assert not logits_of(network, inputs).equal(expected)
    names = [component.name for component in components(network) if component.kind in ("layer", "states")]
    with interventions(network) as touch:
        states = {name: touch.record(name) for name in names}
        network(*other.inputs)
    with interventions(network) as touch:
        for name, (state,) in states.items():
            touch.replace(name, state)
        if getattr(network, "pointer", None) is None:
            torch.testing.assert_close(logits_of(network, inputs), expected)


def test_patching_one_position_of_one_layer(network, two_sources):
    """The effect is that of replacing the state by hand."""
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


def test_patching_needs_inputs_of_one_length(network, sample):
    other = sample.rows(slice(0, 1))
    inputs = (other.inputs[0][:, 1:], other.inputs[1])
    with pytest.raises(UserError, match="both inputs must have as many tokens, but have 6 and 7"):
        patching(network, inputs, other)


def test_patching_needs_different_inputs(network, sample):
    other = sample.rows(slice(0, 1))
    with pytest.raises(UserError, match="both inputs must differ, but have equal tokens; try another input"):
        patching(network, other.inputs, other)


def test_integrated_gradients_are_complete(network, sample):
    """Their sum is the difference between the log probabilities of the input and those of an embedding of 0."""
    network.double()
    one = sample.rows(slice(0, 1))
    attributions, errors = integrated_gradients(network, one)
    name = "source_embedding" if hasattr(network, "source_embedding") else "embedding"

    def log_p():
        return logits_of(network, one.inputs).log_softmax(-1).gather(-1, one.targets.unsqueeze(-1)).squeeze(-1)

    with torch.no_grad():
        difference = log_p()
        with interventions(network) as touch:
            touch.scale(name, by=0.0)
            difference = difference - log_p()
    error = (attributions.sum(1) - difference).abs()[0]
    torch.testing.assert_close(errors.abs(), error, rtol=1e-4, atol=1e-8)
    if not any(isinstance(module, MonotonicAttention | MonotonicCrossAttention) for module in network.modules()):
        assert (error <= 0.01 * difference.abs().clamp(min=1)).all(), "their moves are not smooth"


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
