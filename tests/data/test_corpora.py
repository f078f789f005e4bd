"""Data modules that read files: parallel text, tables, plain text and labeled texts."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import itertools
import random
import re
import sys
import tarfile
import unicodedata
from collections import Counter
from pathlib import Path

import pytest
import tokenizers
import torch
from torch.nn import functional as F

from datamodules import ParallelText, Sentiment, Text, Tsv
from datamodules.parallel_text import read_pairs
from datamodules.sentiment import read_labeled
from lightning_tfm.data import (
    BatchDivision,
    LengthGroupedSampler,
    MaxTokensSampler,
    Pair,
    TableReader,
    WindowSampler,
    stable_hash,
    text_files,
)
from lightning_tfm.data.text_files import read_lines, read_text, split_lines
from lightning_tfm.errors import UserError
from lightning_tfm.system import memory
from lightning_tfm.tokenization import (
    EOS,
    NUM_SPECIAL,
    PAD,
    UNKNOWN,
    WordTokenizer,
    read_tokenizer,
    tokenizer_from_dict,
    train_tokenizer,
    train_word_tokenizer,
)
from support.corpora import TEXT, WORDS, reviews, sentences, write_imdb, write_label_folders, write_lines

LABEL_AND_TEXT = TableReader({"label": None, "text": None})
PARALLEL = TableReader({"source": None, "target": None})


@pytest.fixture
def corpus(tmp_path):
    """Write 300 and 40 sentence pairs as two files and as a TSV, plain, compressed and in another encoding."""
    for split, number in (("train", 300), ("val", 40)):
        pairs = sentences(number, seed=len(split))
        german, english = zip(*pairs, strict=True)
        write_lines(tmp_path / f"{split}.de", german)
        write_lines(tmp_path / f"{split}.en", english)
        write_lines(tmp_path / f"{split}.de.gz", german)
        write_lines(tmp_path / f"{split}.en.gz", english)
        write_lines(tmp_path / f"{split}.tsv", map("\t".join, pairs))
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
    data = parallel(corpus, endings, encoding=encoding, tokenizer=tokens)
    data.setup("fit")
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
    ours, other = parallel(corpus), parallel(corpus, test=[str(corpus / "train.de"), str(corpus / "train.en")])
    for data in (ours, other):
        data.setup("fit")
    assert ours.test_sets == ("val",)
    assert set(ours.fingerprint) == {"train", "val"}
    assert other.fingerprint["test"] == other.fingerprint["train"]


def test_the_vocabulary_is_built_from_training_data_only(corpus):
    write_lines(corpus / "val.de", ["Zebra", *(german for german, _ in sentences(39))])
    write_lines(corpus / "val.en", ["Zebra", *(english for _, english in sentences(39))])
    for tokens in ("character", "word"):
        data = parallel(corpus, tokenizer=tokens)
        assert UNKNOWN in data.tokenizer.decode(data.tokenizer.encode("Zebra"))
    data = parallel(corpus, tokenizer="subword")
    assert data.tokenizer.decode(data.tokenizer.encode("Zebra über \u4e2d")) == "Zebra über \u4e2d", (
        "every text can be encoded by bytes"
    )
    few = parallel(corpus, tokenizer="word", vocab_size=8)
    assert few.vocab_size == 8
    counts = [sum(text.split().count(symbol) for pair in sentences(300, seed=5) for text in pair) for symbol in WORDS]
    kept = set(few.tokenizer.symbols[1:]) & set(WORDS)
    assert all(
        count <= min(counts[list(WORDS).index(word)] for word in kept)
        for word, count in zip(WORDS, counts, strict=True)
        if word not in kept
    )


def test_overlong_pairs_are_refused_or_dropped_and_counted(corpus, capsys):
    with pytest.raises(
        UserError,
        match="max_source_length must be at least 10 for train, but is 8; raise it, or set drop_too_long; the longest",
    ):
        parallel(corpus, tokenizer="word", max_source_length=8).setup("fit")
    write_lines(corpus / "val.de", [german for german, _ in sentences(40, longest=5)])
    write_lines(corpus / "val.en", [english for _, english in sentences(40, longest=5)])
    files = {"test": [str(corpus / "val.de"), str(corpus / "val.en")]}
    data = parallel(corpus, tokenizer="word", max_source_length=8, drop_too_long=True, **files)
    data.setup("fit")
    kept = [pair for pair in sentences(300, seed=5) if len(pair[0].split()) < 8]
    assert [pair[:2] for pair in data.datasets["train"].pairs] == kept
    first, *_ = capsys.readouterr().err.splitlines()
    assert first == f"lightning-tfm: {300 - len(kept)} of 300 training pairs are too long and were dropped"


def test_batches_use_their_token_budget(corpus):
    data = parallel(corpus, tokenizer="word", max_source_length=16, max_target_length=16, batch_tokens=64)
    data.setup("fit")
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


STREAMS = {
    "rows": lambda seed=0, **share: LengthGroupedSampler(torch.arange(100) % 7 + 1, 16, seed, **share),
    "tokens": lambda seed=0, **share: MaxTokensSampler(torch.arange(100) % 7 + 1, 40, seed, **share),
    "windows": lambda seed=0, **share: WindowSampler(2000, 16, 8, seed, **share),
}


def test_token_batches_are_full_and_the_last_two_balanced():
    sampler = MaxTokensSampler(torch.full((24,), 5), 50, seed=2)
    assert sampler.sizes == [10, 7, 7]
    assert sorted(len(rows) for rows in sampler.batches(0)) == [7, 7, 10]
    assert sampler.fewest_rows == 7
    assert MaxTokensSampler(torch.full((12,), 5), 50, seed=2).sizes == [6, 6]
    assert MaxTokensSampler(torch.full((7,), 5), 50, seed=2).sizes == [7]


@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)
def test_the_settings_of_a_stream_include_its_seed(make):
    assert make(seed=5).settings["seed_everything"] == 5
    assert make(seed=5).settings == make(seed=5).settings != make(seed=6).settings


@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)
def test_streams_do_not_depend_on_the_start_or_the_world_size(make):
    whole = [rows.tolist() for rows in itertools.islice(make(), 50)]
    assert whole == [rows.tolist() for rows in itertools.islice(make(), 50)]
    assert whole != [rows.tolist() for rows in itertools.islice(make(seed=1), 50)]
    for start in (1, 7, 33):
        stream = make()
        stream.start = start
        assert whole[start:] == [rows.tolist() for rows in itertools.islice(stream, 50 - start)]
        assert make().samples_seen(start) == sum(map(len, whole[:start]))
    for number in (2, 3):
        streams = [itertools.islice(make(division=BatchDivision(rank, number, number)), 50) for rank in range(number)]
        for batch, *shares in zip(whole, *streams, strict=True):
            assert sorted(batch) == sorted(row for share in shares for row in share.tolist())
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
            assert all(map(len, shares))
    passes = make()
    first, second = ([rows.tolist() for rows in passes.batches(number)] for number in (0, 1))
    assert first != second


# Tables


def test_targets_are_split_at_their_separator(tmp_path):
    train = write_lines(tmp_path / "train.tsv", ["cat\tK AE T", "hat\tHH AE T", "tee\tT IY"])
    val = write_lines(tmp_path / "val.tsv", ["tea\tT IY", "ox\tAA K S"])
    data = Tsv(train, val, target_separator=" ", batch_size=2)
    data.setup("fit")
    tokenizer = tokenizer_from_dict(data.tokenizer.to_dict())
    assert tokenizer.split("cat") == ["c", "a", "t"]
    assert tokenizer.split_target("K AE T") == ["K", "AE", "T"]
    assert tokenizer.decode(tokenizer.encode_target("HH AE T")) == "HH AE T"
    assert len(tokenizer.encode("cat")) == len(tokenizer.encode_target("K AE T")) == 3
    assert tokenizer.symbols[0] == UNKNOWN
    assert set(tokenizer.symbols[1:]) == set("cathe") | {"K", "AE", "T", "HH", "IY"}
    unknown = tokenizer.encode("ox")
    assert unknown == [NUM_SPECIAL, NUM_SPECIAL]
    batch = data.datasets["train"][torch.tensor([0, 2])]
    assert batch.target_out.tolist()[1][2:] == [EOS, PAD]


def test_targets_are_normalized_to_decodable_text(tmp_path):
    """Whitespace between symbols becomes one space, as in predictions, which could not match otherwise."""
    table = write_lines(tmp_path / "table.tsv", ["cat\tK  AE \u00a0T", "hat\tHH AE T"])
    words = write_lines(tmp_path / "words.tsv", ["ein  Hund\ta  dog", "der Hund\tthe dog"])
    for data in (
        Tsv(table, table, target_separator=" ", batch_size=2),
        ParallelText([words], [words], tokenizer="word", batch_size=2),
    ):
        for pair in data.pairs("train"):
            assert data.tokenizer.decode(data.tokenizer.encode_target(pair.target)) == pair.target


def test_features_are_read_from_their_own_column(tmp_path):
    train = write_lines(
        tmp_path / "train.tsv", ["run\tran\tV;PST", "see\tseen\tV;V.PTCP;PST", "V\tV\tN", "go\twent\tV;; PST"]
    )
    data = Tsv(train, train, features=3, batch_size=2)
    data.setup("fit")
    pairs = data.datasets["train"].pairs
    assert pairs[0][:2] == ("run\tV;PST", "ran")
    assert data.tokenizer.split("run\tV;PST") == ["r", "u", "n", "[V]", "[PST]"]
    assert data.tokenizer.split("run") == ["r", "u", "n"]
    assert data.tokenizer.split(pairs[3].source) == ["g", "o", "[V]", "[PST]"]
    assert {symbol for symbol in data.tokenizer.symbols if len(symbol) > 1} == {"[V]", "[PST]", "[V.PTCP]", "[N]"}
    assert (
        tokenizer_from_dict(data.tokenizer.to_dict()).encode("run\tV;PST")
        == data.datasets["train"].sources[torch.tensor([0])][0, :-1].tolist()
    )
    swapped = Tsv(train, train, source=2, target=1, batch_size=2)
    assert swapped.pairs("train")[0][:2] == ("ran", "run")


# Texts


def text_file(tmp_path, content=TEXT, name="text.txt"):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    return str(path)


@pytest.mark.parametrize("tokens", ["character", "subword"])
def test_validation_scores_every_token_once(tokens, tmp_path):
    data = Text(text_file(tmp_path), tokenizer=tokens, vocab_size=300, max_length=16, batch_size=4, eval_batch_size=3)
    data.setup("fit")
    assert data.texts["train"] + data.texts["val"] == TEXT
    assert len(data.texts["val"]) == pytest.approx(300, abs=1)
    ids = data.tokenizer.encode(data.texts["val"])
    seen = torch.cat([batch.target_out.flatten() for batch in data.val_dataloader()])
    assert sorted(seen[seen != PAD].tolist()) == sorted(ids[1:])
    for batch in data.val_dataloader():
        assert batch.source.shape == (batch.target_in.size(0), 0)
        assert batch.target_in[:, 1:].equal(batch.target_out[:, :-1].where(batch.target_in[:, 1:] != PAD, PAD))


def test_training_windows_are_complete_and_start_anywhere(tmp_path):
    data = Text(text_file(tmp_path), max_length=16, batch_size=4)
    data.setup("fit")
    ids = data.datasets["train"].ids
    begins = set()
    for rows in itertools.islice(data.training_batches(data.division), 500):
        batch = data.datasets["train"][rows]
        for begin, target_in, target_out in zip(rows.tolist(), batch.target_in, batch.target_out, strict=True):
            assert target_in.equal(ids[begin : begin + 16])
            assert target_out.equal(ids[begin + 1 : begin + 17])
            begins.add(begin % 16)
    assert len(begins) > 5, "each epoch starts at another offset"


@pytest.mark.parametrize("val_fraction", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("test_fraction", [0.0, 0.05, 0.1, 0.3])
def test_validation_split_is_the_end_of_the_text(val_fraction, test_fraction, tmp_path):
    texts = Text(text_file(tmp_path), val_fraction=val_fraction, test_fraction=test_fraction).texts
    assert texts["val"] == TEXT[round(len(TEXT) * (1 - val_fraction)) :]
    if test_fraction:
        assert texts["train"] + texts["test"] + texts["val"] == TEXT
        assert len(texts["test"]) == pytest.approx(test_fraction * len(TEXT), abs=1)
    else:
        assert texts["train"] + texts["val"] == TEXT
        assert "test" not in texts


def test_the_files_of_a_folder_are_joined_into_one_text(tmp_path):
    text_file(tmp_path, "first\n" * 40, "books/a.txt")
    text_file(tmp_path, "second\n" * 40, "books/b.txt")
    (tmp_path / "books/.DS_Store").write_bytes(b"\0")
    data = Text(str(tmp_path / "books"), max_length=8, batch_size=2, test_fraction=0.1)
    splits = (data.texts[split] for split in ("train", "test", "val"))
    assert "".join(splits) == "first\n" * 40 + "\n" + "second\n" * 40
    data.setup("fit")
    assert set(data.fingerprint) == {"train", "val", "test"}
    assert data.fingerprint["test"] != data.fingerprint["val"]


def test_language_model_loss_covers_the_whole_validation_split(tmp_path):
    """Compare the loss with the sum over single windows; the loss per character divides by the characters per token."""
    from lightning import Trainer

    from lightning_tfm.networks import GPT
    from lightning_tfm.tasks import LanguageModel

    data = Text(
        text_file(tmp_path), tokenizer="subword", vocab_size=300, max_length=16, batch_size=4, eval_batch_size=7
    )
    module = LanguageModel(GPT(data.vocab_size, 16, 2, 1, max_length=16), data.tokenizer)
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    (logged,) = trainer.validate(module, data, verbose=False)
    ids = torch.tensor(data.tokenizer.encode(data.texts["val"]))
    total = 0.0
    for begin in range(0, len(ids) - 1, 16):
        window = ids[begin : begin + 17]
        with torch.no_grad():
            logits = module.network(window[None, :0], window[None, :-1])
        total += F.cross_entropy(logits[0], window[1:], reduction="sum").item()
    loss = total / (len(ids) - 1)
    assert logged["val/loss"] == pytest.approx(loss, rel=1e-5)
    assert logged["val/perplexity"] == pytest.approx(torch.tensor(loss).exp().item(), rel=1e-4)
    assert logged["val/loss_per_character"] == pytest.approx(loss * len(ids) / len(data.texts["val"]), rel=1e-4)


# Labeled texts


def write_archive(path, texts, split="", others=()):
    with tarfile.open(path, "w:gz") as tar:
        for number, (label, text) in enumerate(texts):
            content = text.encode()
            member = tarfile.TarInfo(f"aclImdb/{split}/{label}/{number}_7.txt")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for member in others:
            tar.addfile(member, io.BytesIO(b"bad") if member.isreg() else None)
    return str(path)


def damaged(archive):
    """Overwrite the header of a file in the middle of an archive, and compress it again."""
    path = Path(archive)
    content = bytearray(gzip.decompress(path.read_bytes()))
    begin = content.index(b"aclImdb", len(content) // 2)
    content[begin : begin + 400] = bytes(range(200)) * 2
    path.write_bytes(gzip.compress(bytes(content)))
    return archive


def sentiment(train, **settings):
    return Sentiment(**{"train": train, "val_fraction": 0.2, "test_fraction": 0.2, "batch_size": 8} | settings)


def texts_in(data, splits=("train", "val", "test")):
    return sorted((pair.target, pair.source) for split in splits for pair in data.pairs(split))


def test_labeled_texts_are_equal_from_folders_archives_tables_and_files(tmp_path):
    texts = reviews()
    write_label_folders(tmp_path / "folder", texts)
    write_archive(tmp_path / "archive.tar.gz", texts)
    write_lines(tmp_path / "table.tsv", map("\t".join, texts))
    for label in ("neg", "pos"):
        write_lines(tmp_path / f"texts.{label}", [text for other, text in texts if other == label])
    names = [["folder"], ["archive.tar.gz"], ["table.tsv"], ["texts.pos", "texts.neg"]]
    fingerprints = set()
    for some in names:
        data = sentiment([str(tmp_path / name) for name in some])
        assert data.labels == ["neg", "pos"]
        assert texts_in(data) == sorted(texts), some
        data.setup("fit")
        fingerprints.add(tuple(sorted(texts_in(data, ["test"]))))
    assert len(fingerprints) == 1, "the hash of a text determines its split"


def test_files_beside_label_folders_are_ignored(tmp_path):
    write_label_folders(tmp_path / "folder/reviews", reviews())
    (tmp_path / "folder/reviews/README.txt").write_text("who made this")
    with tarfile.open(tmp_path / "archive.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "folder/reviews", "reviews")
    for name in ("folder", "folder/reviews", "archive.tar.gz"):
        assert texts_in(sentiment([str(tmp_path / name)])) == sorted(reviews()), name


def in_folders(names, number=40):
    """Return the names of `number` files in each of the folders."""
    return [f"{name}/{n}.txt" for name in names for n in range(number)]


LAYOUTS = {
    "labels named as splits": (
        in_folders(["neg", "test", "train", "unsup", "val"]),
        {"neg", "test", "train", "unsup", "val"},
        {},
    ),
    "labels in a folder": (in_folders(["reviews/test", "reviews/pos"]), {"pos", "test"}, {}),
    "labels named as splits, in splits": (in_folders(["train/test", "train/val", "test/val"]), {"test", "val"}, {}),
    "IMDB": (
        [
            *("README", "imdb.vocab", "train/urls_pos.txt", "train/labeledBow.feat"),
            *in_folders(["train/neg", "train/pos", "train/unsup", "test/neg", "test/pos"]),
        ],
        {"neg", "pos"},
        {"they have no label": 40, "they are not in a label's folder": 4},
    ),
    "files beside labels": (
        ["README", "reviews/all.csv", *in_folders(["reviews/a", "reviews/b"])],
        {"a", "b"},
        {"they are not in a label's folder": 2},
    ),
    "texts without a label beside labels": (
        in_folders(["a", "b", "train/unsup"]),
        {"a", "b"},
        {"they have no label": 40},
    ),
}
REFUSED_LAYOUTS = {
    "splits and labels side by side": (
        in_folders(["train/neg", "train/pos", "neg"]),
        "inside train, val, test, but has some in '(.*/)?neg'; rename",
    ),
    "a split without labels": (
        in_folders(["train/neg", "train/pos", "test"]),
        "inside train, val, test, but has some in '(.*/)?test'; rename",
    ),
    "splits without labels": (
        in_folders(["train", "test"]),
        "must hold folders named by their labels, .* but has '(.*/)?test' and '(.*/)?train'",
    ),
    "no training split": (
        in_folders(["test/neg", "test/pos", "val/neg"]),
        "must have a folder train, but has test, val alone",
    ),
    "folders of a label": (
        in_folders(["neg", "pos", "pos/old"]),
        "side by side, but has '(.*/)?neg' and '(.*/)?pos/old'; move",
    ),
}


def lay_out(form, names, tmp_path):
    """Write a text into each file; return the folder, or an archive of it with or without a top-level folder."""
    for name in names:
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}")
    if form == "folder":
        return tmp_path / "data"
    with tarfile.open(tmp_path / "data.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "data", form)
    return tmp_path / "data.tar.gz"


@pytest.mark.parametrize("form", ["folder", ".", "top"])
@pytest.mark.parametrize(("names", "labels", "left_out"), LAYOUTS.values(), ids=LAYOUTS)
def test_every_file_is_read_or_counted(names, labels, left_out, form, tmp_path, capsys):
    data = sentiment([str(lay_out(form, names, tmp_path))])
    reasons = re.findall(r"(\d+) files of .* are left out because (.*), such as ", capsys.readouterr().err)
    assert {reason: int(number) for number, reason in reasons} == left_out
    assert {*data.labels} == labels
    read = [text.removeprefix("text of ") for _, text in texts_in(data)]
    assert len({*read}) == len(read) == len(names) - sum(left_out.values())
    assert all(
        Path(name).parent.name == label
        for label, name in zip((label for label, _ in texts_in(data)), read, strict=True)
    )


@pytest.mark.parametrize("form", ["folder", ".", "top"])
@pytest.mark.parametrize(("names", "message"), REFUSED_LAYOUTS.values(), ids=REFUSED_LAYOUTS)
def test_ambiguous_layouts_are_refused(names, message, form, tmp_path):
    with pytest.raises(UserError, match=message) as error:
        sentiment([str(lay_out(form, names, tmp_path))])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("form", ["folder", ".", "top"])
def test_texts_of_other_splits_are_counted(form, tmp_path, capsys):
    table = [write_lines(tmp_path / "table.tsv", map("\t".join, reviews()))]
    folders = [f"{split}/{label}" for split in ("test", "train", "val") for label in ("neg", "pos")]
    data = str(lay_out(form, in_folders(folders), tmp_path))
    assert len(sentiment(table, test=[data], test_fraction=0).pairs("test")) == 80
    assert "160 files of " in (err := capsys.readouterr().err)
    assert "are left out because they are not for test, such as " in err
    assert len(sentiment([data], test=table).pairs("train")) == 80
    assert "80 texts in test/ of train are left out because test names other data" in capsys.readouterr().err


def test_a_training_folder_may_contain_unlabeled_texts(tmp_path, capsys, monkeypatch):
    """IMDB's folder train holds pos, neg and unsup; its path may be written in several ways."""
    folder, _ = write_imdb(tmp_path, reviews(60), reviews(30, seed=1))
    monkeypatch.chdir(folder / "train")
    for name in (str(folder / "train"), f"{folder}/train/", "."):
        data = sentiment([name], test=[str(folder / "test")], test_fraction=0)
        assert data.labels == ["neg", "pos"]
        assert texts_in(data, ["train", "val"]) == sorted(reviews(60))
        assert "1 files of " in (err := capsys.readouterr().err)
        assert "because they have no label" in err


