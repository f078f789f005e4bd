"""Datasets, samplers and base classes of data modules."""

from lightning_tfm.data.batch import Batch, Examples, MicroBatches
from lightning_tfm.data.datamodule import TaskDataModule
from lightning_tfm.data.download import Download, download
from lightning_tfm.data.hashing import stable_hash
from lightning_tfm.data.labeled_text import LabeledBatch, LabeledDataModule, LabeledDataset
from lightning_tfm.data.loader import ResumableDataLoader
from lightning_tfm.data.pairs import GeneratedDataModule, Pair, PairDataModule, PairDataset, Pairs
from lightning_tfm.data.partitions import partition_by
from lightning_tfm.data.samplers import (
    BatchDivision,
    EvaluationSampler,
    LengthGroupedSampler,
    MaxTokensSampler,
    MixtureSampler,
    TrainingSampler,
    WindowSampler,
)
from lightning_tfm.data.table_files import TableReader, skip_blank, strip_columns
from lightning_tfm.data.text import MixtureDataset, TextDataModule, TextDataset
from lightning_tfm.data.text_files import (
    expand_path,
    is_hidden,
    list_files,
    read_documents,
    read_text,
    resolve_path,
    split_lines,
)

__all__ = [
    "Batch",
    "BatchDivision",
    "Download",
    "EvaluationSampler",
    "Examples",
    "GeneratedDataModule",
    "LabeledBatch",
    "LabeledDataModule",
    "LabeledDataset",
    "LengthGroupedSampler",
    "MaxTokensSampler",
    "MicroBatches",
    "MixtureDataset",
    "MixtureSampler",
    "Pair",
    "PairDataModule",
    "PairDataset",
    "Pairs",
    "ResumableDataLoader",
    "TableReader",
    "TaskDataModule",
    "TextDataModule",
    "TextDataset",
    "TrainingSampler",
    "WindowSampler",
    "download",
    "expand_path",
    "is_hidden",
    "list_files",
    "partition_by",
    "read_documents",
    "read_text",
    "resolve_path",
    "skip_blank",
    "split_lines",
    "stable_hash",
    "strip_columns",
]
