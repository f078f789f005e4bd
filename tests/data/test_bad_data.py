"""Data that cannot be used are refused in one line that names the setting, the file and the value."""

from __future__ import annotations

import codecs
import gzip
from pathlib import Path

import pytest

from datamodules import ParallelText, Sentiment, Text, Tsv
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

REVIEWS = [*map("\t".join, reviews())]
SWAPPED = [f"{text} {number}\t{label}" for number, (label, text) in enumerate(reviews())]


def table(*lines, cls=Tsv, name="t.tsv", **settings):
    """Return a function that reads the lines of a table in a folder for training and validation."""
    return lambda folder: cls(path := write_lines(folder / name, lines), path, **settings)


def pairs(left, right, **settings):
    return lambda folder: ParallelText(names := pair_files(folder, left, right), names, **settings)


def text(content=TEXT, **settings):
    """Return a function that makes the training stream of a text."""

    def make(folder):
        data = Text(text_file(folder, content), **settings)
        data.setup("fit")
        data.training_batches(data.division)

    return make


def labels(*lines, **settings):
    return lambda folder: sentiment(write_lines(folder / "t.tsv", lines), **settings).setup("fit")


def label_folders(*places):
    """Return a function that reads a folder with labeled texts in each of the given folders."""

    def make(folder):
        for place in places:
            write_label_folders(folder / "folder", reviews(), place)
        sentiment(str(folder / "folder"))

    return make


def content(name, content, read=Text, **settings):
    """Return a function that reads a file of the given bytes or text."""

    def make(folder):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        read(str(path.parent if "/" in name else path), **settings)

    return make