def test_links_that_are_not_followed_are_counted(tmp_path, capsys):
    """Links to files are read; links to folders and links in archives are not followed."""
    write_label_folders(tmp_path / "folder", reviews())
    (tmp_path / "folder/pos/linked.txt").symlink_to(tmp_path / "folder" / next((tmp_path / "folder/pos").iterdir()))
    (tmp_path / "folder/meh").symlink_to(tmp_path / "folder/neg")
    with tarfile.open(tmp_path / "archive.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "folder", "reviews")
    for name, number in (("folder", 1), ("archive.tar.gz", 2)):
        data = sentiment([str(tmp_path / name)])
        assert data.labels == ["neg", "pos"]
        assert len(texts_in(data)) == len(reviews()) + 2 - number
        assert f"{number} files of " in (err := capsys.readouterr().err)
        assert "because links are not followed, such as " in err


def test_only_the_test_split_of_a_test_archive_is_tested(tmp_path):
    train = [write_lines(tmp_path / "table.tsv", map("\t".join, reviews(200, seed=2)))]
    _, archive = write_imdb(tmp_path, reviews(60), reviews(30, seed=1))
    assert texts_in(sentiment(train, test=[str(archive)]), ["test"]) == sorted(reviews(30, seed=1))


def test_splits_are_disjoint_for_any_seed(tmp_path):
    train = [write_lines(tmp_path / "table.tsv", map("\t".join, reviews(400)))]
    data = [sentiment(train, seed=seed) for seed in (0, 1)]
    assert texts_in(data[0], ["test"]) == texts_in(data[1], ["test"])
    splits = [{pair.source for pair in data[0].pairs(split)} for split in ("train", "val", "test")]
    assert all(not ours & theirs for ours, theirs in itertools.combinations(splits, 2))
    assert all(40 < len(data[0].pairs(split)) < 130 for split in ("val", "test"))


NUMBERED = [(("neg", "pos")[n % 2], f"text number {n - n % 10 // 9}") for n in range(2_000)]
"""Labeled texts, one in ten of which occurs twice."""


@pytest.mark.parametrize("val_fraction", [0.05, 0.1, 0.3, 0.45])
@pytest.mark.parametrize("test_fraction", [0.05, 0.1, 0.3, 0.45])
def test_split_fractions_are_relative_to_all_texts(val_fraction, test_fraction, tmp_path):
    train = [write_lines(tmp_path / "table.tsv", map("\t".join, NUMBERED))]
    data, other_seed = (
        sentiment(train, val_fraction=val_fraction, test_fraction=test_fraction, seed=seed) for seed in (0, 1)
    )
    splits = {split: [pair.source for pair in data.pairs(split)] for split in ("train", "val", "test")}
    assert sorted(itertools.chain.from_iterable(splits.values())) == sorted(text for _, text in NUMBERED)
    shares = {"train": 1 - val_fraction - test_fraction, "val": val_fraction, "test": test_fraction}
    for split, share in shares.items():
        assert len(splits[split]) / 2_000 == pytest.approx(share, abs=4 * (share * (1 - share) / 2_000) ** 0.5), split
        assert splits[split] == [pair.source for pair in other_seed.pairs(split)]
    for ours, theirs in itertools.combinations(splits.values(), 2):
        assert not {*ours} & {*theirs}


def test_splits_are_intervals_of_one_hash(tmp_path):
    """An unused interval goes to training and leaves the other split unchanged."""
    train = [write_lines(tmp_path / "table.tsv", map("\t".join, NUMBERED))]
    others = [write_lines(tmp_path / "others.tsv", map("\t".join, reviews(50, seed=1)))]

    def interval(begin, end):
        return sorted(row for row in NUMBERED if begin <= stable_hash(f"test {row[1]}") / 2**64 < end)

    data = sentiment(train, val_fraction=0.2, test_fraction=0.3)
    assert texts_in(data, ["test"]) == interval(0, 0.3)
    assert texts_in(data, ["val"]) == interval(0.3, 0.5)
    assert texts_in(data, ["train"]) == interval(0.5, 1)
    data = sentiment(train, val_fraction=0.2, test_fraction=0.3, val=others, test=others)
    assert texts_in(data, ["train"]) == interval(0.5, 1)
    data = sentiment(train, val_fraction=0.2, test_fraction=0, test=others)
    assert texts_in(data, ["val"]) == interval(0, 0.2)
    write_label_folders(tmp_path / "folder", NUMBERED, "train")
    write_label_folders(tmp_path / "folder", reviews(50, seed=1), "test")
    data = sentiment([str(tmp_path / "folder")], val_fraction=0.2, test_fraction=0.3)
    assert texts_in(data, ["val"]) == interval(0.3, 0.5)
    assert texts_in(data, ["train"]) == sorted(interval(0, 0.3) + interval(0.5, 1))


def test_text_files_may_have_any_name_except_a_hidden_one(tmp_path):
    texts = reviews()
    for number, (label, text) in enumerate(texts):
        path = tmp_path / "folder" / label / f"{number}{('', '.txt', '.TXT', '.md')[number % 4]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in ("pos/.DS_Store", ".git/neg/a"):
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\0")
    with tarfile.open(tmp_path / "archive.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "folder", "./reviews")
    for name in ("folder", "archive.tar.gz"):
        assert texts_in(sentiment([str(tmp_path / name)])) == sorted(texts), name


def test_a_folder_with_only_a_test_split_can_be_tested(tmp_path, capsys):
    train = [write_lines(tmp_path / "table.tsv", map("\t".join, reviews(200)))]
    write_label_folders(tmp_path / "folder", reviews(30, seed=1), "test")
    data = sentiment(train, test=[str(tmp_path / "folder")])
    assert texts_in(data, ["test"]) == sorted(reviews(30, seed=1))
    left_out = 200 - len(texts_in(data, ["train", "val"]))
    assert capsys.readouterr().err == (
        f"lightning-tfm: {left_out} texts of train are held out by test_fraction; set it to 0 to train on them\n"
    )


def test_the_test_split_of_an_archive_is_tested(tmp_path):
    for path in write_imdb(tmp_path, reviews(60), reviews(30, seed=1)):
        data = sentiment([str(path)])
        assert data.labels == ["neg", "pos"]
        assert texts_in(data, ["test"]) == sorted(reviews(30, seed=1))
        assert texts_in(data, ["train", "val"]) == sorted(reviews(60))


def test_separate_test_data_do_not_change_the_training_data(tmp_path):
    train = [write_lines(tmp_path / "table.tsv", map("\t".join, reviews(400)))]
    others = [write_lines(tmp_path / "others.tsv", map("\t".join, reviews(50, seed=1)))]
    before, after = sentiment(train), sentiment(train, test=others)
    assert after.tokenizer.to_dict() == before.tokenizer.to_dict()
    assert [texts_in(after, [split]) for split in ("train", "val")] == [
        texts_in(before, [split]) for split in ("train", "val")
    ]
    assert texts_in(after, ["test"]) == sorted(reviews(50, seed=1))
    assert len(sentiment(train, test=others, test_fraction=0).pairs("train")) > len(before.pairs("train"))


def test_archives_are_not_unpacked_to_disk(tmp_path):
    evil = [tarfile.TarInfo("../../pos/evil.txt"), tarfile.TarInfo("a/pos/link.txt")]
    evil[0].size = 3
    evil[1].type, evil[1].linkname = tarfile.SYMTYPE, "/etc/passwd"
    folder = tmp_path / "inner/folder"
    folder.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    data = sentiment([write_archive(folder / "archive.tar.gz", reviews(), others=evil)])
    assert sorted(path for path in tmp_path.rglob("*") if path.name != "archive.tar.gz") == before
    assert texts_in(data) == sorted(reviews()), "no link is followed, and no path leaves the archive"
    member = tarfile.TarInfo("/tmp/pos/evil.txt")
    member.size = 3
    with pytest.raises(UserError, match="must have the folders of its labels side by side, but has '/tmp/pos' and"):
        sentiment([write_archive(folder / "archive.tar.gz", reviews(), others=[member])])
    assert not Path("/tmp/pos").exists()


def test_truncation_keeps_the_end_and_is_counted(tmp_path, capsys):
    train = [write_lines(tmp_path / "table.tsv", map("\t".join, reviews()))]
    data = sentiment(train, max_length=5, truncate=True)
    data.setup("fit")
    examples = data.datasets["train"]
    long = [index for index, pair in enumerate(examples.pairs) if len(data.tokenizer.encode(pair.source)) > 5]
    assert long
    row = long[0]
    assert examples.texts[torch.tensor([row])][0].tolist() == data.tokenizer.encode(examples.pairs[row].source)[-5:]
    assert f"{len(long)} of {len(examples)} train texts are truncated to their last 5 tokens" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"max_length must be at least \d+ for train, but is 5; or set truncate"):
        sentiment(train, max_length=5).setup("fit")


def test_a_fingerprint_is_that_of_the_texts_not_of_their_ids(tmp_path):
    path = text_file(tmp_path)
    texts = [Text(path, max_length=16, **settings) for settings in ({}, {"tokenizer": "subword", "vocab_size": 300})]
    train = write_lines(tmp_path / "train.tsv", map("\t".join, reviews()))
    labeled = [sentiment([train], max_length=length, truncate=True) for length in (3, 50)]
    for data in (*texts, *labeled):
        data.setup("fit")
    assert texts[0].fingerprint == texts[1].fingerprint
    assert texts[0].tokenizer.fingerprint != texts[1].tokenizer.fingerprint
    assert labeled[0].fingerprint == labeled[1].fingerprint
    with pytest.raises(UserError, match="the number of training tokens must match the checkpoint"):
        labeled[0].train_dataloader().load_state_dict(labeled[1].train_dataloader().state_dict())


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
    long = tokenizer.encode("a" * 40)[0]
    assert len(long) == width
    with pytest.raises(UserError, match="num_ngrams must be 0 with subwords"):
        Sentiment(["x.tsv"], tokenizer="subword", num_ngrams=100)
    with pytest.raises(UserError, match="num_ngrams must be at least 0, but is -1"):
        Sentiment(["x.tsv"], num_ngrams=-1)


def test_batches_of_ngrams_equal_the_output_of_the_tokenizer(tmp_path):
    table = write_lines(tmp_path / "reviews.tsv", map("\t".join, reviews(200)))
    data = Sentiment([table], num_ngrams=50, max_length=16, batch_size=20)
    data.setup("fit")
    examples = data.datasets["train"]
    rows = torch.tensor([3, 7, 5])
    text = examples[rows].text  # (B, S, G)
    for row, ids in zip(rows.tolist(), text.tolist(), strict=True):
        expected = data.tokenizer.encode(examples.pairs[row].source)
        assert [tuple(token) for token in ids[: len(expected)]] == expected
        assert not any(map(any, ids[len(expected) :]))
    assert examples[rows].tokens == examples.lengths[rows].sum()


# Unicode


SCRIPTS = {
    "French": "Caf\u00e9 na\u00efve \u00e9l\u00e8ve",
    "marks without a composed form": "x\u030c Q\u0303 e\u0301\u0323",
    "Vietnamese": "Ti\u1ebfng Vi\u1ec7t \u0111\u01b0\u1ee3c",
    "Korean": "\ud55c\uad6d\uc5b4 \ubb38\uc7a5",
    "Hindi": "\u0939\u093f\u0928\u094d\u0926\u0940 \u092d\u093e\u0937\u093e \u0958",
    "Malayalam": "\u0d05\u0d35\u0d28\u0d4d\u200d \u0d35\u0d28\u0d4d\u0d28\u0d41 \u0d15\u0d4a",
    "Persian": "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 \u0622\u0628",
    "Arabic": "\u0644\u064f\u063a\u064e\u0629\u064c \u0645\u064f\u062d\u064e\u0645\u0651\u064e\u062f",
    "Hebrew": "\u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd \u05e2\u05b2\u05dc",
    "Thai": "\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22 \u0e01\u0e33\u0e25\u0e31\u0e07 \u0e17\u0e35\u0e48",
    "emoji": "\U0001f469\U0001f3fd\u200d\U0001f4bb \U0001f468\u200d\U0001f469\u200d\U0001f467 1\ufe0f\u20e3",
}
"""Words of several scripts, separated by spaces."""

UNICODE = [word for text in SCRIPTS.values() for word in text.split()]


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_words_keep_their_combining_marks(text):
    for form in ("NFC", "NFD"):
        normal = unicodedata.normalize(form, text)
        assert WordTokenizer(()).split(f"({normal}) {normal}!") == [
            "(",
            *normal.lower().split(),
            ")",
            *normal.lower().split(),
            "!",
        ]


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
    made = []
    for form in ("NFC", "NFD"):
        content = unicodedata.normalize(form, "\n".join(lines))
        made.append(make(write_lines(tmp_path / f"{form}.tsv", content.split("\n"))))
        made[-1].setup("fit")
    assert (tmp_path / "NFC.tsv").read_bytes() != (tmp_path / "NFD.tsv").read_bytes()
    ours, theirs = made
    assert ours.tokenizer.to_dict() == theirs.tokenizer.to_dict()
    assert ours.fingerprint == theirs.fingerprint
    if not isinstance(ours, Sentiment):  # which does not decode words
        for word in UNICODE:
            word = unicodedata.normalize("NFC", word)
            assert ours.tokenizer.decode(ours.tokenizer.encode_target(word)) == word


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


# Bad input


BAD_FILES = {
    "an empty file": (b"", "must hold text, but is empty"),
    "blank lines only": (b"\n \n", "must hold text, but is empty"),
    "a binary file": (b"abc\0def\n", "must hold text, but is binary"),
    "another encoding": ("größe\n".encode("latin-1"), "must be in encoding utf-8, but its line 1 is not"),
    "UTF-32": (
        "größe\n".encode("utf-32"),
        "starts with the byte order mark of utf-32; set encoding to that",
    ),
    "UTF-16": (
        "größe\n".encode("utf-16"),
        "starts with the byte order mark of utf-16; set encoding to that",
    ),
    "a byte order mark only": (codecs.BOM_UTF8, "must hold text, but is empty"),
}


@pytest.mark.parametrize(("content", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_file_that_is_not_text_is_named_in_the_error(content, message, tmp_path):
    path = tmp_path / "data.txt"
    path.write_bytes(content)
    for make in (
        lambda: Text(str(path)),
        lambda: ParallelText([str(path)], [str(path)]),
        lambda: Tsv(str(path), str(path)),
        lambda: Sentiment([str(path)]),
    ):
        with pytest.raises(UserError, match=message) as error:
            make()
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)


def test_a_damaged_gzip_file_is_named_in_the_error(tmp_path):
    path = tmp_path / "text.gz"
    path.write_bytes(gzip.compress(b"text\n" * 100)[:-9])
    with pytest.raises(UserError, match=r"text.gz' cannot be read"):
        read_text(path)
    path.write_bytes(b"no gzip")
    with pytest.raises(UserError, match=r"text.gz' cannot be read"):
        read_text(path)


def test_zero_bytes_are_refused_in_every_encoding(tmp_path):
    path = tmp_path / "text"
    for encoding in ("utf-8", "utf-16", "utf-32"):
        path.write_text("a\0b", encoding=encoding)
        with pytest.raises(UserError, match="must hold text, but is binary: it holds zero bytes"):
            read_text(path, encoding)


def test_lines_of_a_text_without_line_feeds_end_at_carriage_returns(tmp_path):
    path = tmp_path / "words.tsv"
    path.write_bytes(b"ab\tAB\rc\tC\r")
    assert [pair[:2] for pair in Tsv(str(path), str(path)).pairs("train")] == [("ab", "AB"), ("c", "C")]
    path.write_bytes(b"a\rb\n")
    assert [*read_lines(path)] == ["a\rb"]
    path = tmp_path / "words.csv"
    path.write_bytes(b'"a\nb",AB\rc,"C\rD"\r')
    assert [pair[:2] for pair in Tsv(str(path), str(path)).pairs("train")] == [("a b", "AB"), ("c", "C D")]


def test_lines_end_only_at_line_feeds(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(codecs.BOM_UTF8 + "eins\r\nzwei\x85\u2028drei\x0cvier\n".encode())
    assert [*read_lines(path)] == ["eins", "zwei\x85\u2028drei\x0cvier"]
    path.write_text("größe", encoding="utf-16")
    assert read_text(path, "U16") == read_text(path, "utf_16") == "größe"
    path.write_text("größe", encoding="latin-1")
    for other in ("utf-9", "hex", "zip", "rot13"):  # the last three are not text encodings
        with pytest.raises(UserError, match=f"encoding must be a text encoding known to Python, but is '{other}'; try"):
            read_text(path, other)
    with pytest.raises(UserError, match="must be in encoding idna, but its line 1 is not"):
        read_text(path, "idna")


def pair_files(tmp_path, left, right):
    return [write_lines(tmp_path / "left", left), write_lines(tmp_path / "right", right)]


def table(cls, *lines, name="t.tsv", **settings):
    """Return a function that reads the lines of a table in a folder for training and validation."""
    return lambda folder: cls(path := write_lines(folder / name, lines), path, **settings)


def files(left, right, **settings):
    return lambda folder: ParallelText(names := pair_files(folder, left, right), names, **settings)


def whole_text(content=TEXT, **settings):
    return lambda folder: Text(text_file(folder, content), **settings).setup("fit")


def labels(*lines, **settings):
    return lambda folder: sentiment([write_lines(folder / "t.tsv", lines)], **settings).setup("fit")


def label_folders(*places, texts=reviews()):
    """Return a function that reads a folder with labeled texts in each of the given folders."""

    def make(folder):
        for place in places:
            write_label_folders(folder / "folder", texts, place)
        sentiment([str(folder / "folder")])

    return make


REVIEWS = [*map("\t".join, reviews())]
SWAPPED = [f"{text} {number}\t{label}" for number, (label, text) in enumerate(reviews())]

BAD_DATA = {
    "files of unequal length": (files("abc", "ab"), r"left' and .*right' must have equally many lines, .* 3 and 2"),
    "an empty line of a pair": (files("abc", ["a", " ", "c"]), r"line 2 of .*right' is empty"),
    "a line without its tab": (table(ParallelText, "a\tb", "c d"), r"t.tsv' must have as many tabs .* line 2 has 0"),
    "a table without tabs": (table(Tsv, "a b"), "must have a tab between its fields in each line, but line 1 has 0"),
    "three columns of parallel text": (
        table(ParallelText, "a\tb\tc"),
        r"must hold two columns, source and target, .* but has 3; set data.class_path to datamodules.Tsv",
    ),
    "three files": (
        lambda p: ParallelText(files := [write_lines(p / "t", ["a\tb"])] * 3, files),
        "train must be two files or a TSV, but is 3 files: ",
    ),
    "no such column": (table(Tsv, "a\tb", target=3), "target must be a column of .*t.tsv', from 1 to 2, but is 3"),
    "an empty field": (table(Tsv, "a\tb", "a\t "), "must hold a target, but column 2 of line 2 of .* is empty"),
    "too few subwords": (files("abc", "abc", vocab_size=100), "vocab_size must be at least 259, .* but is 100"),
    "fewer tokens in a batch than in a text": (
        files("abc", "abc", batch_tokens=50),
        r"batch_tokens must be at least the longest text \(64\), but is 50",
    ),
    "no file": (lambda p: Text(str(p / "none")), "there is no file '.*none', nor is it one of tinyshakespeare"),
    "a text that is shorter than the context": (
        whole_text("short text", max_length=64),
        "the train split of the text must have at least 129 tokens with max_length 64, but has 9; try max_length 4",
    ),
    "more windows in a batch than there are": (
        lambda p: (
            (data := Text(text_file(p), max_length=64, batch_size=100)).setup("fit")
            or data.training_batches(data.division)
        ),
        "batch_size must be at most the 41 windows of the training split, but is 100",
    ),
    "a validation split that is shorter than the context": (
        whole_text(val_fraction=0.01, max_length=64),
        "the val split of the text must have at least 65 tokens with max_length 64, but has 30; try max_length 14",
    ),
    "an empty vocabulary": (whole_text(vocab_size=4), r"vocab_size must be above 4, .* but is 4; try 1000"),
    "a line without a text": (
        labels("neg\tbad", "", "pos\t "),
        r"must hold a text, but column 2 of line 3 of '.*t.tsv' is empty; delete the line",
    ),
    "blank rows only": (table(Tsv, ",", " , ", name="t.csv"), "t.csv' must hold text, but is empty"),
    "an unclosed quotation mark": (
        table(Tsv, '"a\nb",c', 'd,"e', "f,g", name="t.csv"),
        "must hold comma-separated values, but the row of line 3 does not: unexpected end of data; write",
    ),
    "a text after a quotation mark": (
        table(Tsv, "a;b", '"c" d;e', "f;g", name="t.csv"),
        "must hold semicolon-separated values, but the row of line 2 does not: ';' expected after '\"'; write",
    ),
    "three columns of labeled texts": (labels("1\tpos\tgood"), "two columns, label and text, .* but has 3; set label"),
    "no column for the target": (
        table(Tsv, "a\tN", features=2),
        "target must be a column of '.*t.tsv', which has no further column; set it to a number",
    ),
    "a text without a word": (
        labels(*REVIEWS, *["pos\t<br />"] * 9),
        r"each text must have a token, but '<br />' \(pos\) does not; delete it",
    ),
    "a damaged archive": (
        lambda p: sentiment([damaged(write_archive(p / "a.tar.gz", reviews()))]),
        "must be an archive of texts, but cannot be read as one: it is damaged",
    ),
    "an empty folder": (lambda p: Text(str(p)), "must be a text or a folder of texts, but .* holds no file"),
    "no validation fraction": (whole_text(val_fraction=0.0), "val_fraction must be above 0"),
    "an unseen label": (
        lambda p: labels(*REVIEWS, test=[write_lines(p / "x.tsv", ["meh\tso so"])])(p),
        r"each label must occur in the training split \(neg, pos\), but that of 'so so' in test is 'meh'",
    ),
    "swapped columns": (labels(*SWAPPED), "labels must repeat, .* in a table, column 1 is the label"),
    "no data": (lambda p: sentiment([]), r"train must name data, but is empty; try \[FILE\]"),
    "an empty split": (labels(*REVIEWS[:4], test_fraction=0.01), "test_fraction must .* but of 4 it takes 0; try"),
    "fractions that leave no training texts": (
        labels(*["pos\ta", "neg\tg"] * 9, val_fraction=0.4, test_fraction=0.4),
        "test_fraction must leave texts on both sides, but of 18 it takes 9; try another fraction",
    ),
    "a folder among files": (lambda p: sentiment([str(p), str(p)]), "must be a file, but is a folder"),
    "features of column 0": (table(Tsv, "a\tb", features=0), "features must be a column .* from 1 to 2, but is 0"),
    "a vocab_size without symbols": (table(Tsv, "a\tb", vocab_size=4), r"vocab_size must be above 4, .* but is 4"),
    "UTF-32 that is called UTF-16": (
        lambda p: (p / "t.txt").write_bytes("abc".encode("utf-32")) and Text(str(p / "t.txt"), encoding="utf-16"),
        "must be in encoding utf-16, but starts with the byte order mark of utf-32; set encoding to that",
    ),
    "one label": (labels(*(f"pos\tgreat {n}" for n in range(50))), "at least two labels, but there is pos"),
    "files without labels": (
        lambda p: sentiment([write_lines(p / "a", ["x"]), write_lines(p / "b", ["y"])]),
        "several files must end with their labels, NAME.LABEL, but are",
    ),
    "a folder without labels": (
        lambda p: text_file(p, "text", "folder/a.txt") and sentiment([str(p / "folder")]),
        "must hold folders named by their labels",
    ),
    "a label's folder in another's": (
        label_folders("", "pos"),
        "must have the folders of its labels side by side, but has 'neg' and 'pos/pos'; move or remove one",
    ),
    "unknown split names": (
        label_folders("train", "dev"),
        "must have its texts in folders of labels inside train, val, test, but has some in 'dev/neg'; rename or remove",
    ),
    "no test fraction": (labels(*REVIEWS, test_fraction=0), "test_fraction must be above 0 .* but is 0; try 0.1"),
    "no archive": (
        lambda p: (p / "a.tar.gz").write_bytes(b"no archive") and sentiment([str(p / "a.tar.gz")]),
        "must be an archive of texts, but cannot be read as one",
    ),
    "no tokenizer": (
        lambda p: Text(text_file(p), tokenizer_file=text_file(p, "{}", "tokenizer.json")),
        "must be a Hugging Face tokenizer.json, but is not",
    ),
}


@pytest.mark.parametrize(("make", "message"), BAD_DATA.values(), ids=BAD_DATA)
def test_unusable_data_are_refused_in_one_line(make, message, tmp_path):
    with pytest.raises(UserError, match=message) as error:
        make(tmp_path)
    assert "\n" not in str(error.value)


def test_a_tokenizer_file_defines_the_subwords(tmp_path):
    subwords = train_tokenizer([TEXT], "subword", 300)
    data = Text(text_file(tmp_path), tokenizer_file=text_file(tmp_path, subwords.to_dict()["model"], "tokenizer.json"))
    assert data.tokenizer.encode(TEXT) == subwords.encode(TEXT)


def test_processing_for_the_model_of_a_tokenizer_file_is_disabled(tmp_path):
    """Truncation, padding and special tokens are for the inputs of a model; texts are read in full."""
    subwords = train_tokenizer([TEXT], "subword", 300)
    others = tokenizers.Tokenizer.from_str(subwords.to_dict()["model"])
    others.add_special_tokens(["<s>"])
    others.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 297)])
    others.enable_truncation(5)
    others.enable_padding(length=2000)
    assert others.encode(TEXT).ids[0] == 297
    assert len(others.encode(TEXT).ids) == 2000
    theirs = read_tokenizer(Path(text_file(tmp_path, others.to_str(), "tokenizer.json")))
    assert theirs.encode(TEXT) == subwords.encode(TEXT)
    assert theirs.encode_all([TEXT]) == [subwords.encode(TEXT)]
    assert theirs.split(TEXT) == subwords.split(TEXT)


