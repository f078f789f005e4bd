"""`lightning-tfm average`: average the weights of several checkpoints."""

from __future__ import annotations

from pathlib import Path

from lightning_tfm.checkpoint import average_checkpoints, write
from lightning_tfm.commands.parser import CommandParser
from lightning_tfm.errors import UserError
from lightning_tfm.runs.names import HELP, named_checkpoint


def make_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        "lightning-tfm average",
        description="Average the weights of several checkpoints of one model, as Vaswani et al. (2017, 6.1) do.",
    )
    parser.add_argument("checkpoints", metavar="RUN", nargs="+", help=HELP)
    parser.add_argument("--output", type=Path, metavar="FILE", required=True, help="where to write the average")
    return parser


def average(arguments: list[str]) -> int:
    """Write a checkpoint with the mean weights of several checkpoints.

    Note:
        The checkpoint has no training state, so no run can be resumed from it.
    """
    options = make_parser().parse_args(arguments)
    if options.output.exists():
        raise UserError(f"--output must be a new file, but {str(options.output)!r} exists; choose another")
    write(average_checkpoints([*map(named_checkpoint, options.checkpoints)]), options.output)
    print(f"{options.output}: the mean of {len(options.checkpoints)} checkpoints")
    return 0
