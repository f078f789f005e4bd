"""From pairs of texts to batches of ids."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from lightning_tfm.data.batches import Batch, TaskDataModule, fingerprint, padded, stable_hash
from lightning_tfm.errors import UserError, say
from lightning_tfm.tokenizer import BOS, EOS, PAD, Tokenizer


class Pair(NamedTuple):
    """A source text and the target text that answers it.

    `alignment` holds, where it is known, which symbols belong together: (source index, target index), from 0.
    `kind` is what the pair is an example of, where the data have several; metrics are told by it.
    """

    source: str
    target: str
    alignment: tuple[tuple[int, int], ...] | None = None
    kind: str | None = None


class PairDataset(Dataset):
    """Encoded pairs, cut into batches by one index operation: `dataset[rows]` is a Batch."""

    def __init__(self, pairs: Sequence[Pair], tokenizer: Tokenizer) -> None:
        self.pairs = pairs
        sources = tokenizer.encode_all([pair.source for pair in pairs])
        targets = tokenizer.encode_all_targets([pair.target for pair in pairs])
        self.sources, self.source_lengths = padded([[*ids, EOS] for ids in sources])
        self.targets, self.target_lengths = padded([[BOS, *ids, EOS] for ids in targets])

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(f"{pair.source}\t{pair.target}" for pair in self.pairs)

    @property
    def lengths(self) -> Tensor:
        return self.source_lengths

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, rows: Tensor) -> Batch:
        source = self.sources[rows, : self.source_lengths[rows].max()]
        target = self.targets[rows, : self.target_lengths[rows].max()]
        target_in = target[:, :-1]
        return Batch(source, target_in.masked_fill(target_in == EOS, PAD), target[:, 1:])


class PairDataModule(TaskDataModule, ABC):
    """Pairs in, batches out. A subclass says what its pairs are.

    Vocabulary and lengths are known once it is constructed, so that a model can be built, and refused, first.

    Args:
        tokenizer: the vocabulary of sources and targets.
        max_source_length: the longest source in tokens, EOS included.
        max_target_length: the longest target in tokens, EOS included.
        drop_longer: whether training pairs that are longer are left out, instead of refused.
        others: as in TaskDataModule.
    """

    holds = "pairs of source and target"

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_source_length: int,
        max_target_length: int,
        batch_size: int,
        eval_batch_size: int,
        num_workers: int,
        seed: int,
        test_sets: tuple[str, ...] = ("test",),
        drop_longer: bool = False,
    ) -> None:
        super().__init__(tokenizer, batch_size, eval_batch_size, num_workers, seed, test_sets)
        self.max_source_length = max_source_length
        self.max_target_length = max_target_length
        self.drop_longer = drop_longer

    @abstractmethod
    def pairs(self, split: str) -> list[Pair]:
        """All pairs of "train", "val" or a test set, the same at every call and on every machine."""

    def examples(self, split: str) -> PairDataset:
        examples = PairDataset(self.pairs(split), self.tokenizer)
        sides = (
            ("source", examples.source_lengths, self.max_source_length),
            ("target", examples.target_lengths - 1, self.max_target_length),
        )
        fits = torch.ones(len(examples), dtype=torch.bool)
        for side, lengths, limit in sides:
            fits &= lengths <= limit
            longest = int(lengths.max())
            if longest > limit and not (self.drop_longer and split == "train"):
                pair = examples.pairs[int(lengths.argmax())]
                mend = "raise it, or set drop_longer" if split == "train" else "raise it"
                raise UserError(
                    f"max_{side}_length must be at least {longest} for {split}, but is {limit}; {mend}; the longest "
                    f"begins with {getattr(pair, side)[:40]!r}"
                )
        if fits.all():
            return examples
        left_out = int((~fits).sum())
        if left_out == len(examples):
            raise UserError(f"all {left_out} training pairs are too long; raise max_source_length or max_target_length")
        say(f"{left_out} of {len(examples)} training pairs are too long, and left out")
        kept = [pair for pair, fit in zip(examples.pairs, fits.tolist(), strict=True) if fit]
        return PairDataset(kept, self.tokenizer)


class GeneratedDataModule(PairDataModule):
    """Pairs drawn from a seed. A subclass says how one is drawn.

    A source belongs to one split by its hash alone, whatever the seed: a tenth of all sources to validation, a
    fifth to the test sets, the rest to training. So no source is in two splits, not even under two seeds. Training
    pairs are drawn with repetition, as they come; the pairs of other splits are distinct.

    Args:
        sizes: how many pairs each split holds.
        spelling: sources of one spelling, in the sense of this function, belong to one split.
        others: as in PairDataModule.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_source_length: int,
        max_target_length: int,
        batch_size: int,
        eval_batch_size: int,
        num_workers: int,
        seed: int,
        sizes: dict[str, int],
        spelling: Callable[[str], str] = str,
    ) -> None:
        test_sets = tuple(split for split in sizes if split not in ("train", "val"))
        super().__init__(
            tokenizer,
            max_source_length,
            max_target_length,
            batch_size,
            eval_batch_size,
            num_workers,
            seed,
            test_sets,
        )
        for split, size in sizes.items():
            if size < 1:
                raise UserError(f"{split}_size must be at least 1, but is {size}")
        if batch_size > sizes["train"]:
            raise UserError(f"batch_size must be at most train_size ({sizes['train']}), but is {batch_size}")
        self.sizes = sizes
        self.spelling = spelling

    def setup(self, stage: str) -> None:
        if self.datasets:
            return
        super().setup(stage)
        seen: dict[str, str] = {}
        for split, examples in self.datasets.items():
            for source in {pair.source for pair in examples.pairs}:
                if source in seen:
                    raise UserError(f"splits must be disjoint, but {source!r} is in {seen[source]} and in {split}")
                seen[source] = split

    @abstractmethod
    def stream(self, split: str, seed: int) -> Iterator[Pair]:
        """Endless pairs, from a seed; `split` is for those data that draw some pairs for one split only."""

    def pairs(self, split: str) -> list[Pair]:
        size = self.sizes[split]
        bucket = split if split in ("train", "val") else "test"
        pairs: list[Pair] = []
        seen: set[str] = set()
        fruitless = 0
        hidden = rank_zero_only.rank > 0 or not sys.stderr.isatty()
        with tqdm(total=size, desc=f"generating {split}", unit=" pairs", leave=False, disable=hidden) as bar:
            for pair in self.stream(split, stable_hash(f"{split} {self.seed}")):
                if _bucket(self.spelling(pair.source)) == bucket and (bucket == "train" or pair.source not in seen):
                    seen.add(pair.source)
                    pairs.append(pair)
                    fruitless = 0
                    bar.update()
                    if len(pairs) == size:
                        return pairs
                fruitless += 1
                if fruitless > 100_000:
                    raise UserError(
                        f"{split}_size is {size}, but only {len(pairs)} distinct sources were found; try {len(pairs)}"
                    )
        raise AssertionError("a stream ended")


def _bucket(source: str) -> str:
    """The split that a source belongs to: "test" for all test sets."""
    return ("val", "test", "test", *["train"] * 7)[stable_hash(source) % 10]
