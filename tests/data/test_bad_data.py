"""Data that cannot be used are refused in one line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from datamodules import ParallelText, Text, Tsv
from lightning_tfm.errors import UserError
from support.corpora import (
    TEXT,
    pair_files,
    reviews,
    sentiment,
    text_file,
    write_archive,
    write_label_folders,
    write_lines,
)


def damaged(archive):
    """Overwrite the header of a file in the middle of an archive, and compress it again."""
    path = Path(archive)
    content = bytearray(gzip.decompress(path.read_bytes()))
    begin = content.index(b"aclImdb", len(content) // 2)
    content[begin : begin + 400] = bytes(range(200)) * 2
    path.write_bytes(gzip.compress(bytes(content)))
    return archive


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
