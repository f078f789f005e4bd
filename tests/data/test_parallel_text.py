"""Sentence pairs from files."""

from __future__ import annotations

import hashlib
import re
from collections import Counter

import pytest
import torch

from datamodules import ParallelText
from datamodules.parallel_text import read_pairs
from lightning_tfm.data import text_files
from lightning_tfm.errors import UserError
from lightning_tfm.system import memory
from lightning_tfm.tokenization import EOS, NUM_SPECIAL, UNKNOWN, tokenizer_from_dict
from support.corpora import PARALLEL, pair_files, sentences, write_lines, write_table
from support.data import set_up


@pytest.fixture
def corpus(tmp_path):
    """Write 300 and 40 sentence pairs as two files and as a TSV, plain, compressed and in another encoding."""
    for split, number in (("train", 300), ("val", 40)):
        pairs = sentences(number, seed=len(split))
        for language, texts in zip(("de", "en"), zip(*pairs, strict=True), strict=True):
            write_lines(tmp_path / f"{split}.{language}", texts)
            write_lines(tmp_path / f"{split}.{language}.gz", texts)
        write_table(tmp_path / f"{split}.tsv", pairs)
        write_lines(tmp_path / f"{split}.latin1.tsv", map("\t".join, pairs), "latin-1")
    return tmp_path


def parallel(corpus, endings=("de", "en"), **settings):
    files = {split: [str(corpus / f"{split}.{ending}") for ending in endings] for split in ("train", "val")}
    return ParallelText(**{"vocab_size": 300, "batch_size": 16} | files | settings)


@pytest.mark.parametrize("tokens", ["character", "word", "subword"])
@pytest.mark.parametrize(
    ("endings", "encoding"),
    [(("de", "en"), "utf-8"), (("de.gz", "en.gz"), "utf-8"), (("tsv",), "utf-8"), (("latin1.tsv",), "latin-1")],
)
def test_parallel_text_equals_the_content_of_its_files(endings, encoding, tokens, corpus):
    data = set_up(parallel(corpus, endings, encoding=encoding, tokenizer=tokens))
    assert [pair[:2] for pair in data.datasets["train"].pairs] == sentences(300, seed=5)
    assert [pair[:2] for pair in data.datasets["val"].pairs] == sentences(40, seed=3)
    again = tokenizer_from_dict(data.tokenizer.to_dict())
    for pair in data.datasets["val"].pairs:
        for text in pair[:2]:
            ids = data.tokenizer.encode(text)
            assert min(ids) >= NUM_SPECIAL
            assert data.tokenizer.decode([*ids, EOS]) == text
            assert again.encode(text) == ids
            assert len(data.tokenizer.split(text)) == len(ids)
    assert data.vocab_size == data.tokenizer.vocab_size <= 300


def test_validation_data_are_tested_without_test_files(corpus):
    data = set_up(parallel(corpus))
    assert data.test_sets == ("val",)
    assert set(data.fingerprint) == {"train", "val"}
    data = set_up(parallel(corpus, test=[str(corpus / "train.de"), str(corpus / "train.en")]))
    assert data.fingerprint["test"] == data.fingerprint["train"]


def test_the_vocabulary_is_built_from_training_data_only(corpus):
    for language in ("de", "en"):
        write_lines(corpus / f"val.{language}", ["Zebra"])
    for tokens in ("character", "word"):
        data = parallel(corpus, tokenizer=tokens)
        assert UNKNOWN in data.tokenizer.decode(data.tokenizer.encode("Zebra"))
    data = parallel(corpus, tokenizer="subword")
    text = "Zebra über \u4e2d"
    assert data.tokenizer.decode(data.tokenizer.encode(text)) == text, "every text can be encoded by bytes"
    few = parallel(corpus, tokenizer="word", vocab_size=8)
    assert few.vocab_size == 8
    counts = Counter(word for pair in sentences(300, seed=5) for text in pair for word in text.split())
    kept = few.tokenizer.symbols[1:]
    assert min(counts[word] for word in kept) >= max(counts[word] for word in counts if word not in kept)


