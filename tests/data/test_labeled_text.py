"""Labeled texts: layouts of folders and archives, and splits."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import pytest
import torch

from lightning_tfm.data import stable_hash
from lightning_tfm.errors import UserError
from support.corpora import (
    reviews,
    sentiment,
    texts_in,
    write_archive,
    write_imdb,
    write_label_folders,
    write_lines,
    write_table,
)
from support.data import set_up


def test_labeled_texts_are_equal_from_folders_archives_tables_and_files(tmp_path):
    texts = reviews()
    write_label_folders(tmp_path / "folder", texts)
    write_archive(tmp_path / "archive.tar.gz", texts)
    write_table(tmp_path / "table.tsv", texts)
    for label in ("neg", "pos"):
        write_lines(tmp_path / f"texts.{label}", [text for other, text in texts if other == label])
    tested = set()
    for names in (["folder"], ["archive.tar.gz"], ["table.tsv"], ["texts.pos", "texts.neg"]):
        data = sentiment([str(tmp_path / name) for name in names])
        assert data.labels == ["neg", "pos"]
        assert texts_in(data) == sorted(texts), names
        tested.add(tuple(texts_in(data, ["test"])))
    assert len(tested) == 1, "the hash of a text determines its split"


def in_folders(*names):
    """Return the names of 40 files in each of the folders."""
    return [f"{name}/{n}{('', '.txt', '.TXT', '.md')[n % 4]}" for name in names for n in range(40)]


NO_LABEL, NO_FOLDER = "they have no label", "they are not in a label's folder"
IMDB = in_folders("train/neg", "train/pos", "train/unsup", "test/neg", "test/pos")
IMDB += ["README", "imdb.vocab", "train/urls_pos.txt", "train/labeledBow.feat"]

LAYOUTS = {  # the files, the labels and the number of files left out for each reason
    "labels named as splits": (in_folders("neg", "test", "train", "unsup", "val"), "neg test train unsup val", {}),
    "labels in a folder": (in_folders("reviews/test", "reviews/pos"), "pos test", {}),
    "labels named as splits, in splits": (in_folders("train/test", "train/val", "test/val"), "test val", {}),
    "IMDB": (IMDB, "neg pos", {NO_LABEL: 40, NO_FOLDER: 4}),
    "files beside labels": (["README", "in/all.csv", *in_folders("in/a", "in/b")], "a b", {NO_FOLDER: 2}),
    "texts without a label beside labels": (in_folders("a", "b", "train/unsup"), "a b", {NO_LABEL: 40}),
}
REFUSED_LAYOUTS = {
    "splits and labels side by side": (in_folders("train/neg", "train/pos", "neg"), "train, val, test, .*neg'; rename"),
    "a split without labels": (in_folders("train/neg", "train/pos", "test"), "train, val, test, .*test'; rename"),
    "splits without labels": (in_folders("train", "test"), "named by their labels, .*test' and '(.*/)?train'"),
    "no training split": (in_folders("test/neg", "test/pos", "val/neg"), "a folder train, but has test, val alone"),
    "folders of a label": (in_folders("neg", "pos", "pos/old"), "side by side, .*neg' and '(.*/)?pos/old'; move"),
}


def lay_out(form, names, tmp_path):
    """Write a text into each file; return the folder, or an archive of it with or without a top-level folder."""
    folder = tmp_path / "data"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"text of {name}")
    (folder / ".git/neg").mkdir(parents=True)
    for hidden in (".git/neg/a", f"{Path(names[-1]).parent}/.DS_Store"):
        (folder / hidden).write_bytes(b"\0")
    if form == "folder":
        return str(folder)
    with tarfile.open(tmp_path / "data.tar.gz", "w:gz") as tar:
        tar.add(folder, form)
    return str(tmp_path / "data.tar.gz")


forms = pytest.mark.parametrize("form", ["folder", ".", "top"])


@forms
@pytest.mark.parametrize(("names", "labels", "left_out"), LAYOUTS.values(), ids=LAYOUTS)
def test_every_file_is_read_or_counted(names, labels, left_out, form, tmp_path, capsys):
    """Hidden files are neither; other names may end in anything."""
    data = sentiment(lay_out(form, names, tmp_path))
    reasons = re.findall(r"(\d+) files of .* are left out because (.*), such as ", capsys.readouterr().err)
    assert {reason: int(number) for number, reason in reasons} == left_out
    assert {*data.labels} == {*labels.split()}
    read = {text.removeprefix("text of "): label for label, text in texts_in(data)}
    assert len(read) == len(texts_in(data)) == len(names) - sum(left_out.values())
    assert all(Path(name).parent.name == label for name, label in read.items())


@forms
@pytest.mark.parametrize(("names", "message"), REFUSED_LAYOUTS.values(), ids=REFUSED_LAYOUTS)
def test_ambiguous_layouts_are_refused(names, message, form, tmp_path):
    with pytest.raises(UserError, match=message) as error:
        sentiment(lay_out(form, names, tmp_path))
    assert "\n" not in str(error.value)


@forms
def test_texts_of_other_splits_are_counted(form, tmp_path, capsys):
    table = write_table(tmp_path / "table.tsv", reviews())
    folders = [f"{split}/{label}" for split in ("test", "train", "val") for label in ("neg", "pos")]
    data = lay_out(form, in_folders(*folders), tmp_path)
    assert len(sentiment(table, test=[data], test_fraction=0).pairs("test")) == 80
    assert re.search("160 files of .* because they are not for test, such as ", capsys.readouterr().err)
    assert len(sentiment(data, test=[table]).pairs("train")) == 80
    assert "80 texts in test/ of train are left out because test names other data" in capsys.readouterr().err


def test_a_training_folder_may_contain_unlabeled_texts(tmp_path, capsys, monkeypatch):
    """IMDB's folder train holds pos, neg and unsup; its path may be written in several ways."""
    folder, _ = write_imdb(tmp_path, reviews(60), reviews(30, seed=1))
    monkeypatch.chdir(folder / "train")
    for name in (str(folder / "train"), f"{folder}/train/", "."):
        data = sentiment([name], test=[str(folder / "test")], test_fraction=0)
        assert data.labels == ["neg", "pos"]
        assert texts_in(data, ["train", "val"]) == sorted(reviews(60))
        assert re.search("1 files of .* because they have no label", capsys.readouterr().err)


