"""Atomic writing of files, relative paths, and reading of logged metrics."""

from __future__ import annotations

import csv
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a temporary file that atomically replaces `path` once it is written and synchronized to disk.

    Args:
        path: the path of the file to write; its folder is created if necessary.
        mode: the permissions of the file, before the umask.

    Yields:
        The temporary file.

    Note:
        The temporary file is removed after an error. Its name is always `path` with the suffix .part, so killed
        processes leave at most one file.
    """
    beside = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(beside, "wb", opener=partial(os.open, mode=mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    synchronize(path.parent)  # with the renaming


def synchronize(folder: Path) -> None:
    """Synchronize the names of the files in a folder to disk, where the system allows it."""
    with suppress(OSError):  # folders cannot be opened on Windows
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def relative(path: str | Path) -> str:
    """Return a path relative to the working directory, or an absolute path if it is on a different Windows drive."""
    try:
        return os.path.relpath(path)
    except ValueError:
        return os.path.abspath(path)


def delete_folder(folder: Path) -> None:
    """Delete a folder, and its parent if empty."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # it holds other folders
        folder.parent.rmdir()


def read_metrics(path: Path) -> Iterator[dict[str, str]]:
    """Yield the complete rows of a `metrics.csv`; the last row of a running or killed process may be incomplete.

    Args:
        path: the path of the file.
    """
    *lines, _ = path.read_text(encoding="utf-8").split("\n")
    yield from csv.DictReader(lines)


def write_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a text file atomically in UTF-8, see `atomic_write`."""
    with atomic_write(path, mode) as file:
        file.write(text.encode())
