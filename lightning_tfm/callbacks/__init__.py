"""Callbacks that observe, save and record a run."""

from lightning_tfm.callbacks.attention_logger import AttentionLogger
from lightning_tfm.callbacks.checkpoints import Checkpoints
from lightning_tfm.callbacks.compile import Compile
from lightning_tfm.callbacks.head_scores import HeadScores
from lightning_tfm.callbacks.heartbeat import Heartbeat
from lightning_tfm.callbacks.predictions import Predictions
from lightning_tfm.callbacks.provenance import Provenance
from lightning_tfm.callbacks.summary import Summary
from lightning_tfm.callbacks.telemetry import Telemetry
from lightning_tfm.callbacks.training_progress import ProgressBar
from lightning_tfm.callbacks.weight_averaging import WeightAveraging

__all__ = [
    "AttentionLogger",
    "Checkpoints",
    "Compile",
    "HeadScores",
    "Heartbeat",
    "Predictions",
    "ProgressBar",
    "Provenance",
    "Summary",
    "Telemetry",
    "WeightAveraging",
]
