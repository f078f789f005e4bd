"""Compilation of the network for training."""

from __future__ import annotations

from typing import cast

from lightning import Callback, LightningModule, Trainer
from torch import nn


class Compile(Callback):
    """Callback that compiles the network for training: `--trainer.callbacks+=lightning_tfm.callbacks.Compile`.

    Checkpoints and parameter names are the same as without compilation.

    Args:
        backend: backend of torch.compile. "inductor" requires a C++ compiler or a GPU, "aot_eager" requires neither.

    Note:
        Compilation slows down the first steps, so it pays off only in long runs. Only `forward` is compiled, not
        decoding, whose steps are small and vary in length, and not the validation of a network with an encoder.
    """

    def __init__(self, backend: str = "inductor") -> None:
        self.backend = backend

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            cast(nn.Module, pl_module.network).compile(backend=self.backend)
