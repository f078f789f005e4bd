"""Atomic writing of checkpoints with a checksum.

A checkpoint is a zip archive written by `torch.save` whose comment is its SHA-256 checksum: `torch.load` reads it as
usual, and `unzip -z` shows the checksum.
"""

from __future__ import annotations

import hashlib
import os
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

import torch

from lightning_tfm.errors import UserError
from lightning_tfm.system.files import atomic_write

COMMENT_LENGTH = 2
"""Size in bytes of the comment length, the last field of a zip archive by torch, which has no comment."""


def write(content: dict[str, Any], path: str | Path) -> None:
    """Write a checkpoint atomically: to a temporary file in the same folder, which is synced to disk and renamed.

    After a crash, `path` is either unchanged or complete. The content is streamed, without a copy in memory.

    Raises:
        UserError: if the checkpoint cannot be written.
    """
    path, handled = Path(path), sys.exc_info()[1]
    try:
        with atomic_write(path) as file:
            torch.save(content, file)
            file.write(_comment(_checksum(file, file.tell() - COMMENT_LENGTH)))
    except BaseException as error:
        # torch fails to close an unfinished file, and raises an error of its own in place of the first.
        cause = error
        while cause.__context__ is not None and cause.__context__ is not handled:
            cause = cause.__context__
        if not isinstance(cause, OSError):
            raise cause from None
        raise UserError(
            f"the checkpoint {str(path)!r} cannot be written: {cause.strerror}; "
            + ("the one before it is kept" if path.exists() else "nothing was overwritten")
            + "; free disk space, or choose a writable folder, then resume with --ckpt_path last"
        ) from None


def _checksum(file: BinaryIO, size: int) -> str:
    """Return the SHA-256 of the first `size` bytes of a file, and leave its position after them."""
    checksum = hashlib.sha256()
    file.seek(0)
    while size and (chunk := file.read(min(size, 1 << 20))):
        checksum.update(chunk)
        size -= len(chunk)
    return checksum.hexdigest()


def _comment(checksum: str) -> bytes:
    """Return the end of an archive with a hexadecimal SHA-256: the comment length and the comment."""
    comment = f"sha256:{checksum}".encode()
    return struct.pack("<H", len(comment)) + comment


def verify_checksum(path: str | Path) -> bool:
    """Return whether a file was written by `write` and has not changed since; raise OSError if it cannot be read."""
    with Path(path).open("rb") as file:
        size = file.seek(0, os.SEEK_END) - len(_comment(hashlib.sha256().hexdigest()))
        return size >= 0 and _comment(_checksum(file, size)) == file.read()
