"""Nearest training examples of a text, by the states of the network.

Shapes: batch B, source tokens S, target tokens T, width D.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_tfm.data import TaskDataModule
from lightning_tfm.data.labeled_text import LabeledBatch
from lightning_tfm.errors import UserError
from lightning_tfm.inference import Predictor
from lightning_tfm.insight import Sample, components, interventions
from lightning_tfm.layers import HardMonotonicAttention
from lightning_tfm.networks import Network, Seq2SeqNetwork
from lightning_tfm.tokenization import PAD, Tokenizer

By = Literal["source", "decoder"]
"""Features that are compared: the mean state of the source, or the input of the output layer at one step."""

MAX_EXAMPLES, MAX_TOKENS = 2_000, 30_000
"""Maximum numbers of training examples and of their tokens, to limit the computation time."""

BATCH_SIZE = 100
"""Number of examples, of similar lengths, in a batch."""


class Neighbor(NamedTuple):
    """Training example similar to a text.

    Attributes:
        source: its source, or the text.
        target: its target; empty for a text.
        similarity: the cosine of the angle between its features and those of the text.
        mark: the first index and the end of the predicted token in the target, or in the text, in characters. Both are
            the end of the target for EOS. None if sources are compared, or the token follows the text.
    """

    source: str
    target: str
    similarity: float
    mark: tuple[int, int] | None


class Neighbors:
    """Features of a fixed sample of training examples.

    Args:
        predictor: the model, in evaluation mode.
        data: the data module, after `setup`.
    """

    def __init__(self, predictor: Predictor, data: TaskDataModule) -> None:
        self.predictor, self.network = predictor, predictor.network
        self.dataset: Any = data.datasets["train"]
        self.rows = draw_rows(self.dataset, MAX_EXAMPLES)
        lengths = self.dataset.lengths[self.rows]
        self.rows = self.rows[: max(1, int((lengths.cumsum(0) <= MAX_TOKENS).sum()))]
        self.rows = self.rows[self.dataset.lengths[self.rows].argsort(stable=True)]

    @cached_property
    @torch.no_grad()
    def _features(self) -> dict[By, tuple[Tensor, Tensor, Tensor]]:
        """Return the normalized features (N, D) with their rows and positions (N)."""
        sources, decoders, rows, positions = [], [], [], []
        for some in self.rows.split(BATCH_SIZE):
            sample = Sample.of(self.dataset[some], self.network).to(self.predictor.device)
            source, decoder = features(self.network, sample.inputs)
            row, position = sample.is_target.nonzero(as_tuple=True)
            sources.append(source)
            if decoder is not None:
                decoders.append(decoder[row, position])
                rows.append(some[row.cpu()])
                positions.append(position.cpu())
        by_source = F.normalize(torch.cat(sources), dim=1), self.rows, torch.zeros_like(self.rows)
        if not decoders:
            return {"source": by_source}
        by_decoder = F.normalize(torch.cat(decoders), dim=1), torch.cat(rows), torch.cat(positions)
        return {"source": by_source, "decoder": by_decoder}

    @torch.no_grad()
    def nearest(self, inputs: tuple[Tensor, ...], by: By, position: int, number: int) -> list[Neighbor]:
        """Return the examples with the most similar features, in descending order.

        Args:
            inputs: the arguments of the network's `forward` for one text, (1, ...) each.
            by: the features.
            position: the index of a target token; ignored if sources are compared.
            number: the number of examples.

        Raises:
            UserError: if the network has no output layer named `head`.
        """
        source, decoder = features(self.network, inputs)
        if by == "decoder" and decoder is None:
            raise UserError(f"by must be source for {type(self.network).__name__}, which has no layer named head")
        feature = source[0] if by == "source" or decoder is None else decoder[0, position]
        values, rows, positions = self._features[by]
        best = (values @ F.normalize(feature, dim=0)).topk(min(number, len(rows)))
        indices = best.indices.cpu()
        found = zip(best.values.tolist(), rows[indices].tolist(), positions[indices].tolist(), strict=True)
        return [self._neighbor(row, similarity, place if by == "decoder" else None) for similarity, row, place in found]

    def _neighbor(self, row: int, similarity: float, position: int | None) -> Neighbor:
        """Return the example of a row, with a mark at the target token of a position."""
        source, target = example_texts(self.dataset, row, self.predictor)
        if position is None:
            return Neighbor(source, target, similarity, None)
        batch = self.dataset[torch.tensor([row])]
        tokenizer = self.predictor.tokenizer
        if isinstance(batch, LabeledBatch):
            return Neighbor(source, target, similarity, (0, len(target)))
        if hasattr(self.dataset, "pairs"):
            ids = batch.target_out[0].tolist()
            return Neighbor(source, tokenizer.decode(ids), similarity, span(tokenizer, ids, position))
        ids = batch.target_in[0].tolist()
        index = position + isinstance(self.network, Seq2SeqNetwork)  # a language model predicts the next token
        return Neighbor(source, target, similarity, span(tokenizer, ids, index) if index < len(ids) else None)


def draw_rows(dataset: Any, number: int) -> Tensor:
    """Draw at most `number` rows of a dataset, the same in every call."""
    return torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))[:number]


def example_texts(dataset: Any, row: int, predictor: Predictor) -> tuple[str, str]:
    """Return the source and the target of an example; the target of a window of a text is empty."""
    if hasattr(dataset, "pairs"):
        pair = dataset.pairs[row]
        return pair.source, pair.target
    return predictor.tokenizer.decode(dataset[torch.tensor([row])].target_in[0].tolist()), ""


def span(tokenizer: Tokenizer, ids: Sequence[int], index: int) -> tuple[int, int]:
    """Return the first index and the end of a token in the text of its ids, in characters, without spaces around it."""
    text = tokenizer.decode(ids)
    start, end = (len(tokenizer.decode(ids[:stop])) for stop in (index, index + 1))
    token = text[start:end]
    return (start + len(token) - len(token.lstrip()) if token.strip() else start), end


def features(network: Network, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
    """Return the mean state of the source (B, D) and the input of the output layer (B, T, D) of a network.

    The states of the source are those of the encoder or, in one sequence, of the last layer. The second result is None
    if the network has no output layer named `head`. If this layer is computed for each pair of a target and a source
    token, as in hard monotonic attention, its input is averaged over the source.
    """
    source = inputs[0] if inputs[0].size(1) else inputs[-1]  # a text has no source
    is_token = (source if source.dim() == 2 else source[..., 0]) != PAD  # (B, S)
    collected: list[Tensor] = []
    head = getattr(network, "head", None)
    with interventions(network) as touch:
        states = touch.record(source_states(network))
        if head is not None:
            hook = head.register_forward_pre_hook(lambda _, arguments: collected.append(arguments[0]))
            touch.hooks.callback(hook.remove)
        network(*inputs)
    mean = _mean(states[0][:, : is_token.size(1)], is_token)
    if not collected:
        return mean, None
    if any(isinstance(module, HardMonotonicAttention) for module in network.modules()):  # (B, T, S, D)
        collected = [_mean(part, is_token.unsqueeze(1)) for part in collected]
    return mean, torch.cat([part if part.dim() == 3 else part.unsqueeze(1) for part in collected], dim=1)


def source_states(network: Network) -> str:
    """Return the name of the component whose outputs are the states of the source."""
    kinds = {component.name: component.kind for component in components(network)}
    if "encoder_states" in kinds:
        return "encoder_states"
    layers = [name for name, kind in kinds.items() if kind == "layer"]
    layers = [name for name in layers if network.side(name) == "encoder"] or layers
    embeddings = [name for name, kind in kinds.items() if kind == "embedding"]
    return (layers or embeddings)[-1 if layers else 0]


def _mean(states: Tensor, is_token: Tensor) -> Tensor:
    """Return the mean (..., D) of states (..., S, D) at tokens, whose mask is broadcastable to (..., S)."""
    return (states * is_token.unsqueeze(-1)).sum(-2) / is_token.sum(-1, keepdim=True).clamp(min=1)
