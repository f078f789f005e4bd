"""Reading of text files in any encoding; error messages name the file and the line."""

from __future__ import annotations

import codecs
import gzip
import importlib
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from lightning_tfm.data.download import MIRROR, Download, download
from lightning_tfm.errors import UserError
from lightning_tfm.tokenization import normalize_text

BOMS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",  # after UTF-32, which starts alike
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Encodings by the byte order mark at the start of a file."""


def expand_path(name: str, setting: str = "path") -> Path:
    """Return the path of a user's file or folder, which may begin with ~ and contain variables such as $HOME.

    A shell expands neither inside a list, such as [~/train.de, ~/train.en], nor in a YAML file.

    Args:
        name: the name of the file or folder.
        setting: the setting that names it, for error messages.

    Raises:
        UserError: if the name is empty, which would otherwise be that of the current folder.
    """
    if not name:
        raise UserError(f"{setting} must name a file, but is empty; name yours, as with --data.{setting} FILE")
    return Path(os.path.expanduser(os.path.expandvars(name)))


def resolve_path(name: str, downloads: dict[str, Download], setting: str = "path") -> Path:
    """Return the path of a user's file, here or in the mirror, or of a downloadable file.

    Args:
        name: the name of the file.
        downloads: the downloadable files, by name.
        setting: the setting of the data module that names the file, for error messages.

    Raises:
        UserError: if there is none, or if it is a folder.
    """
    path = expand_path(name, setting)
    if path.is_file():
        return path
    if path.is_dir():
        raise UserError(f"{setting} must be a file, but is a folder: {name!r}")
    if name in downloads:
        return download(name, downloads[name])
    if (mirror := os.environ.get(MIRROR)) and Path(mirror, name).is_file():
        return Path(mirror, name)
    others = f", nor is it one of {', '.join(downloads)}, which can be downloaded" if downloads else ""
    raise UserError(
        f"{setting} must be a file, but there is no file {name!r}{others}; set it to yours, as with "
        f"--data.{setting} FILE, or set {MIRROR} to the folder that holds it"
    )


def is_hidden(path: PurePath) -> bool:
    """Return whether a path relative to a data folder is hidden, such as .git/config or .DS_Store."""
    return any(part.startswith(".") for part in path.parts)


def list_files(folder: Path) -> list[Path]:
    """Return the files and links in a folder and its subfolders, except hidden ones, sorted by name."""
    paths = sorted(folder.rglob("*"), key=lambda path: path.parts)  # Path ignores case on Windows
    files = (path for path in paths if path.is_file() or path.is_symlink())
    return [path for path in files if not is_hidden(path.relative_to(folder))]


@contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading, which is decompressed if its name ends with .gz or .zst.

    Raises:
        UserError: if the file cannot be read, or if .zst files cannot be decompressed because a package is missing.
    """
    opener: Callable[[Path], Any] = partial(open, mode="rb")
    damages: tuple[type[Exception], ...] = (EOFError, zlib.error)
    suffix = path.suffix.lower()
    if suffix == ".gz":
        opener = gzip.open
    elif suffix == ".zst":
        zstd = _import_zstd(path)
        opener, damages = zstd.open, (*damages, zstd.ZstdError)
    try:
        with opener(path) as file:
            yield file
    except gzip.BadGzipFile as error:
        raise UserError(f"the file {str(path)!r} cannot be read: {error}; rename it without .gz") from None
    except damages as error:
        raise UserError(f"the file {str(path)!r} cannot be read: {error}; copy it again") from None
    except OSError as error:
        raise UserError(f"the file {str(path)!r} cannot be read: {error.strerror or error}") from None


def _import_zstd(path: Path) -> Any:
    """Import the module that decompresses .zst files, which is in the standard library from Python 3.14 on."""
    try:
        return importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    except ImportError:
        raise UserError(
            f"the file {str(path)!r} needs the package backports.zstd; pip install backports.zstd"
        ) from None


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """Read and normalize the text of a file, which is decompressed if its name ends with .gz or .zst.

    Raises:
        UserError: if the file cannot be read, is empty or binary, or has a different encoding.
    """
    return "".join(read_parts(path, encoding))


def read_parts(path: Path, encoding: str = "utf-8") -> Iterator[str]:
    """Yield the text of a file, see `read_text`, in parts, which limits the memory."""
    with open_file(path) as file:
        yield from _decode_parts(file, str(path), encoding)


def decode_text(data: bytes, name: str, encoding: str) -> str:
    """Decode and normalize the content of the file with a name, see `read_text`."""
    return "".join(_decode_parts(BytesIO(data), name, encoding))


BYTES = 1 << 18
"""Number of bytes that are decoded at a time."""


