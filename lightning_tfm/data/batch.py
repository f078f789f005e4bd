"""Batches of token ids, and the protocol of datasets that return them."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_tfm.tokenization import PAD


class Batch(NamedTuple):
    """Batch of B sequences of right-padded token ids.

    Attributes:
        source: the input of the encoder (B, S); each row ends with EOS. S is 0 for data without sources.
        target_in: the input of the decoder (B, T); starts with BOS for pairs.
        target_out: the targets of the decoder (B, T), target_in shifted by one token; ends with EOS for pairs.
        rows: the index of each sequence in its dataset (B).
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
        """Return the number of target tokens without padding, as a scalar tensor."""
        return (self.target_out != PAD).sum()


class MicroBatches(tuple[Any, ...]):
    """Micro-batches of a process, see `BatchDivision`, each padded on its own."""

    @property
    def tokens(self) -> Tensor:
        """Return the number of tokens without padding in all micro-batches, as a scalar tensor."""
        return torch.stack([batch.tokens for batch in self]).sum()


class Examples(Protocol):
    """Protocol of encoded datasets, which map a tensor of row indices to a batch."""

    @property
    def lengths(self) -> Tensor:
        """Return the length of each row in tokens (N), by which samplers group rows."""

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all rows."""

    @property
    def fingerprint(self) -> str:
        """Return a hash of the texts, whatever the tokenizer; equal data have equal fingerprints."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Tensor) -> NamedTuple: ...