def test_a_tokenizer_file_may_have_gaps_between_its_ids(tmp_path):
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 1, "c": 7}, merges=[]))
    tokenizer = read_tokenizer(Path(text_file(tmp_path, model.to_str(), "tokenizer.json")))
    assert tokenizer.encode("abc") == [3, 4, 10]
    assert tokenizer.vocab_size == 11
    assert "b" in tokenizer.decode([4, 8])


@pytest.mark.parametrize(
    ("name", "lines", "settings"),
    [
        ("words.tsv", ["source\ttarget", "ab\tAB", "c\tC"], {}),
        ("words.tsv", ["german\tenglish", "ab\tAB", "c\tC"], {"header": True}),
        ("words.tsv", ["number\tgerman\tenglish", "1\tab\tAB", "2\tc\tC"], {"source": "german", "target": "english"}),
        ("words.csv.gz", ['"ab",AB', "c,C"], {}),
        ("words.csv", ["Source,Target", '"ab","AB"', "c,C"], {}),
        ("words.CSV", ["id;Lemma;Form", '1;"ab";AB', "2;c;C"], {}),
        ("words.csv", ["ab;AB", "c;C"], {}),
        ("words.tsv", ["target\tsource", "ab\tAB", "c\tC"], {"source": 1}),
        ("words.tsv", ["word\tkey", "AB\tab", "C\tc"], {"target": "word"}),
        ("words.tsv", ["target\tsource", "AB\tab", "C\tc"], {}),
        ("words.tsv", ["AB\tab", "C\tc"], {"source": 2}),
        ("words.tsv", ["ab\tN\tAB", "c\tV\tC"], {"target": 3}),
    ],
)
def test_tables_have_headers_and_may_be_csv(name, lines, settings, tmp_path):
    table = write_lines(tmp_path / name, lines)
    data = Tsv(table, table, **settings)
    assert [pair[:2] for pair in data.pairs("train")] == [("ab", "AB"), ("c", "C")]


