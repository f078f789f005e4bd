"""Checkpoints, written atomically with a checksum, and loaded without executing code."""

from lightning_tfm.checkpoint.archive import verify_checksum, write
from lightning_tfm.checkpoint.averaging import average_checkpoints
from lightning_tfm.checkpoint.compatibility import bounded_by, check_fits
from lightning_tfm.checkpoint.content import (
    FORMAT,
    CheckpointReader,
    copy_checkpoint,
    has_training_state,
    is_whole,
    read,
    read_index,
)
from lightning_tfm.checkpoint.ensembling import join_checkpoints

__all__ = [
    "FORMAT",
    "CheckpointReader",
    "average_checkpoints",
    "bounded_by",
    "check_fits",
    "copy_checkpoint",
    "has_training_state",
    "is_whole",
    "join_checkpoints",
    "read",
    "read_index",
    "verify_checksum",
    "write",
]
