"""What a user types: `lightning-tfm COMMAND ...`, or `python -m lightning_tfm COMMAND ...`."""

from __future__ import annotations

import os
import signal
import sys
from argparse import ArgumentError
from io import TextIOWrapper

from lightning_tfm.errors import Interrupted, UserError, explain, shell_quote
from lightning_tfm.memory import uncollected

USAGE = """\
usage: lightning-tfm COMMAND ...

commands:
  fit        train the model of a YAML on its data, then test the best checkpoint
  validate   score a checkpoint on the validation data of a YAML
  test       score a checkpoint on the test data of a YAML
  generate   answer your own input with a checkpoint
  average    one checkpoint with the mean weights of several
  export     write a trained network for other programs: safetensors, torch_export, onnx
  report     show runs on a page of their own: settings, curves, errors, attention
  reproduce  run experiments over seeds, and compare them with what their YAMLs claim

  lightning-tfm fit --config experiments/date_attention_lstm.yaml
  lightning-tfm generate runs/date_attention_lstm/version_0/checkpoints/best.ckpt "May 3, 1979"

`lightning-tfm COMMAND --help` lists a command's settings.
"""

COMMANDS = ("fit", "validate", "test", "generate", "average", "export", "report", "reproduce")


def main() -> None:
    """Runs a command. Ends the process with status 2, and one line, at a user's mistake."""
    arguments = sys.argv[1:]
    command = arguments[0] if arguments else "--help"
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # what a terminal has no character for must not end a command
            stream.reconfigure(errors="backslashreplace")
    # The commands are imported here: torch and Lightning take seconds, which a help text should not.
    try:
        if command in ("--help", "-h"):
            print(USAGE, end="")
        elif command == "generate":
            with uncollected():
                from lightning_tfm.commands.generate import generate
            sys.exit(generate(arguments[1:]))
        elif command == "average":
            with uncollected():
                from lightning_tfm.commands.average import average
            sys.exit(average(arguments[1:]))
        elif command == "export":
            with uncollected():
                from lightning_tfm.commands.export import export
            sys.exit(export(arguments[1:]))
        elif command == "report":
            with uncollected():
                from lightning_tfm.commands.report import report
            sys.exit(report(arguments[1:]))
        elif command == "reproduce":
            with uncollected():
                from lightning_tfm.commands.reproduce import reproduce
            sys.exit(reproduce(arguments[1:]))
        elif command in ("fit", "validate", "test"):
            with uncollected():
                from lightning_tfm.cli import run
            run()
        else:
            raise UserError(f"the command must be one of {', '.join(COMMANDS)} and come first, but is {command!r}")
    except (UserError, ArgumentError) as error:
        if not _speaks():
            sys.exit(0)
        print(f"lightning-tfm: error: {explain(error)}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # whoever read the answers has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the last flush would fail again
        sys.exit(141)
    except Interrupted as interrupted:
        sys.exit(_told(interrupted))
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        print(
            f"lightning-tfm: error: {error.filename or 'input or output'}: {error.strerror or error}", file=sys.stderr
        )
        sys.exit(1)


def _speaks() -> bool:
    """Whether this process speaks for all that train together: a launcher kills them where one of the others fails."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _told(interrupted: Interrupted) -> int:
    """Says how to go on after a signal; returns the exit status."""
    if not _speaks():
        return 0
    command = sys.argv[1:]
    if command[0] == "fit":
        command = [*_without_option(command, "--ckpt_path"), "--ckpt_path", interrupted.ckpt_path]
    saved = "" if interrupted.saved_step is None else f", saved after step {interrupted.saved_step}"
    print(
        f"lightning-tfm: ended by {signal.Signals(interrupted.signum).name}{saved}; go on with:\n"
        f"  lightning-tfm {' '.join(map(shell_quote, command))}",
        file=sys.stderr,
    )
    return 128 + interrupted.signum


def _without_option(arguments: list[str], option: str) -> list[str]:
    """Return the arguments without each `option VALUE` and `option=VALUE`."""
    kept, rest = [], iter(arguments)
    for argument in rest:
        if argument == option:
            next(rest, None)  # its value
        elif not argument.startswith(f"{option}="):
            kept.append(argument)
    return kept


if __name__ == "__main__":
    main()
