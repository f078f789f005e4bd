"""Zip archives whose bytes depend on their files only, and the reading of such archives from strangers."""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from zipfile import ZIP_STORED, ZipFile, ZipInfo

from lightning_tfm.errors import CONTROLS, UserError
from lightning_tfm.system.files import atomic_write

PERMISSIONS = 0o100644 << 16
"""Attributes of all entries: a regular file, which its owner can write."""


def write_archive(folder: Path, path: Path) -> None:
    """Write the files of a folder to an archive, atomically.

    Entries are sorted, and have the same date and permissions. They are not compressed, since compressed bytes depend
    on the version of zlib.
    """
    files = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
    with atomic_write(path) as target, ZipFile(target, "w", ZIP_STORED) as archive:
        for name, file in sorted(files.items()):
            entry = ZipInfo(name)  # of 1980-01-01
            entry.create_system, entry.external_attr, entry.file_size = 3, PERMISSIONS, file.stat().st_size
            with file.open("rb") as content, archive.open(entry, "w") as copy:
                shutil.copyfileobj(content, copy)


def read_archive(path: Path, folder: Path, setting: str) -> None:
    """Extract an archive to a new folder.

    Args:
        path: the archive.
        folder: the folder, which is created.
        setting: the setting that names the archive, for error messages.

    Raises:
        UserError: if the file is not an archive, an entry could be written outside the folder, replace another or grow
            when it is read, or `write_archive` would write other bytes.
    """
    wanted = f"{setting} must be an archive as `pack` writes it"
    again = "get it again from its author"
    try:
        with ZipFile(path) as archive:
            entries = archive.infolist()
            problem = _problem(entries, path.stat().st_size)
            for entry in [] if problem else entries:
                target = folder / entry.filename
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(entry) as content, target.open("xb") as copy:
                    shutil.copyfileobj(content, copy)
    except FileNotFoundError:
        raise UserError(f"{setting} must be an archive, but there is no file {str(path)!r}; check its name") from None
    except Exception as error:  # the content may be anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{wanted}, but {str(path)!r} cannot be read: {reason}; {again}") from None
    if problem:
        raise UserError(f"{wanted}, but {str(path)!r} {problem}; do not trust it")
    with TemporaryDirectory(dir=folder.parent) as temporary:
        write_archive(folder, copied := Path(temporary) / "copy.zip")
        if not filecmp.cmp(path, copied, shallow=False):
            raise UserError(f"{wanted}, but {str(path)!r} has other bytes outside of its files; {again}")


def _problem(entries: Sequence[ZipInfo], size: int) -> str:
    """Return why the entries of an archive of a size in bytes must not be extracted; empty if they may."""
    if not entries:
        return "is empty"
    seen: set[str] = set()
    for entry in entries:
        name, path = entry.filename, PurePosixPath(entry.filename)
        is_outside = path.is_absolute() or ".." in path.parts or path.as_posix() != name or "." in path.parts
        if is_outside or "\\" in name or ":" in name or CONTROLS.search(name):
            return f"holds {name!r}, which is not the name of a file in a folder"
        if name.casefold() in seen:
            return f"holds {name!r} twice"
        seen.add(name.casefold())
        if entry.external_attr != PERMISSIONS:
            return f"holds {name!r}, which is a link, a folder or a program"
        if entry.compress_type != ZIP_STORED or entry.compress_size != entry.file_size:
            return f"holds {name!r}, which is compressed"
    if sum(entry.file_size for entry in entries) > size:
        return "would be larger when it is read"
    return ""
