"""Lock of the folder of a run, which a process holds while it writes there."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout

from lightning_tfm.errors import UserError


def lock_run(folder: Path) -> FileLock:
    """Lock the folder of a run until the returned lock is deleted or the process ends, even by SIGKILL.

    Raises:
        UserError: if another process holds the lock.

    Note:
        On a file system without locks, the folder is not locked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = _run_lock(folder)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(f"the run {str(folder)!r} is locked by another process; stop that process first") from None
    except PermissionError:
        raise  # the folder belongs to another user
    except OSError:
        pass  # the file system has no locks
    return lock


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the lock of a run.

    Args:
        folder: the folder of the run.
    """
    if not (folder / ".lock").exists():
        return False
    lock = _run_lock(folder)
    try:
        lock.acquire()
    except Timeout:
        return True
    except OSError:  # no permission, or a file system without locks
        return False
    lock.release()
    return False


def _run_lock(folder: Path) -> FileLock:
    return FileLock(folder / ".lock", blocking=False, fallback_to_soft=False)
