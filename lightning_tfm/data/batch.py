"""Batches of token ids, and the protocol of the datasets that return them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_tfm.tokenization import PAD, Ids


class Batch(NamedTuple):
    """Batch of B sequences of right-padded token ids.

    Attributes:
        source: (B, S), each row ends with EOS; S = 0 for data without sources.
        target_in: (B, T), the input of the decoder; the targets of pairs start with BOS.
        target_out: (B, T), the targets of the decoder: target_in shifted by one token; those of pairs end with EOS.
        rows: (B), the index of each sequence in its dataset.
    """

    source: Tensor
    target_in: Tensor
    target_out: Tensor
    rows: Tensor

    @property
    def inputs(self) -> tuple[Tensor, Tensor]:
        """Return the positional arguments of a network's `forward`."""
        return self.source, self.target_in

    @property
    def tokens(self) -> Tensor:
        """Return the number of target tokens without padding, a scalar."""
        return (self.target_out != PAD).sum()


class Examples(Protocol):
    """Protocol of encoded datasets, which return a batch for a tensor of row indices."""

    @property
    def lengths(self) -> Tensor:
        """Length of each row in tokens, (N); samplers put rows of similar length into one batch."""

    @property
    def fingerprint(self) -> str:
        """Hash of the data; equal data have equal fingerprints."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Tensor) -> NamedTuple: ...


def pad_sequences(rows: Sequence[Ids]) -> tuple[Tensor, Tensor]:
    """Return rows of ids as one tensor, right-padded with PAD, and their lengths.

    Args:
        rows: N sequences of tokens, each an id or a tuple of G ids.

    Returns:
        The ids, (N, longest) or (N, longest, G), and the lengths, (N).
    """
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.tensor([*itertools.chain.from_iterable(rows)], dtype=torch.long)
    ids = torch.full((len(rows), int(lengths.max()), *tokens.shape[1:]), PAD)
    ids[torch.arange(ids.size(1)) < lengths.unsqueeze(1)] = tokens
    return ids, lengths
