"""The lock of a run."""

import errno
import fcntl
import os
import signal
import time
from pathlib import Path

import pytest
from filelock import FileLock

from lightning_tfm.errors import UserError
from lightning_tfm.runs.record import Run
from support.processes import CONTEXT


def hold_lock(folder, ready):
    """Lock a folder, fork a child that outlives this process, and wait to be killed."""
    lock = Run(folder).lock()
    child = os.fork()
    if child:
        ready.send((child, lock.is_locked))
    time.sleep(60)


def test_a_killed_process_releases_its_lock_even_if_a_child_survives(tmp_path):
    ready, sender = CONTEXT.Pipe()
    process = CONTEXT.Process(target=hold_lock, args=(tmp_path, sender))
    process.start()
    child, is_locked = ready.recv()
    assert is_locked
    try:
        with pytest.raises(UserError, match="is locked by another process; stop that process first"):
            Run(tmp_path).lock()
        process.kill()
        process.join()
        assert Run(tmp_path).lock().is_locked
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_lock_held_for_a_moment_is_awaited(monkeypatch, tmp_path):
    other = FileLock(tmp_path / ".lock")
    for wait in (Run(tmp_path).lock, Run(tmp_path).wait):
        other.acquire()
        monkeypatch.setattr(time, "sleep", lambda seconds: other.release())
        wait()
        assert not other.is_locked


@pytest.mark.parametrize("reason", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_tolerated(reason, monkeypatch, tmp_path):
    def refuse(file, operation):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert not Run(tmp_path).lock().is_locked
    assert not Run(tmp_path).lock().is_locked


@pytest.mark.parametrize("make", [lambda path: path.symlink_to(path.parent / "elsewhere"), Path.mkdir])
def test_a_lock_that_is_not_a_file_is_refused(make, tmp_path):
    make(tmp_path / ".lock")
    with pytest.raises(UserError, match=r"/\.lock' must be a file, to be locked, but is a link or a folder; delete"):
        Run(tmp_path).lock()


@pytest.mark.parametrize("reason", [errno.EACCES, errno.ENOSPC, errno.EROFS, errno.EMFILE])
def test_a_lock_that_cannot_be_created_raises_the_error(reason, monkeypatch, tmp_path):
    def refuse(*args):
        raise OSError(reason, os.strerror(reason), str(tmp_path / ".lock"))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match=os.strerror(reason)):
        Run(tmp_path).lock()
