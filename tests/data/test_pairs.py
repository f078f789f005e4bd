"""Compact storage of texts, tokens and pairs."""

from __future__ import annotations

import pytest
import torch

from lightning_tfm.data import Pair, Pairs
from lightning_tfm.data.rows import TextRows, TokenRows
from lightning_tfm.errors import UserError
from lightning_tfm.system import memory
from support.corpora import TEXTS


@pytest.mark.parametrize("vocab_size", [10, 40_000])
def test_rows_are_stored_without_padding_and_read_with_it(vocab_size):
    torch.manual_seed(0)
    lengths = torch.tensor([3, 0, 7, 1])
    rows = [torch.randint(1, vocab_size, (length,)) for length in lengths.tolist()]
    for parts in ([torch.cat(rows)], rows):
        stored = TokenRows(parts, lengths, vocab_size)
        for indices in ([0], [1, 3], [3, 2, 2, 0], [1]):
            expected = torch.nn.utils.rnn.pad_sequence([rows[index] for index in indices], batch_first=True)
            assert stored[torch.tensor(indices)].equal(expected)


@pytest.mark.parametrize("part", [1, 3, memory.PART])
@pytest.mark.parametrize("texts", [TEXTS, TEXTS * 40, [""] * 4, []])
def test_stored_texts_are_those_of_a_list(texts, part, monkeypatch):
    monkeypatch.setattr(memory, "PART", part)
    stored = TextRows()
    for texts_of_part in memory.in_parts(texts):
        stored.extend(texts_of_part)
    assert [*stored] == texts
    assert [stored[row] for row in range(-len(texts), len(texts))] == [*texts, *texts]
    for rows in (slice(None), slice(1, 3), slice(-2, None), slice(2, 1), slice(None, None, -2), slice(9, 20)):
        assert stored[rows] == texts[rows]
    with pytest.raises(IndexError):
        stored[len(texts)]


def test_texts_with_zero_bytes_are_refused():
    stored = TextRows()
    stored.extend(["a"])
    with pytest.raises(UserError, match=r"texts must not contain zero bytes, but one does: 'b\\x00c'; remove them"):
        stored.extend(["b", "b\0c"])
    assert [*stored] == ["a"]


def test_stored_pairs_are_those_of_a_list():
    whole = [Pair(text, text[::-1], ((0, row),), "long" if row else None) for row, text in enumerate(TEXTS)]
    stored = Pairs.of(whole)
    assert [*stored] == stored[:] == whole
    assert Pairs.of(stored) is stored
    assert stored.are_aligned
    assert not Pairs.of([*whole, Pair("May", "05")]).are_aligned
    assert not Pairs([(TEXTS, TEXTS)]).are_aligned
    mask = torch.tensor([len(text) > 1 for text in TEXTS])
    assert [*stored.subset(mask)] == [pair for pair in whole if len(pair.source) > 1]
    assert [*Pairs([(TEXTS, TEXTS), (TEXTS, TEXTS)]).subset(mask.repeat(2))] == [
        Pair(text, text) for text in TEXTS * 2 if len(text) > 1
    ]
