"""What a user types: `lightning-tfm COMMAND ...`, or `python -m lightning_tfm COMMAND ...`."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentError

from lightning_tfm.errors import UserError, explain

USAGE = """\
usage: lightning-tfm COMMAND ...

commands:
  fit       train the model of a YAML on its data, then test the best checkpoint
  validate  score a checkpoint on the validation data of a YAML
  test      score a checkpoint on the test data of a YAML
  generate  answer your own input with a checkpoint

  lightning-tfm fit --config experiments/date_attention_lstm.yaml
  lightning-tfm generate runs/date_attention_lstm/version_0/checkpoints/best.ckpt "May 3, 1979"

`lightning-tfm COMMAND --help` lists a command's settings.
"""


def main() -> None:
    """Runs a command. Ends the process with status 2, and one line, at a user's mistake."""
    arguments = sys.argv[1:]
    command = arguments[0] if arguments else "--help"
    # The commands are imported here: torch and Lightning take seconds, which a help text should not.
    try:
        if command in ("--help", "-h"):
            print(USAGE, end="")
        elif command == "generate":
            from lightning_tfm.commands.generate import generate

            sys.exit(generate(arguments[1:]))
        elif command in ("fit", "validate", "test"):
            from lightning_tfm.cli import run

            run()
        else:
            raise UserError(f"the command must be fit, validate, test or generate and come first, but is {command!r}")
    except (UserError, ArgumentError) as error:
        print(f"lightning-tfm: error: {explain(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever read the answers has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the last flush would fail again
        sys.exit(141)


if __name__ == "__main__":
    main()
