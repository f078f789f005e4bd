"""Attention weights of a few validation examples during the training of a run."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import TypedDict

VALIDATIONS = 32
"""Number of validations, from the first to the last, that are kept at most, except that the ends may add two."""


class LayerHistory(TypedDict):
    """Attention weights of a layer during the training.

    Attributes:
        layer: the name of the layer.
        heads: the number of heads H.
        queries: the symbol of each row (T).
        keys: the symbol of each column (S).
        gold: the cells [column, row] linked by the gold alignment.
        predicts: "target" if rows are labeled with the symbols of the target, which they predict; otherwise empty.
        weights: the weights (H, T, S) at each step, as base64-encoded bytes, where 255 is a weight of 1.
    """

    layer: str
    heads: int
    queries: list[str]
    keys: list[str]
    gold: Sequence[Sequence[int]]
    predicts: str
    weights: list[str]


class ExampleHistory(TypedDict):
    """Attention weights for an example during the training.

    Attributes:
        title: the text of the example.
        layers: the layers.
    """

    title: str
    layers: list[LayerHistory]


class AttentionHistory(TypedDict):
    """Attention weights at the validations of a training.

    Attributes:
        steps: the number of training steps before each validation, in ascending order.
        examples: the examples.
    """

    steps: list[int]
    examples: list[ExampleHistory]


def extended(history: AttentionHistory | None, step: int, examples: Sequence[ExampleHistory]) -> AttentionHistory:
    """Add a validation to a history; drop some if there are too many, and those that a resumed run repeats.

    The steps are divided into intervals, whose length is a power of two, and the first validation of each is kept.
    Since shorter intervals divide longer ones, the history depends only on the steps of all validations, so that a
    resumed run has that of an uninterrupted one.

    Args:
        history: the history; None if there is none.
        step: the number of training steps.
        examples: the examples, with the weights of this validation.
    """
    earlier = [(old, n) for n, old in enumerate(history["steps"]) if old < step] if history else []
    titles = [[each["title"] for each in some] for some in (history["examples"] if history else (), examples)]
    if history is None or not earlier or titles[0] != titles[1]:  # a fork may have other data
        return {"steps": [step], "examples": list(examples)}
    length = 1
    while step > VALIDATIONS * length:
        length *= 2
    kept = list({old // length: (old, n) for old, n in reversed(earlier)}.values())[::-1]
    return {
        "steps": [*(old for old, _ in kept), step],
        "examples": [
            {
                "title": new["title"],
                "layers": [
                    {**layer, "weights": [*(old["weights"][n] for _, n in kept), *layer["weights"]]}
                    for old, layer in zip(past["layers"], new["layers"], strict=True)
                ],
            }
            for past, new in zip(history["examples"], examples, strict=True)
        ],
    }
