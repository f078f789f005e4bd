"""Errors, notes on standard error, and signals that end a command."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

from tqdm import tqdm

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))
"""Signals that end a command; training saves first. Windows has no SIGHUP, which a closed terminal sends."""


class UserError(ValueError):
    """Error that the user can fix. The message names the setting, the rule, the value and a fix, in one line."""


class Interrupted(BaseException):
    """Exception that ends a command after a signal.

    Args:
        signum: the number of the signal.
        saved_step: the step of the checkpoint that was saved after the signal; None if none was saved.
        ckpt_path: the value of --ckpt_path that resumes the run; None if it has no checkpoint yet.
    """

    def __init__(self, signum: int, saved_step: int | None = None, ckpt_path: str | None = None) -> None:
        super().__init__(signum)
        self.signum, self.saved_step, self.ckpt_path = signum, saved_step, ckpt_path


def rank_zero_print(text: str) -> None:
    """Print a line on standard error, in the first process only."""
    if is_main_process() and os.environ.get("RANK", "0") == "0":
        with suppress(OSError):  # the terminal was closed
            tqdm.write(f"lightning-tfm: {text}", file=sys.stderr)  # above the bars


def shell_quote(text: str) -> str:
    """Quote an argument for bash like `shlex.quote`, escaping non-printable characters.

    When a command is pasted, a tab would act as a key press, and a line feed would break the line in two.
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
    """Install a handler for SIGNALS, except those that the process inherited as ignored, for example under `nohup`.

    Args:
        handler: the handler.

    Returns:
        The previous handlers, by signal.
    """
    handled = [signum for signum in SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
    return {signum: signal.signal(signum, handler) for signum in handled}


def ignore_signals() -> None:
    """Ignore SIGNALS from now on."""
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def is_main_process() -> bool:
    """Return whether this is the main process of the machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal by raising Interrupted."""
    raise Interrupted(signum)
