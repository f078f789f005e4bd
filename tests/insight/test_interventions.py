"""Interventions in every network."""

from __future__ import annotations

import pytest
import torch

from lightning_tfm.errors import UserError
from lightning_tfm.inference.decoding import decode
from lightning_tfm.insight import components, interventions
from lightning_tfm.networks import GPT, AttentionLSTM, Transformer
from lightning_tfm.tokenization import PAD
from support.networks import VOCAB_SIZE, step_by_step, tiny


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
