"""Subwords from a tokenizer file."""

from __future__ import annotations

from pathlib import Path

import tokenizers

from datamodules import Text
from lightning_tfm.tokenization import read_tokenizer, train_tokenizer
from support.corpora import TEXT, text_file


def test_a_tokenizer_file_defines_the_subwords_only(tmp_path):
    """Truncation, padding and special tokens are for the inputs of a model; texts are read in full."""
    subwords = train_tokenizer([TEXT], "subword", 300)
    others = tokenizers.Tokenizer.from_str(subwords.to_dict()["model"])
    others.add_special_tokens(["<s>"])
    others.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 297)])
    others.enable_truncation(5)
    others.enable_padding(length=2000)
    assert others.encode(TEXT).ids[0] == 297
    assert len(others.encode(TEXT).ids) == 2000
    for model in (subwords.to_dict()["model"], others.to_str()):
        data = Text(text_file(tmp_path), tokenizer_file=text_file(tmp_path, model, "tokenizer.json"))
        assert data.tokenizer.encode(TEXT) == subwords.encode(TEXT)
        assert data.tokenizer.encode_all([TEXT]) == [subwords.encode(TEXT)]
        assert data.tokenizer.split(TEXT) == subwords.split(TEXT)


def test_a_tokenizer_file_may_have_gaps_between_its_ids(tmp_path):
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 1, "c": 7}, merges=[]))
    tokenizer = read_tokenizer(Path(text_file(tmp_path, model.to_str(), "tokenizer.json")))
    assert tokenizer.encode("abc") == [3, 4, 10]
    assert tokenizer.vocab_size == 11
    assert "b" in tokenizer.decode([4, 8])
