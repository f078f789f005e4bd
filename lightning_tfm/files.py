"""Files that are what they were or what they should be, whatever happens while they are written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a file beside `path` and, once it is written and on the disk, puts it in its place.

    It has one name, so that a killed process leaves one such file at most; after an error it is removed.
    """
    beside = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # the new name, too; Windows cannot open a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def relative(path: str | Path) -> str:
    """Return a path relative to the working directory, or absolute if it is on another drive of Windows."""
    try:
        return os.path.relpath(path)
    except ValueError:
        return os.path.abspath(path)


def write_text(path: Path, text: str) -> None:
    """Writes a text file whole or not at all."""
    with replacing(path) as file:
        file.write(text.encode())
