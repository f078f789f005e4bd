"""Text files as lines, whatever their encoding: what cannot be read as said is refused by name and line."""

from __future__ import annotations

import codecs
import gzip
import zlib
from pathlib import Path

from lightning_tfm.data.download import Download, download
from lightning_tfm.errors import UserError


def located(name: str, known: dict[str, Download]) -> Path:
    """A file of the user, or one of those that can be downloaded.

    Raises:
        UserError: if it is neither.
    """
    if Path(name).is_file():
        return Path(name)
    if name in known:
        return download(name, known[name])
    raise UserError(
        f"there is no file {name!r}" + (f", nor is it one of {', '.join(known)}, which can be downloaded" if known else "")
    )


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """A file's text; one whose name ends with .gz is unpacked.

    Raises:
        UserError: if it is empty, binary or of another encoding.
    """
    try:
        codecs.lookup(encoding)
    except LookupError:
        raise UserError(f"encoding must be one that Python knows, but is {encoding!r}; try utf-8 or latin-1") from None
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"the file {str(path)!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not data.strip():
        raise UserError(f"the file {str(path)!r} must hold text, but is empty")
    if b"\0" in data and not encoding.lower().replace("_", "-").startswith(("utf-16", "utf-32")):
        raise UserError(f"the file {str(path)!r} must hold text, but is binary: it holds zero bytes")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(
            f"the file {str(path)!r} must be in encoding {encoding}, but its line {line} is not; name its encoding"
        ) from None
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def read_lines(path: Path, encoding: str = "utf-8") -> list[str]:
    """A file's lines, as `read_text` reads it. What separates lines is the line feed alone."""
    return read_text(path, encoding).removesuffix("\n").split("\n")
