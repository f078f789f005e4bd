"""From data to batches: one module a kind of data."""

from lightning_tfm.data.batches import (
    Batch,
    BatchStream,
    EvaluationBatches,
    Examples,
    TaskDataModule,
    TokenBatches,
    TrainingBatches,
    TrainingLoader,
    WindowBatches,
    padded,
    stable_hash,
)
from lightning_tfm.data.download import Download, download
from lightning_tfm.data.files import is_hidden, located, normalized, read_lines, read_table, read_text
from lightning_tfm.data.labels import LabelledBatch, LabelledDataModule, LabelledDataset
from lightning_tfm.data.pairs import GeneratedDataModule, Pair, PairDataModule, PairDataset
from lightning_tfm.data.text import TextDataModule, TextDataset

__all__ = [
    "Batch",
    "BatchStream",
    "Download",
    "EvaluationBatches",
    "Examples",
    "GeneratedDataModule",
    "LabelledBatch",
    "LabelledDataModule",
    "LabelledDataset",
    "Pair",
    "PairDataModule",
    "PairDataset",
    "TaskDataModule",
    "TextDataModule",
    "TextDataset",
    "TokenBatches",
    "TrainingBatches",
    "TrainingLoader",
    "WindowBatches",
    "download",
    "is_hidden",
    "located",
    "normalized",
    "padded",
    "read_lines",
    "read_table",
    "read_text",
    "stable_hash",
]
