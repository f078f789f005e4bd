"""Where a model looks while it reads a text or writes a target: each head's weights, with what they are between."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_tfm.data import Pair, PairDataset
from lightning_tfm.layers import SelfAttention, attention_maps
from lightning_tfm.networks import EncoderClassifier, Network
from lightning_tfm.tokenizer import Tokenizer

SHOWN = 64
"""Rows and columns of a layer that are shown, the first: of more, nothing could be told apart."""


CONTROLS = {ord("\n"): "\N{RETURN SYMBOL}", ord("\t"): "\N{RIGHTWARDS ARROW TO BAR}"}
"""What stands for a character that cannot be seen."""


class Look(NamedTuple):
    """One layer's attention.

    Attributes:
        layer: its name in the network.
        weights: (H, T, S).
        queries: the symbol of each row: what is written there, or what is read, in an encoder.
        keys: the symbol of each column.
        gold: the cells (column, row) that the pair's alignment links.
        begin: the first row that writes the target.
    """

    layer: str
    weights: Tensor
    queries: list[str]
    keys: list[str]
    gold: list[tuple[int, int]]
    begin: int = 0

    def first(self, count: int = SHOWN) -> Look:
        """Its first rows and columns; where there are more rows, the first of the target."""
        begin = self.begin if len(self.queries) > count else 0
        rows = slice(begin, begin + count)
        cells = [(column, row - begin) for column, row in self.gold]
        gold = [(column, row) for column, row in cells if column < count and 0 <= row < count]
        weights = self.weights[:, rows, :count]
        return Look(self.layer, weights, self.queries[rows], self.keys[:count], gold)


@torch.no_grad()
def looks(network: Network, tokenizer: Tokenizer, pair: Pair) -> list[Look]:
    """The attention of all layers while the network, fed the target, answers the pair's source, or reads it."""
    device = next(network.parameters()).device
    if isinstance(network, EncoderClassifier):
        ids, symbols = tokenizer.encode(pair.source), tokenizer.split(pair.source)
        read = slice(-network.max_length, None)
        return text_looks(network, torch.tensor(ids[read], dtype=torch.long), symbols[read])
    source = [*tokenizer.split(pair.source), "EOS"]
    target = tokenizer.split_target(pair.target)
    read, written = ["BOS", *target], [*target, "EOS"]
    links = list(pair.alignment or ())
    batch = PairDataset([pair], tokenizer)[torch.tensor([0])]
    with attention_maps(network) as maps:
        network(batch.source.to(device), batch.target_in.to(device))
    found = []
    for layer, weights in maps.items():
        weights = weights[0].float().cpu()
        if not isinstance(network.get_submodule(layer), SelfAttention):
            found.append(Look(layer, weights, written, source, links))
        elif weights.size(-1) == len(source) + len(read):  # one sequence: each row writes what the next one reads
            gold = [(i, len(source) + j) for i, j in links]
            rows, columns = [*source[1:], *read, "EOS"], [*source, *read]
            found.append(Look(layer, weights, rows, columns, gold, begin=len(source)))
        elif layer.startswith("encoder"):
            found.append(Look(layer, weights, source, source, []))
        else:
            found.append(Look(layer, weights, written, read, []))
    return found


def window_looks(network: Network, tokenizer: Tokenizer, ids: list[int]) -> list[Look]:
    """The attention of all layers while a language model reads a window of a text, of which the first SHOWN tokens."""
    ids = ids[:SHOWN]  # what comes later, no row sees
    symbols = [tokenizer.decode([number]).translate(CONTROLS) for number in ids]
    return text_looks(network, torch.tensor(ids), symbols)


@torch.no_grad()
def text_looks(network: Network, ids: Tensor, symbols: list[str]) -> list[Look]:
    """The attention of all layers while a language model or a classifier reads a text: ids (T), and their symbols."""
    text = ids.unsqueeze(0).to(next(network.parameters()).device)
    with attention_maps(network) as maps:
        if isinstance(network, EncoderClassifier):
            network(text)
        else:
            network(text[:, :0], text)
    return [Look(layer, weights[0].float().cpu(), symbols, symbols, []) for layer, weights in maps.items()]
