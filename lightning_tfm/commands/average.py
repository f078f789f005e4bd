"""`lightning-tfm average`: average the weights of several checkpoints."""

from __future__ import annotations

from lightning_tfm.checkpoint import average_checkpoints, write
from lightning_tfm.commands.parser import CommandParser, checkpoints_to_join


def make_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        "lightning-tfm average",
        description="Average the weights of several checkpoints of one model, as Vaswani et al. (2017, 6.1) do.",
    )
    parser.add_checkpoints("average")
    return parser


def average(arguments: list[str]) -> int:
    """Write a checkpoint with the mean weights of several checkpoints.

    Note:
        The checkpoint has no training state, so no run can be resumed from it.
    """
    options = make_parser().parse_args(arguments)
    write(average_checkpoints(checkpoints_to_join(options)), options.output)
    print(f"{options.output}: the mean of {len(options.checkpoints)} checkpoints")
    return 0
