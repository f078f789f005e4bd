"""Simulation of a power loss: a run records what it synchronizes to disk, from which crashed folders are built."""

import os
import pickle
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from support.processes import CONTEXT, child_main

ENVIRONMENT = {"WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}


class Call(NamedTuple):
    """Call of fsync, or the end of the run.

    Attributes:
        files: the inode of each file before the call, by path.
        inode: the inode that is synchronized; None at the end.
        content: the bytes and the modification time of a file; of a folder, for each name, the inode and whether it is
            a folder, too.
    """

    files: dict[Path, int]
    inode: int | None
    content: Any


def record(*arguments: object, cwd: Path) -> list[Call]:
    """Run `lightning-tfm` in a child process, and return its calls of fsync."""
    log = cwd / "calls_of_fsync"
    process = CONTEXT.Process(target=_record, args=(log, list(map(str, arguments)), cwd))
    process.start()
    process.join(300)
    assert process.exitcode == 0, (cwd / "stderr").read_text()
    with log.open("rb") as file:
        return pickle.load(file)


def crashes(calls: list[Call], root: int, names_kept: bool) -> Iterator[dict[Path, tuple[bytes, int]]]:
    """Yield the files after a power loss before each call of fsync and at the end.

    Args:
        calls: the calls.
        root: the inode of the folder in which the run was started.
        names_kept: whether the names of all files are kept, but a file has the content of the last call for it, and is
            empty if there was none. Otherwise, all changes since the last call for a file or folder are lost.
    """
    disk: dict[int | None, Any] = {}
    for call in calls:
        files = call.files if names_kept else dict(_durable(root, disk, Path()))
        yield {path: disk.get(inode, (b"", 0)) for path, inode in files.items()}
        disk[call.inode] = call.content


def restore(files: dict[Path, tuple[bytes, int]], cwd: Path) -> None:
    """Write files, see `crashes`, to a new folder."""
    cwd.mkdir()
    for path, (data, modified) in files.items():
        (cwd / path).parent.mkdir(parents=True, exist_ok=True)
        (cwd / path).write_bytes(data)
        os.utime(cwd / path, ns=(modified, modified))


def _record(log, arguments, cwd):
    fsync, calls, opened = os.fsync, [], []

    def recorded(descriptor):
        files = _files(cwd)
        fsync(descriptor)
        opened.append(os.dup(descriptor))  # so that no other file gets its inode
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            with os.scandir(descriptor) as entries:
                content = {entry.name: (entry.inode(), entry.is_dir()) for entry in entries}
        else:
            content = Path(f"/proc/self/fd/{descriptor}").read_bytes(), status.st_mtime_ns
        calls.append(Call(files, status.st_ino, content))

    os.fsync = recorded
    try:
        child_main(arguments, cwd, cwd / "stdout", cwd / "stderr", None, False, None, False, ENVIRONMENT)
    finally:
        with log.open("wb") as file:
            pickle.dump([*calls, Call(_files(cwd), None, None)], file)


def _files(cwd):
    return {path.relative_to(cwd): path.stat().st_ino for path in (cwd / "runs").rglob("*") if path.is_file()}


def _durable(inode, disk, path):
    """Yield the path and the inode of each file whose name is on the disk."""
    for name, (other, is_folder) in disk.get(inode, {}).items():
        if is_folder:
            yield from _durable(other, disk, path / name)
        else:
            yield path / name, other