def test_fields_of_csv_may_contain_commas_and_line_feeds(tmp_path):
    table = write_lines(tmp_path / "reviews.csv", ["label,text", 'pos,"good, really"', 'neg,"bad\nthough"'])
    assert [pair[:2] for pair in read_labeled([table], LABEL_AND_TEXT, "test")["test"]] == [
        ("good, really", "pos"),
        ("bad though", "neg"),
    ]
    # the header says that the label is the target
    assert [*read_pairs([table], PARALLEL, "test")] == [[["good, really", "bad though"], ["pos", "neg"]]]


def test_fields_may_be_longer_than_the_limit_of_the_csv_module(tmp_path):
    text = "ab" * 100_000
    table = write_lines(tmp_path / "words.csv", [f"{text},AB"])
    assert [*read_pairs([table], PARALLEL, "test")] == [[[text], ["AB"]]]


LABELED = [f"{number % 2}\ta {('bad', 'good')[number % 2]} film {number}" for number in range(20)]
PRONOUNCED = [f"{letter}{letter.lower()}\t{letter} AH {letter}" for letter in "ABCDEFGHIJ"]
TAGGED = [f"{letter}{letter.lower()}\t{letter}\t{'NV'[place % 2]}" for place, letter in enumerate("ABCDEFGHIJ" * 2)]
ALONE = [f"{letter}\t{letter.lower()}" for letter in "ABCDEFGHIJKL"]


