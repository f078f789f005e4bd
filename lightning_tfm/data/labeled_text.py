"""Dataset and data module of labeled texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_tfm.data.datamodule import TaskDataModule
from lightning_tfm.data.hashing import hash_lines
from lightning_tfm.data.pairs import Pair
from lightning_tfm.data.rows import TokenRows
from lightning_tfm.errors import UserError, rank_zero_print
from lightning_tfm.tokenization import PAD, Tokenizer


class LabeledBatch(NamedTuple):
    """Batch of B texts and their classes.

    Attributes:
        text: the right-padded ids (B, S), or (B, S, G) if each token has G ids.
        label: the class of each text (B), from 0.
        rows: the index of each text in its dataset (B).
    """

    text: Tensor
    label: Tensor
    rows: Tensor

    @property
    def inputs(self) -> tuple[Tensor]:
        """Return the positional arguments of a network's `forward`."""
        return (self.text,)

    @property
    def tokens(self) -> Tensor:
        """Return the number of tokens without padding, as a scalar tensor."""
        words = self.text if self.text.dim() == 2 else self.text[..., 0]
        return (words != PAD).sum()


class LabeledDataset(Dataset[LabeledBatch]):
    """Dataset of encoded texts: `dataset[rows]` is a LabeledBatch.

    Texts of more than `max_length` tokens are truncated to their last tokens.

    Raises:
        UserError: if a text has no tokens.
    """

    def __init__(self, pairs: Sequence[Pair], tokenizer: Tokenizer, labels: Sequence[str], max_length: int) -> None:
        self.pairs = pairs
        ids = tokenizer.encode_all([pair.source for pair in pairs])
        if not all(ids):
            text, label, *_ = pairs[ids.index([])]
            raise UserError(f"each text must have a token, but {text[:40]!r} ({label}) does not; delete it")
        self.longest = max(map(len, ids))
        self.cut = sum(len(row) > max_length for row in ids)  # number of truncated texts
        read = [row[-max_length:] for row in ids]
        self.spelled = None
        if tokenizer.ids_per_token > 1:  # store them once per word, not per occurrence
            numbers: dict[int | tuple[int, ...], int] = {(PAD,) * tokenizer.ids_per_token: PAD}
            read = [[numbers.setdefault(token, len(numbers)) for token in row] for row in read]
            self.spelled = torch.tensor([*numbers])  # (words, G)
        self.texts = TokenRows(
            [torch.tensor([*chain.from_iterable(read)])],
            torch.tensor([*map(len, read)]),
            tokenizer.vocab_size if self.spelled is None else len(self.spelled),
        )
        self.labels = torch.tensor([labels.index(pair.target) for pair in pairs])

    @property
    def lengths(self) -> Tensor:
        return self.texts.lengths

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def fingerprint(self) -> str:
        return hash_lines(f"{pair.target}\t{pair.source}" for pair in self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, rows: Tensor) -> LabeledBatch:
        text = self.texts[rows]
        return LabeledBatch(text if self.spelled is None else self.spelled[text], self.labels[rows], rows)


class LabeledDataModule(TaskDataModule, ABC):
    """Base class of data modules of labeled texts. Subclasses implement `pairs`.

    Args:
        tokenizer: the tokenizer of the texts.
        labels: the names of the classes.
        max_length: maximum length of a text in tokens.
        truncate: whether to keep the last `max_length` tokens of longer texts instead of raising UserError; reviews
            often end with their verdict.
        batch_size: number of texts in a training batch, over all processes.
        settings: further arguments of TaskDataModule.
    """

    holds = "texts with labels"
    source_noun = "texts"
    datasets: Mapping[str, LabeledDataset]

    def __init__(
        self,
        tokenizer: Tokenizer,
        labels: Sequence[str],
        max_length: int = 200,
        truncate: bool = False,
        batch_size: int = 32,
        **settings: Any,
    ) -> None:
        super().__init__(tokenizer, batch_size=batch_size, **settings)
        if len(labels) < 2:
            raise UserError(f"there must be at least two labels, but there is {', '.join(labels) or 'none'}")
        if max_length < 1:
            raise UserError(f"max_length must be at least 1, but is {max_length}; try 200")
        self.labels = list(labels)
        self.num_classes = len(labels)
        self.max_length = self.max_source_length = max_length
        self.truncate = truncate

    @abstractmethod
    def pairs(self, split: str) -> list[Pair]:
        """Return all texts and labels of "train", "val" or a test set, the same in every call and on every machine."""

    @property
    def longest_source(self) -> int:
        return int(self.datasets["train"].lengths.max())

    @property
    def shortest_source(self) -> int:
        return int(self.datasets["train"].lengths.min())

    def sources(self, split: str) -> list[str]:
        return [pair.source for pair in self.datasets[split].pairs]

    def examples(self, split: str) -> LabeledDataset:
        pairs = self.pairs(split)
        examples = LabeledDataset(pairs, self.tokenizer, self.labels, self.max_length)
        if examples.cut and not self.truncate:
            raise UserError(
                f"max_length must be at least {examples.longest} for {split}, but is {self.max_length}; "
                "or set truncate to read only the end of longer texts"
            )
        if examples.cut:
            rank_zero_print(
                f"{examples.cut} of {len(pairs)} {split} texts are truncated to their last {self.max_length} tokens"
            )
        return examples
