"""Datasets and data module of windows of a text, or of a mixture of texts."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_tfm.data.batch import Batch, Examples
from lightning_tfm.data.datamodule import TaskDataModule
from lightning_tfm.data.samplers import BatchDivision, MixtureSampler, TrainingSampler, WindowSampler
from lightning_tfm.data.text_files import expand_path
from lightning_tfm.data.token_files import Reader, TokenFile, first_characters, prepare_tokens
from lightning_tfm.errors import UserError
from lightning_tfm.tokenization import (
    END_OF_DOCUMENT,
    PAD,
    UNKNOWN,
    SymbolTokenizer,
    Tokenizer,
    build_vocab,
    read_tokenizer,
    train_tokenizer,
)

SAMPLE = 10_000_000
"""Number of characters at the beginning of the training split on which a tokenizer of subwords is trained.

Of a mixture of texts, the same number of characters of each is used, SAMPLE in total.
"""


class TextDataset(Dataset[Batch]):
    """Dataset of windows of a text: `dataset[rows]` is a Batch without sources, whose targets are the next tokens.

    A window has `max_length` tokens. The stride between the starts of consecutive rows is 1 for windows at any
    position, or `max_length` for adjacent windows, which score every token once.

    Raises:
        UserError: if the text has fewer than 2 * max_length + 1 tokens, or max_length + 1 if stride is max_length.
    """

    def __init__(self, tokens: TokenFile, split: str, max_length: int, stride: int, name: str) -> None:
        _, number, num_characters, self.fingerprint, _ = tokens.splits[split][name]
        least = max_length + 1 if stride == max_length else 2 * max_length + 1
        if number < least:
            raise UserError(
                f"the {split} split of {name} must have at least {least} tokens with max_length {max_length}, but "
                f"has {number}; try max_length {max(1, (number - 1) // 2)}, or more text"
            )
        self.settings = tokens, split, max_length, stride, name
        self.ids = tokens.ids(split, name)
        self.max_length, self.stride = max_length, stride
        self.num_characters, self.characters_per_token = num_characters, num_characters / number
        self.num_rows = len(range(0, number - (max_length if stride == 1 else 1), stride))
        self.last_length = min(max_length, number - 1 - (self.num_rows - 1) * stride)
        self.num_tokens = (self.num_rows - 1) * max_length + self.last_length

    @property
    def lengths(self) -> Tensor:
        """Return the number of scored tokens of each row (N), of which only the last may be smaller."""
        lengths = torch.tensor(self.max_length).expand(self.num_rows)  # one number is stored
        is_complete = self.last_length == self.max_length
        return lengths if is_complete else torch.cat([lengths[:-1], torch.tensor([self.last_length])])

    def __reduce__(self) -> tuple[Any, ...]:
        """Map the file again in a worker process, which would otherwise get a copy of the tokens."""
        return type(self), self.settings

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, rows: Tensor) -> Batch:
        begins = rows * self.stride
        complete = self.ids.unfold(0, self.max_length + 1, 1)  # a view of the windows at any position
        if begins.max() < len(complete):
            windows = complete[begins].long()  # (B, T + 1)
        else:  # the last row is shorter
            steps = begins.unsqueeze(1) + torch.arange(self.max_length + 1)
            windows = self.ids[steps.clamp(max=len(self.ids) - 1)].long().masked_fill_(steps >= len(self.ids), PAD)
        return Batch(windows[:, :0], windows[:, :-1], windows[:, 1:], rows)


class MixtureDataset(Dataset[Batch]):
    """Dataset of the windows of several texts: the rows of the first text are followed by those of the next one.

    Args:
        texts: the windows of each text.
    """

    def __init__(self, texts: Sequence[TextDataset]) -> None:
        self.texts = texts
        self.ends = torch.tensor([*map(len, texts)]).cumsum(0)  # the rows of each text end before this one
        self.num_tokens = sum(text.num_tokens for text in texts)
        self.characters_per_token = sum(text.num_characters for text in texts) / sum(len(text.ids) for text in texts)
        self.fingerprint = hashlib.sha256(" ".join(text.fingerprint for text in texts).encode()).hexdigest()[:16]

    @property
    def lengths(self) -> Tensor:
        """Return the number of scored tokens of each row (N)."""
        return torch.cat([text.lengths for text in self.texts])

    def text_indices(self, rows: Tensor) -> Tensor:
        """Return the index of the text of each row (B)."""
        return torch.bucketize(rows, self.ends.to(rows.device), right=True)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, rows: Tensor) -> Batch:
        indices = self.text_indices(rows)
        begins = self.ends - torch.tensor([*map(len, self.texts)])
        windows = torch.empty(2, len(rows), self.texts[0].max_length, dtype=torch.long)
        for index in indices.unique().tolist():
            is_own = indices == index
            batch = self.texts[index][rows[is_own] - begins[index]]
            windows[0, is_own], windows[1, is_own] = batch.target_in, batch.target_out
        return Batch(windows[0, :, :0], windows[0], windows[1], rows)


class TextDataModule(TaskDataModule, ABC):
    """Base class of data modules of a text, which is split into windows. Subclasses implement `read`.

    The text is split into training, test and validation data, in this order. The validation split is the last
    `val_fraction` of the text for any `test_fraction`. The test split precedes it, so settings chosen on the end of the
    text can be tested on data not used to choose them.

    The tokens are written to the cache at first use, where the next run, and all processes of a run, find them.

    A subclass for a mixture of texts sets `weights` before it calls this constructor, and overrides `readers`. Each
    text is split, and all have the same tokenizer. See `MixtureSampler` for the training batches.

    A text may consist of documents that end with EOS, see `read`. Windows may span several of them, as in GPT-2, so
    that a token attends also to the documents before its own.

    Attributes:
        weights: the weight of each text in the training batches, by the name of the text; by default of only one.

    Args:
        tokenizer: the characters of the training split, or byte-level subwords trained on its first 10 million
            characters.
        vocab_size: maximum size of the vocabulary, which keeps the most frequent tokens.
        tokenizer_file: a Hugging Face tokenizer.json, used instead of a trained tokenizer.
        val_fraction: fraction of the whole text for validation.
        test_fraction: fraction of the whole text for testing; with 0, the model is tested on the validation split.
        max_length: number of tokens in a window.
        batch_size: number of windows in a training batch, over all processes.
        settings: further arguments of TaskDataModule.

    Note:
        A text is encoded in blocks of at most 8,192 characters. They end where a byte-level tokenizer divides a text
        anyway, but other tokenizers, such as those of SentencePiece, may divide it differently there.
    """

    holds = "a text"
    test_setting = "test_fraction"
    source_noun = "lines"
    datasets: Mapping[str, TextDataset | MixtureDataset]
    weights: Mapping[str, float] = {"the text": 1.0}

    def __init__(
        self,
        tokenizer: Literal["character", "subword"] = "character",
        vocab_size: int = 6_000,
        tokenizer_file: str | None = None,
        val_fraction: float = 0.1,
        test_fraction: float = 0.0,
        max_length: int = 64,
        batch_size: int = 32,
        **settings: Any,
    ) -> None:
        if not (val_fraction > 0 and test_fraction >= 0 and val_fraction + test_fraction < 1):
            raise UserError(
                "val_fraction must be above 0, test_fraction at least 0, and both together below 1, but they are "
                f"{val_fraction} and {test_fraction}; try 0.1 and 0"
            )
        if max_length < 1:
            raise UserError(f"max_length must be at least 1, but is {max_length}; try 64")
        given = None if tokenizer_file is None else read_tokenizer(expand_path(tokenizer_file, "tokenizer_file"))
        trained, self.tokens = prepare_tokens(
            {"text": self.version(), "tokenizer": given.fingerprint if given else [tokenizer, vocab_size]},
            self.readers(),
            lambda texts: given or _train_tokenizer(texts, tokenizer, vocab_size),
            val_fraction,
            test_fraction,
        )
        super().__init__(trained, batch_size=batch_size, **settings)
        self.test_sets = ("test",) if test_fraction else ("val",)
        self.max_length = self.max_source_length = max_length

    @abstractmethod
    def read(self) -> Iterator[str]:
        """Yield the text in parts of any length, the same in every call and on every machine.

        A subclass that reads documents yields END_OF_DOCUMENT after each, or a line feed, since the parts are joined.
        """

    def readers(self) -> Mapping[str, Reader]:
        """Return a function that reads each text of `weights`, by name; by default `read`, which reads the only one."""
        return dict.fromkeys(self.weights, self.read)

    def version(self) -> str:
        """Return a text that identifies the text and its version, such as its name and date.

        By default, this is the hash of the text, for which all of it is read each time.
        """
        total = hashlib.sha256()
        for part in chain.from_iterable(read() for read in self.readers().values()):
            total.update(part.encode(errors="surrogatepass"))
        return total.hexdigest()

    def overlaps(self, splits: Sequence[str]) -> dict[str, tuple[int, int]]:
        return {split: self.tokens.overlaps[split] for split in splits if split != "train"}

    @property
    def marks_ends(self) -> bool:
        """Return whether documents of the training split end with EOS."""
        return any(split.num_ends for split in self.tokens.splits["train"].values())

    def examples(self, split: str) -> TextDataset | MixtureDataset:
        stride = 1 if split == "train" else self.max_length
        texts = [TextDataset(self.tokens, split, self.max_length, stride, name) for name in self.weights]
        return MixtureDataset(texts) if len(texts) > 1 else texts[0]

    def _by_length(self, examples: Examples) -> Callable[[Tensor], Tensor]:
        if not isinstance(examples, TextDataset):
            return super()._by_length(examples)  # a table of all rows, which takes much memory for long texts
        # The last window comes first if it is shorter.
        shift = int(examples.last_length < examples.max_length)
        return lambda places: (places - shift) % len(examples)

    def training_batches(self, division: BatchDivision) -> TrainingSampler:
        sizes = [split.num_tokens for split in self.tokens.splits["train"].values()]
        batches: WindowSampler | MixtureSampler
        if len(sizes) == 1:
            batches = WindowSampler(sizes[0], self.max_length, self.batch_size, self.seed, division)
        else:
            batches = MixtureSampler(sizes, self.weights, self.max_length, self.batch_size, self.seed, division)
        if not batches.batches_per_epoch:
            raise UserError(
                f"batch_size must be at most the {batches.windows} windows of the training split, but is "
                f"{self.batch_size}"
            )
        return batches


def _train_tokenizer(texts: Sequence[Iterable[list[str]]], tokens: str, vocab_size: int) -> Tokenizer:
    """Train a tokenizer on texts, each in lists of blocks: of all characters, or of subwords of the first SAMPLE."""
    if tokens == "subword":
        size = SAMPLE // len(texts)
        samples = [first_characters(chain.from_iterable(blocks), size) for blocks in texts]
        sample = (block.removesuffix(END_OF_DOCUMENT) for block in chain.from_iterable(samples))
        return train_tokenizer(sample, tokens, vocab_size)
    counts: Counter[str] = Counter()
    for some in chain.from_iterable(texts):
        counts.update(SymbolTokenizer(()).count(some, are_targets=False))
    counts.pop(END_OF_DOCUMENT, None)
    return SymbolTokenizer([UNKNOWN, *build_vocab(counts, vocab_size)])