@pytest.mark.parametrize(
    ("first", "lines", "is_header"),
    [
        ("label\tquote", LABELED, True),
        ("Star rating\tbody of it", LABELED, True),  # above numbers
        ("name\tsound", PRONOUNCED, True),  # above several words
        ("name\tnext\tkind", TAGGED, True),  # above texts that repeat
        ("name\tother", ALONE, False),
        ("name\tsound", PRONOUNCED[:9], False),  # too few rows
        ("Zz\tZ AH Z", PRONOUNCED, False),
        ("Zz\tZ\tN", TAGGED, False),
        ("2\ta meh film", LABELED, False),
        ("B\tExcellent", [f"{'AB'[number % 2]}\tan image of {number}" for number in range(20)], False),
        ("one million\t1,000,000", [f"a {number}\t{number}" for number in range(10)], False),
        ("half\t1/2", [f"a {number}\t{number}" for number in range(10)], False),
    ],
)
def test_a_first_line_unlike_the_others_is_a_header(first, lines, is_header, tmp_path, capsys):
    table = write_lines(tmp_path / "table.tsv", [first, *lines])
    assert len(Tsv(table, table).pairs("train")) == len(lines) + (not is_header)
    assert (f"names its columns: {first.replace(chr(9), ', ')}; set header to false" in capsys.readouterr().err) is (
        is_header
    )
    for header in (True, False):
        assert len(Tsv(table, table, header=header).pairs("train")) == len(lines) + (not header)


