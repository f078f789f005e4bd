"""Reading of columns of tables; error messages name the file and the line."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from operator import contains
from pathlib import Path

from lightning_tfm.data.text_files import read_text, split_lines
from lightning_tfm.errors import UserError, rank_zero_print
from lightning_tfm.system.memory import in_parts

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

NAMES_BY_SETTING = {"source": SOURCE_NAMES, "text": SOURCE_NAMES, "target": TARGET_NAMES, "label": TARGET_NAMES}
"""Column names by which a header selects the column of a setting that is null."""

WORD, NUMBER = re.compile(r"[A-Za-z][\w-]*", re.ASCII), re.compile(r"[-+]?\d+([.,]\d+)?")
"""Fields that may name a column, and fields that do not."""

SAMPLE = 1_000
"""Number of rows with which the first line of a table is compared."""

Row = tuple[int, Sequence[str]]
"""Line number, from 1, and fields of a row."""


@dataclass(frozen=True)
class TableReader:
    """Reader of columns of the tables of a dataset, one for each split.

    Fields are separated by tabs or, if the name of a table ends with .csv, by commas or semicolons.

    Args:
        columns: the number, from 1, or the name of each column, by the setting that selects it; None for the further
            column with a name in NAMES_BY_SETTING, or else the next one.
        encoding: the encoding of the tables, by Python's name.
        header: whether the first line names the columns; None to infer it: it does if a column is selected by name, if
            an earlier table has the same header, or if `names_columns` is true.
        hint: what to do if there are more columns and neither settings nor names select them, for the error message;
            None to ignore further columns.
        inferred: the headers of earlier tables that were inferred.
    """

    columns: Mapping[str, int | str | None]
    encoding: str = "utf-8"
    header: bool | None = None
    hint: str | None = None
    inferred: list[list[str]] = field(default_factory=list)

    def read(self, path: Path) -> Iterator[list[list[str]]]:
        """Yield the texts of each column, without white space around them, a part at a time.

        Rows without a text are skipped and counted.

        Raises:
            UserError: if `read_text` fails, the rows have different numbers of fields, there are no rows below the
                header, a column does not exist, or a field is empty.
        """
        rows = _read_rows(path, self.encoding)
        sample = [*islice(rows, 1 + SAMPLE)]
        if not sample:
            raise UserError(f"the file {str(path)!r} must hold text, but is empty")
        names = [name.strip() for name in sample[0][1]]
        header = self._has_header(path, names, [fields for _, fields in sample[1:]])
        if header and len(sample) == 1:
            raise UserError(f"{str(path)!r} must hold rows below its header, but holds none")
        selected = self._select(path, names, header)

        def empty(place: int, line: int) -> UserError:
            return UserError(
                f"each line must hold a {[*self.columns][place]}, but column {selected[place]} of line {line} of "
                f"{str(path)!r} is empty; delete the line"
            )

        yield from strip_columns(chain(sample[header:], rows), [number - 1 for number in selected], empty)

    def _has_header(self, path: Path, names: list[str], rows: list[Sequence[str]]) -> bool:
        if self.header is not None:
            return self.header
        if any(isinstance(column, str) for column in self.columns.values()):
            return True
        if names not in self.inferred and not names_columns(names, rows):
            return False
        self.inferred.append(names)
        rank_zero_print(
            f"the first line of {path} names its columns: {_listed(names)}; set header to false if it is data"
        )
        return True

    def _select(self, path: Path, names: list[str], header: bool) -> list[int]:
        """Return the number of each column, from 1."""
        numbers: dict[str, int] = {}
        for setting, column in self.columns.items():
            number, rule = column, f"from 1 to {len(names)}"
            if isinstance(column, str):
                number = names.index(column) + 1 if header and column in names else 0
                rule = f"which has {_listed(names) if header else 'no header'}"
            if isinstance(number, int):
                if not 1 <= number <= len(names):
                    raise UserError(f"{setting} must be a column of {str(path)!r}, {rule}, but is {column!r}")
                numbers[setting] = number
        free = [number for number in range(1, len(names) + 1) if number not in numbers.values()]
        for setting in self.columns if header else ():
            named = [number for number in free if names[number - 1].lower() in NAMES_BY_SETTING.get(setting, ())]
            if setting not in numbers and len(named) == 1:
                numbers[setting] = named[0]
                free.remove(named[0])
        if self.hint is not None and len(numbers) < len(self.columns) < len(names):
            raise UserError(
                f"{str(path)!r} must hold two columns, {' and '.join(self.columns)}, or name them in its first line, "
                f"but has {len(names)}; {self.hint}"
            )
        if without := [setting for setting in self.columns if setting not in numbers][len(free) :]:
            raise UserError(
                f"{without[0]} must be a column of {str(path)!r}, which has no further column; set it to a number"
            )
        selected = [numbers.get(setting) or free.pop(0) for setting in self.columns]
        if free and None in self.columns.values():
            used = ", ".join(f"{setting} ({number})" for setting, number in zip(self.columns, selected, strict=True))
            rank_zero_print(f"of the {len(names)} columns of {path}, only {used} are used")
        return selected


def _listed(names: Iterable[str]) -> str:
    """Return the names of columns for a message, without the rest of names longer than 40 characters."""
    return ", ".join(f"{name:.40}" for name in names)


def names_columns(first: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Return whether the first row of a table names its columns.

    It does if all its fields are known names, or one names a source and another a target. With ten or more other rows,
    it also does if none of its fields recurs in its column, and it is unlike the other rows: if only its field of a
    column is not a number, and has no digit, or all its fields are words, and some column below contains no single
    word, or only a few distinct texts (at most a tenth of the rows).
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
    """Yield the texts of each of the given columns (from 0), without white space around them, a part at a time.

    The function `empty` returns the error for an empty text, given its place in `columns` and its line number.
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
    """Yield rows except those without a text, or those with an empty one if `kept` is `all`, and print their number.

    `noun` names the skipped rows in the message.
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
    """Yield the rows of a table, including its header, see `TableReader`."""
    text = read_text(path, encoding)
    if path.name.lower().removesuffix(".gz").endswith(".csv"):
        # Rows may end with a carriage return although quoted fields contain line feeds.
        text = text.replace("\r", "\n")
        separator = _csv_separator(text)
        rows = _parse_csv(path, text, separator)
    else:
        separator, rows = "\t", enumerate(map(str.split, split_lines(text), repeat("\t")), start=1)
    name, num_columns = SEPARATORS[separator], 0
    for part in in_parts(skip_blank(rows, f"blank lines of {path}")):
        widths = [len(fields) for _, fields in part]
        num_columns = num_columns or widths[0]
        if num_columns < 2 or widths.count(num_columns) < len(widths):
            wanted, hint = f"a {name} between its fields", ""
            if num_columns > 1:
                wanted = f"as many {name}s as the first ({num_columns - 1})"
            elif separator == "\t":
                hint = "; replace its separators by tabs, or rename a file of commas or semicolons to .csv"
            row = next(row for row, width in enumerate(widths) if num_columns < 2 or width != num_columns)
            line, fields = part[row]
            shown = f"{widths[row] - 1}: {separator.join(fields)!r:.60}"
            raise UserError(f"{str(path)!r} must have {wanted} in each line, but line {line} has {shown}{hint}")
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