def _decode_parts(file: BinaryIO, name: str, encoding: str) -> Iterator[str]:
    try:
        "".encode(encoding)  # raises LookupError also for codecs of bytes, such as "zip"
        codec = codecs.lookup(encoding)
    except LookupError:
        raise UserError(
            f"encoding must be a text encoding known to Python, but is {encoding!r}; try utf-8 or latin-1"
        ) from None
    is_wide = codec.name.startswith(("utf-16", "utf-32"))
    decoder = codecs.getincrementaldecoder(encoding)()
    num_lines, is_first, is_blank, has_line_feed = 0, True, True, False
    text = ""
    while True:
        data = file.read(BYTES)
        other = next((utf for mark, utf in BOMS.items() if data.startswith(mark)), None) if is_first else None
        if other and not codec.name.startswith(other):
            raise UserError(
                f"the file {name!r} must be in encoding {encoding}, but starts with the byte order mark of {other}; "
                "set encoding to that"
            )
        is_binary = b"\0" in data and not is_wide
        try:
            decoded = "" if is_binary else decoder.decode(data, final=not data)
        except UnicodeError as error:
            before = getattr(error, "object", b"")[: getattr(error, "start", 0)]
            line = num_lines + before.count(b"\n") + 1
            raise UserError(
                f"the file {name!r} must be in encoding {encoding}, but its line {line} is not; set its encoding, such "
                "as latin-1"
            ) from None
        if is_binary or "\0" in decoded:
            raise UserError(f"the file {name!r} must hold text, but is binary: it holds zero bytes; save it as text")
        num_lines += data.count(b"\n")
        text += decoded.removeprefix("\ufeff") if is_first else decoded
        is_first = False
        has_line_feed = has_line_feed or "\n" in decoded
        if data and "\r" in text and not has_line_feed:
            continue  # perhaps a text of the classic Mac OS, which is not divided
        # No other character is composed with a line feed or a space.
        end = max(text.rfind("\n") + 1, text.rfind(" "), 0) if data else len(text)
        part, text = text[:end], text[end:]
        if part:
            part = normalize_text(part.replace("\r\n", "\n"))
            is_blank = is_blank and part.isspace()
            yield part if has_line_feed else part.replace("\r", "\n")
        if not data:
            break
    if is_blank:
        raise UserError(f"the file {name!r} must hold text, but is empty")


def read_documents(path: Path, encoding: str, column: str) -> Iterator[Iterable[str]]:
    """Yield the documents of a file, each in parts: the rows of JSON lines or of Parquet, or else the whole text.

    Args:
        path: a file; JSON lines are named .jsonl or .ndjson, also before .gz or .zst, and Parquet .parquet.
        encoding: the encoding of a text; JSON is always in UTF-8.
        column: the field of a row that holds its text.

    Raises:
        UserError: see `read_text`, or if a row has no text in this field.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    kind = next((suffix for suffix in reversed(suffixes) if suffix not in (".gz", ".zst")), "")
    if kind == ".parquet":
        rows = _parquet_rows(path, column)
    elif kind in (".jsonl", ".ndjson"):
        rows = _json_rows(path)
    else:
        yield read_parts(path, encoding)
        return
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or not isinstance(row.get(column), str):
            names = ", ".join(row) if isinstance(row, dict) else "no field"
            raise UserError(
                f"column must be a field of text in every row of {str(path)!r}, but is {column!r}, and row {number} "
                f"has {names}; set it to the field of the texts"
            )
        text = row[column].encode(errors="replace").decode()  # of lone surrogates, which JSON can escape
        yield [normalize_text(text.replace("\r\n", "\n"))]


def _json_rows(path: Path) -> Iterator[Any]:
    with open_file(path) as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            try:
                yield json.loads(line)
            except ValueError as error:  # also of the encoding
                raise UserError(f"line {number} of the file {str(path)!r} must be JSON, but is not: {error}") from None


def _parquet_rows(path: Path, column: str) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"the file {str(path)!r} needs the package pyarrow; pip install pyarrow") from None
    with open_file(path) as opened, parquet.ParquetFile(opened) as file:
        names = file.schema_arrow.names
        for batch in file.iter_batches(batch_size=1000, columns=[column] if column in names else names):
            yield from batch.to_pylist()


CHARACTERS = 1_000_000
"""Minimum number of characters that are split into lines at a time, except at the end of a text."""


def split_lines(text: str) -> Iterator[str]:
    """Yield the lines of a text, separated only by line feeds.

    Note:
        A list of all lines takes several times the memory of the text.
    """
    begin, last = 0, len(text) - text.endswith("\n")
    while begin <= last:
        end = text.find("\n", begin + CHARACTERS, last)
        end = last if end < 0 else end
        yield from text[begin:end].split("\n")
        begin = end + 1
