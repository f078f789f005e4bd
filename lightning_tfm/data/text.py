"""Dataset and data module of windows of a text."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_tfm.data.batch import Batch
from lightning_tfm.data.datamodule import TaskDataModule
from lightning_tfm.data.samplers import BatchDivision, TrainingSampler, WindowSampler
from lightning_tfm.errors import UserError
from lightning_tfm.tokenization import PAD, Tokenizer

SHORT_LINE = 30
"""Minimum length, in characters, of lines that are compared with the training data."""


class TextDataset(Dataset[Batch]):
    """Dataset of windows of a text: `dataset[rows]` is a Batch without sources, whose targets are the next tokens.

    A window has `max_length` tokens. The stride between the starts of consecutive rows is 1 for windows at any
    position, or `max_length` for adjacent windows, which score every token once.

    Raises:
        UserError: if the text has fewer than 2 * max_length + 1 tokens, or max_length + 1 if stride is max_length.
    """

    def __init__(self, text: str, tokenizer: Tokenizer, max_length: int, stride: int, split: str) -> None:
        ids = tokenizer.encode(text)
        least = max_length + 1 if stride == max_length else 2 * max_length + 1
        if len(ids) < least:
            raise UserError(
                f"the {split} split of the text must have at least {least} tokens with max_length {max_length}, but "
                f"has {len(ids)}; try max_length {max(1, (len(ids) - 1) // 2)}, or more text"
            )
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.ids = torch.tensor(ids)
        self.max_length, self.stride = max_length, stride
        self.characters_per_token = len(text) / len(ids)
        begins = torch.arange(0, len(ids) - (max_length if stride == 1 else 1), stride)
        self.lengths = (len(ids) - 1 - begins).clamp(max=max_length)  # number of scored tokens, (rows)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, rows: Tensor) -> Batch:
        steps = rows.unsqueeze(1) * self.stride + torch.arange(self.max_length + 1)  # (B, T + 1)
        windows = self.ids[steps.clamp(max=len(self.ids) - 1)].masked_fill(steps >= len(self.ids), PAD)
        return Batch(windows[:, :0], windows[:, :-1], windows[:, 1:], rows)


class TextDataModule(TaskDataModule):
    """Base class of data modules of a text, which is split into windows.

    Args:
        tokenizer: the tokenizer of the text.
        texts: the text of each split; without "test", the model is tested on "val".
        max_length: number of tokens in a window.
        batch_size: number of windows in a training batch, over all processes.
        settings: further arguments of TaskDataModule.
    """

    holds = "a text"
    test_setting = "test_fraction"
    source_noun = "lines"
    datasets: Mapping[str, TextDataset]

    def __init__(
        self, tokenizer: Tokenizer, texts: dict[str, str], max_length: int = 64, batch_size: int = 32, **settings: Any
    ) -> None:
        super().__init__(tokenizer, batch_size=batch_size, **settings)
        self.test_sets = ("test",) if "test" in texts else ("val",)
        if max_length < 1:
            raise UserError(f"max_length must be at least 1, but is {max_length}; try 64")
        self.texts = texts
        self.max_length = self.max_source_length = max_length

    def sources(self, split: str) -> list[str]:
        """Return the lines of a split except short ones, such as names of speakers, which often recur."""
        return [line for line in self.texts[split].splitlines() if len(line) >= SHORT_LINE]

    def examples(self, split: str) -> TextDataset:
        stride = 1 if split == "train" else self.max_length
        return TextDataset(self.texts[split], self.tokenizer, self.max_length, stride, split)

    def training_batches(self, division: BatchDivision) -> TrainingSampler:
        num_tokens = len(self.datasets["train"].ids)
        batches = WindowSampler(num_tokens, self.max_length, self.batch_size, self.seed, division)
        if not batches.batches_per_epoch:
            raise UserError(
                f"batch_size must be at most the {batches.windows} windows of the training split, but is "
                f"{self.batch_size}"
            )
        return batches
