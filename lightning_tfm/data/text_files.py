"""Reading of text files and tables in any encoding; error messages name the file and the line."""

from __future__ import annotations

import codecs
import csv
import gzip
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, repeat
from operator import contains
from pathlib import Path, PurePath

from lightning_tfm.data.download import MIRROR, Download, download
from lightning_tfm.errors import UserError, rank_zero_print
from lightning_tfm.system.memory import in_parts
from lightning_tfm.tokenization import normalize_text

BOMS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",  # after UTF-32, whose mark starts with the same bytes
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Encodings by the byte order mark at the start of a file."""


def expand_path(name: str) -> Path:
    """Return the path of a user's file or folder, which may begin with ~ and contain variables such as $HOME.

    A shell expands neither inside a list, such as [~/train.de, ~/train.en], nor in a YAML file.
    """
    return Path(os.path.expanduser(os.path.expandvars(name)))


def resolve_path(name: str, known: dict[str, Download]) -> Path:
    """Return the path of a user's file, in the current folder or the mirror, or of a downloadable file.

    Args:
        name: the path of the file, or the name of a downloadable file.
        known: the downloadable files, by name.

    Raises:
        UserError: if the file does not exist or cannot be downloaded.
    """
    path = expand_path(name)
    if path.is_file():
        return path
    if path.is_dir():
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
        data = gzip.decompress(data) if path.suffix.lower() == ".gz" else data
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
    if "\n" not in text:
        text = text.replace("\r", "\n")  # the line end of the classic Mac OS, and of Excel's CSV for it
    if not text or text.isspace():
        raise UserError(f"the file {name!r} must hold text, but is empty")
    return text


CHARACTERS = 1_000_000
"""Minimum number of characters that are split into lines at a time, except at the end of a text."""

SOURCE_NAMES = (
    *("source", "src", "input", "text", "review", "sentence", "comment", "tweet", "body", "content", "message"),
    *("document", "question", "prompt", "utterance"),
    *("word", "lemma", "spelling", "grapheme", "graphemes", "orthography"),
)
TARGET_NAMES = (
    *("target", "tgt", "trg", "output", "translation", "label", "class", "category", "sentiment", "polarity", "rating"),
    *("stars", "score", "topic", "intent", "emotion", "answer", "response", "form", "inflection", "inflected"),
    *("pronunciation", "transcription", "phoneme", "phonemes", "ipa"),
)
OTHER_NAMES = ("features", "feature", "msd", "tags", "id", "index")
"""Column names by which the first line of a table is recognized as a header."""

KNOWN = {"source": SOURCE_NAMES, "text": SOURCE_NAMES, "target": TARGET_NAMES, "label": TARGET_NAMES}
"""Column names by which a header selects the column of a setting that is null."""

WORD, NUMBER = re.compile(r"[A-Za-z][\w-]*", re.ASCII), re.compile(r"[-+]?\d+([.,]\d+)?")
"""Fields that may name a column, and fields that do not."""

SAMPLE = 1_000
"""Number of rows with which the first line of a table is compared."""

Row = tuple[int, Sequence[str]]
"""Line number, from 1, and fields of a row."""


def read_columns(
    path: Path,
    encoding: str,
    columns: Mapping[str, int | str | None],
    header: bool | None = None,
    instead: str | None = None,
    headers: list[list[str]] | None = None,
) -> Iterator[list[list[str]]]:
    """Yield the texts of each of the given columns of a table, without white space around them, a part at a time.

    Fields are separated by tabs or, if the name of the table ends with .csv, by commas or semicolons. Rows without a
    text are skipped and counted.

    Args:
        path: the path of the table.
        encoding: the encoding of the table, by Python's name.
        columns: the number, from 1, or the name of each column, by the setting that selects it; None for the further
            column with a name in KNOWN, or else the next one.
        header: whether the first line names the columns; by default, if a column is selected by name, or
            `names_columns` is true.
        instead: what to do if there are more columns and neither settings nor names select them, for the error message;
            None to ignore further columns.
        headers: the headers inferred in the other splits, to which that of this table is appended; an equal first line
            is a header, too.

    Raises:
        UserError: if `read_text` fails, the rows have different numbers of fields, there are no rows below the header,
            a column does not exist, or a field is empty.
    """
    rows = _read_rows(path, encoding)
    sample = [*islice(rows, 1 + SAMPLE)]
    if not sample:
        raise UserError(f"the file {str(path)!r} must hold text, but is empty")
    names = [field.strip() for field in sample[0][1]]
    if header is None and not (header := any(isinstance(column, str) for column in columns.values())):
        header = names in (headers or ()) or names_columns(names, [fields for _, fields in sample[1:]])
        if header:
            if headers is not None:
                headers.append(names)
            listed = ", ".join(names)
            rank_zero_print(f"the first line of {path} names its columns: {listed}; set header to false if it is data")
    if header and len(sample) == 1:
        raise UserError(f"{str(path)!r} must hold rows below its header, but holds none")

    numbers: dict[str, int] = {}
    for setting, column in columns.items():
        if column is None:
            continue
        if isinstance(column, str):
            if not header or column not in names:
                available = f"has {', '.join(names)}" if header else "has no header"
                raise UserError(f"{setting} must be a column of {str(path)!r}, which {available}, but is {column!r}")
            column = names.index(column) + 1
        if not 1 <= column <= len(names):
            raise UserError(f"{setting} must be a column of {str(path)!r}, from 1 to {len(names)}, but is {column}")
        numbers[setting] = column
    free = [number for number in range(1, len(names) + 1) if number not in numbers.values()]
    for setting in columns if header else ():
        known = [number for number in free if names[number - 1].lower() in KNOWN.get(setting, ())]
        if setting not in numbers and len(known) == 1:
            numbers[setting] = known[0]
            free.remove(known[0])
    if instead is not None and len(numbers) < len(columns) < len(names):
        raise UserError(
            f"{str(path)!r} must hold two columns, {' and '.join(columns)}, or name them in its first line, but has "
            f"{len(names)}; {instead}"
        )
    if without := [setting for setting in columns if setting not in numbers][len(free) :]:
        raise UserError(
            f"{without[0]} must be a column of {str(path)!r}, which has no further column; set it to a number"
        )
    selected = [numbers.get(setting) or free.pop(0) for setting in columns]

    def empty(place: int, line: int) -> UserError:
        return UserError(
            f"each line must hold a {[*columns][place]}, but column {selected[place]} of line {line} of "
            f"{str(path)!r} is empty; delete the line"
        )

    yield from strip_columns(chain(sample[header:], rows), [number - 1 for number in selected], empty)


def names_columns(first: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Return whether the first row of a table names its columns.

    It does if all its fields are known names, or one names a source and another a target. With ten or more other rows,
    it also does if none of its fields recurs in its column, and it is unlike the other rows: if only its field of a
    column is not a number, and has no digit, or all its fields are words, and some column below contains no single
    word, or only a few distinct texts (at most a tenth of the rows).

    Args:
        first: the fields of the first row.
        rows: the fields of the other rows, or of the first of them.
    """
    names = {name.lower() for name in first}
    if len(names) == len(first) and (
        names <= {*SOURCE_NAMES, *TARGET_NAMES, *OTHER_NAMES}
        or not (names.isdisjoint(SOURCE_NAMES) or names.isdisjoint(TARGET_NAMES))
    ):
        return True
    columns = [{*map(str.strip, texts)} for texts in zip(*rows, strict=True)]
    if len(rows) < 10 or any(map(contains, columns, first)):
        return False
    are_words = all(map(WORD.fullmatch, first))
    return any(
        (not re.search(r"\d", name) and all(map(NUMBER.fullmatch, texts)))
        or (are_words and (not any(map(WORD.fullmatch, texts)) or 10 * len(texts) <= len(rows)))
        for name, texts in zip(first, columns, strict=True)
    )


