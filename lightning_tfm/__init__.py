"""A PyTorch Lightning research framework for sequence models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_tfm.data import GeneratedDataModule, LabeledDataModule, Pair, PairDataModule, TextDataModule
    from lightning_tfm.decoding import DecodingOptions
    from lightning_tfm.errors import UserError
    from lightning_tfm.loading import load
    from lightning_tfm.modules import Classifier, LanguageModel, MaskedLanguageModel, Seq2SeqModule
    from lightning_tfm.networks import (
        GPT,
        AttentionLSTM,
        EncoderClassifier,
        LinearTransformer,
        MaskedEncoder,
        Transformer,
    )
    from lightning_tfm.optimizers import AdamW, LRSchedule, Muon

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

_SOURCES = ("errors", "decoding", "networks", "loading", "optimizers", "data", "modules")  # the slow ones last


def __getattr__(name: str) -> Any:
    """Import an exported name on first use, so that `--help` does not import torch."""
    if name in __all__:
        for source in _SOURCES:
            module = import_module(f"{__name__}.{source}")
            if name in vars(module):
                return vars(module)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