def damaged_archive(folder):
    """Overwrite the header of a file in the middle of an archive, and compress it again."""
    path = Path(write_archive(folder / "a.tar.gz", reviews()))
    content = bytearray(gzip.decompress(path.read_bytes()))
    begin = content.index(b"aclImdb", len(content) // 2)
    content[begin : begin + 400] = bytes(range(200)) * 2
    path.write_bytes(gzip.compress(bytes(content)))
    sentiment(str(path))


BAD_DATA = {
    "no file": (lambda p: Text(str(p / "none")), "no file '.*none', nor is it one of tinyshakespeare"),
    "an empty name": (lambda p: Text(""), "path must name a file, but is empty; name yours"),
    "an empty name of a tokenizer": (content("t.txt", b"abc", tokenizer_file=""), "tokenizer_file must name a file"),
    "an empty folder": (lambda p: Text(str(p)), "folder of texts, but .* holds no file"),
    "UTF-32 that is called UTF-16": (
        content("t.txt", "abc".encode("utf-32"), encoding="utf-16"),
        "encoding utf-16, but .* byte order mark of utf-32",
    ),
    "no tokenizer": (
        lambda p: Text(text_file(p), tokenizer_file=text_file(p, "{}", "tokenizer.json")),
        "Hugging Face tokenizer.json",
    ),
    "an empty vocabulary": (text(vocab_size=4), r"vocab_size .* 4, .* is 4; try 1000"),
    "no validation fraction": (text(val_fraction=0.0), "val_fraction must be above 0"),
    "a text that is shorter than the context": (
        text("short text", max_length=64),
        "train split .* at least 129 tokens with max_length 64, but has 9; try max_length 4",
    ),
    "a validation split that is shorter than the context": (
        text(val_fraction=0.01, max_length=64),
        "val split .* at least 65 tokens with max_length 64, but has 30; try max_length 14",
    ),
    "more windows in a batch than there are": (
        text(max_length=64, batch_size=100),
        "batch_size must be at most the 41 windows .* but is 100",
    ),
    "files of unequal length": (pairs("abc", "ab"), "left' and .*right' .* equally many lines, .* 3 and 2"),
    "an empty line of a pair": (pairs("abc", ["a", " ", "c"]), "line 2 of .*right' is empty"),
    "a line without its tab": (table("a\tb", "c d", cls=ParallelText), "t.tsv' .* tabs .* line 2 has 0"),
    "three columns of parallel text": (table("a\tb\tc", cls=ParallelText), "two columns, .* has 3; .*datamodules.Tsv"),
    "three files": (
        lambda p: ParallelText(files := [write_lines(p / "t", ["a\tb"])] * 3, files),
        "train must be two files or a TSV, but is 3 files",
    ),
    "too few subwords": (pairs("abc", "abc", vocab_size=100), "vocab_size must be at least 259, .* but is 100"),
    "fewer tokens in a batch than in a text": (
        pairs("abc", "abc", batch_tokens=50),
        r"batch_tokens .* longest text \(64\), but is 50",
    ),
    "a table without tabs": (table("a b"), "a tab between its fields .* line 1 has 0"),
    "no such column": (table("a\tb", target=3), "target .* of .*t.tsv', from 1 to 2, but is 3"),
    "an unknown column": (table("a\tb", "c\td", source="word"), "source .* of '.*', which has a, b, but is 'word'"),
    "a column without a header": (table("a\tb", "c\td", source="a", header=False), "source .* has no header"),
    "features of column 0": (table("a\tb", features=0), "features .* from 1 to 2, but is 0"),
    "partitions without features": (table("a\tb", partition=True), "features must be a column .* but is null; set it"),
    "partitions and a category": (
        table("a\tb\tN", features=3, partition=True, category=3),
        "category must be null if partition is true, but is 3; leave",
    ),
    "no column for the target": (table("a\tN", features=2), "target .* '.*t.tsv', which has no further column"),
    "an empty field": (table("a\tb", "a\t "), "a target, but column 2 of line 2 of .* is empty"),
    "an empty field below a header": (table("source\ttarget", "a\t"), "column 2 of line 2 of '.*' is empty"),
    "a header only": (table("source\ttarget"), "rows below its header"),
    "blank rows only": (table(",", " , ", name="t.csv"), "t.csv' must hold text, but is empty"),
    "an unclosed quotation mark": (
        table('"a\nb",c', 'd,"e', "f,g", name="t.csv"),
        "comma-separated values, but the row of line 3 .* unexpected end of data",
    ),
    "a text after a quotation mark": (
        table("a;b", '"c" d;e', "f;g", name="t.csv"),
        "semicolon-separated values, but the row of line 2 .* ';' expected after '\"'",
    ),
    "a vocab_size without symbols": (table("a\tb", vocab_size=4), "vocab_size .* 4, .* but is 4"),
    "no data": (lambda p: sentiment([]), r"train must name data, but is empty; try \[FILE\]"),
    "an empty name of a split": (labels(*REVIEWS, test=""), "test must name a file, but is empty"),
    "an empty name among files": (lambda p: sentiment([str(p), ""]), "train must"),
    "a folder among files": (lambda p: sentiment([str(p), str(p)]), "must be a file, but is a folder"),
    "files without labels": (
        lambda p: sentiment([write_lines(p / "a", ["x"]), write_lines(p / "b", ["y"])]),
        "several files must end with their labels, NAME.LABEL",
    ),
    "a folder without labels": (content("folder/a.txt", "text", sentiment), "folders named by their labels"),
    "a label's folder in another's": (label_folders("", "pos"), "side by side, but has 'neg' and 'pos/pos'"),
    "unknown split names": (label_folders("train", "dev"), "inside train, val, test, but has some in 'dev/neg'"),
    "no archive": (content("a.tar.gz", "no archive", sentiment), "archive of texts, but cannot be read as one"),
    "a damaged archive": (damaged_archive, "archive of texts, but cannot be read as one: it is damaged"),
    "three columns of labeled texts": (labels("1\tpos\tgood"), "two columns, label and text, .* has 3; set label"),
    "a line without a text": (labels("neg\tbad", "", "pos\t "), "a text, but column 2 of line 3 of '.*t.tsv' is empty"),
    "a text without a word": (labels(*REVIEWS, *["pos\t<br />"] * 9), r"a token, but '<br />' \(pos\) does not"),
    "swapped columns": (labels(*SWAPPED), "labels must repeat, .* column 1 is the label"),
    "one label": (labels(*(f"pos\tgreat {n}" for n in range(50))), "at least two labels, but there is pos"),
    "an unseen label": (
        lambda p: labels(*REVIEWS, test=[write_lines(p / "x.tsv", ["meh\tso so"])])(p),
        r"training split \(neg, pos\), but that of 'so so' in test is 'meh'",
    ),
    "no test fraction": (labels(*REVIEWS, test_fraction=0), "test_fraction .* above 0 .* but is 0; try 0.1"),
    "an empty split": (labels(*REVIEWS[:4], test_fraction=0.01), "test_fraction .* of 4 it takes 0; try"),
    "fractions that leave no training texts": (
        labels(*["pos\ta", "neg\tg"] * 9, val_fraction=0.4, test_fraction=0.4),
        "test_fraction must leave texts on both sides, but of 18 it takes 9",
    ),
}


@pytest.mark.parametrize(("make", "message"), BAD_DATA.values(), ids=BAD_DATA)
def test_unusable_data_are_refused_in_one_line(make, message, tmp_path):
    with pytest.raises(UserError, match=message) as error:
        make(tmp_path)
    assert "\n" not in str(error.value)


BAD_FILES = {
    "an empty file": (b"", "must hold text, but is empty"),
    "blank lines only": (b"\n \n", "must hold text, but is empty"),
    "a byte order mark only": (codecs.BOM_UTF8, "must hold text, but is empty"),
    "a binary file": (b"abc\0def\n", "must hold text, but is binary"),
    "another encoding": ("größe\n".encode("latin-1"), "encoding utf-8, but its line 1 is not"),
    "UTF-32": ("größe\n".encode("utf-32"), "byte order mark of utf-32; set encoding"),
    "UTF-16": ("größe\n".encode("utf-16"), "byte order mark of utf-16; set encoding"),
}


@pytest.mark.parametrize(
    "read", [Text, Sentiment, *(lambda path, cls=cls: cls(path, path) for cls in (ParallelText, Tsv))]
)
@pytest.mark.parametrize(("content", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_file_that_is_not_text_is_named_in_the_error(content, message, read, tmp_path):
    path = tmp_path / "data.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"'{path}'.* {message}") as error:
        read(str(path))
    assert "\n" not in str(error.value)
