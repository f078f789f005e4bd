"""Files of text: encodings, line ends and paths."""

from __future__ import annotations

import codecs
import gzip
import itertools

import pytest

from datamodules import ParallelText, Sentiment, Text, Tsv
from lightning_tfm.data import text_files
from lightning_tfm.data.text_files import read_lines, read_text, split_lines
from lightning_tfm.errors import UserError
from support.corpora import reviews, text_file, texts_in, write_label_folders, write_lines

BAD_FILES = {
    "an empty file": (b"", "must hold text, but is empty"),
    "blank lines only": (b"\n \n", "must hold text, but is empty"),
    "a binary file": (b"abc\0def\n", "must hold text, but is binary"),
    "another encoding": ("größe\n".encode("latin-1"), "must be in encoding utf-8, but its line 1 is not"),
    "UTF-32": ("größe\n".encode("utf-32"), "starts with the byte order mark of utf-32; set encoding to that"),
    "UTF-16": ("größe\n".encode("utf-16"), "starts with the byte order mark of utf-16; set encoding to that"),
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


@pytest.mark.parametrize("characters", [1, 2, 5, 1000])
def test_lines_do_not_depend_on_the_number_of_characters_split_at_a_time(characters, monkeypatch):
    monkeypatch.setattr(text_files, "CHARACTERS", characters)
    for text in map("".join, itertools.product("a\n", repeat=6)):
        assert [*split_lines(text)] == text.removesuffix("\n").split("\n")
