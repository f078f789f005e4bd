"""Labeled texts: layouts of folders and archives, and splits."""

from __future__ import annotations

import itertools
import re
import tarfile
from pathlib import Path

import pytest
import torch

from lightning_tfm.data import (
    stable_hash,
)
from lightning_tfm.errors import UserError
from support.corpora import reviews, sentiment, texts_in, write_archive, write_imdb, write_label_folders, write_lines


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
