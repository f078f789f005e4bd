"""Tokenizers of characters, words and features."""

from __future__ import annotations

import unicodedata
from collections import Counter

import pytest

from lightning_tfm.errors import UserError
from lightning_tfm.system import memory
from lightning_tfm.tokenization import BOS, EOS, PAD, UNKNOWN, SymbolTokenizer, WordTokenizer, tokenizer_from_dict
from support.corpora import TEXTS


@pytest.mark.parametrize(
    "tokenizer",
    [
        SymbolTokenizer([UNKNOWN, *"ab é\U0001f600"]),
        SymbolTokenizer([UNKNOWN, "a", "b", "ab"], " "),
        SymbolTokenizer([UNKNOWN, *"ab", "[V]", "[a]"], "", " ", ";"),
        SymbolTokenizer([UNKNOWN, *"ab", "[V]", "[a]"], "", "", ";"),
        SymbolTokenizer([UNKNOWN, *"abe\u0301"], decompose=True),
        WordTokenizer(["a", "ab"]),
    ],
    ids=[
        "characters",
        "words",
        "features and words",
        "features and characters",
        "letters and marks",
        "words and punctuation",
    ],
)
@pytest.mark.parametrize("are_targets", [False, True])
def test_texts_encoded_together_equal_texts_encoded_one_by_one(tokenizer, are_targets):
    texts = ["ab a", "", "\U0001f600 xé", "b\tV;a;N", " ", "\ud800a", "aab"]
    encode = tokenizer.encode_target if are_targets else tokenizer.encode
    for together in (texts, texts[:1], ["", ""]):
        ids, lengths = tokenizer.encode_flat(together, are_targets)
        assert [part.tolist() for part in ids.split(lengths.tolist())] == [encode(text) for text in together]


@pytest.mark.parametrize("part", [2, memory.PART])
@pytest.mark.parametrize(
    "tokenizer",
    [SymbolTokenizer((), *settings) for settings in ((), (" ",), ("", " "), ("", None, ";"), ("", " ", ";", 1, True))],
)
@pytest.mark.parametrize("are_targets", [False, True])
def test_counts_of_symbols_are_those_of_split_texts(tokenizer, are_targets, part, monkeypatch):
    monkeypatch.setattr(memory, "PART", part)
    texts = [*TEXTS, "run\tV;PST", "a a b"]
    split = tokenizer.split_target if are_targets else tokenizer.split
    assert tokenizer.count(iter(texts), are_targets) == Counter(symbol for text in texts for symbol in split(text))


@pytest.mark.parametrize(("text", "separator"), [("3 May", ""), ("ein großer Hund", " ")])
def test_tokenizers_restore_the_text(text, separator):
    symbols = sorted(set(text.split() if separator else text))
    tokenizer = SymbolTokenizer(symbols, separator)
    ids = tokenizer.encode(text)
    assert min(ids) > EOS
    assert max(ids) < tokenizer.vocab_size == 3 + len(symbols)
    assert tokenizer.decode([BOS, *ids, EOS, ids[0], PAD]) == text
    assert tokenizer_from_dict(tokenizer.to_dict()).encode(text) == ids


def test_decomposed_characters_are_letters_and_marks_and_are_composed_again():
    letters = [*"\u1112\u1161\u11ab", "e", "\u0301"]
    tokenizer = SymbolTokenizer([UNKNOWN, *letters], decompose=True)
    for text in ("\ud55c", "\u00e9"):  # a Korean syllable, and e with an accent
        ids = tokenizer.encode(text)
        assert len(ids) == len(unicodedata.normalize("NFD", text)) > len(text)
        assert tokenizer.unknown_id not in ids
        assert ids == tokenizer.encode_target(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer_from_dict(tokenizer.to_dict()).encode(text) == ids


def test_unknown_symbols_are_reported_with_their_position():
    with pytest.raises(UserError, match=r"no character 'x' \(position 3 of 'abxa'\)"):
        SymbolTokenizer("ab").encode("abxa")
    with pytest.raises(UserError, match=r"no character 'x' \(position 2 of 'bx'\)"):
        SymbolTokenizer("ab").encode_flat(["ab", "bx"], are_targets=False)
    with pytest.raises(UserError, match=r"no word 'Hund' \(position 2 of 'der Hund'\)"):
        SymbolTokenizer(["der"], " ").encode("der Hund")
