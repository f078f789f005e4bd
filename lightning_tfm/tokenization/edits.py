"""Edit distances of texts as sequences of symbols, and the alignments by which they differ least."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_tfm.tokenization.tokenizer import pad_sequences

ALIGNED = 256
"""Number of texts that are aligned at once, which bounds the memory."""


def edit_distances(outputs: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> Tensor:
    """Return the edit distance (Levenshtein 1966) of each output to its reference (B), in symbols."""
    lengths = [(len(output), len(reference)) for output, reference in zip(outputs, references, strict=True)]
    ends = torch.tensor(lengths).T
    distances = torch.zeros_like(ends[0])
    for n, row in enumerate(_distances(outputs, references)):
        distances = torch.where(ends[0] == n, row.gather(1, ends[1].unsqueeze(1)).squeeze(1), distances)
    return distances


def align(outputs: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> Iterator[list[tuple[str, str]]]:
    """Yield an alignment of each output to its reference with the fewest edits.

    Of several such alignments, it is the one that, from the end, aligns two symbols rather than omits one.

    Yields:
        The pairs (symbol of the reference, symbol of the output) in order, which may be equal: a missing symbol of the
        output is "", and so is that of the reference if a symbol is inserted.
    """
    for start in range(0, len(outputs), ALIGNED):
        some = outputs[start : start + ALIGNED], references[start : start + ALIGNED]
        distances = torch.stack([*_distances(*some)], dim=1).tolist()  # (B, N + 1, M + 1)
        yield from map(_trace, *some, distances)


def _distances(outputs: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> Iterator[Tensor]:
    """Yield the distances of the first n symbols of each output to all prefixes of its reference (B, M + 1), from 0."""
    numbers: dict[str, int] = {}

    def number(texts: Sequence[Sequence[str]]) -> Tensor:
        return pad_sequences([[numbers.setdefault(symbol, len(numbers)) for symbol in text] for text in texts])[0]

    output, reference = number(outputs), number(references)  # (B, N), (B, M)
    steps = torch.arange(reference.size(1) + 1)
    distances = steps.expand(len(outputs), -1)
    yield distances
    for n, symbol in enumerate(output.unbind(1), start=1):
        changed = torch.minimum(distances[:, 1:] + 1, distances[:, :-1] + (symbol.unsqueeze(1) != reference))
        changed = torch.cat((torch.full_like(distances[:, :1], n), changed), dim=1)
        # A missing symbol costs 1: the minimum over j <= m of changed[j] + m - j.
        distances = (changed - steps).cummin(1).values + steps
        yield distances


def _trace(output: Sequence[str], reference: Sequence[str], distances: list[list[int]]) -> list[tuple[str, str]]:
    """Return the alignment that the distances of all prefixes (N + 1, M + 1) give."""
    pairs = []
    n, m = len(output), len(reference)
    while n or m:
        if n and m and distances[n][m] == distances[n - 1][m - 1] + (output[n - 1] != reference[m - 1]):
            n, m = n - 1, m - 1
            pairs.append((reference[m], output[n]))
        elif m and distances[n][m] == distances[n][m - 1] + 1:
            m -= 1
            pairs.append((reference[m], ""))
        else:
            n -= 1
            pairs.append(("", output[n]))
    return pairs[::-1]
