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
from lightning_tfm.tokenizer import PAD, SubwordTokenizer, Tokenizer


class LabelledText(NamedTuple):
    """A text, and what it is an example of."""

    text: str
    label: str

    @property
    def pair(self) -> Pair:
        """The text as a source, its label as what answers it."""
        return Pair(self.text, self.label)


class LabelledBatch(NamedTuple):
    """B texts and their classes.

    Attributes:
        text: (B, S), right-padded ids.
        label: (B), from 0.
    """

    text: Tensor
    label: Tensor

    @property
    def inputs(self) -> tuple[Tensor]:
        """What a network's forward takes."""
        return (self.text,)

    @property
    def tokens(self) -> Tensor:
        """How many tokens are read."""
        return (self.text != PAD).sum()


class LabelledDataset(Dataset):
    """Encoded texts: `dataset[rows]` is a LabelledBatch. Of a text above max_length, its end is kept."""

    def __init__(
        self,
        texts: Sequence[LabelledText],
        tokenizer: Tokenizer | SubwordTokenizer,
        labels: Sequence[str],
        max_length: int,
    ) -> None:
        self.pairs = [text.pair for text in texts]
        ids = tokenizer.encode_all([text.text for text in texts])
        self.cut = sum(len(row) > max_length for row in ids)  # how many
        self.ids, self.lengths = padded([row[-max_length:] for row in ids])
        self.labels = torch.tensor([labels.index(text.label) for text in texts])

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(f"{pair.target}\t{pair.source}" for pair in self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, rows: Tensor) -> LabelledBatch:
        return LabelledBatch(self.ids[rows, : self.lengths[rows].max()], self.labels[rows])


class LabelledDataModule(TaskDataModule, ABC):
    """Texts with labels in, batches out. A subclass says what its texts are.

    Args:
        tokenizer: the vocabulary.
        labels: the names of the classes.
        max_length: tokens of a text that are read: its last.
        others: as in TaskDataModule.
    """

    holds = "texts with labels"

    def __init__(
        self,
        tokenizer: Tokenizer | SubwordTokenizer,
        labels: Sequence[str],
        max_length: int,
        batch_size: int,
        eval_batch_size: int,
        num_workers: int,
        seed: int,
    ) -> None:
        super().__init__(tokenizer, batch_size, eval_batch_size, num_workers, seed)
        if len(labels) < 2:
            raise UserError(f"there must be at least two labels, but there is {', '.join(labels) or 'none'}")
        self.labels = list(labels)
        self.num_classes = len(labels)
        self.max_length = self.max_source_length = max_length
        self.max_target_length = 0

    @abstractmethod
    def texts(self, split: str) -> list[LabelledText]:
        """All texts of "train", "val" or a test set, the same at every call and on every machine."""

    def examples(self, split: str) -> LabelledDataset:
        texts = self.texts(split)
        examples = LabelledDataset(texts, self.tokenizer, self.labels, self.max_length)
        if examples.cut:
            say(
                f"{examples.cut} of {len(texts)} texts of {split} are cut, for they are longer than "
                f"{self.max_length} tokens"
            )
        return examples
