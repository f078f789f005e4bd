"""LightningModules, one for each task."""

from lightning_tfm.tasks.base import TaskModule
from lightning_tfm.tasks.classifier import Classifier
from lightning_tfm.tasks.language_model import LanguageModel
from lightning_tfm.tasks.masked_language_model import MaskedLanguageModel
from lightning_tfm.tasks.seq2seq import Seq2SeqModule

__all__ = ["Classifier", "LanguageModel", "MaskedLanguageModel", "Seq2SeqModule", "TaskModule"]
