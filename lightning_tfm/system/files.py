"""Durable writing of files, and relative paths."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def atomic_write(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a temporary file that atomically replaces `path` once it is written and synchronized to disk.

    Args:
        path: the path of the file to write; its folder is created if necessary.
        mode: the permissions of the file, before the umask.

    Yields:
        The temporary file, which can also be read.

    Note:
        The temporary file is removed after an error. Its name is always `path` with the suffix .part, so killed
        processes leave at most one file.
    """
    beside = path.with_name(path.name + ".part")
    make_folder(path.parent)
    try:
        with naming_file(path), open(beside, "w+b", opener=partial(os.open, mode=mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        replace_file(beside, path)
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Add the path of a file to errors of writing it, such as that of a full disk, which lack it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def replace_file(source: Path, target: Path) -> None:
    """Rename a file to replace another one in the same folder, and synchronize the renaming to disk."""
    source.replace(target)
    synchronize(target.parent)


def make_folder(folder: Path) -> bool:
    """Create a folder and its parents, and synchronize their names to disk; return False if the folder exists."""
    if folder.is_dir():
        return False
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True)
    except FileExistsError:  # created by another process
        return False
    for path in created:
        synchronize(path.parent)
    return True


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


def write_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a text file atomically in UTF-8, see `atomic_write`."""
    with atomic_write(path, mode) as file:
        file.write(text.encode())


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically, see `atomic_write`; values without a JSON type are written as strings."""
    write_text(path, json.dumps(content, ensure_ascii=False, indent=2, default=str) + "\n")


def copy_file(source: str | Path, target: str | Path) -> None:
    """Copy a file with its permissions, atomically, see `atomic_write`."""
    with Path(source).open("rb") as content, atomic_write(Path(target), os.stat(source).st_mode & 0o777) as file:
        shutil.copyfileobj(content, file)
