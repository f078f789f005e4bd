"""Predictions for examples and for lines of input, as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_tfm.runs.record import Prediction

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_tfm.data import Pair

MAX_TITLE_LENGTH = 80
"""Maximum length of a text in a title, in characters."""


class Alternative(NamedTuple):
    """Id that a network might choose at a step, with its symbol and its probability."""

    id: int
    symbol: str
    probability: float


class OutputStep(NamedTuple):
    """Step of an output: an id with its symbol, its log probability in nats, and its most probable alternatives."""

    id: int
    symbol: str
    log_probability: float
    alternatives: Sequence[Alternative]

    @property
    def probability(self) -> float:
        return math.exp(self.log_probability)


class Output(NamedTuple):
    """Output for a line of input.

    Attributes:
        text: the text of the output, or the label.
        probability: the probability of the label, in classification.
        log_probability: the log probability in nats, if `DecodingOptions.scores` is set.
        alignment: the links (source index, output index), if `DecodingOptions.alignments` is set; indices count words
            if the tokens are subwords, otherwise tokens.
        steps: the step of each token that the network has chosen, or of the label, if `DecodingOptions.steps` is set.
    """

    text: str
    probability: float | None = None
    log_probability: float | None = None
    alignment: tuple[tuple[int, int], ...] | None = None
    steps: Sequence[OutputStep] | None = None


class LinePrediction(NamedTuple):
    """Prediction for a line of input.

    Attributes:
        outputs: the outputs, the best first; None if no output could be generated.
        note: the reason for a missing output, or a warning about the input; may be empty.
    """

    outputs: list[Output] | None
    note: str = ""

    @property
    def text(self) -> str | None:
        """Return the text of the best output; None if there is none."""
        return self.outputs[0].text if self.outputs else None


class Score(NamedTuple):
    """Log probability of a line.

    Attributes:
        log_probability: the log probability in nats, summed over tokens; None if the line cannot be scored.
        tokens: the number of predicted tokens.
        note: the reason for a missing score, or a warning about the line; may be empty.
        steps: the step of each predicted token, if requested.
    """

    log_probability: float | None
    tokens: int
    note: str = ""
    steps: Sequence[OutputStep] | None = None

    @property
    def perplexity(self) -> float | None:
        """Return the perplexity per token, infinite if it overflows; None if there is no score."""
        if self.log_probability is None:
            return None
        try:
            return math.exp(-self.log_probability / self.tokens)
        except OverflowError:
            return math.inf


class TeacherForced(NamedTuple):
    """Line of input with the output of the model, for teacher forcing.

    Attributes:
        output: the text of the output.
        inputs: the arguments, (1, ...) each.
        targets: the ids (1, T), or the class (1, 1), that `forward` predicts.
        is_target: the mask (1, T), False where nothing is predicted.
        input_symbols: the symbol of each token that is embedded (S): of the source, of the text, or of source and
            target in one sequence.
        target_symbols: the symbol of each target (T).
        decoder_symbols: the symbol of each input of a decoder that attends to an encoder (T); empty without one.
    """

    output: str
    inputs: tuple[Tensor, ...]
    targets: Tensor
    is_target: Tensor
    input_symbols: list[str]
    target_symbols: list[str]
    decoder_symbols: Sequence[str] = ()


class AttentionExample(NamedTuple):
    """Test example whose attention is plotted.

    Attributes:
        row: the index of the example in the dataset.
        title: the title of its plots.
        content: the content as plain values, see `Predictor.attention`.
    """

    row: int
    title: str
    content: dict[str, Any]


def make_prediction(pair: Pair, prediction: str, nll: float) -> Prediction:
    """Return a prediction for the source of a pair, with its negative log-likelihood."""
    return {
        "source": pair.source,
        "target": pair.target,
        "prediction": prediction,
        "correct": prediction == pair.target,
        "nll": round(nll, 4),
        "category": pair.category,
        "alignment": pair.alignment,
    }


def worst_first(prediction: Mapping[str, Any]) -> float:
    """Return a key that sorts predictions by decreasing loss; NaN counts as infinite."""
    return -math.inf if math.isnan(prediction["nll"]) else -prediction["nll"]


def short_title(text: str) -> str:
    """Truncate a text for a title."""
    return text if len(text) <= MAX_TITLE_LENGTH else f"{text[:MAX_TITLE_LENGTH]}..."
