"""Compilation of the network for training."""

from __future__ import annotations

from typing import cast

from lightning import Callback, LightningModule, Trainer
from torch import nn


class Compile(Callback):
    """Compiles the network's `forward` for training: `--trainer.callbacks+=lightning_tfm.callbacks.Compile`.

    The first steps include the compilation, so this is useful for long runs. Checkpoints are the same as without it,
    including the parameter names. Decoding, whose steps are small and vary in length, is not compiled.

    Args:
        backend: backend of torch.compile. "inductor" needs a C++ compiler or a GPU, "aot_eager" needs neither.
    """

    def __init__(self, backend: str = "inductor") -> None:
        self.backend = backend

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            cast(nn.Module, pl_module.network).compile(backend=self.backend)
