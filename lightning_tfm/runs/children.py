"""Runs in child processes: `lightning-tfm fit` with its output in a log, one or several at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from lightning_tfm.runs.lock import INTERVAL
from lightning_tfm.system.files import make_folder


class ChildRun:
    """A `lightning-tfm fit` in a child process, which starts in the current folder.

    Note:
        `main` sets PYTHONSAFEPATH, so neither this process nor those that it starts import modules from that folder.

    Args:
        arguments: the arguments of `fit`.
        log: the file to which the output of the process is appended; its folder is created.
        pass_fds: file descriptors that the process inherits, except on Windows.

    Attributes:
        log: the log.
        process: the process.
    """

    def __init__(self, arguments: Sequence[str], log: Path, pass_fds: Sequence[int] = ()) -> None:
        self.log = log
        make_folder(log.parent)
        with log.open("ab") as output:
            self._begin = output.tell()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lightning_tfm", "fit", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # In its own session, the run is not reached by Ctrl-C: it receives a single SIGTERM from `terminate`.
                start_new_session=True,
                pass_fds=() if os.name == "nt" else pass_fds,
            )

    @property
    def is_running(self) -> bool:
        """Return whether the process is running."""
        return self.process.poll() is None

    @property
    def last_line(self) -> str:
        """Return the last line that the process has written, which is the error message of a failed run."""
        lines = self.log.read_bytes()[self._begin :].decode(errors="replace").split("\n")
        line = next((line for line in reversed(lines) if line.strip()), "it was killed")
        return line.removeprefix("lightning-tfm: error: ")

    def terminate(self) -> None:
        """Let a running process save a checkpoint and exit; on Windows, which has no SIGTERM, kill it."""
        if self.is_running:
            self.process.terminate()


def run_children(
    starts: Iterable[Callable[[], ChildRun]], jobs: int = 1, watch: Callable[[list[ChildRun]], None] = lambda _: None
) -> list[ChildRun]:
    """Start runs, at most `jobs` at a time, wait until all have ended, and return them in the order of their start.

    If an exception is raised, for example by a signal, the running processes are terminated, and have ended when the
    function raises it.

    Args:
        starts: functions that start a run each, called in this order.
        jobs: the number of runs at a time.
        watch: a function that is called several times per second, and at the end, with all runs started so far. It may
            terminate a run.
    """
    waiting, children = iter(starts), list[ChildRun]()
    try:
        while True:
            while sum(child.is_running for child in children) < jobs and (start := next(waiting, None)):
                children.append(start())
            running = any(child.is_running for child in children)
            watch(children)
            if not running:
                return children
            time.sleep(INTERVAL)
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.process.wait()
