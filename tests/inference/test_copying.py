"""Symbols outside the vocabulary that a pointer-generator copies."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from lightning_tfm.inference import Seq2SeqPredictor
from lightning_tfm.layers import attention_maps
from lightning_tfm.layers.losses import token_nll
from lightning_tfm.networks import GPT, AttentionLSTM, Transformer
from lightning_tfm.tokenization import BOS, EOS, PAD, UNKNOWN, SymbolTokenizer, pad_sequences
from support.networks import minimize, randomize

TOKENIZER = SymbolTokenizer([UNKNOWN, *"ab", "[V]"], "", "", ";")
SIZES = {"d_model": 16, "num_heads": 2, "num_layers": 3, "max_length": 12}
NETWORKS = {
    "Transformer": lambda: Transformer(TOKENIZER.vocab_size, **SIZES, pointer_generator=True),
    "Transformer monotonic": lambda: Transformer(
        TOKENIZER.vocab_size, **SIZES, pointer_generator=True, cross_attention="monotonic"
    ),
    "AttentionLSTM": lambda: AttentionLSTM(TOKENIZER.vocab_size, 16, pointer_generator=True),
    "AttentionLSTM features": lambda: AttentionLSTM(
        TOKENIZER.vocab_size,
        16,
        attention="monotonic",
        pointer_generator=True,
        features_encoder="linear",
        feature_ids=TOKENIZER.feature_ids,
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_each_unknown_symbol_is_the_unknown_one_with_the_largest_weight(name):
    """The weights are those from which the network copies; features and known symbols are not copied."""
    network = randomize(NETWORKS[name](), 0.6).eval()
    predictor = Seq2SeqPredictor(network, TOKENIZER, 12)
    copied = set()
    for source in ("axbycz\tV;X", "xyzx\tV", "zab\tX", "yx"):
        output = f"a{UNKNOWN}{UNKNOWN}b{UNKNOWN}"
        ids = [[*TOKENIZER.encode(source), EOS]], [[BOS, *TOKENIZER.encode_target(output)]]
        with attention_maps(network) as maps:
            network(*map(torch.tensor, ids))
        *_, weights = network.source_attention(maps, torch.tensor(ids[0])).values()
        word = source.partition("\t")[0]
        expected = list(output)
        for row in (1, 2, 4):
            places = [place for place, symbol in enumerate(word) if symbol not in "ab"]
            expected[row] = word[max(places, key=lambda place: weights[0, :, row, place].mean())]
        assert predictor.copy_unknown(source, output) == "".join(expected)
        copied |= {*expected}
    assert len(copied & {*"xyz"}) == 3


def test_outputs_beyond_the_maximum_length_are_not_copied_to():
    """The name of a feature in an output is read as characters, so the output may be longer than it was decoded."""
    predictor = Seq2SeqPredictor(randomize(NETWORKS["AttentionLSTM"](), 0.6).eval(), TOKENIZER, 12)
    assert predictor.copy_unknown("axb\tV", f"{UNKNOWN}{4 * '[V]'}{UNKNOWN}") == f"x{4 * '[V]'}{UNKNOWN}"


def test_only_pointer_generators_copy_and_only_unknown_symbols():
    sources, output = ("axb", "ab\tX", "ab"), f"a{UNKNOWN}"
    for network in (GPT(TOKENIZER.vocab_size, **SIZES), AttentionLSTM(TOKENIZER.vocab_size)):
        assert Seq2SeqPredictor(network, TOKENIZER, 12).copy_unknown(sources[0], output) == output
    predictor = Seq2SeqPredictor(NETWORKS["AttentionLSTM"](), TOKENIZER, 12)
    assert [predictor.copy_unknown(source, output) for source in sources[1:]] == [output] * 2
    assert predictor.copy_unknown("axb", "ab") == "ab"


def test_copying_is_learned_from_unknown_symbols_of_the_training_data():
    """A network that has learned to copy unknown symbols copies those that it has never seen."""
    rng = random.Random(0)
    words = ["".join(rng.choices(f"ab{UNKNOWN}", k=rng.randint(1, 6))) for _ in range(60)]
    source, _ = pad_sequences([[*TOKENIZER.encode(word), EOS] for word in words])
    target_out, _ = pad_sequences([[*TOKENIZER.encode_target(word), EOS] for word in words])
    target_in = torch.cat((torch.full_like(target_out[:, :1], BOS), target_out[:, :-1]), dim=1)
    target_in = target_in.masked_fill(target_in == EOS, PAD)
    network = AttentionLSTM(TOKENIZER.vocab_size, 32, attention="monotonic", pointer_generator=True)
    minimize(lambda: token_nll(network(source, target_in), target_out) / len(words), network)
    outputs = Seq2SeqPredictor(network, TOKENIZER, 12).predict(["xayb", "yx", "b", "zbaxq"])
    assert [output.text for output in outputs] == ["xayb", "yx", "b", "zbaxq"]


def test_without_generation_the_network_copies_the_symbols_that_replace_unknown_ones():
    network = randomize(NETWORKS["AttentionLSTM"](), 0.6).eval()
    nn.init.zeros_(network.pointer.generation.weight)
    nn.init.constant_(network.pointer.generation.bias, -50.0)
    (prediction,) = Seq2SeqPredictor(network, TOKENIZER, 6).predict(["xyzzyx"])
    assert prediction.text
    assert {*prediction.text} <= {*"xyz"}
