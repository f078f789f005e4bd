"""Attention maps of predictions and their labels."""

from __future__ import annotations

import torch

from lightning_tfm.data import Pair
from lightning_tfm.networks import GPT
from lightning_tfm.plots.pictures import draw_attention
from lightning_tfm.tasks import Seq2SeqModule
from lightning_tfm.tokenization import SymbolTokenizer


def attention(network, tokenizer, pair):
    return Seq2SeqModule(network, tokenizer, 10).attention(pair._asdict())


def test_attention_maps_are_labeled_with_their_tokens(network):
    tokenizer = SymbolTokenizer("abcdefgh")
    pair = Pair("abcd", "ba", ((1, 0), (0, 1)))
    maps = attention(network, tokenizer, pair)
    assert any(attention_map.gold for attention_map in maps)
    for attention_map in maps:
        heads, T, S = attention_map.weights.shape
        assert (len(attention_map.queries), len(attention_map.keys)) == (T, S), attention_map.layer
        for column, row in attention_map.gold:
            assert (attention_map.keys[column], attention_map.queries[row]) in (("b", "b"), ("a", "a"))
        figure = draw_attention(attention_map)
        *panels, bar = figure.axes
        assert len(panels) == heads
        assert bar.get_ylabel() == "weight"
        assert [label.get_text() for label in panels[0].get_yticklabels()] == attention_map.queries
        assert [label.get_text() for label in panels[-1].get_xticklabels()] == attention_map.keys
        assert figure.get_supxlabel() == "attended symbol"
        assert figure.get_supylabel() == (f"{attention_map.predicts} symbol".strip())
        if attention_map.predicts:  # the last row predicts the end
            assert attention_map.queries[-1] == "EOS"
        for panel, weights in zip(panels, attention_map.weights, strict=True):
            assert len(panel.collections[0].get_paths()) == len(attention_map.gold)
            torch.testing.assert_close(torch.tensor(panel.images[0].get_array().data), weights)


def test_attention_of_a_wrong_prediction_is_that_of_the_output(network):
    module = Seq2SeqModule(network, SymbolTokenizer("abcdefgh"), 10).eval()
    target = {"source": "abc", "target": "dcba", "alignment": [[0, 3], [1, 2]]}
    for text in ("dcba", "bb"):
        actual = module.attention(target | {"prediction": text})
        expected = module.attention(target | {"target": text})
        for layer, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(layer.weights, other.weights)
            assert layer.queries == other.queries
            assert layer.gold == (other.gold if text == "dcba" else [])
            assert (layer.predicts, other.predicts) in (("output", "target"), ("", ""))
        assert any(layer.gold for layer in actual) == (text == "dcba")


def test_cropping_a_long_joint_sequence_keeps_the_target():
    """The rows of the source are cropped instead."""
    tokenizer = SymbolTokenizer("abcdefgh")
    source, target = "abcdefgh" * 7, "hgfedcba"
    pair = Pair(source, target, tuple((7 - i, i) for i in range(8)))
    network = GPT(tokenizer.vocab_size, 16, 2, 1, max_length=80)
    (attention_map,) = attention(network, tokenizer, pair)
    cropped = attention_map.cropped()
    assert cropped.queries == [*target, "EOS"]
    assert len(cropped.gold) == 8
    assert all(cropped.keys[column] == cropped.queries[row] for column, row in cropped.gold)
    assert cropped.weights.equal(attention_map.weights[:, -9:, :64])
