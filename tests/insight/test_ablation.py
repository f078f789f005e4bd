"""Ablations in every network, against independent answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from lightning_tfm.data import Batch
from lightning_tfm.insight import Sample, head_scores, interventions, sample
from lightning_tfm.insight.ablation import METHODS, Ablator, Part, heads_of, parts_of
from lightning_tfm.insight.inspection import inspect_network, number_of_steps
from lightning_tfm.insight.sample import outcome, tokens_of
from lightning_tfm.networks import GPT, Transformer
from lightning_tfm.tokenization import EOS, NUM_SPECIAL, PAD
from support.networks import tiny


@pytest.fixture
def examples(network, batch):
    return examples_for(network, batch)


def examples_for(network, batch):
    """Return pairs with an alignment, parts and categories."""
    source, target_in = batch
    target_out = torch.full_like(target_in, PAD)
    target_out[:, :-1] = target_in[:, 1:]
    target_out[torch.arange(5), (target_in != PAD).sum(1) - 1] = EOS
    pairs = Sample.of(Batch(source, target_in, target_out, torch.arange(5)), network)
    gold = torch.rand(5, 6, 7) < 0.3
    parts = {"beginning": pairs.is_target & (torch.arange(6) < 2), "none": torch.zeros_like(pairs.is_target)}
    categories = {"first": pairs.is_target & (torch.arange(5) < 2).unsqueeze(1)}
    return replace(pairs, gold=gold, parts=parts, categories=categories)


def test_inspection_does_not_depend_on_batches(network, examples, monkeypatch):
    steps = []
    expected = inspect_network(network, examples, lambda: steps.append(1))
    assert len(steps) >= number_of_steps(network) - len(heads_of(network))  # the smallest set may be undefined
    monkeypatch.setattr(sample, "BATCH_TOKENS", 30)
    assert len([*examples.batches()]) == 3
    assert as_numbers(inspect_network(network, examples)) == pytest.approx(as_numbers(expected), rel=1e-3, abs=1e-5)
    assert all(part["without"].keys() == set(METHODS) for part in expected["components"])


def as_numbers(value, path=""):
    """Return all numbers of nested mappings and sequences, by path."""
    if isinstance(value, dict):
        return {
            key: number for name, part in value.items() for key, number in as_numbers(part, f"{path}/{name}").items()
        }
    if isinstance(value, list | tuple):
        return as_numbers(dict(enumerate(value)), path)
    return {path: float(value)} if isinstance(value, int | float) else {}


def test_an_ablation_by_the_mean_replaces_the_output_by_a_constant(network, examples):
    for part in heads_of(network):
        with interventions(network) as touch:
            calls = touch.record(*part)
            network(*examples.inputs)
        is_token = tokens_of(network, part.name, examples.inputs) != PAD
        mean = torch.cat(calls, dim=1)[is_token].mean(0)
        with interventions(network) as touch:
            touch.replace(part.name, mean, part.head)
            expected = outcome(network, examples)
        torch.testing.assert_close(Ablator(network, examples).without([part], "mean").nll, expected.nll)


def test_an_ablation_by_resampling_gives_the_outputs_of_another_example(network, examples):
    """Every example is another one for one other, and with equal examples, nothing changes."""
    ablator = Ablator(network, examples)
    assert sorted(ablator.others.tolist()) == [0, 1, 2, 3, 4]
    assert (ablator.others != torch.arange(5)).all()
    equal = examples.rows(torch.zeros(4, dtype=torch.long))
    ablator = Ablator(network, equal)
    for part in parts_of(network):
        torch.testing.assert_close(ablator.without([part], "resample").nll, ablator.full.nll)


def test_a_layer_is_ablated_by_ablating_its_sublayers(batch):
    network = tiny(Transformer, dropout=0.0)().eval()
    ablator = Ablator(network, examples_for(network, batch))
    sublayers = [Part(f"decoder.1.{name}") for name in ("self_attention", "cross_attention", "feed_forward")]
    for method in METHODS:
        assert ablator.without([Part("decoder.1")], method).nll.equal(ablator.without(sublayers, method).nll)


def test_effects_are_means_with_bootstrap_intervals(batch):
    network = tiny(GPT)().eval()
    ablator = Ablator(network, examples_for(network, batch).rows(torch.arange(200) % 5))
    values = torch.randn(200)
    effect = ablator.effect(values)
    assert effect.mean == pytest.approx(values.mean().item(), abs=1e-6)
    interval = stats.bootstrap([values.numpy()], np.mean, method="percentile", rng=0).confidence_interval
    assert effect[1:] == pytest.approx(tuple(interval), abs=0.01)
    wider = ablator.effect(values, tests=20)
    assert wider.low < effect.low < effect.high < wider.high


def test_errors_are_counted_by_position_part_and_category(network, examples):
    ablator = Ablator(network, examples)
    if not parts_of(network):
        return  # such as one with hard monotonic attention
    ablation = ablator.ablate(parts_of(network)[0])
    more = ablator.full.is_right.float() - ablation.outcome.is_right.float()
    positions = ablation.errors["position"]
    assert positions.keys() == {str(column + 1) for column in range(6) if examples.is_target[:, column].any()}
    for name, effect in positions.items():
        column = int(name) - 1
        assert effect.mean == pytest.approx(more[:, column][examples.is_target[:, column]].mean().item())
    assert "none" not in ablation.errors["part"]
    for by, masks in {"part": examples.parts, "category": examples.categories}.items():
        for name, effect in ablation.errors[by].items():
            assert effect.mean == pytest.approx(more[masks[name]].mean().item())
            assert effect.low <= effect.mean <= effect.high


def test_scores_are_means_over_the_queries(batch):
    """The scores of uniform weights are known."""
    network = tiny(GPT, positions="learned")().eval()
    with torch.no_grad():
        for layer in network.layers:
            layer.self_attention.qkv_proj.weight.zero_()
    text = torch.arange(NUM_SPECIAL, NUM_SPECIAL + 4).repeat(2).unsqueeze(0)  # a text of 4 symbols, twice
    scores = head_scores(network, Sample((text[:, :0], text), text, torch.ones_like(text, dtype=torch.bool)))
    weights = [1 / (query + 1) for query in range(8)]
    expected = {
        "previous_token": sum(weights[1:]) / 7,
        "first_token": sum(weights[1:]) / 7,
        "duplicate_token": sum(weights[4:]) / 4,
        "induction": sum(weights[4:]) / 4,
    }
    assert scores.keys() == {(head.name, head.head) for head in heads_of(network)}
    for each in scores.values():
        assert each == pytest.approx(expected)