def strip_columns(
    rows: Iterable[Row], columns: Sequence[int], empty: Callable[[int, int], UserError]
) -> Iterator[list[list[str]]]:
    """Yield the texts of each of the given columns, without white space around them, a part at a time.

    Args:
        rows: the rows.
        columns: the numbers of the columns, from 0.
        empty: function that returns the error for an empty text, given its place in `columns` and its line number.
    """
    for part in in_parts(rows):
        lines, rows_of_fields = zip(*part, strict=True)
        fields = [*zip(*rows_of_fields, strict=True)]  # by column
        stripped = [[*map(str.strip, fields[column])] for column in columns]
        for place, texts in enumerate(stripped):
            if not all(texts):
                raise empty(place, lines[texts.index("")])
        yield stripped


def skip_blank(rows: Iterable[Row], noun: str, kept: Callable[[Iterable[str]], bool] = any) -> Iterator[Row]:
    """Yield rows except those without a text, whose number is printed.

    Args:
        rows: the rows.
        noun: what is skipped, for the message.
        kept: `any` to keep the rows with at least one text, `all` to keep only those without an empty one.
    """
    skipped = []
    for row in rows:
        if kept(map(str.strip, row[1])):
            yield row
        else:
            skipped.append(row[0])
    if skipped:
        rank_zero_print(f"{len(skipped):,} {noun} are skipped, the first in line {skipped[0]:,}")


