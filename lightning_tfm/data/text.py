"""From a text to windows of it."""

from __future__ import annotations

import hashlib
from functools import cached_property

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_tfm.data.batches import Batch, BatchStream, TaskDataModule, WindowBatches
from lightning_tfm.errors import UserError
from lightning_tfm.tokenizer import PAD, Tokenizer


class TextDataset(Dataset):
    """Windows of a text: `dataset[rows]` is a Batch without sources, whose targets are what follows, token by token.

    Args:
        text: the text.
        tokenizer: its vocabulary.
        context: tokens of a window.
        stride: tokens from the beginning of a row to that of the next: 1 for windows anywhere; `context` for windows
            side by side, which score every token once.
        part: which of the text it is, as an error names it.

    Raises:
        UserError: if the text is too short: to train, which begins anywhere, two windows must fit.
    """

    def __init__(self, text: str, tokenizer: Tokenizer, context: int, stride: int, part: str) -> None:
        ids = tokenizer.encode(text)
        least = context + 1 if stride == context else 2 * context + 1
        if len(ids) < least:
            raise UserError(
                f"the {part} part of the text must have at least {least} tokens with context {context}, but has "
                f"{len(ids)}; try context {max(1, (len(ids) - 1) // 2)}, or more text"
            )
        self.ids = torch.tensor(ids)
        self.context, self.stride = context, stride
        self.characters_per_token = len(text) / len(ids)
        begins = torch.arange(0, len(ids) - (context if stride == 1 else 1), stride)
        self.lengths = (len(ids) - 1 - begins).clamp(max=context)  # what is scored

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, rows: Tensor) -> Batch:
        steps = rows.unsqueeze(1) * self.stride + torch.arange(self.context + 1)  # (B, T + 1)
        windows = self.ids[steps.clamp(max=len(self.ids) - 1)].masked_fill(steps >= len(self.ids), PAD)
        return Batch(windows[:, :0], windows[:, :-1], windows[:, 1:])


class TextDataModule(TaskDataModule):
    """A text in, windows out. A subclass says what the text is.

    Args:
        tokenizer: the vocabulary.
        texts: the text of each split.
        context: tokens of a window.
        others: as in TaskDataModule.
    """

    holds = "a text"

    def __init__(
        self,
        tokenizer: Tokenizer,
        texts: dict[str, str],
        context: int,
        batch_size: int,
        eval_batch_size: int,
        num_workers: int,
        seed: int,
    ) -> None:
        super().__init__(tokenizer, batch_size, eval_batch_size, num_workers, seed)
        if context < 1:
            raise UserError(f"context must be at least 1, but is {context}; try 64")
        self.texts = texts
        self.context = self.max_source_length = context
        self.max_target_length = 0

    def examples(self, split: str) -> TextDataset:
        stride = 1 if split == "train" else self.context
        return TextDataset(self.texts[split], self.tokenizer, self.context, stride, split)

    def training_batches(self, rank: int, world_size: int) -> BatchStream:
        num_tokens = len(self.datasets["train"].ids)
        batches = WindowBatches(num_tokens, self.context, self.batch_size, self.seed, rank, world_size)
        if not batches.batches_per_pass:
            raise UserError(
                f"batch_size must be at most the {batches.windows} windows of the training part, but is "
                f"{self.batch_size}"
            )
        return batches
