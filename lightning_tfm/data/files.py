"""Reading of text files and tables in any encoding; error messages name the file and the line."""

from __future__ import annotations

import codecs
import csv
import gzip
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path, PurePath
from typing import NamedTuple

from lightning_tfm.data.download import MIRROR, Download, download
from lightning_tfm.errors import UserError, rank_zero_print
from lightning_tfm.memory import in_parts
from lightning_tfm.tokenization import normalize_text

BOMS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",  # after UTF-32, whose mark starts with the same bytes
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Encodings by the byte order mark at the start of a file."""


def resolve_path(name: str, known: dict[str, Download]) -> Path:
    """Return the path of a user's file, in the current folder or the mirror, or of a downloadable file.

    Args:
        name: the path of the file, or the name of a downloadable file.
        known: the downloadable files, by name.

    Raises:
        UserError: if the file does not exist or cannot be downloaded.
    """
    if Path(name).is_file():
        return Path(name)
    if Path(name).is_dir():
        raise UserError(f"{name!r} must be a file, but is a folder")
    if name in known:
        return download(name, known[name])
    if (mirror := os.environ.get(MIRROR)) and Path(mirror, name).is_file():
        return Path(mirror, name)
    others = f", nor is it one of {', '.join(known)}, which can be downloaded" if known else ""
    raise UserError(f"there is no file {name!r}{others}; {MIRROR} may name the folder that holds it")


def is_hidden(path: PurePath) -> bool:
    """Return whether a path relative to a data folder is hidden, such as .git/config or .DS_Store."""
    return any(part.startswith(".") for part in path.parts)


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """Read and normalize the text of a file, which is decompressed if its name ends with .gz.

    Args:
        path: the path of the file.
        encoding: the encoding of the file, by Python's name.

    Raises:
        UserError: if the file cannot be read, is empty or binary, or has a different encoding.
    """
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"the file {str(path)!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return decode_text(data, str(path), encoding)


def decode_text(data: bytes, name: str, encoding: str) -> str:
    """Decode and normalize the content of a file.

    Args:
        data: the content.
        name: the name of the file, for error messages.
        encoding: the encoding, by Python's name.

    Raises:
        UserError: if the content is empty or binary, or has a different encoding.
    """
    try:
        known = codecs.lookup(encoding).name
        other = next((encoding_of_mark for mark, encoding_of_mark in BOMS.items() if data.startswith(mark)), None)
        if other and not known.startswith(other):
            raise UserError(
                f"the file {name!r} must be in encoding {encoding}, but starts with the byte order mark of {other}; "
                "set encoding to that"
            )
        is_binary = b"\0" in data and not known.startswith(("utf-16", "utf-32"))
        text = "" if is_binary else data.decode(encoding)
    except UnicodeError as error:
        line = data[: getattr(error, "start", 0)].count(b"\n") + 1
        raise UserError(
            f"the file {name!r} must be in encoding {encoding}, but its line {line} is not; set its encoding"
        ) from None
    except LookupError:  # also for codecs from bytes to bytes, such as "zip"
        raise UserError(
            f"encoding must be a text encoding known to Python, but is {encoding!r}; try utf-8 or latin-1"
        ) from None
    if is_binary or "\0" in text:
        raise UserError(f"the file {name!r} must hold text, but is binary: it holds zero bytes")
    text = normalize_text(text.removeprefix("\ufeff").replace("\r\n", "\n"))
    if not text or text.isspace():
        raise UserError(f"the file {name!r} must hold text, but is empty")
    return text


CHARACTERS = 1_000_000
"""Minimum number of characters that are split into lines at a time, except at the end of a text."""

SOURCE_NAMES = ("source", "src", "input", "text", "review", "sentence")
TARGET_NAMES = ("target", "tgt", "trg", "output", "translation", "label", "class", "category", "sentiment")
"""Column names by which the first line of a table is recognized as a header."""


class Table(NamedTuple):
    """Table of a file, whose rows are parsed while they are read, so that large tables fit into memory.

    Attributes:
        rows: the fields of each row, which can be read once.
        columns: the names of the columns; None if the table has no header.
        num_columns: the number of columns, at least 2.
    """

    rows: Iterator[list[str]]
    columns: list[str] | None
    num_columns: int

    def ordered(self, first: Sequence[str], second: Sequence[str]) -> Iterator[list[str]]:
        """Return the rows, with the two columns swapped if the header names them in reverse order.

        Args:
            first: possible names of the first column.
            second: possible names of the second column.
        """
        names = [name.lower() for name in self.columns or ()]
        swapped = len(names) == 2 and names[0] in second and names[1] in first
        return (row[::-1] for row in self.rows) if swapped else self.rows

    @property
    def first(self) -> int:
        """Return the line number of the first row, counted from 1, including a header."""
        return 1 if self.columns is None else 2


def read_table(path: Path, encoding: str = "utf-8", header: bool | None = None) -> Table:
    """Read a table, whose fields are separated by tabs, or by commas if its name ends with .csv.

    Args:
        path: the path of the table.
        encoding: the encoding of the table, by Python's name.
        header: whether the first line names the columns; by default, if all its fields are in SOURCE_NAMES or
            TARGET_NAMES, or "features".

    Raises:
        UserError: if `read_text` fails, or there are no rows below the header; also while the rows are read, if a line
            has no separator, or fewer or more than the first line.
    """
    rows = _read_rows(path, encoding)
    first = next(rows)
    names = [field.strip() for field in first]
    known = (*SOURCE_NAMES, *TARGET_NAMES, "features")
    if header is None and (header := all(name.lower() in known for name in names)):
        rank_zero_print(f"the first line of {path} names its columns: {', '.join(names)}")
    if not header:
        return Table(chain([first], rows), None, len(names))
    if (second := next(rows, None)) is None:
        raise UserError(f"{str(path)!r} must hold rows below its header, but holds none")
    return Table(chain([second], rows), names, len(names))


def strip_columns(
    rows: Iterable[Sequence[str]], columns: Sequence[int], empty: Callable[[int, int], UserError]
) -> Iterator[list[list[str]]]:
    """Yield the texts of each of the given columns, without white space around them, a part at a time.

    Args:
        rows: the fields of each row.
        columns: the numbers of the columns, from 0.
        empty: function that returns the error for an empty text, given its place in `columns` and its row, from 0.
    """
    before = 0
    for part in in_parts(rows):
        fields = [*zip(*part, strict=True)]  # by column
        stripped = [[*map(str.strip, fields[column])] for column in columns]
        for place, texts in enumerate(stripped):
            if not all(texts):
                raise empty(place, before + texts.index(""))
        before += len(part)
        yield stripped


def _read_rows(path: Path, encoding: str) -> Iterator[list[str]]:
    """Yield the fields of each row of a table, including its header, see `read_table`."""
    lines, num_columns = read_lines(path, encoding), 0
    if path.name.removesuffix(".gz").endswith(".csv"):
        separator, rows = "comma", _parse_csv(path, lines)
    else:
        separator, rows = "tab", map(str.split, lines, repeat("\t"))
    before = 0
    for part in in_parts(rows):
        widths = [*map(len, part)]
        num_columns = num_columns or widths[0]
        if num_columns < 2 or widths.count(num_columns) < len(widths):
            wanted = f"a {separator} between its fields"
            if num_columns > 1:
                wanted = f"as many {separator}s as the first ({num_columns - 1})"
            row = next(row for row, width in enumerate(widths) if num_columns < 2 or width != num_columns)
            raise UserError(
                f"{str(path)!r} must have {wanted} in each line, but line {before + row + 1} has "
                f"{max(0, widths[row] - 1)}"
            )
        before += len(part)
        yield from part


def _parse_csv(path: Path, lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield the fields of each row of comma-separated values, with white space inside fields reduced to spaces."""
    try:
        for row in csv.reader((f"{line}\n" for line in lines), strict=True):
            yield [re.sub(r"[\r\n\t]+", " ", field) for field in row]
    except csv.Error as error:
        raise UserError(f"{str(path)!r} must hold comma-separated values, but does not: {error}") from None


def read_lines(path: Path, encoding: str = "utf-8") -> Iterator[str]:
    """Return an iterator over the lines of a file, separated only by line feeds; see `read_text`."""
    return split_lines(read_text(path, encoding))


def split_lines(text: str) -> Iterator[str]:
    """Yield the lines of a text, separated only by line feeds.

    Args:
        text: the text, whose last line may end with a line feed.

    Note:
        A list of all lines takes several times the memory of the text.
    """
    begin, last = 0, len(text) - text.endswith("\n")
    while begin <= last:
        end = text.find("\n", begin + CHARACTERS, last)
        end = last if end < 0 else end
        yield from text[begin:end].split("\n")
        begin = end + 1
