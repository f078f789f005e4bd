"""Entry point of the command line: `lightning-tfm COMMAND ...` or `python -m lightning_tfm COMMAND ...`."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import time
from argparse import ArgumentError, ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from io import TextIOWrapper
from types import ModuleType

from lightning_tfm.commands import SUMMARIES, import_command
from lightning_tfm.config.arguments import check_arguments
from lightning_tfm.config.parsing_errors import format_error, out_of_memory
from lightning_tfm.errors import (
    Interrupted,
    UserError,
    escape_controls,
    fit_terminal,
    format_command,
    ignore_signals,
    is_main_process,
    nearest,
    requeue,
    shell_quote,
)
from lightning_tfm.fit import LIGHTNING_COMMANDS
from lightning_tfm.system.memory import gc_disabled
from lightning_tfm.system.portability import VARIABLES, VariablesError

USAGE = """\
usage: lightning-tfm COMMAND ...

commands:
{commands}

examples:
  lightning-tfm fit date_attention_lstm
  lightning-tfm generate date_attention_lstm "May 3, 1979"

`lightning-tfm COMMAND --help` lists the settings of a command.
`lightning-tfm --version` prints the version.
"""

COMMANDS = LIGHTNING_COMMANDS | SUMMARIES
"""Summaries of all commands, by name."""

DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors of accessing a file or a folder without permission, or of writing to a file system that is read-only."""


def main() -> None:
    """Run a command; on a user error, print one line and exit with status 2."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    command = arguments[0] if arguments else "--help"
    os.environ["PYTHONSAFEPATH"] = "1"  # child processes must not import modules from the current folder
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # otherwise, a lost connection prints the stack of C++
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # unencodable characters must not end a command
            stream.reconfigure(errors="backslashreplace")
    # Import commands lazily: torch and Lightning take seconds to import.
    try:
        check_arguments(command, arguments[1:])
        if command in ("--help", "-h"):
            print(USAGE.format(commands="\n".join(f"  {name:<10}  {COMMANDS[name]}" for name in COMMANDS)), end="")
        elif command == "--version":
            print(f"lightning-tfm {version('lightning_tfm')}")
        elif command in SUMMARIES:
            with importing():
                function = import_command(command)
            sys.exit(function(arguments[1:]))
        elif command in LIGHTNING_COMMANDS and {"--help", "-h"} & set(arguments):
            from lightning_tfm.fit.help import help_text

            print(help_text(command), end="")
        elif command == "fit" and any(argument.partition("=")[0] in ("--seeds", "--jobs") for argument in arguments):
            with importing():
                from lightning_tfm.commands.seeds import fit_seeds
            sys.exit(fit_seeds(arguments[1:]))
        elif command in LIGHTNING_COMMANDS:
            with importing():
                from lightning_tfm.fit.cli import run
                from lightning_tfm.fit.help import with_class_names
            run(["--help" if argument == "--help-all" else argument for argument in with_class_names(arguments)])
        else:
            hint = f"; available: {', '.join(COMMANDS)}" if command.startswith("-") else nearest(command, COMMANDS)
            raise UserError(f"the command must come first, but is {command!r}{hint}")
    except VariablesError:  # libraries have read the environment already
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | VARIABLES)
    except (UserError, ArgumentError) as error:
        ignore_signals()
        if is_main_process() or not _ends_main_process():
            line = f"lightning-tfm: error: {escape_controls(format_error(error))}"
            print(fit_terminal(line, sys.stderr), file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise, the final flush would fail again
        sys.exit(141)
    except Interrupted as interrupted:
        ignore_signals()
        if not is_main_process():
            sys.exit(0)
        with suppress(OSError):  # the terminal was closed
            _print_resume_command(interrupted)
        if signal.Signals(interrupted.signum).name == "SIGUSR1":
            requeue()
        sys.exit(128 + interrupted.signum)
    except KeyboardInterrupt:
        ignore_signals()
        sys.exit(130 if is_main_process() else 0)  # otherwise, the launcher would kill the first process
    except RuntimeError as error:
        if (message := out_of_memory(str(error))) is None:
            raise
        print(f"lightning-tfm: error: {message}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        name, is_denied = error.filename or "input or output", error.errno in DENIED
        message = f"{name}: {error.strerror or error}"
        if is_denied:
            message = (
                f"{name!r} must be readable and writable, but is not: {error.strerror}; change its permissions or "
                "those of its folder, or run the command in another folder"
            )
        print(f"lightning-tfm: error: {escape_controls(message)}", file=sys.stderr)
        sys.exit(2 if is_denied else 1)


def _ends_main_process(seconds: float = 10.0) -> bool:
    """Wait until the main process, which has started this one, has ended; return whether it has.

    The launcher kills the main process once another one has failed. Waiting lets it print the same error before.

    Args:
        seconds: how long to wait.
    """
    parent, end = os.getppid(), time.monotonic() + seconds
    while os.getppid() == parent and time.monotonic() < end:
        time.sleep(0.1)
    return os.getppid() != parent


@contextmanager
def importing() -> Iterator[None]:
    """Import packages faster, with a message in a terminal, and exclude them from garbage collection."""
    is_shown = sys.stderr is not None and sys.stderr.isatty()
    if is_shown:
        print("starting ...", end="", file=sys.stderr, flush=True)
    with gc_disabled():
        try:
            with _without_scipy_signal():
                yield
        finally:
            gc.freeze()  # otherwise, Python scans all imported objects when it exits, which takes up to two seconds
            if is_shown:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def _without_scipy_signal() -> Iterator[None]:
    """Keep torchmetrics from importing scipy.signal, which takes 0.6 s.

    torchmetrics imports it only to add `scipy.signal.hamming`, which the package SRMRpy expects.
    """
    placeholder = ModuleType("scipy.signal")
    placeholder.hamming = None  # type: ignore[attr-defined]
    sys.modules.setdefault(placeholder.__name__, placeholder)
    try:
        yield
    finally:
        if sys.modules.get(placeholder.__name__) is placeholder:
            del sys.modules[placeholder.__name__]


def _print_resume_command(interrupted: Interrupted) -> None:
    """Print the command that resumes after a signal."""
    command = sys.argv[1:]
    if interrupted.ckpt_path is not None:
        parser = ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--ckpt_path")
        _, others = parser.parse_known_args(command)
        command = [*others, "--ckpt_path", interrupted.ckpt_path]
    again = "resume" if interrupted.ckpt_path is not None or command[0] in ("reproduce", "sweep") else "run again"
    saved = "" if interrupted.saved_step is None else f", saved after step {interrupted.saved_step}"
    print(
        f"lightning-tfm: interrupted by {signal.Signals(interrupted.signum).name}{saved}; {again} with:\n"
        + format_command(["lightning-tfm", *map(shell_quote, command)], sys.stderr),
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
