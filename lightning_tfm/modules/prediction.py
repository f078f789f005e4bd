"""Predictions for examples and lines of input, as plain values."""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict

from lightning_tfm.data import Pair


class Prediction(TypedDict, total=False):
    """The prediction for one example of the test: a line of predictions.jsonl.

    Attributes:
        source: the input text.
        target: the reference.
        prediction: the output.
        correct: whether the output is the reference.
        nll: the negative log-likelihood of the reference, in nats.
        category: the category of the example, if the data has categories.
        alignment: gold links (source index, target index), if they are known.
        probability: the probability of a predicted label.
    """

    source: str
    target: str
    prediction: str
    correct: bool
    nll: float
    category: str | None
    alignment: tuple[tuple[int, int], ...] | None
    probability: float


class Answer(NamedTuple):
    """The output for one line of input.

    Attributes:
        text: the output; None if there is none.
        note: the reason for a missing output, or a warning about the input; may be empty.
    """

    text: str | None
    note: str = ""


class AttentionExample(NamedTuple):
    """An example of the test whose attention is drawn.

    Attributes:
        row: its index in the dataset.
        title: a title for its pictures.
        content: its content as plain values, see `TaskModule.attention`.
    """

    row: int
    title: str
    content: dict[str, Any]


class Evaluation(TypedDict):
    """Outputs of a validation or test step: the predictions for the batch."""

    predictions: list[Prediction]


def strip_fields(line: str) -> str:
    """Strip whitespace around the tab-separated fields of a line, as in the training data."""
    return "\t".join(field.strip() for field in line.split("\t")).rstrip("\t")


def make_prediction(pair: Pair, prediction: str, nll: float) -> Prediction:
    """Return the prediction for a pair's source."""
    return {
        "source": pair.source,
        "target": pair.target,
        "prediction": prediction,
        "correct": prediction == pair.target,
        "nll": round(nll, 4),
        "category": pair.category,
        "alignment": pair.alignment,
    }
