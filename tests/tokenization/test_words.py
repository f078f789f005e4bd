"""Lowercased words, their n-grams and combining marks."""

from __future__ import annotations

import re
import sys
import unicodedata

import pytest
import torch

from datamodules import Sentiment
from lightning_tfm.errors import UserError
from lightning_tfm.tokenization import PAD, WordTokenizer, tokenizer_from_dict, train_word_tokenizer
from support.corpora import SCRIPTS, TEXT, reviews, write_table
from support.data import set_up


def test_words_are_lowercased_and_split_from_punctuation():
    tokenizer = train_word_tokenizer(["It's great<br />GREAT film!", "great"], vocab_size=7)
    assert tokenizer.split("It's great<br />GREAT!") == ["it's", "great", "great", "!"]
    assert tokenizer.vocab_size == 7
    assert tokenizer.words[0] == "great"
    again = tokenizer_from_dict(tokenizer.to_dict())
    assert type(again) is WordTokenizer
    assert again.encode("Great nonsense") == tokenizer.encode("great NONSENSE") == [4, 3]


def test_ngrams_represent_unseen_words():
    tokenizer = tokenizer_from_dict(train_word_tokenizer(["a watch", "a fuss"], 7, num_ngrams=10_000).to_dict())
    (a, watch, unwatchable), width = tokenizer.encode("a watch unwatchable"), tokenizer.ids_per_token
    assert tokenizer.vocab_size == 7 + 10_000
    assert {len(a), len(watch), len(unwatchable)} == {width}
    assert (a[0], watch[0], unwatchable[0]) == (4, 6, 3), "the id of the word comes first"
    ngrams = [{id for id in word[1:] if id != PAD} for word in (a, watch, unwatchable)]
    assert all(7 <= id < tokenizer.vocab_size for word in ngrams for id in word)
    # <watch> has 3 + 4 + 5 n-grams; those within the word occur in both words: watch watc atch wat atc tch
    assert [len(word) for word in ngrams[:2]] == [1, 12]
    assert len(ngrams[1] & ngrams[2]) == 6
    watched = tokenizer.encode("watched")[0]
    assert watch[1] == watched[1] != unwatchable[1], "the first n-gram is the beginning of the word"
    assert len(tokenizer.encode("a" * 40)[0]) == width
    for name, number, message in (
        ("subword", 100, "num_ngrams must be 0 "),
        ("word", -1, "num_ngrams .* 0, but is -1"),
    ):
        with pytest.raises(UserError, match=message):
            Sentiment(["x.tsv"], tokenizer=name, num_ngrams=number)


def test_batches_of_ngrams_equal_the_output_of_the_tokenizer(tmp_path):
    table = write_table(tmp_path / "reviews.tsv", reviews(200))
    data = set_up(Sentiment([table], num_ngrams=50, max_length=16, batch_size=20))
    examples = data.datasets["train"]
    rows = torch.tensor([3, 7, 5])
    text = examples[rows].text  # (B, S, G)
    for row, ids in zip(rows.tolist(), text.tolist(), strict=True):
        expected = data.tokenizer.encode(examples.pairs[row].source)
        assert [tuple(token) for token in ids[: len(expected)]] == expected
        assert not any(map(any, ids[len(expected) :]))
    assert examples[rows].tokens == examples.lengths[rows].sum()


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_words_keep_their_combining_marks(text):
    for form in ("NFC", "NFD"):
        normal = unicodedata.normalize(form, text)
        words = normal.lower().split()
        assert WordTokenizer(()).split(f"({normal}) {normal}!") == ["(", *words, ")", *words, "!"]


def test_every_combining_mark_extends_a_word():
    split = WordTokenizer(()).split
    marks = [chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)).startswith("M")]
    assert len(marks) > 2_000
    assert [mark for mark in marks if len(split(f"a{mark}b")) > 1] == []


def test_texts_without_combining_marks_are_split_into_the_same_words():
    """Compare with a pattern that does not know combining marks."""
    letters = "".join(map(chr, range(0x300))).replace("\u0130", "")  # its lower case is an i and a combining mark
    for text in (letters, letters[::-1], " ".join(letters), TEXT, "it's 'tis '' - rock 'n' roll<br />x_1\u00ad\u00bd"):
        assert WordTokenizer(()).split(text) == re.findall(r"[\w']+|[^\w\s]", text.replace("<br />", " ").lower())