@pytest.mark.parametrize("read", [Tsv, ParallelText, Sentiment])
def test_a_header_of_the_training_table_is_one_in_each_split(read, tmp_path):
    """A header above few rows cannot be told from data by itself."""
    train, val = (write_lines(tmp_path / f"{n}.tsv", ["kind\tquote", *LABELED[:n]]) for n in (20, 4))
    settings = {"test_fraction": 0.3} if read is Sentiment else {}
    assert len(read(train, val, **settings).pairs("val")) == 4


def test_decimal_commas_do_not_separate_fields(tmp_path):
    table = write_lines(tmp_path / "t.csv", [f"{number},5;n{number}" for number in range(5)])
    assert Tsv(table, table).pairs("train")[1][:2] == ("1,5", "n1")
    table = write_lines(tmp_path / "u.csv", [f"{number},5" for number in range(5)])
    assert Tsv(table, table).pairs("train")[1][:2] == ("1", "5")


def test_a_column_is_selected_once(tmp_path):
    table = write_lines(tmp_path / "t.tsv", ["word\tclass\tplural", "cat\tN\tcats"])
    assert Tsv(table, table, features="class").pairs("train")[0][:2] == ("cat\tN", "cats")


@pytest.mark.parametrize(
    ("header", "order", "settings"),
    [
        ("id;text;label", "{0};{2};{1}", {}),
        (";stars;review", "{0};{1};{2}", {}),
        ("kind;quote;page", "{1};{2};{0}", {"label": "kind", "text": 2}),
        (None, "{0};{2};{1}", {"label": 3, "text": 2}),
    ],
)
def test_labels_and_texts_may_be_any_columns(header, order, settings, tmp_path):
    rows = [order.format(number, *row) for number, row in enumerate(reviews())]
    table = write_lines(tmp_path / "t.csv", [header, *rows] if header else rows)
    assert texts_in(Sentiment(table, **settings)) == sorted(reviews())


