"""Samples on which a network is inspected, and the outcomes of a network for them.

Shapes: batch B, source tokens S, target tokens T, ids V.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from lightning_tfm.data import Batch, LabeledBatch, Pair
from lightning_tfm.inference import MASK
from lightning_tfm.networks import CausalNetwork, Network, Seq2SeqNetwork
from lightning_tfm.tasks.alignment import gold_links
from lightning_tfm.tokenization import PAD

MASK_INTERVAL = 7
"""For a masked language model, every token whose position is a multiple of this number is masked."""

BATCH_TOKENS = 8_192
"""Maximum number of tokens in a batch, which bounds the memory."""


@dataclass(frozen=True)
class Sample:
    """Inputs of a network with their targets.

    Attributes:
        inputs: the arguments of the network's `forward`, (B, ...) each.
        targets: the ids (B, T), or the classes (B, 1), of the targets.
        is_target: the mask (B, T), False where no target is predicted.
        gold: the gold links (B, T, S), see `gold_links`; None without a gold alignment.
        parts: masks (B, T) of the parts of a target, such as the month, by name.
        categories: masks (B, T) of the examples of each category, by name.
    """

    inputs: tuple[Tensor, ...]
    targets: Tensor
    is_target: Tensor
    gold: Tensor | None = None
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    categories: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: Batch | LabeledBatch, network: Network) -> Self:
        """Return the sample of a batch of data for a network."""
        if isinstance(batch, LabeledBatch):
            targets = batch.label.unsqueeze(1)
            return cls((batch.text,), targets, torch.ones_like(targets, dtype=torch.bool))
        if isinstance(network, Seq2SeqNetwork):
            return cls(batch.inputs, batch.target_out, batch.target_out != PAD)
        text = batch.target_in
        is_masked = (torch.arange(text.size(1), device=text.device) % MASK_INTERVAL == 0) & (text != PAD)
        return cls((text.masked_fill(is_masked, MASK),), text, is_masked)

    @classmethod
    def from_dataset(
        cls, dataset: Any, rows: Tensor, network: Network, target_parts: Mapping[str, Sequence[int]] | None = None
    ) -> Self:
        """Return the sample of some rows of a dataset, with their alignment, parts and categories.

        Args:
            dataset: the dataset.
            rows: the indices of the examples (B).
            network: the network.
            target_parts: the positions of the parts of a target, by name, see `PairDataModule`.
        """
        batch = dataset[rows]
        sample = cls.of(batch, network)
        pairs: list[Pair] = [dataset.pairs[row] for row in rows.tolist()] if hasattr(dataset, "pairs") else []
        shape, positions = sample.targets.shape, torch.arange(sample.targets.size(1))
        parts = {
            name: torch.isin(positions, torch.tensor(columns)).expand(shape) & sample.is_target
            for name, columns in (target_parts or {}).items()
        }
        # The categories of labeled texts are the labels.
        names = [pair.target if isinstance(batch, LabeledBatch) else pair.category for pair in pairs]
        categories = {
            name: torch.tensor([each == name for each in names]).unsqueeze(1).expand(shape) & sample.is_target
            for name in sorted({name for name in names if name is not None})
        }
        is_aligned = bool(pairs) and all(pair.alignment is not None for pair in pairs)
        gold = gold_links(pairs, batch) if is_aligned else None
        return cls(sample.inputs, sample.targets, sample.is_target, gold, parts, categories)

    def __len__(self) -> int:
        return len(self.targets)

    @cached_property
    def groups(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the masks (B, T) of the targets at each position, of each part and of each category.

        Groups without targets are omitted.
        """
        columns = torch.arange(self.targets.size(1), device=self.targets.device)
        positions = {str(column + 1): self.is_target & (columns == column) for column in columns.tolist()}
        groups = {"position": positions, "part": self.parts, "category": self.categories}
        return {by: {name: mask for name, mask in masks.items() if mask.any()} for by, masks in groups.items()}

    def rows(self, rows: Tensor | slice) -> Self:
        """Return the sample of some examples."""
        return self._map(lambda tensor: tensor[rows])

    def to(self, device: torch.device) -> Self:
        """Return the sample on a device."""
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, function: Any) -> Self:
        """Apply a function to each tensor of the sample."""

        def mapped(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {name: function(tensor) for name, tensor in value.items()}
            if isinstance(value, tuple):
                return tuple(map(function, value))
            return None if value is None else function(value)

        return type(self)(*(mapped(getattr(self, each.name)) for each in fields(self)))

    def batches(self) -> Iterator[slice]:
        """Yield the rows of batches with at most BATCH_TOKENS tokens, or with one example."""
        length = sum(ids.size(1) for ids in self.inputs)
        size = max(1, BATCH_TOKENS // length)
        for start in range(0, len(self), size):
            yield slice(start, start + size)


class Outcome(NamedTuple):
    """Quality of the outputs of a network for a sample.

    Attributes:
        nll: the negative log probability of each target in nats (B, T); 0 where there is none.
        is_right: whether each target is the most probable output (B, T); True where there is none.
    """

    nll: Tensor
    is_right: Tensor

    @property
    def errors(self) -> Tensor:
        """Return the number of wrong targets of each example (B)."""
        return (~self.is_right).sum(1)

    @property
    def exact(self) -> Tensor:
        """Return whether each example is right (B).

        This is the exact match of greedy decoding, which gives a target if and only if each of its tokens is the most
        probable one after those before.
        """
        return self.is_right.all(1)

    @classmethod
    def of(cls, logits: Tensor, sample: Sample) -> Outcome:
        """Return the outcome of logits (B, T, V)."""
        is_right = logits.argmax(-1) == sample.targets
        return cls(-log_probabilities(logits, sample), is_right | ~sample.is_target)

    @classmethod
    def join(cls, outcomes: Sequence[Outcome]) -> Outcome:
        """Return the outcome of the examples of all outcomes."""
        return cls(*map(torch.cat, zip(*outcomes, strict=True)))


def logits_of(network: Network, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return the logits (B, T, V) of a network in float32 or wider, with T = 1 for a classifier."""
    logits = network(*inputs)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.unsqueeze(1) if logits.dim() == 2 else logits


def log_probabilities(logits: Tensor, sample: Sample) -> Tensor:
    """Return the log probability of each target (B, T), 0 where there is none, for logits (B, T, V)."""
    values = logits.log_softmax(-1).gather(-1, sample.targets.unsqueeze(-1)).squeeze(-1)
    return values.masked_fill(~sample.is_target, 0)


def tokens_of(network: Network, name: str, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return the ids (B, T) of the tokens for which a component of a network has outputs."""
    if isinstance(network, CausalNetwork):
        return torch.cat(inputs, dim=1)
    tokens = inputs[0] if network.side(name) == "encoder" else inputs[-1]
    return tokens if tokens.dim() == 2 else tokens[..., 0]


@torch.no_grad()
def outcome(network: Network, sample: Sample) -> Outcome:
    """Return the outcome of a network, in evaluation mode, for a sample."""
    batches = map(sample.rows, sample.batches())
    return Outcome.join([Outcome.of(logits_of(network, batch.inputs), batch) for batch in batches])
