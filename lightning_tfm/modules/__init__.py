"""The LightningModules, one a task."""

from lightning_tfm.modules.classifier import Classifier
from lightning_tfm.modules.language_model import LanguageModel
from lightning_tfm.modules.optimization import Optimization
from lightning_tfm.modules.seq2seq import Seq2SeqModule
from lightning_tfm.modules.task import TaskModule

__all__ = ["Classifier", "LanguageModel", "Optimization", "Seq2SeqModule", "TaskModule"]
