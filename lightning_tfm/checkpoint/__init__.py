"""Checkpoints, written atomically with a checksum, and loaded without executing code."""

from lightning_tfm.checkpoint.archive import verify_checksum, write
from lightning_tfm.checkpoint.averaging import average_checkpoints
from lightning_tfm.checkpoint.compatibility import check_fits
from lightning_tfm.checkpoint.content import VerifiedCheckpointIO, latest_valid, read

__all__ = [
    "VerifiedCheckpointIO",
    "average_checkpoints",
    "check_fits",
    "latest_valid",
    "read",
    "verify_checksum",
    "write",
]
