"""Composed and decomposed characters are the same data."""

from __future__ import annotations

import random
import unicodedata

import pytest

from datamodules import ParallelText, Sentiment, Text, Tsv
from support.corpora import UNICODE, reviews, sentiment, texts_in, write_label_folders, write_lines
from support.data import set_up

FORMS = {
    "characters": lambda p: ParallelText([p], [p], tokenizer="character", batch_size=2),
    "words": lambda p: ParallelText([p], [p], tokenizer="word", batch_size=2),
    "subwords": lambda p: ParallelText([p], [p], tokenizer="subword", batch_size=2),
    "table": lambda p: Tsv(p, p, target_separator=" ", batch_size=2),
    "text": lambda p: Text(p, max_length=4, batch_size=2),
    "labels": lambda p: Sentiment([p], num_ngrams=50, batch_size=2),
}


@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
def test_nfc_and_nfd_files_give_the_same_ids(make, tmp_path):
    draw = random.Random(0)
    lines = ["\t".join((draw.choice(UNICODE[:2]), " ".join(draw.choices(UNICODE, k=4)))) for _ in range(200)]
    nfc, nfd = (
        set_up(make(write_lines(tmp_path / f"{form}.tsv", [unicodedata.normalize(form, line) for line in lines])))
        for form in ("NFC", "NFD")
    )
    assert (tmp_path / "NFC.tsv").read_bytes() != (tmp_path / "NFD.tsv").read_bytes()
    assert nfc.tokenizer.to_dict() == nfd.tokenizer.to_dict()
    assert nfc.fingerprint == nfd.fingerprint
    if not isinstance(nfc, Sentiment):  # which does not decode words
        for word in UNICODE:
            word = unicodedata.normalize("NFC", word)
            assert nfc.tokenizer.decode(nfc.tokenizer.encode_target(word)) == word


def test_nfc_and_nfd_labels_are_the_same_label(tmp_path):
    """macOS normalizes file names to NFD, other systems do not."""
    label = UNICODE[0]
    texts = [(label if old == "pos" else old, text) for old, text in reviews()]
    for form in ("NFC", "NFD"):
        write_label_folders(tmp_path / form, [(unicodedata.normalize(form, label), text) for label, text in texts])
        for name in ("neg", label):
            path = tmp_path / f"{form}.{unicodedata.normalize(form, name)}"
            write_lines(path, [text for label, text in texts if label == name])
        for names in ([form], [f"{form}.neg", unicodedata.normalize(form, f"{form}.{label}")]):
            data = sentiment([str(tmp_path / name) for name in names])
            assert texts_in(data) == sorted(texts)
