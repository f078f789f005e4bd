"""Files of text: encodings, line ends and paths."""

from __future__ import annotations

import codecs
import gzip
import itertools

import pytest

from datamodules import ParallelText, Sentiment, Text, Tsv
from lightning_tfm.data import text_files
from lightning_tfm.data.text_files import read_text, split_lines
from lightning_tfm.errors import UserError
from support.corpora import reviews, text_file, texts_in, write_label_folders, write_table
from support.data import split_texts


@pytest.mark.parametrize(
    ("content", "fix"),
    [(gzip.compress(b"text\n" * 100, mtime=0)[:-9], "copy it again"), (b"no gzip", "rename it without .gz")],
    ids=["truncated", "no gzip"],
)
def test_a_damaged_gzip_file_is_named_in_the_error(content, fix, tmp_path):
    path = tmp_path / "text.gz"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"text.gz' cannot be read: .*; {fix}"):
        read_text(path)


def test_texts_are_decoded_by_their_encoding(tmp_path):
    path = tmp_path / "text"
    path.write_text("größe", encoding="utf-16")
    assert read_text(path, "U16") == read_text(path, "utf_16") == "größe"
    for encoding in ("utf-8", "utf-16", "utf-32"):
        path.write_text("a\0b", encoding=encoding)
        with pytest.raises(UserError, match="is binary: it holds zero bytes; save it as text"):
            read_text(path, encoding)
    path.write_text("größe", encoding="latin-1")
    for encoding in ("utf-9", "hex", "zip", "rot13"):  # the last three are not text encodings
        with pytest.raises(UserError, match=f"encoding .* known to Python, but is '{encoding}'; try"):
            read_text(path, encoding)
    with pytest.raises(UserError, match="encoding idna, but its line 1 is not"):
        read_text(path, "idna")


def test_lines_end_at_line_feeds_or_at_carriage_returns_if_there_is_no_line_feed(tmp_path):
    path = tmp_path / "text"
    for content, lines in (
        (codecs.BOM_UTF8 + "eins\r\nzwei\x85\u2028drei\x0cvier\n".encode(), ["eins", "zwei\x85\u2028drei\x0cvier"]),
        (b"a\rb\n", ["a\rb"]),
        (b"a\rb\r", ["a", "b"]),
    ):
        path.write_bytes(content)
        assert [*split_lines(read_text(path))] == lines
    for name, content, pairs in (
        ("words.tsv", b"ab\tAB\rc\tC\r", [("ab", "AB"), ("c", "C")]),
        ("words.csv", b'"a\nb",AB\rc,"C\rD"\r', [("a b", "AB"), ("c", "C D")]),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        assert [pair[:2] for pair in Tsv(str(path), str(path)).pairs("train")] == pairs


def test_paths_are_expanded(tmp_path, monkeypatch):
    table = write_table(tmp_path / "t.tsv", reviews())
    write_label_folders(tmp_path / "folder", reviews())
    text_file(tmp_path, name="texts/text.txt")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TEXTS", "texts")
    for name in (table, "~/t.tsv", "$HOME/t.tsv", "~/folder", ["~/t.tsv"]):
        assert texts_in(Sentiment(name)) == sorted(reviews())
    assert len(Tsv("~/t.tsv", "${HOME}/t.tsv").pairs("val")) == len(reviews())
    assert len(ParallelText("~/t.tsv", ["~/t.tsv"]).pairs("val")) == len(reviews())
    assert split_texts(Text("~/$TEXTS")) == split_texts(Text("~/texts/text.txt"))


@pytest.mark.parametrize("characters", [1, 2, 5, 1000])
def test_lines_do_not_depend_on_the_number_of_characters_split_at_a_time(characters, monkeypatch):
    monkeypatch.setattr(text_files, "CHARACTERS", characters)
    for text in map("".join, itertools.product("a\n", repeat=6)):
        assert [*split_lines(text)] == text.removesuffix("\n").split("\n")