def test_links_that_are_not_followed_are_counted(tmp_path, capsys):
    """Links to files are read; links to folders and links in archives are not followed."""
    write_label_folders(tmp_path / "folder", reviews())
    (tmp_path / "folder/pos/linked.txt").symlink_to(next((tmp_path / "folder/pos").iterdir()))
    (tmp_path / "folder/meh").symlink_to(tmp_path / "folder/neg")
    with tarfile.open(tmp_path / "archive.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "folder", "reviews")
    for name, number in (("folder", 1), ("archive.tar.gz", 2)):
        data = sentiment(str(tmp_path / name))
        assert data.labels == ["neg", "pos"]
        assert len(texts_in(data)) == len(reviews()) + 2 - number
        assert re.search(f"{number} files of .* because links are not followed", capsys.readouterr().err)


NUMBERED = [(("neg", "pos")[n % 2], f"text number {n - n % 10 // 9}") for n in range(2_000)]
"""Labeled texts, one in ten of which occurs twice."""


def test_splits_are_intervals_of_one_hash(tmp_path):
    """An unused interval goes to training and leaves the other split unchanged; so do separate data."""
    train, others = write_table(tmp_path / "t.tsv", NUMBERED), [write_table(tmp_path / "x.tsv", reviews(50, seed=1))]
    write_label_folders(tmp_path / "folder", NUMBERED, "train")
    write_label_folders(tmp_path / "folder", reviews(50, seed=1), "test")

    def interval(begin, end):
        return sorted(row for row in NUMBERED if begin <= stable_hash(f"test {row[1]}") / 2**64 < end)

    def splits(train=train, val_fraction=0.2, test_fraction=0.3, **settings):
        data = sentiment(train, val_fraction=val_fraction, test_fraction=test_fraction, **settings)
        return [texts_in(data, [split]) for split in ("train", "val", "test")]

    test, val, rest, other = interval(0, 0.3), interval(0.3, 0.5), interval(0.5, 1), sorted(reviews(50, seed=1))
    assert [len(test), len(val), len(rest)] == pytest.approx([600, 400, 1000], abs=80)
    assert splits() == splits(seed=1) == [rest, val, test]
    assert splits(val=others, test=others) == [rest, other, other]
    assert splits(test=others) == [rest, val, other]
    assert splits(test=others, test_fraction=0) == [interval(0.2, 1), interval(0, 0.2), other]
    assert splits(str(tmp_path / "folder")) == [sorted(test + rest), val, other]
    tokenizers = [sentiment(train, **settings).tokenizer.to_dict() for settings in ({}, {"test": others})]
    assert tokenizers[0] == tokenizers[1]


def test_the_test_split_of_a_folder_or_an_archive_is_tested(tmp_path, capsys):
    """Also if it is the only split, or training data are elsewhere."""
    table = write_table(tmp_path / "table.tsv", reviews(200, seed=2))
    train, test = sorted(reviews(60)), sorted(reviews(30, seed=1))
    folder, archive = write_imdb(tmp_path, train, test)
    for path in (folder, archive):
        data = sentiment(str(path))
        assert data.labels == ["neg", "pos"]
        assert texts_in(data, ["test"]) == test
        assert texts_in(data, ["train", "val"]) == train
    assert texts_in(sentiment(table, test=[str(archive)]), ["test"]) == test
    write_label_folders(tmp_path / "folder", test, "test")
    capsys.readouterr()
    data = sentiment(table, test=[str(tmp_path / "folder")])
    assert texts_in(data, ["test"]) == test
    left_out = 200 - len(texts_in(data, ["train", "val"]))
    message = f"lightning-tfm: {left_out} texts of train are held out by test_fraction; set it to 0 to train on them\n"
    assert capsys.readouterr().err == message


def test_archives_are_not_unpacked_to_disk(tmp_path):
    evil = [tarfile.TarInfo("../../pos/evil.txt"), tarfile.TarInfo("a/pos/link.txt")]
    evil[0].size = 3
    evil[1].type, evil[1].linkname = tarfile.SYMTYPE, "/etc/passwd"
    folder = tmp_path / "inner/folder"
    folder.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    data = sentiment(write_archive(folder / "archive.tar.gz", reviews(), others=evil))
    assert sorted(path for path in tmp_path.rglob("*") if path.name != "archive.tar.gz") == before
    assert texts_in(data) == sorted(reviews()), "no link is followed, and no path leaves the archive"
    member = tarfile.TarInfo("/tmp/pos/evil.txt")
    member.size = 3
    with pytest.raises(UserError, match="side by side, but has '/tmp/pos' and"):
        sentiment(write_archive(folder / "archive.tar.gz", reviews(), others=[member]))
    assert not Path("/tmp/pos").exists()


def test_truncation_keeps_the_end_and_is_counted(tmp_path, capsys):
    train = write_table(tmp_path / "table.tsv", reviews())
    data = set_up(sentiment(train, max_length=5, truncate=True))
    examples, encode = data.datasets["train"], data.tokenizer.encode
    row, *rows = (index for index, pair in enumerate(examples.pairs) if len(encode(pair.source)) > 5)
    assert examples.texts[torch.tensor([row])][0].tolist() == encode(examples.pairs[row].source)[-5:]
    assert f"{1 + len(rows)} of {len(examples)} train texts are truncated to their last 5 " in capsys.readouterr().err
    with pytest.raises(UserError, match=r"max_length .* \d+ for train, but is 5; or set truncate"):
        sentiment(train, max_length=5).setup("fit")
