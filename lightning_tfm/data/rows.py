"""Storage of texts and of encoded texts, which takes less memory than a Python object for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import torch
from torch import Tensor

from lightning_tfm.errors import UserError
from lightning_tfm.tokenization import PAD

BLOCK = 100
"""Number of texts that are stored as one object."""

SEPARATOR = "\0"
"""Character between the texts of a block."""


class TextRows(Sequence[str]):
    """Texts, stored in blocks of UTF-8: `rows[index]` is a text, and `rows[begin:end]` a list of texts.

    A short text takes a fifth of the memory of a Python string.
    """

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._length = 0

    def extend(self, texts: Sequence[str]) -> None:
        """Append texts; raise UserError if one contains a zero byte."""
        if SEPARATOR in "".join(texts):
            wrong = next(text for text in texts if SEPARATOR in text)
            raise UserError(f"texts must not contain zero bytes, but one does: {wrong[:40]!r}; remove them")
        if self._length % BLOCK:  # the last block is not full
            texts = [*self._blocks.pop().decode().split(SEPARATOR), *texts]
            self._length -= self._length % BLOCK
        self._blocks += (SEPARATOR.join(texts[row : row + BLOCK]).encode() for row in range(0, len(texts), BLOCK))
        self._length += len(texts)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        selected = range(self._length)[index]
        if isinstance(selected, range):
            return [self[row] for row in selected]
        block, place = divmod(selected, BLOCK)
        return self._blocks[block].decode().split(SEPARATOR)[place]

    def __iter__(self) -> Iterator[str]:
        for block in self._blocks:
            yield from block.decode().split(SEPARATOR)


def id_type(vocab_size: int) -> torch.dtype:
    """Return the smallest type, of int16 and int32, in which ids of a vocabulary can be stored."""
    return torch.int16 if vocab_size <= torch.iinfo(torch.int16).max else torch.int32


class TokenRows:
    """Rows of token ids, stored one after the other without padding: `rows[indices]` is a padded batch.

    The parts hold the ids of all rows, one row after the other, and `lengths` (N) the number of ids of each row.
    They are stored in the type that `id_type` returns for `vocab_size`.
    """

    def __init__(self, parts: Iterable[Tensor], lengths: Tensor, vocab_size: int) -> None:
        self.lengths = lengths
        self._starts = lengths.cumsum(0) - lengths
        dtype = id_type(vocab_size)
        # Rows are read up to the length of the longest in a batch, so padding follows the last row.
        padding = torch.full((int(lengths.max()),), PAD, dtype=dtype)
        self._ids = torch.cat([*(part.to(dtype) for part in parts), padding])

    def count(self, id: int) -> Tensor:
        """Return how often an id occurs in each row (N)."""
        places = (self._ids == id).nonzero().squeeze(1)
        rows = torch.searchsorted(self._starts, places, right=True) - 1
        return rows.bincount(minlength=len(self.lengths))

    def __getitem__(self, indices: Tensor) -> Tensor:
        """Return the rows with indices (B), right-padded to the length T of the longest, as int64 (B, T)."""
        lengths = self.lengths[indices]
        steps = torch.arange(int(lengths.max()))
        ids = self._ids[self._starts[indices].unsqueeze(1) + steps].long()
        return ids.masked_fill_(steps >= lengths.unsqueeze(1), PAD)
