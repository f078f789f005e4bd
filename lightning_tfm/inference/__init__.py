"""Predictors, one for each task, which apply a trained network to lines of text without Lightning."""

from lightning_tfm.inference.classifier import ClassifierPredictor
from lightning_tfm.inference.language_model import LanguageModelPredictor
from lightning_tfm.inference.masked_language_model import MASK, MaskedLanguageModelPredictor
from lightning_tfm.inference.prediction import (
    Alternative,
    AttentionExample,
    LinePrediction,
    Output,
    OutputStep,
    Score,
    TeacherForced,
    make_prediction,
    short_title,
    worst_first,
)
from lightning_tfm.inference.predictor import BATCH_SIZE, Predictor, clean_line
from lightning_tfm.inference.seq2seq import Seq2SeqPredictor
from lightning_tfm.runs.record import Prediction

__all__ = [
    "BATCH_SIZE",
    "MASK",
    "Alternative",
    "AttentionExample",
    "ClassifierPredictor",
    "LanguageModelPredictor",
    "LinePrediction",
    "MaskedLanguageModelPredictor",
    "Output",
    "OutputStep",
    "Prediction",
    "Predictor",
    "Score",
    "Seq2SeqPredictor",
    "TeacherForced",
    "clean_line",
    "make_prediction",
    "short_title",
    "worst_first",
]
