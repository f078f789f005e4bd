"""`lightning-tfm ensemble`: join several checkpoints in one, an ensemble."""

from __future__ import annotations

from lightning_tfm.checkpoint import join_checkpoints, write
from lightning_tfm.commands.parser import CommandParser, checkpoints_to_join
from lightning_tfm.errors import UserError


def make_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        "lightning-tfm ensemble",
        description="Join the networks of several sequence-to-sequence models in one checkpoint, whose probabilities "
        "are the mean of theirs. Other commands read it as any other.",
    )
    parser.add_checkpoints("ensemble")
    return parser


def ensemble(arguments: list[str]) -> int:
    """Write a checkpoint whose network is the ensemble of those of several checkpoints.

    Note:
        The checkpoint has no training state, so no run can be resumed from it.
    """
    options = make_parser().parse_args(arguments)
    paths = checkpoints_to_join(options)
    if len(paths) < 2:
        raise UserError(
            f"RUN must be given at least twice, but only {options.checkpoints[0]!r} is named; name all runs of an "
            "experiment with runs/NAME/version_*"
        )
    write(join_checkpoints(paths, options.output.stem), options.output)
    print(f"{options.output}: an ensemble of {len(paths)} checkpoints")
    return 0
