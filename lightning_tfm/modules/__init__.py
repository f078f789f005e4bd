"""LightningModules, one for each task."""

from lightning_tfm.modules.classifier import Classifier
from lightning_tfm.modules.language_model import LanguageModel
from lightning_tfm.modules.masked_language_model import MaskedLanguageModel
from lightning_tfm.modules.seq2seq import Seq2SeqModule
from lightning_tfm.modules.task import TaskModule

__all__ = ["Classifier", "LanguageModel", "MaskedLanguageModel", "Seq2SeqModule", "TaskModule"]
