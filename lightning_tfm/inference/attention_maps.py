"""Attention weights labeled with the symbols of their rows and columns."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_tfm.layers import attention_maps

MAX_POSITIONS = 64
"""Maximum number of rows and columns shown per layer."""

VISIBLE = {ord("\n"): "\N{RETURN SYMBOL}", ord("\t"): "\N{RIGHTWARDS ARROW TO BAR}"}
"""Visible replacements of control characters."""


def visible(symbol: str) -> str:
    """Return the label of a symbol, which shows blanks and control characters."""
    return symbol.translate(VISIBLE).replace(" ", "\N{OPEN BOX}")


class AttentionMap(NamedTuple):
    """The attention weights of one layer.

    Attributes:
        layer: the name of the layer in the network.
        weights: the weights (H, T, S).
        queries: the symbol of each row: the predicted symbol if `predicts` is set, otherwise the input symbol.
        keys: the symbol of each column.
        gold: the cells (column, row) linked by the gold alignment.
        first_target: the first row that predicts a target symbol.
        predicts: "target" or "output" if the rows are labeled with its symbols, which they predict; otherwise empty.
    """

    layer: str
    weights: Tensor
    queries: list[str]
    keys: list[str]
    gold: list[tuple[int, int]]
    first_target: int = 0
    predicts: Literal["", "target", "output"] = ""

    def cropped(self, size: int = MAX_POSITIONS) -> AttentionMap:
        """Crop the map to at most `size` rows and columns; cropped rows start at the first target symbol."""
        first = self.first_target if len(self.queries) > size else 0
        rows = slice(first, first + size)
        cells = [(column, row - first) for column, row in self.gold]
        gold = [(column, row) for column, row in cells if column < size and 0 <= row < size]
        return self._replace(
            weights=self.weights[:, rows, :size],
            queries=self.queries[rows],
            keys=self.keys[:size],
            gold=gold,
            first_target=0,
        )

    def encoded(self) -> str:
        """Return the weights (H, T, S) as base64-encoded bytes, where 255 is a weight of 1."""
        return base64.b64encode((self.weights * 255).round().to(torch.uint8).numpy().tobytes()).decode()


@torch.no_grad()
def attention_weights(network: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    """Return the weights (H, T, S) of all layers by name for a batch of one example, as float32 on the CPU."""
    device = next(network.parameters()).device
    with attention_maps(network) as maps:
        network(*(ids.to(device) for ids in inputs))
    return {layer: weights[0].float().cpu() for layer, weights in maps.items()}


def text_attention(network: nn.Module, symbols: list[str], *inputs: Tensor) -> list[AttentionMap]:
    """Return the attention maps of all layers of a network for a batch of one text with these symbols."""
    maps = attention_weights(network, *inputs)
    return [AttentionMap(layer, weights, symbols, symbols, []) for layer, weights in maps.items()]


def links(
    attention: AttentionMap, source_words: Sequence[int] | None = None, target_words: Sequence[int] | None = None
) -> tuple[tuple[int, int], ...]:
    """Link each target symbol to the source symbol with the largest weight, except EOS, or the words of both.

    Only the first head is read; its last column must be EOS (see `Predictor.align`). `source_words` and `target_words`
    give the word index of each symbol, to link words instead of symbols.
    """
    sources = attention.weights[0, :, :-1].argmax(-1).tolist()
    pairs = [
        (source_words[i] if source_words else i, target_words[j] if target_words else j) for j, i in enumerate(sources)
    ]
    return tuple(sorted(set(pairs)))