@pytest.mark.parametrize("place", [0, 3, 5])
def test_blank_lines_are_skipped_and_counted(place, tmp_path, capsys):
    for name, blank in (("table.tsv", "\t "), ("table.tsv", ""), ("table.csv", ","), ("table.csv", "")):
        lines = [f"a{number}{'b' if blank == '' else ''}" for number in range(5)]
        separator = "," if name.endswith(".csv") else "\t"
        rows = [f"{line}{separator}{line}" for line in lines]
        table = write_lines(tmp_path / name, [*rows[:place], blank, blank, *rows[place:]])
        assert [pair.source for pair in Tsv(table, table).pairs("train")] == lines
        assert f"2 blank lines of {table} are skipped, the first in line {place + 1}\n" in capsys.readouterr().err
    texts = [f"good {number}" for number in range(5)]
    good = write_lines(tmp_path / "a.pos", [*texts[:place], " ", *texts[place:]])
    bad = write_lines(tmp_path / "a.neg", ["bad"] * 5)
    assert [*read_labeled([good, bad], LABEL_AND_TEXT, "test")["test"]] == [
        *(Pair(text, "pos") for text in texts),
        *[Pair("bad", "neg")] * 5,
    ]
    assert f"1 blank lines of {good} are skipped, the first in line {place + 1}\n" in capsys.readouterr().err


