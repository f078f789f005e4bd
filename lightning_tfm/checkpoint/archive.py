"""Atomic writing of checkpoints with a checksum.

A checkpoint is a zip archive written by `torch.save` whose comment is its SHA-256 checksum: `torch.load` reads it as
usual, and `unzip -z` shows the checksum.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from lightning_tfm.errors import UserError, interruption
from lightning_tfm.system.files import atomic_write

COMMENT_LENGTH = 2
"""Size in bytes of the comment length, the last field of a zip archive by torch, which has no comment."""


def write(content: dict[str, Any], path: str | Path) -> None:
    """Write a checkpoint atomically: to a temporary file in the same folder, which is synced to disk and renamed.

    After a crash, `path` is either unchanged or complete. The content is streamed, without a copy in memory.

    Raises:
        UserError: if the checkpoint cannot be written.
    """
    path = Path(path)
    writer = None
    try:
        with atomic_write(path) as file:
            writer = _ChecksumWriter(file)
            torch.save(content, cast(IO[bytes], writer))
            writer.close()
    except BaseException as error:
        failure = writer.failure if writer and writer.failure else error  # torch hides the error of the file
        failure = interruption(failure) or failure  # torch cannot close an unfinished file
        if not isinstance(failure, OSError):
            raise failure from None
        raise UserError(
            f"the checkpoint {str(path)!r} cannot be written: {failure.strerror}; "
            + ("the one before it is kept" if path.exists() else "nothing was overwritten")
            + "; free disk space, or choose a writable folder, then resume with --ckpt_path last"
        ) from None


class _ChecksumWriter:
    """File-like object that computes the SHA-256 of its data, and buffers the last bytes, which `close` replaces."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.sum = hashlib.sha256()
        self.kept = b""
        self.failure: BaseException | None = None

    def write(self, data: bytes) -> int:
        end = self.kept + bytes(data[-COMMENT_LENGTH:])
        # Most of the data is written without a copy.
        parts = (
            (self.kept, memoryview(data)[:-COMMENT_LENGTH]) if len(data) > COMMENT_LENGTH else (end[:-COMMENT_LENGTH],)
        )
        try:
            for part in parts:
                self.sum.update(part)
                self.file.write(part)
        except BaseException as error:
            self.failure = error
            raise
        self.kept = end[-COMMENT_LENGTH:]
        return len(data)

    def flush(self) -> None:
        """Do nothing; torch.save requires this method."""

    def close(self) -> None:
        """Write the end of the archive with the checksum as comment."""
        self.file.write(_comment(self.sum.hexdigest()))


def _comment(digest: str) -> bytes:
    """Return the end of an archive with a hexadecimal SHA-256: the comment length and the comment."""
    comment = f"sha256:{digest}".encode()
    return struct.pack("<H", len(comment)) + comment


def verify_checksum(path: str | Path) -> bool:
    """Return whether a file was written by `write` and has not changed since; raise OSError if it cannot be read."""
    length = len(_comment(hashlib.sha256().hexdigest()))
    with Path(path).open("rb") as file:
        size = file.seek(0, os.SEEK_END) - length
        if size < 0:
            return False
        file.seek(0)
        total = hashlib.sha256()
        while size and (chunk := file.read(min(size, 1 << 20))):
            total.update(chunk)
            size -= len(chunk)
        return size == 0 and file.read() == _comment(total.hexdigest())
