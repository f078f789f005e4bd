"""Locks of files, which a process holds while it writes to a run or an output."""

from __future__ import annotations

import errno
from pathlib import Path

from filelock import FileLock, Timeout

from lightning_tfm.errors import UserError

RETRY_SECONDS = 1.0
"""Seconds for which `lock_file` retries, since `is_locked` holds the lock for a moment."""

INTERVAL = 0.2
"""Seconds between two checks whether another process has ended."""

WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of locking a file on a file system without locks."""


def lock_file(path: Path, name: str) -> FileLock:
    """Lock a file, which is created, until the returned lock is deleted or the process ends, even by SIGKILL.

    Args:
        path: the path of the file.
        name: the name in error messages of what is locked.

    Raises:
        UserError: if another process holds the lock, or the path is that of a link or a folder.

    Note:
        On a file system without locks, the file is not locked.
    """
    lock = FileLock(path, blocking=False, fallback_to_soft=False)
    try:
        lock.acquire(RETRY_SECONDS, blocking=True)
    except Timeout:
        raise UserError(f"{name} is locked by another process; stop that process first") from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise UserError(
                f"{str(path)!r} must be a file, to be locked, but is a link or a folder; delete it"
            ) from None
        if error.errno not in WITHOUT_LOCKS:
            raise
    return lock


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a file, such as that of a run."""
    if not path.exists():
        return False
    lock = FileLock(path, blocking=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        return True
    except OSError:  # no permission, or a file system without locks
        return False
    lock.release()
    return False