def test_pairs_that_lack_a_text_are_skipped_in_training(tmp_path, capsys):
    left, right = pair_files(tmp_path, ["a", "", "b", "", "", "c"], ["d", "", "e", "f", "", "g", ""])
    texts = [["a", "b", "c"], ["d", "e", "g"]]
    assert [*read_pairs([left, right], PARALLEL, "train")] == [texts]
    assert "4 pairs of " in (err := capsys.readouterr().err)
    assert "without a source or a target are skipped, the first in line 2\n" in err
    with pytest.raises(UserError, match=r"line 4 of '.*left' is empty; delete the pair"):
        [*read_pairs([left, right], PARALLEL, "val")]
    left, right = pair_files(tmp_path, ["a", "", "b", "c"], ["d", "", "e", "g", "", ""])
    assert [*read_pairs([left, right], PARALLEL, "val")] == [texts]
    assert "3 pairs of " in capsys.readouterr().err


def test_paths_are_expanded(tmp_path, monkeypatch):
    table = write_lines(tmp_path / "t.tsv", map("\t".join, reviews()))
    write_label_folders(tmp_path / "folder", reviews())
    (tmp_path / "texts").mkdir()
    text_file(tmp_path / "texts")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TEXTS", "texts")
    for name in (table, "~/t.tsv", "$HOME/t.tsv", "~/folder", ["~/t.tsv"]):
        assert texts_in(Sentiment(name)) == sorted(reviews())
    assert len(Tsv("~/t.tsv", "${HOME}/t.tsv").pairs("val")) == len(reviews())
    assert len(ParallelText("~/t.tsv", ["~/t.tsv"]).pairs("val")) == len(reviews())
    assert Text("~/$TEXTS").texts == Text("~/texts/text.txt").texts


def test_texts_of_the_same_tokens_count_as_overlaps(tmp_path, capsys):
    train = [write_lines(tmp_path / "t.tsv", ["pos\tA good film!", "neg\tbad", "neg\tso so"])]
    others = [write_lines(tmp_path / "x.tsv", ["pos\ta Good film !", "pos\tgood", "neg\tBAD", "neg\tunknown"])]
    Sentiment(train, others, others, val_fraction=0, test_fraction=0, batch_size=2).setup("fit")
    assert "2 of 4 texts of test also occur in train" in capsys.readouterr().err
    table, other = (write_lines(tmp_path / f"{n}.tsv", [f"a  b\tc\t{f}"]) for n, f in enumerate(("V;PST", "V; PST")))
    Tsv(table, other, features=3, source_separator=" ", batch_size=1).setup("fit")
    assert "1 of 1 sources of val also occur in train" in capsys.readouterr().err


@pytest.mark.parametrize("characters", [1, 2, 5, 1000])
def test_lines_do_not_depend_on_the_number_of_characters_split_at_a_time(characters, monkeypatch):
    monkeypatch.setattr(text_files, "CHARACTERS", characters)
    for text in map("".join, itertools.product("a\n", repeat=6)):
        assert [*split_lines(text)] == text.removesuffix("\n").split("\n")


ROWS = [(f"source {number}", f"target {number}") for number in range(7)]


def write_rows(folder, name, rows):
    """Write a table, or two files NAME.0 and NAME.1, and return their paths."""
    if name.endswith(".tsv"):
        return [write_lines(folder / name, ["\t".join(row) for row in rows])]
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
    data = ParallelText(names, names, tokenizer=tokenizer)
    data.setup("fit")
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


@pytest.mark.parametrize("part", [1, 3, memory.PART])
def test_tables_do_not_depend_on_the_number_of_rows_read_at_a_time(part, monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "PART", part)
    lines = [f"a {number}\tb  {number}\tV;PST" for number in range(7)]
    table = write_lines(tmp_path / "table.tsv", lines)
    data = Tsv(table, table, features=3, target_separator=" ", max_source_length=8)
    data.setup("fit")
    assert [*data.datasets["train"].pairs] == [Pair(f"a {number}\tV;PST", f"b {number}") for number in range(7)]
    assert data.tokenizer.symbols[1:6] == (" ", "[PST]", "[V]", "a", "b")
    for line, message in (("a 5\t \tV", "column 2 of line 6 of .* is empty"), ("a 5", "line 6 has 0")):
        broken = write_lines(tmp_path / "broken.tsv", [*lines[:5], line, *lines[5:]])
        with pytest.raises(UserError, match=message):
            Tsv(broken, table, features=3)


@pytest.mark.parametrize(
    ("lines", "settings", "message"),
    [
        (["a\tb", "c\td"], {"source": "word"}, "source must be a column of '.*', which has a, b, but is 'word'"),
        (["a\tb", "c\td"], {"source": "a", "header": False}, "source must be a column of '.*', which has no header"),
        (["source\ttarget"], {}, "must hold rows below its header, but holds none"),
        (["source\ttarget", "a\t"], {}, "column 2 of line 2 of '.*' is empty"),
    ],
)
def test_mistakes_in_headers_are_reported(lines, settings, message, tmp_path):
    table = write_lines(tmp_path / "words.tsv", lines)
    with pytest.raises(UserError, match=message):
        Tsv(table, table, **settings)
