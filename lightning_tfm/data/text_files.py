"""Reading of text files in any encoding; error messages name the file and the line."""

from __future__ import annotations

import codecs
import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePath

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


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """Read and normalize the text of a file, which is decompressed if its name ends with .gz.

    Raises:
        UserError: if the file cannot be read, is empty or binary, or has a different encoding.
    """
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix.lower() == ".gz" else data
    except gzip.BadGzipFile as error:
        raise UserError(f"the file {str(path)!r} cannot be read: {error}; rename it without .gz") from None
    except (EOFError, zlib.error) as error:
        raise UserError(f"the file {str(path)!r} cannot be read: {error}; copy it again") from None
    except OSError as error:
        raise UserError(f"the file {str(path)!r} cannot be read: {error.strerror or error}") from None
    return decode_text(data, str(path), encoding)


def decode_text(data: bytes, name: str, encoding: str) -> str:
    """Decode and normalize the content of the file with a name, see `read_text`."""
    try:
        codec = codecs.lookup(encoding).name
        other = next((utf for mark, utf in BOMS.items() if data.startswith(mark)), None)
        if other and not codec.startswith(other):
            raise UserError(
                f"the file {name!r} must be in encoding {encoding}, but starts with the byte order mark of {other}; "
                "set encoding to that"
            )
        is_binary = b"\0" in data and not codec.startswith(("utf-16", "utf-32"))
        text = "" if is_binary else data.decode(encoding)
    except UnicodeError as error:
        line = data[: getattr(error, "start", 0)].count(b"\n") + 1
        raise UserError(
            f"the file {name!r} must be in encoding {encoding}, but its line {line} is not; set its encoding, such as "
            "latin-1"
        ) from None
    except LookupError:  # also for codecs such as "zip"
        raise UserError(
            f"encoding must be a text encoding known to Python, but is {encoding!r}; try utf-8 or latin-1"
        ) from None
    if is_binary or "\0" in text:
        raise UserError(f"the file {name!r} must hold text, but is binary: it holds zero bytes; save it as text")
    text = normalize_text(text.removeprefix("\ufeff").replace("\r\n", "\n"))
    if "\n" not in text:
        text = text.replace("\r", "\n")  # of the classic Mac OS
    if not text or text.isspace():
        raise UserError(f"the file {name!r} must hold text, but is empty")
    return text


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
