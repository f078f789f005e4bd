"""What watches a run."""

from lightning_tfm.callbacks.checkpoints import Checkpoints
from lightning_tfm.callbacks.compile import Compile
from lightning_tfm.callbacks.provenance import Provenance
from lightning_tfm.callbacks.summary import Summary

__all__ = ["Checkpoints", "Compile", "Provenance", "Summary"]