def _read_rows(path: Path, encoding: str) -> Iterator[Row]:
    """Yield the rows of a table, including its header, see `read_columns`."""
    text = read_text(path, encoding)
    if path.name.lower().removesuffix(".gz").endswith(".csv"):
        text = text.replace("\r", "\n")  # rows may end with it although quoted fields contain line feeds
        separator = _csv_separator(text)
        rows = _parse_csv(path, text, separator)
    else:
        separator, rows = "\t", enumerate(map(str.split, split_lines(text), repeat("\t")), start=1)
    name, num_columns = SEPARATORS[separator], 0
    for part in in_parts(skip_blank(rows, f"blank lines of {path}")):
        widths = [len(fields) for _, fields in part]
        num_columns = num_columns or widths[0]
        if num_columns < 2 or widths.count(num_columns) < len(widths):
            wanted = f"a {name} between its fields"
            if num_columns > 1:
                wanted = f"as many {name}s as the first ({num_columns - 1})"
            row = next(row for row, width in enumerate(widths) if num_columns < 2 or width != num_columns)
            raise UserError(
                f"{str(path)!r} must have {wanted} in each line, but line {part[row][0]} has {widths[row] - 1}"
            )
        yield from part


SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab"}
"""Separators of fields, and their names."""


def _csv_separator(text: str) -> str:
    """Return the separator by which the most of the first rows have the same number of fields, of at least two.

    If several have, it is the one by which the most also have if commas between digits do not count.
    """

    def agreement(separator: str, comma: str) -> int:
        lines = (re.sub(r"(?<=\d),(?=\d)", comma, line) for line in _csv_lines(text))
        widths = Counter(map(len, islice(csv.reader(lines, delimiter=separator), SAMPLE)))
        return max((number for width, number in widths.items() if width > 1), default=0)

    return max(SEPARATORS, key=lambda separator: [agreement(separator, comma) for comma in ",."])


def _csv_lines(text: str) -> Iterator[str]:
    """Yield the lines of a text for `csv.reader`, whose limit of the length of a field is lifted."""
    csv.field_size_limit(2**31 - 1)  # the maximum on Windows
    return (f"{line}\n" for line in split_lines(text))


def _parse_csv(path: Path, text: str, separator: str) -> Iterator[Row]:
    """Yield the rows of separated values, with white space inside fields reduced to spaces."""
    rows, line = csv.reader(_csv_lines(text), delimiter=separator, strict=True), 1
    try:
        for row in rows:
            yield line, [re.sub(r"[\r\n\t]+", " ", field) for field in row]
            line = rows.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{str(path)!r} must hold {SEPARATORS[separator]}-separated values, but the row of line {line} does not: "
            f"{error}; write a quotation mark inside quotation marks twice"
        ) from None


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
