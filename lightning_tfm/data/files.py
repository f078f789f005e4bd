"""Text files as lines, whatever their encoding: what cannot be read as said is refused by name and line."""

from __future__ import annotations

import codecs
import gzip
import os
import unicodedata
import zlib
from pathlib import Path, PurePath

from lightning_tfm.data.download import MIRROR, Download, download
from lightning_tfm.errors import UserError

BEGINNINGS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",  # with which that of utf-32 begins
    codecs.BOM_UTF16_BE: "utf-16",
}
"""The marks that files begin with."""


def located(name: str, known: dict[str, Download]) -> Path:
    """A file of the user, in the current folder or that of the mirror, or one of those that can be downloaded.

    Raises:
        UserError: if it is neither.
    """
    if Path(name).is_file():
        return Path(name)
    if Path(name).is_dir():
        raise UserError(f"{name!r} must be a file here, but is a folder")
    if name in known:
        return download(name, known[name])
    if (mirror := os.environ.get(MIRROR)) and Path(mirror, name).is_file():
        return Path(mirror, name)
    others = f", nor is it one of {', '.join(known)}, which can be downloaded" if known else ""
    raise UserError(f"there is no file {name!r}{others}; {MIRROR} may name the folder that holds it")


def is_hidden(path: PurePath) -> bool:
    """Whether a path inside a folder is of what programs keep for themselves, as .git/ and .DS_Store."""
    return any(part.startswith(".") for part in path.parts)


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """Return a file's text, normalized; one whose name ends with .gz is unpacked.

    Raises:
        UserError: if it is empty, binary or of another encoding.
    """
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"the file {str(path)!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return decoded(data, str(path), encoding)


def normalized(text: str) -> str:
    """Return the text in Unicode's normalization form NFC.

    Files, the names of labels and a user's questions all pass through it, so that a letter and its accent are encoded
    alike however they were typed.
    """
    return unicodedata.normalize("NFC", text)


def decoded(data: bytes, name: str, encoding: str) -> str:
    """Return the normalized text of a file's content; `name` is the file's, for messages.

    Raises:
        UserError: as `read_text` does.
    """
    try:
        known = codecs.lookup(encoding).name
        begun = next((other for mark, other in BEGINNINGS.items() if data.startswith(mark)), None)
        if begun and not known.startswith(begun):
            raise UserError(f"the file {name!r} must be in encoding {encoding}, but begins as {begun} does; name that")
        if not known.startswith(("utf-16", "utf-32")) and b"\0" in data:
            raise UserError(f"the file {name!r} must hold text, but is binary: it holds zero bytes")
        text = data.decode(encoding)
    except UnicodeError as error:
        line = data[: getattr(error, "start", 0)].count(b"\n") + 1
        raise UserError(
            f"the file {name!r} must be in encoding {encoding}, but its line {line} is not; name its encoding"
        ) from None
    except LookupError:  # also of what packs bytes, as "zip"
        raise UserError(
            f"encoding must be one of texts that Python knows, but is {encoding!r}; try utf-8 or latin-1"
        ) from None
    text = normalized(text.removeprefix("\ufeff").replace("\r\n", "\n"))
    if not text.strip():
        raise UserError(f"the file {name!r} must hold text, but is empty")
    return text


def read_table(path: Path, encoding: str = "utf-8") -> list[list[str]]:
    """The fields of a file's lines, which tabs set apart.

    Raises:
        UserError: as `read_text`, and if the lines have no tab, or not equally many.
    """
    rows = [line.split("\t") for line in read_lines(path, encoding)]
    for number, row in enumerate(rows, start=1):
        if len(row) != len(rows[0]) or len(row) == 1:
            wanted = (
                "a tab between its fields" if len(rows[0]) == 1 else f"as many tabs as the first ({len(rows[0]) - 1})"
            )
            raise UserError(f"{str(path)!r} must have {wanted} in each line, but line {number} has {len(row) - 1}")
    return rows


def read_lines(path: Path, encoding: str = "utf-8") -> list[str]:
    """A file's lines, as `read_text` reads it. What separates lines is the line feed alone."""
    return read_text(path, encoding).removesuffix("\n").split("\n")
