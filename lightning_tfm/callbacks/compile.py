"""A network that is compiled for training."""

from __future__ import annotations

from lightning import Callback, LightningModule, Trainer


class Compile(Callback):
    """Compiles the network's `forward` before training: `--trainer.callbacks+=lightning_tfm.callbacks.Compile`.

    The first steps then take as long as compiling does, so it is for long runs. Checkpoints are those of the network
    itself, names and all; decoding, whose steps are small and of many lengths, is not compiled.

    Args:
        backend: of torch.compile: "inductor" needs a compiler for C++ or a GPU, "aot_eager" needs none.
    """

    def __init__(self, backend: str = "inductor") -> None:
        self.backend = backend

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            pl_module.network.compile(backend=self.backend)
