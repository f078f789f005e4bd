"""Interventions in every network."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lightning_tfm.errors import UserError
from lightning_tfm.inference.decoding import decode
from lightning_tfm.insight import components, interventions
from lightning_tfm.layers import attention_layers, attention_maps
from lightning_tfm.networks import (
    GPT,
    AttentionLSTM,
    CausalNetwork,
    EncoderClassifier,
    LinearTransformer,
    MaskedEncoder,
    Transformer,
)
from lightning_tfm.tokenization import PAD
from support.networks import NETWORKS, VOCAB_SIZE, randomize, step_by_step, tiny

QUERY, KEY = 3, 2
"""A query and an earlier key."""


def test_recording_changes_no_output(network, batch):
    expected = network(*batch)
    with interventions(network) as touch:
        recorded = {component: touch.record(component.name) for component in components(network)}
        assert network(*batch).equal(expected)
    assert all(outputs for component, outputs in recorded.items())
    assert network(*batch).equal(expected)


def test_interventions_end_with_the_context(network, batch):
    expected = network(*batch)
    with interventions(network) as touch:
        for component in components(network):
            touch.scale(component.name, by=0.0)
        assert not network(*batch).equal(expected)
    assert network(*batch).equal(expected)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


def test_decoding_with_a_cache_equals_forward(network, batch):
    """Also with heads that are scaled, whatever the length of a call."""
    source, target_in = batch
    with interventions(network) as touch:
        for index, component in enumerate(components(network)):
            if component.kind == "attention":
                touch.scale(component.name, by=0.5, head=component.num_heads - 1)
            elif component.kind == "feed_forward":
                touch.scale(component.name, by=1.5 + index)
        torch.testing.assert_close(step_by_step(network, source, target_in), network(source, target_in))


@pytest.mark.parametrize("head", range(4))
def test_a_head_is_ablated_as_by_zero_columns_of_the_projection(head, batch):
    network = tiny(Transformer, dropout=0.0)().eval()
    attention = network.decoder[1].cross_attention
    with interventions(network) as touch:
        touch.scale("decoder.1.cross_attention", by=0.0, head=head)
        ablated = network(*batch)
    with torch.no_grad():
        attention.out_proj.weight[:, 4 * head : 4 * head + 4] = 0
    torch.testing.assert_close(ablated, network(*batch))


def test_ablating_all_but_one_path_equals_a_network_with_this_path_alone(batch):
    """One head of the first layer and the feed-forward network of the second remain."""
    network = tiny(GPT, dropout=0.0)().eval()
    with interventions(network) as touch:
        for head in (0, 1, 3):
            touch.scale("layers.0.self_attention", by=0.0, head=head)
        touch.scale("layers.0.feed_forward", by=0.0)
        touch.scale("layers.1.self_attention", by=0.0)
        ablated = network(*batch)
    source, target_in = batch
    S = source.size(1)
    tokens = torch.cat(batch, dim=1)
    real = torch.cat((source != PAD, torch.ones_like(target_in, dtype=torch.bool)), dim=1)
    positions = network.positions.number_sequence(source != PAD, target_in.size(1))
    x = network.embedding(tokens) + network.positions.weight[positions]
    attention, feed_forward = network.layers[0].self_attention, network.layers[1].feed_forward
    first, second = network.layers[0].add_self.norm, network.layers[1].add_feed_forward.norm
    query, key, value = (part[..., 8:12] for part in attention.qkv_proj(first(x)).chunk(3, dim=-1))
    mask = torch.ones(tokens.size(1), tokens.size(1), dtype=torch.bool).tril() & real.unsqueeze(1)
    weights = (query @ key.transpose(1, 2) / 2).masked_fill(~mask, -1e9).softmax(-1)
    x = x + (weights @ value) @ attention.out_proj.weight[:, 8:12].T + attention.out_proj.bias
    x = x + feed_forward(second(x))
    torch.testing.assert_close(ablated, network.head(network.norm(x))[:, S:])


def test_gradients_flow_through_an_intervention(network, batch):
    by = torch.ones((), requires_grad=True)
    with interventions(network) as touch:
        touch.scale(components(network)[-1].name, by=by)
        network(*batch).logsumexp(-1).sum().backward()
    assert by.grad.isfinite()
    assert by.grad != 0


def test_a_replaced_layer_decides_the_output(batch):
    network = tiny(GPT)().eval()
    with interventions(network) as touch:
        touch.replace("layers.1", torch.zeros(16))
        logits = network(*batch)
    assert logits.equal(logits[:1, :1].expand_as(logits))


def test_predictions_change_while_decoding(batch):
    network = tiny(AttentionLSTM)().eval()
    expected = decode(network.decode_step, network.encode(batch[0]), 6)
    with interventions(network) as touch:
        touch.replace("attention", torch.full((32,), 9.0))
        changed = decode(network.decode_step, network.encode(batch[0]), 6)
    assert not changed.equal(expected)


def test_unknown_components_and_heads_are_refused():
    with interventions(tiny(GPT)()) as touch:
        with pytest.raises(UserError, match=r"no component 'layer\.0'"):
            touch.scale("layer.0", by=0.0)
        with pytest.raises(UserError, match=r"head must be from 0 to 3 for layers\.0\.self_attention, but is 4"):
            touch.scale("layers.0.self_attention", by=0.0, head=4)
        with pytest.raises(UserError, match=r"head must be None for layers\.0\.feed_forward"):
            touch.record("layers.0.feed_forward", head=0)
    with pytest.raises(UserError, match="interventions must be made within their context, but it has ended"):
        touch.scale("layers.0", by=0.0)


def drawn(network, name, batch):
    """Return a query that an output depends on, and a key that it does not attend to alone."""
    before = batch[0].size(1) if isinstance(network, CausalNetwork) else 0
    key = KEY + 2 * attention_layers(network)[name].over_memory  # not reachable by monotonic attention
    return before + QUERY, before + key


def test_an_attention_may_be_edited_to_its_own_weights(network, batch):
    expected = network(*batch)
    with interventions(network) as touch:
        for name in attention_layers(network):
            touch.edit_weights(name, lambda weights: weights)
        torch.testing.assert_close(network(*batch), expected, atol=1e-4, rtol=1e-4)


def test_drawn_weights_are_recorded_and_end_with_the_context(network, batch):
    """Other heads and earlier queries keep their weights."""
    expected = network(*batch)
    with attention_maps(network) as intact:
        network(*batch)
    for name, layer in attention_layers(network).items():
        query, key = drawn(network, name, batch)
        head = layer.num_heads - 1
        with attention_maps(network) as maps, interventions(network) as touch:
            touch.attend(name, query, key, head)
            assert not network(*batch).equal(expected)
        one = torch.eye(maps[name].size(-1))[key]
        assert maps[name][:, head, query].equal(one.expand(5, -1))
        assert maps[name][:, :head].equal(intact[name][:, :head])
        torch.testing.assert_close(maps[name][:, head, :query], intact[name][:, head, :query])
        with interventions(network) as touch, attention_maps(network) as maps:
            touch.attend(name, query, key)
            network(*batch)
        assert maps[name][:, :, query].equal(one.expand(5, layer.num_heads, -1))
    assert network(*batch).equal(expected)
    assert not any({"forward", "weights"} & vars(module).keys() for module in network.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


def test_drawn_weights_are_the_same_while_decoding(network, batch):
    """A query has the same index in forward and step by step, and weights that depend on it follow."""
    for name, layer in attention_layers(network).items():
        query, key = drawn(network, name, batch)
        for head in (0, None):
            with attention_maps(network) as whole, interventions(network) as touch:
                touch.attend(name, query, key, head)
                expected = network(*batch)
                assert network(*batch).equal(expected), "a call of forward counts from 0"
            with interventions(network) as touch:
                touch.attend(name, query, key, head)
                if isinstance(network, LinearTransformer):
                    with pytest.raises(UserError, match="not in decode_step"):
                        step_by_step(network, *batch)
                    continue
                with attention_maps(network) as joined:
                    torch.testing.assert_close(step_by_step(network, *batch), expected, atol=1e-4, rtol=1e-4)
            rows = slice(-batch[1].size(1), None)  # those of a padded source may differ
            torch.testing.assert_close(joined[name][:, :, rows], whole[name][:, :, rows], atol=1e-5, rtol=1e-4)
            assert joined[name][:, layer.num_heads - 1 if head is None else 0, query, key].eq(1).all()


def test_gradients_through_drawn_weights_are_finite(network, batch):
    with interventions(network) as touch:
        for name in attention_layers(network):
            touch.attend(name, *drawn(network, name, batch))
        network(*batch).logsumexp(-1).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in network.parameters() if p.grad is not None)


@pytest.mark.parametrize("head", range(4))
@pytest.mark.parametrize("records_first", [True, False])
def test_the_context_of_a_drawn_head_is_the_value_of_its_key(head, records_first, batch):
    """Each call is recorded once, whatever the order of the interventions."""
    network = randomize(tiny(Transformer)()).eval()
    name, layer = "decoder.1.cross_attention", network.decoder[1].cross_attention
    memories = []
    handle = network.encoder_norm.register_forward_hook(lambda _, __, memory: memories.append(memory))
    with interventions(network) as touch:
        contexts = touch.record(name, head) if records_first else None
        touch.attend(name, QUERY, KEY, head)
        contexts = contexts or touch.record(name, head)
        outputs = touch.record(name)
        network(*batch)
    handle.remove()
    (context,), (output,), (memory,) = contexts, outputs, memories
    part = slice(16 + 4 * head, 20 + 4 * head)
    value = memory[:, KEY] @ layer.kv_proj.weight[part].T + layer.kv_proj.bias[part]
    torch.testing.assert_close(context[:, QUERY], value)
    assert output.shape == (5, 6, 16)


@pytest.mark.parametrize("network", ["Transformer pointer_generator", "AttentionLSTM pointer_generator"], indirect=True)
def test_a_pointer_generator_copies_by_drawn_weights(network, batch):
    torch.nn.init.zeros_(network.pointer.generation.weight)
    torch.nn.init.constant_(network.pointer.generation.bias, -50.0)
    for run in (network, partial(step_by_step, network)):
        with interventions(network) as touch:
            touch.attend(list(attention_layers(network))[-1], QUERY, KEY)
            probabilities = run(*batch)[:, QUERY].exp()
        torch.testing.assert_close(probabilities, torch.eye(VOCAB_SIZE)[batch[0][:, KEY]])


@pytest.mark.parametrize("name", ["AttentionLSTM", "AttentionLSTM gru additive", "Transformer monotonic"])
def test_weights_are_edited_in_training(name, batch):
    network = randomize(NETWORKS[name](dropout=0.0))
    outputs = []
    for mode in (False, True):
        with interventions(network.train(mode)) as touch:
            for layer in attention_layers(network):
                touch.edit_weights(layer, lambda weights: torch.ones_like(weights) / weights.size(-1))
            outputs.append(network(*batch))
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-4)
    assert not network.eval()(*batch).isclose(outputs[0]).all()


def test_edits_of_weights_take_effect_in_order(batch):
    """Also those of an inner context, before the edits of heads."""
    network = randomize(tiny(GPT)()).eval()
    name, seen = "layers.0.self_attention", []
    expected = network(*batch)
    with interventions(network) as outer:
        outer.scale(name, by=2.0, head=1)
        outer.edit_weights(name, lambda weights: weights * 3, head=1)
        with interventions(network) as inner:
            inner.edit_weights(name, lambda weights: seen.append(weights) or weights / 6)
            inner.edit_weights(name, lambda weights: weights * 6, head=0)
            inner.edit_weights(name, lambda weights: weights * 6, head=2)
            inner.edit_weights(name, lambda weights: weights * 6, head=3)
            torch.testing.assert_close(network(*batch), expected, atol=1e-5, rtol=1e-4)
        (weights,) = seen
        sums = torch.tensor([1.0, 3.0, 1.0, 1.0])[:, None].expand(5, 4, 13)
        torch.testing.assert_close(weights.sum(-1), sums)
        assert not network(*batch).equal(expected)
    assert len(seen) == 1
    assert network(*batch).equal(expected)


@pytest.mark.parametrize("cls", [EncoderClassifier, MaskedEncoder])
def test_weights_over_a_text_are_drawn(cls):
    text = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 10, 4, PAD]])
    network = randomize(cls(VOCAB_SIZE, 3, 9, 16, 4, 2, 32) if cls is EncoderClassifier else tiny(cls)()).eval()
    expected = network(text)
    for name in attention_layers(network):
        with attention_maps(network) as maps, interventions(network) as touch:
            touch.attend(name, QUERY, KEY, head=1)
            assert not network(text).isclose(expected).all()
        assert maps[name][:, 1, QUERY].equal(torch.eye(5)[KEY].expand(2, -1))
    assert network(text).equal(expected)


def test_a_compiled_network_runs_with_drawn_weights(batch):
    network = randomize(tiny(Transformer)()).eval()

    def run():
        with interventions(network) as touch:
            touch.attend("decoder.0.cross_attention", QUERY, KEY)
            return network(*batch)

    intact, expected = network(*batch), run()
    network.compile(backend="aot_eager")
    torch.testing.assert_close(network(*batch), intact)
    torch.testing.assert_close(run(), expected)
    torch.testing.assert_close(network(*batch), intact)


def test_unknown_attention_layers_heads_queries_and_keys_are_refused(batch):
    network = tiny(GPT)().eval()
    name = "layers.0.self_attention"
    with interventions(network) as touch:
        with pytest.raises(
            UserError, match=r"no attention layer 'layers\.0\.attention'; did you mean 'layers\.0\.self"
        ):
            touch.attend("layers.0.attention", 0, 0)
        with pytest.raises(UserError, match=r"head must be from 0 to 3 for layers\.0\.self_attention, but is 4"):
            touch.edit_weights(name, lambda weights: weights, head=4)
        with pytest.raises(UserError, match=r"query must be at least 0, but is -1; try 0"):
            touch.attend(name, -1, 0)
        network(*batch)
    for key in (-1, 9):
        with interventions(network) as touch:
            touch.attend(name, 8, key)
            with pytest.raises(UserError, match=rf"key must be from 0 to 8 for query 8 of {name}, but is {key}; try 8"):
                step_by_step(network, *batch)
    with pytest.raises(UserError, match="interventions must be made within their context, but it has ended"):
        touch.attend(name, 0, 0)


def test_every_part_of_a_network_is_a_component():
    network = tiny(Transformer)()
    sublayers = {"self_attention", "feed_forward"}
    expected = {"source_embedding", "target_embedding"}
    for stack, others in (("encoder", set()), ("decoder", {"cross_attention"})):
        for index in range(2):
            expected |= {f"{stack}.{index}"} | {f"{stack}.{index}.{name}" for name in sublayers | others}
    assert {component.name for component in components(network)} == expected
    assert [component.name for component in components(AttentionLSTM(VOCAB_SIZE))] == [
        "source_embedding",
        "target_embedding",
        "encoder_states",
        "start",
        "attention",
    ]
