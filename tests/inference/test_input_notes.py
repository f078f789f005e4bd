"""Warnings about a line of input."""

import pytest

from lightning_tfm.errors import UserError
from lightning_tfm.inference import MaskedLanguageModelPredictor, Seq2SeqPredictor
from lightning_tfm.networks import GPT, MaskedEncoder
from lightning_tfm.tokenization import UNKNOWN, SymbolTokenizer
from support.networks import tiny

FEATURES = SymbolTokenizer([UNKNOWN, *"aehntz NPL;", "[N]", "[PL]"], feature_separator=";")
UNKNOWN_SYMBOLS = "{} of {} tokens are not in the vocabulary: {}"


def note(predictor, line):
    _, text = predictor.encode_line(line)
    return text


def make(cls, network, tokenizer, *arguments):
    made = tiny(network)
    return cls(made.func(tokenizer.vocab_size, **made.keywords), tokenizer, *arguments)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("hat\tN;PL", ""),
        ("hat\tPL", ""),
        ("hat PL", "it has no features, which follow a tab; type a tab before 'PL' in place of the space"),
        ("hat PL;N", "it has no features, which follow a tab; type a tab before 'PL;N' in place of the space"),
        ("hat ne", "it has no features, unlike the training data; add a tab and the features"),
        ("hat", "it has no features, unlike the training data; add a tab and the features"),
        ("hat\tN;SG", UNKNOWN_SYMBOLS.format(1, 5, "'[SG]'")),
        ("xaxy\tN", UNKNOWN_SYMBOLS.format(3, 5, "'x', 'y'")),
        ("zvwxxy\tN", UNKNOWN_SYMBOLS.format(5, 7, "'x', 'v', 'w', ...")),
    ],
)
def test_features_and_unknown_symbols_are_named(line, expected):
    predictor = make(Seq2SeqPredictor, GPT, FEATURES, 9)
    assert note(predictor, line) == expected


def test_too_many_columns_are_refused():
    with pytest.raises(UserError, match="only the columns of the source and its features, but has 3 columns"):
        note(make(Seq2SeqPredictor, GPT, FEATURES, 9), "hat\tN\tnets")


@pytest.mark.parametrize(
    ("features", "line", "number"),
    [(None, "hat", 1), (None, "hat\t ", 1), (None, "hat\ta\tn", 3), (";", "hat", 1), (";", "hat\ta\tN\tn", 4)],
)
def test_another_number_of_sources_is_refused(features, line, number):
    tokenizer = SymbolTokenizer([UNKNOWN, *"ahnt\t", "[N]"], feature_separator=features, num_sources=2)
    predictor = make(Seq2SeqPredictor, GPT, tokenizer, 9)
    rule = "3 columns, separated by tabs, of 2 sources and their features" if features else "2 columns, .* of 2 sources"
    with pytest.raises(UserError, match=f"it must hold {rule}, but has {number}$"):
        note(predictor, line)


def test_features_that_do_not_follow_several_sources_are_named():
    tokenizer = SymbolTokenizer([UNKNOWN, *"ahntN\t ", "[N]"], feature_separator=";", num_sources=2)
    predictor = make(Seq2SeqPredictor, GPT, tokenizer, 9)
    assert note(predictor, "hat\ta\tN") == ""
    expected = "it has no features, which follow a tab; type a tab before 'N' in place of the space"
    assert note(predictor, "hat\ta N") == expected


def test_lengths_outside_those_of_training_are_named():
    predictor = make(Seq2SeqPredictor, GPT, SymbolTokenizer("ab"), 9)
    assert note(predictor, "a") == ""  # before training, no length is known
    predictor.shortest_source, predictor.longest_source = 3, 5
    notes = {number: note(predictor, "a" * number) for number in range(2, 7)}
    assert notes == {
        2: "it has 2 tokens, fewer than any training text (3)",
        **dict.fromkeys((3, 4, 5), ""),
        6: "it has 6 tokens, more than any training text (5)",
    }


def test_unknown_symbols_beside_masks_are_named():
    """The characters of the mask itself are no symbols of the text."""
    predictor = make(MaskedLanguageModelPredictor, MaskedEncoder, SymbolTokenizer([UNKNOWN, *"abc"]))
    assert note(predictor, "a[MASK]b") == ""
    assert note(predictor, "ax[MASK]b[MASK]y") == UNKNOWN_SYMBOLS.format(2, 6, "'x', 'y'")
