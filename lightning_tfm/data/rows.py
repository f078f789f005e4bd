"""Storage of encoded texts."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_tfm.tokenization import PAD


class TokenRows:
    """Rows of token ids, stored one after the other without padding: `rows[indices]` is a padded batch.

    Args:
        ids: the ids of all rows, one row after the other.
        lengths: the number of ids of each row (N).
        vocab_size: the number of different ids, which determines the type in which they are stored.
    """

    def __init__(self, ids: Tensor, lengths: Tensor, vocab_size: int) -> None:
        self.lengths = lengths
        self._starts = lengths.cumsum(0) - lengths
        dtype = torch.int16 if vocab_size <= torch.iinfo(torch.int16).max else torch.int32
        # Rows are read up to the length of the longest in a batch, so padding follows the last row.
        self._ids = torch.nn.functional.pad(ids.to(dtype), (0, int(lengths.max())), value=PAD)

    def __getitem__(self, indices: Tensor) -> Tensor:
        """Return the rows with indices (B), right-padded to the length T of the longest, as int64 (B, T)."""
        lengths = self.lengths[indices]
        steps = torch.arange(int(lengths.max()))
        ids = self._ids[self._starts[indices].unsqueeze(1) + steps].long()
        return ids.masked_fill_(steps >= lengths.unsqueeze(1), PAD)
