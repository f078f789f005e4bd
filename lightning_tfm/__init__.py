"""A PyTorch Lightning research framework for sequence models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_tfm.data import GeneratedDataModule, LabeledDataModule, Pair, PairDataModule, TextDataModule
    from lightning_tfm.errors import UserError
    from lightning_tfm.inference.decoding import DecodingOptions
    from lightning_tfm.inference.loading import load
    from lightning_tfm.networks import (
        GPT,
        AttentionLSTM,
        EncoderClassifier,
        LinearTransformer,
        MaskedEncoder,
        Transformer,
    )
    from lightning_tfm.optimizers import AdamW, LRSchedule, Muon
    from lightning_tfm.tasks import Classifier, LanguageModel, MaskedLanguageModel, Seq2SeqModule

__all__ = [
    "GPT",
    "AdamW",
    "AttentionLSTM",
    "Classifier",
    "DecodingOptions",
    "EncoderClassifier",
    "GeneratedDataModule",
    "LRSchedule",
    "LabeledDataModule",
    "LanguageModel",
    "LinearTransformer",
    "MaskedEncoder",
    "MaskedLanguageModel",
    "Muon",
    "Pair",
    "PairDataModule",
    "Seq2SeqModule",
    "TextDataModule",
    "Transformer",
    "UserError",
    "load",
]

# the slow ones last
_SOURCES = ("errors", "inference.decoding", "networks", "inference.loading", "optimizers", "data", "tasks")


def __getattr__(name: str) -> Any:
    """Import an exported name on first use, so that `--help` does not import torch."""
    if name in __all__:
        for source in _SOURCES:
            module = import_module(f"{__name__}.{source}")
            if name in vars(module):
                return vars(module)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
