"""What watches a run."""

from lightning_tfm.callbacks.attention import Attention
from lightning_tfm.callbacks.averaging import WeightAveraging
from lightning_tfm.callbacks.checkpoints import Checkpoints
from lightning_tfm.callbacks.compile import Compile
from lightning_tfm.callbacks.predictions import Predictions
from lightning_tfm.callbacks.progress import ProgressBar
from lightning_tfm.callbacks.provenance import Provenance
from lightning_tfm.callbacks.summary import Summary
from lightning_tfm.callbacks.telemetry import Telemetry

__all__ = [
    "Attention",
    "Checkpoints",
    "Compile",
    "Predictions",
    "ProgressBar",
    "Provenance",
    "Summary",
    "Telemetry",
    "WeightAveraging",
]
