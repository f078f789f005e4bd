"""Nearest training examples, and the test example with the largest loss."""

from __future__ import annotations

import json

import pytest
import torch

from datamodules import Copy, Text
from lightning_tfm.errors import UserError
from lightning_tfm.explore import Explorer
from lightning_tfm.explore.explorer import describe
from lightning_tfm.explore.neighbors import features, span
from lightning_tfm.inference import (
    ClassifierPredictor,
    LanguageModelPredictor,
    MaskedLanguageModelPredictor,
    Seq2SeqPredictor,
)
from lightning_tfm.networks import GPT, AttentionLSTM, EncoderClassifier, MaskedEncoder, Transformer
from lightning_tfm.tokenization import EOS, PAD, SymbolTokenizer, train_tokenizer
from support.corpora import reviews, sentiment, text_file, write_table
from support.data import small
from support.networks import randomize


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a small data module of each kind, set up, with a predictor."""
    folder = tmp_path_factory.mktemp("data")
    torch.manual_seed(0)
    pairs = small(Copy)(max_length=6)
    text = Text(path=text_file(folder), max_length=16, batch_size=8, test_fraction=0.1)
    labeled = sentiment([write_table(folder / "reviews.tsv", reviews(200))], num_ngrams=50, max_length=16)
    for module in (pairs, text, labeled):
        module.setup("fit")
    sizes = {"d_model": 16, "num_heads": 2, "num_layers": 1}
    lengths = pairs.max_target_length
    models = {
        "transformer": (Seq2SeqPredictor(Transformer.from_data(pairs, **sizes), pairs.tokenizer, lengths), pairs),
        "gpt": (Seq2SeqPredictor(GPT.from_data(pairs, **sizes), pairs.tokenizer, lengths), pairs),
        "lstm": (Seq2SeqPredictor(AttentionLSTM.from_data(pairs, d_model=16), pairs.tokenizer, lengths), pairs),
        "hard": (
            Seq2SeqPredictor(
                AttentionLSTM.from_data(pairs, d_model=16, attention="hard_monotonic"), pairs.tokenizer, lengths
            ),
            pairs,
        ),
        "language_model": (LanguageModelPredictor(GPT.from_data(text, **sizes), text.tokenizer), text),
        "masked": (MaskedLanguageModelPredictor(MaskedEncoder.from_data(text, **sizes), text.tokenizer), text),
        "classifier": (
            ClassifierPredictor(EncoderClassifier.from_data(labeled, **sizes), labeled.tokenizer, labeled.labels),
            labeled,
        ),
    }
    for predictor, _ in models.values():
        randomize(predictor.network)
    return models


def test_features_do_not_depend_on_padding(network, batch):
    source, target_in = batch
    with torch.no_grad():
        mean, steps = features(network, batch)
    assert steps.shape[:2] == target_in.shape
    for row in range(len(source)):
        S, T = ((ids[row] != PAD).sum() for ids in batch)
        with torch.no_grad():
            one_mean, one_steps = features(network, (source[row : row + 1, :S], target_in[row : row + 1, :T]))
        torch.testing.assert_close(mean[row], one_mean[0])
        torch.testing.assert_close(steps[row, :T], one_steps[0])


PAIRS = ("transformer", "gpt", "lstm", "hard")


@pytest.mark.parametrize("kind", [*PAIRS, "language_model", "classifier"])
def test_a_training_example_is_its_own_neighbor(kind, data):
    predictor, module = data[kind]
    result = Explorer(predictor, data=lambda: module).neighbors(first_text(predictor, module))
    best = result["examples"][0]
    assert best["similarity"] == pytest.approx(1, abs=1e-5)
    assert best["source"] == first_text(predictor, module)
    assert best["mark"] is None
    values = [example["similarity"] for example in result["examples"]]
    assert values == sorted(values, reverse=True)
    assert len(values) == 10
    json.dumps(result, allow_nan=False)


def first_text(predictor, module):
    dataset = module.datasets["train"]
    if hasattr(dataset, "pairs"):
        return dataset.pairs[3].source
    return predictor.tokenizer.decode(dataset[torch.tensor([3])].target_in[0].tolist())


@pytest.mark.parametrize("kind", PAIRS)
def test_a_step_of_a_training_example_is_its_own_neighbor(kind, data):
    predictor, module = data[kind]
    explorer = Explorer(predictor, data=lambda: module)
    pair = module.datasets["train"].pairs[3]
    words, target = pair.target.split(), [*predictor.tokenizer.encode_target(pair.target), EOS]
    for step in (0, len(words) - 1, len(words)):
        examples = explorer.neighbors(pair.source, "decoder", step, target, number=100)["examples"]
        end = len(" ".join(words[: step + 1]))
        mark = (end - len(words[step]) if step < len(words) else end, end)
        own = [each for each in examples if each["source"] == pair.source and each["mark"] == mark]
        assert own
        assert own[0]["similarity"] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("kind", ["language_model", "masked", "classifier"])
def test_neighbors_of_steps_of_other_tasks(kind, data):
    predictor, module = data[kind]
    text = "der [MASK]und" if kind == "masked" else first_text(predictor, module)
    examples = Explorer(predictor, data=lambda: module).neighbors(text, by="decoder")["examples"]
    assert len(examples) == 10
    for example in examples:
        if kind == "classifier":
            assert example["mark"] == (0, len(example["target"]))
        elif example["mark"] is not None:  # unless the next token follows the text
            start, end = example["mark"]
            assert (0 if kind == "masked" else 1) <= start
            assert end == start + 1 <= len(example["source"])


@pytest.mark.parametrize("kind", ["characters", "words", "subword"])
def test_spans_of_tokens_make_up_the_text(kind):
    text = "Zwei kleine Bären, zwei große Bären."
    tokenizer = {
        "characters": lambda: SymbolTokenizer(sorted(set(text))),
        "words": lambda: SymbolTokenizer(sorted(set(text.split())), " "),
        "subword": lambda: train_tokenizer([text] * 10, "subword", 280),
    }[kind]()
    ids = tokenizer.encode_target(text)
    *spans, last = [span(tokenizer, [*ids, EOS], index) for index in range(len(ids) + 1)]
    assert last == (len(text), len(text))
    tokens = [text[start:end] for start, end in spans]
    assert all(tokens)
    assert kind != "words" or tokens == text.split()
    assert kind != "characters" or tokens == [*text]
    ends = [0, *(end for _, end in spans)]
    assert not "".join(text[end:start] for end, (start, _) in zip(ends, spans, strict=False)).strip()
    assert ends[-1] == len(text)


def test_data_are_loaded_once_and_only_when_needed(data):
    predictor, module = data["transformer"]
    calls = []
    explorer = Explorer(predictor, data=lambda: calls.append(1) or module)
    describe([explorer])
    explorer.answer("1 2")
    assert not calls
    explorer.neighbors("1 2")
    explorer.worst()
    explorer.neighbors("1 2", by="decoder")
    assert calls == [1]
    for arguments, message in (
        ({"by": "decoder", "step": 50}, "step must be from 0 to"),
        ({"number": 0}, "number must be from 1 to 100, but is 0"),
    ):
        with pytest.raises(UserError, match=message):
            explorer.neighbors("1 2", **arguments)


@pytest.mark.parametrize("kind", PAIRS)
def test_the_worst_example_has_the_largest_loss(kind, data):
    predictor, module = data[kind]
    result = Explorer(predictor, data=lambda: module).worst()
    pairs = module.datasets["test"].pairs
    scores = predictor.score([f"{pair.source}\t{pair.target}" for pair in pairs])
    worst = min(range(len(pairs)), key=lambda row: scores[row].log_probability)
    assert (result["source"], result["target"]) == pairs[worst][:2]
    assert result["nll"] == pytest.approx(-scores[worst].log_probability, rel=1e-4)
    assert result["prediction"] == predictor.predict([result["source"]])[0].text
    assert result["examples"] == len(pairs)


def test_the_worst_example_of_other_tasks(data):
    predictor, module = data["language_model"]
    result = Explorer(predictor, data=lambda: module).worst()
    assert predictor.score([result["source"]])[0].log_probability > -result["nll"]  # which also counts the next token
    assert result["target"] == ""
    predictor, module = data["classifier"]
    result = Explorer(predictor, data=lambda: module).worst()
    assert result["target"] in module.labels
    assert result["prediction"] in module.labels
