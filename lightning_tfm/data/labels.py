"""From texts with labels to batches of ids and classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_tfm.data.batches import TaskDataModule, fingerprint, padded
from lightning_tfm.data.pairs import Pair
from lightning_tfm.errors import UserError, say
from lightning_tfm.tokenizer import PAD, Tokenizer


class LabelledBatch(NamedTuple):
    """B texts and their classes.

    Attributes:
        text: (B, S), right-padded ids, or (B, S, G) where a token has G of them.
        label: (B), from 0.
    """

    text: Tensor
    label: Tensor

    @property
    def inputs(self) -> tuple[Tensor]:
        """What a network's forward takes."""
        return (self.text,)

    @property
    def words(self) -> Tensor:
        """The own id of each token, which comes first of those that it has, (B, S)."""
        return self.text if self.text.dim() == 2 else self.text[..., 0]

    @property
    def tokens(self) -> Tensor:
        """How many tokens are read."""
        return (self.words != PAD).sum()


class LabelledDataset(Dataset):
    """Encoded texts: `dataset[rows]` is a LabelledBatch. Of a text above text_length, its end is kept.

    Args:
        pairs: texts and their labels.
        tokenizer: the vocabulary.
        labels: the names of the classes.
        text_length: tokens of a text that are read.

    Raises:
        UserError: if a text holds no token.
    """

    def __init__(self, pairs: Sequence[Pair], tokenizer: Tokenizer, labels: Sequence[str], text_length: int) -> None:
        self.pairs = pairs
        ids = tokenizer.encode_all([pair.source for pair in pairs])
        if not all(ids):
            empty = pairs[ids.index([])]
            raise UserError(
                f"each text must hold a word, but {empty.source[:40]!r} ({empty.target}) does not; delete it"
            )
        self.longest = max(map(len, ids))
        self.cut = sum(len(row) > text_length for row in ids)  # how many
        read = [row[-text_length:] for row in ids]
        self.spelled = None
        if tokenizer.ids_per_token > 1:  # which are kept once for each word, not for each time that it is used
            numbers = {(PAD,) * tokenizer.ids_per_token: PAD}
            read = [[numbers.setdefault(token, len(numbers)) for token in row] for row in read]
            self.spelled = torch.tensor([*numbers])  # (words, G)
        self.ids, self.lengths = padded(read)
        self.labels = torch.tensor([labels.index(pair.target) for pair in pairs])

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(f"{pair.target}\t{pair.source}" for pair in self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, rows: Tensor) -> LabelledBatch:
        text = self.ids[rows, : self.lengths[rows].max()]
        return LabelledBatch(text if self.spelled is None else self.spelled[text], self.labels[rows])


class LabelledDataModule(TaskDataModule, ABC):
    """Texts with labels in, batches out. A subclass says what its texts are.

    Args:
        tokenizer: the vocabulary.
        labels: the names of the classes.
        text_length: tokens of a text that are read.
        cut_longer: whether of longer texts the end is read, instead of their being refused.
        others: as in TaskDataModule.
    """

    holds = "texts with labels"

    def __init__(
        self,
        tokenizer: Tokenizer,
        labels: Sequence[str],
        text_length: int,
        cut_longer: bool,
        batch_size: int,
        eval_batch_size: int,
        num_workers: int,
        seed: int,
    ) -> None:
        super().__init__(tokenizer, batch_size, eval_batch_size, num_workers, seed)
        if len(labels) < 2:
            raise UserError(f"there must be at least two labels, but there is {', '.join(labels) or 'none'}")
        if text_length < 1:
            raise UserError(f"text_length must be at least 1, but is {text_length}; try 200")
        self.labels = list(labels)
        self.num_classes = len(labels)
        self.text_length = self.max_source_length = text_length
        self.cut_longer = cut_longer
        self.max_target_length = 0

    @abstractmethod
    def pairs(self, split: str) -> list[Pair]:
        """All texts of "train", "val" or a test set and their labels, the same at every call and on every machine."""

    def examples(self, split: str) -> LabelledDataset:
        pairs = self.pairs(split)
        examples = LabelledDataset(pairs, self.tokenizer, self.labels, self.text_length)
        if examples.cut and not self.cut_longer:
            raise UserError(
                f"text_length must be at least {examples.longest} for {split}, but is {self.text_length}; "
                "or set cut_longer, and of longer texts the end is read"
            )
        if examples.cut:
            say(f"of {examples.cut} of {len(pairs)} texts of {split} the last {self.text_length} tokens are read")
        return examples