def test_overlong_pairs_are_refused_or_dropped_and_counted(corpus, capsys):
    with pytest.raises(UserError, match=r"max_source_length .* 10 for train, but is 8; .* set drop_too_long"):
        parallel(corpus, tokenizer="word", max_source_length=8).setup("fit")
    short = [write_table(corpus / "short.tsv", sentences(40, longest=5))]
    files = {"val": short, "test": short}
    data = set_up(parallel(corpus, tokenizer="word", max_source_length=8, drop_too_long=True, **files))
    kept = [pair for pair in sentences(300, seed=5) if len(pair[0].split()) < 8]
    assert [pair[:2] for pair in data.datasets["train"].pairs] == kept
    assert f"{300 - len(kept)} of 300 training pairs are too long" in capsys.readouterr().err.splitlines()[0]


def test_batches_use_their_token_budget(corpus):
    data = set_up(parallel(corpus, tokenizer="word", max_source_length=16, max_target_length=16, batch_tokens=64))
    dataset = data.datasets["train"]
    stream = data.training_batches(data.division)
    rows = torch.cat(list(stream.batches(0)))
    assert sorted(rows.tolist()) == list(range(300))
    sizes = []
    for batch_rows in stream.batches(0):
        batch = dataset[batch_rows]
        tokens = max(batch.source.numel(), batch.target_in.numel())
        assert tokens <= 64
        sizes.append(tokens)
    assert sum(sizes) / len(sizes) > 0.75 * 64
    assert len({len(batch_rows) for batch_rows in stream.batches(0)}) > 3


def test_pairs_that_lack_a_text_are_skipped_in_training(tmp_path, capsys):
    left, right = pair_files(tmp_path, ["a", "", "b", "", "", "c"], ["d", "", "e", "f", "", "g", ""])
    texts = [["a", "b", "c"], ["d", "e", "g"]]
    assert [*read_pairs([left, right], PARALLEL, "train")] == [texts]
    message = "4 pairs of .* without a source or a target are skipped, the first in line 2\n"
    assert re.search(message, capsys.readouterr().err)
    with pytest.raises(UserError, match=r"line 4 of '.*left' is empty; delete the pair"):
        [*read_pairs([left, right], PARALLEL, "val")]
    left, right = pair_files(tmp_path, ["a", "", "b", "c"], ["d", "", "e", "g", "", ""])
    assert [*read_pairs([left, right], PARALLEL, "val")] == [texts]
    assert "3 pairs of " in capsys.readouterr().err


ROWS = [(f"source {number}", f"target {number}") for number in range(7)]


def write_rows(folder, name, rows):
    """Write a table, or two files NAME.0 and NAME.1, and return their paths."""
    if name.endswith(".tsv"):
        return [write_table(folder / name, rows)]
    if name.endswith(".csv"):
        quoted = (",".join(f'"{field}"'.replace(" ", "\n") for field in row) for row in rows)
        return [write_lines(folder / name, ["source,target", *quoted])]
    return [write_lines(folder / f"{name}.{side}", texts) for side, texts in enumerate(zip(*rows, strict=True))]


@pytest.mark.parametrize("name", ["table.tsv", "table.csv", "files"])
@pytest.mark.parametrize("tokenizer", ["character", "word"])
@pytest.mark.parametrize("part", [1, 3, memory.PART])
def test_pairs_do_not_depend_on_the_number_of_rows_read_at_a_time(part, tokenizer, name, monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "PART", part)
    monkeypatch.setattr(text_files, "CHARACTERS", part)
    names = write_rows(tmp_path, name, ROWS)
    data = set_up(ParallelText(names, names, tokenizer=tokenizer))
    assert [pair[:2] for pair in data.datasets["train"].pairs] == ROWS
    lines = "".join(f"{source}\t{target}\n" for source, target in ROWS)
    assert data.fingerprint["train"] == hashlib.sha256(lines.encode()).hexdigest()[:16]
    texts = [text for row in ROWS for text in row]
    counts = Counter("".join(texts) if tokenizer == "character" else " ".join(texts).split())
    assert data.tokenizer.symbols == (UNKNOWN, *sorted(counts, key=lambda symbol: (-counts[symbol], symbol)))
    broken = write_rows(tmp_path, f"broken.{name}", [*ROWS[:5], ("source 5", ""), *ROWS[5:]])
    number = 17 if name.endswith(".csv") else 6  # after a header and five rows of three lines
    with pytest.raises(UserError, match=f"line {number} of .*broken.* is empty"):
        ParallelText(names, broken, tokenizer=tokenizer)
