"""Lightning plugin for checkpoints.

The package does not import it, so reading a checkpoint does not import Lightning.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
from lightning.fabric.plugins import CheckpointIO

from lightning_tfm.checkpoint.archive import write
from lightning_tfm.checkpoint.content import CheckpointReader, with_shards
from lightning_tfm.checkpoint.shards import INDEX, remove_shards


class VerifiedCheckpointIO(CheckpointReader, CheckpointIO):
    """Lightning plugin that saves and loads checkpoints with `write` and `read`."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        write(checkpoint, path)
        remove_shards(Path(path), kept=checkpoint.get(INDEX, {}).get("folder"))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = True
    ) -> dict[str, Any]:
        # Lightning migrates checkpoints of older versions, but `take` accepts those of this format only.
        return with_shards(self.take(path), path) | {"pytorch-lightning_version": lightning.__version__}

    def remove_checkpoint(self, path: str | Path) -> None:
        Path(path).unlink(missing_ok=True)
        remove_shards(Path(path))
