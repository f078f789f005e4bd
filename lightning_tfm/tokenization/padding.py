"""Padding of token ids."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_tfm.tokenization.tokenizer import PAD, Ids


def pad_sequences(rows: Sequence[Ids]) -> tuple[Tensor, Tensor]:
    """Right-pad N sequences, whose tokens are ids or tuples of G ids, with PAD.

    Returns:
        The ids (N, longest) or (N, longest, G), and the lengths (N).
    """
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.tensor([*itertools.chain.from_iterable(rows)], dtype=torch.long)
    ids = torch.full((len(rows), int(lengths.max()), *tokens.shape[1:]), PAD)
    ids[torch.arange(ids.size(1)) < lengths.unsqueeze(1)] = tokens
    return ids, lengths
