"""Errors, messages on standard error, and signals that end a command."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType
from typing import Any

from tqdm import tqdm

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
"""Signals that end a command, before which training saves.

SIGHUP, of a closed terminal, and SIGUSR1, of SLURM before a time limit, are not defined on Windows.
"""

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters except tab and line feed."""


class UserError(ValueError):
    """Error that the user can fix. The message names the setting, the rule, the value and a fix, in one line."""


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the closest known name, or all of them."""
    names = list(names)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; available: {', '.join(names)}"


class Interrupted(BaseException):
    """Exception that ends a command after a signal.

    Args:
        signum: the number of the signal.
        saved_step: the step of the last checkpoint that this process has saved; None if it has saved none.
        ckpt_path: the value of --ckpt_path that resumes the run; None if there is no checkpoint yet.
    """

    def __init__(self, signum: int, saved_step: int | None = None, ckpt_path: str | None = None) -> None:
        super().__init__(signum)
        self.signum, self.saved_step, self.ckpt_path = signum, saved_step, ckpt_path


def rank_zero_print(text: str) -> None:
    """Print a message to standard error on the process of rank 0 only."""
    if is_main_process() and _rank("RANK", "SLURM_PROCID") == 0:
        with suppress(OSError):  # the terminal was closed
            tqdm.write(f"lightning-tfm: {escape_controls(text)}", file=sys.stderr)  # above progress bars


def escape_controls(text: str) -> str:
    r"""Replace the control characters of a text, except tab and line feed, by escapes such as \x1b.

    Otherwise, a text from data or the name of a file could move the cursor of a terminal, or change its settings.
    """
    return CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def shell_quote(text: str) -> str:
    """Quote an argument for bash like `shlex.quote`, escaping non-printable characters.

    In a pasted command, a tab would act as a key press, and a line feed would end the line.
    """
    if text.isprintable():
        return shlex.quote(text)
    escapes = {"\\": "\\\\", "'": "\\'", "\t": "\\t", "\n": "\\n"}

    def escaped(character: str) -> str:
        if character in escapes or character.isprintable():
            return escapes.get(character, character)
        return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))

    return f"$'{''.join(map(escaped, text))}'"


def handle_signals(handler: Callable[[int, FrameType | None], Any]) -> dict[int, Any]:
    """Install a handler for SIGNALS, except those inherited as ignored, for example under `nohup`.

    Args:
        handler: the handler.

    Returns:
        The previous handlers, by signal.
    """
    handled = [signum for signum in SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
    return {signum: signal.signal(signum, handler) for signum in handled}


def ignore_signals() -> None:
    """Ignore SIGNALS from now on.

    Note:
        With SIG_IGN, Python would print a traceback for a signal that has just arrived.
    """
    for signum in SIGNALS:
        signal.signal(signum, lambda signum, frame: None)


def is_main_process() -> bool:
    """Return whether this is the main process of its machine."""
    return _rank("LOCAL_RANK", "SLURM_LOCALID") == 0


def _rank(*variables: str) -> int:
    """Return the value of the first environment variable that is set; 0 if none is."""
    return int(next((os.environ[name] for name in variables if name in os.environ), 0))


def requeue() -> None:
    """Requeue the SLURM job of this process, if it has rank 0 in one."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None or _rank("RANK", "SLURM_PROCID"):
        return
    command = ["scontrol", "requeue", job]
    try:
        subprocess.run(command, check=True, capture_output=True, encoding="utf-8", errors="replace")
        print(f"lightning-tfm: requeued job {job}", file=sys.stderr)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip()
        print(f"lightning-tfm: error: {' '.join(command)} failed: {reason}", file=sys.stderr)


def interrupt(signum: int, frame: FrameType | None) -> None:
    """Handle a signal by raising Interrupted, unless an earlier one is ending the command."""
    if interruption(sys.exc_info()[1]) is None:
        raise Interrupted(signum)


def interruption(error: BaseException | None) -> Interrupted | None:
    """Return the first `Interrupted` in the context chain of an error; None if there is none."""
    while error is not None and not isinstance(error, Interrupted):
        error = error.__context__
    return error
