"""Dataset and data modules of pairs of source and target texts."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, compress, repeat
from typing import Any, ClassVar, Literal, NamedTuple, overload

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.utils.data import Dataset

from lightning_tfm.data.batch import Batch
from lightning_tfm.data.datamodule import TaskDataModule
from lightning_tfm.data.hashing import hash_lines, stable_hash
from lightning_tfm.data.rows import TextRows, TokenRows, id_type
from lightning_tfm.errors import UserError, rank_zero_print
from lightning_tfm.system.memory import in_parts, total_memory
from lightning_tfm.system.progress import progress_bar
from lightning_tfm.tokenization import BOS, EOS, PAD, Tokenizer, name_symbols

MAX_MISSES = 100_000
"""Number of successive pairs that are not new, after which a split is taken to have no more."""

LEAST_BYTES = 200
"""Memory that a generated pair takes at least, in bytes; those of Copy and Date take 10% more before encoding."""


class Pair(NamedTuple):
    """Source text and target text.

    Attributes:
        source: the source text.
        target: the target text, or the label of a labeled text.
        alignment: the aligned symbols as (source index, target index), from 0; None if unknown.
        category: the category of the pair, by which metrics are grouped; None if the data have no categories.
    """

    source: str
    target: str
    alignment: tuple[tuple[int, int], ...] | None = None
    category: str | None = None


Annotation = tuple[tuple[tuple[int, int], ...] | None, str | None]
"""Alignment and category of a pair."""


class Pairs(Sequence[Pair]):
    """Pairs whose texts are stored as TextRows, so that ten million of them fit into memory.

    `parts` yields sources, targets and, if there are any, categories part by part; `annotations` holds those of all
    pairs, or is None without any.
    """

    def __init__(
        self, parts: Iterable[Sequence[Sequence[str]]], annotations: Sequence[Annotation] | None = None
    ) -> None:
        self.sources, self.targets = TextRows(), TextRows()
        by_category: dict[str, Annotation] = {}  # equal annotations are stored once
        annotated: list[Annotation] = []
        for sources, targets, *categories in parts:
            self.sources.extend(sources)
            self.targets.extend(targets)
            annotated += (by_category.setdefault(name, (None, name)) for names in categories for name in names)
        self._annotations = annotated or annotations

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> Pairs:
        """Return pairs as Pairs, without a copy if they are stored so."""
        if isinstance(pairs, cls):
            return pairs
        sides = [pair.source for pair in pairs], [pair.target for pair in pairs]
        annotations = [pair[2:] for pair in pairs]
        return cls([sides], annotations if any(annotation != (None, None) for annotation in annotations) else None)

    @cached_property
    def are_aligned(self) -> bool:
        """Return whether all pairs have an alignment."""
        return self._annotations is not None and all(alignment is not None for alignment, _ in self._annotations)

    def subset(self, mask: Tensor) -> Pairs:
        """Return the pairs for which a mask (N) is True."""
        selectors = mask.tolist()
        kept = compress(zip(self.sources, self.targets, strict=True), selectors)
        annotations = None if self._annotations is None else [*compress(self._annotations, selectors)]
        return Pairs(([*zip(*part, strict=True)] for part in in_parts(kept)), annotations)

    def __len__(self) -> int:
        return len(self.sources)

    @overload
    def __getitem__(self, index: int) -> Pair: ...
    @overload
    def __getitem__(self, index: slice) -> list[Pair]: ...
    def __getitem__(self, index: int | slice) -> Pair | list[Pair]:
        if isinstance(index, slice):
            return [self[row] for row in range(len(self))[index]]
        annotation = (None, None) if self._annotations is None else self._annotations[index]
        return Pair(self.sources[index], self.targets[index], *annotation)

    def __iter__(self) -> Iterator[Pair]:
        annotations: Iterable[Annotation] = self._annotations or repeat((None, None), len(self))
        for source, target, annotation in zip(self.sources, self.targets, annotations, strict=True):
            yield Pair(source, target, *annotation)


class PairDataset(Dataset[Batch]):
    """Dataset of encoded pairs: `dataset[rows]` is a Batch."""

    def __init__(self, pairs: Sequence[Pair], tokenizer: Tokenizer) -> None:
        self.pairs = Pairs.of(pairs)
        self.sources = _encode(self.pairs.sources, tokenizer, are_targets=False)
        self.targets = _encode(self.pairs.targets, tokenizer, are_targets=True)

    @cached_property
    def fingerprint(self) -> str:
        return hash_lines(map("\t".join, zip(self.pairs.sources, self.pairs.targets, strict=True)))

    def unknown_symbols(self, side: Literal["source", "target"], tokenizer: Tokenizer) -> list[list[str]]:
        """Return the symbols of each source, or of each target, that are not in the vocabulary, if there are any."""
        if tokenizer.unknown_id is None:
            return []
        is_target = side == "target"
        texts = self.pairs.targets if is_target else self.pairs.sources
        rows = (self.targets if is_target else self.sources).count(tokenizer.unknown_id).nonzero().squeeze(1)
        return [tokenizer.unknown_symbols(texts[row], is_target) for row in rows.tolist()]

    @property
    def source_lengths(self) -> Tensor:
        """Return the number of tokens of each source (N), including EOS."""
        return self.sources.lengths

    @property
    def target_lengths(self) -> Tensor:
        """Return the number of tokens of each target (N), including BOS and EOS."""
        return self.targets.lengths

    @property
    def lengths(self) -> Tensor:
        return self.source_lengths

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, rows: Tensor) -> Batch:
        target = self.targets[rows]
        target_in = target[:, :-1]
        return Batch(self.sources[rows], target_in.masked_fill(target_in == EOS, PAD), target[:, 1:], rows)


def _encode(texts: TextRows, tokenizer: Tokenizer, are_targets: bool) -> TokenRows:
    """Encode texts, a part at a time, with EOS at the end of each row, and BOS at the beginning of targets."""
    parts, lengths = [], []
    for some_texts in in_parts(texts):
        ids, numbers = tokenizer.encode_flat(some_texts, are_targets)
        lengths.append((numbers + (2 if are_targets else 1)).int())
        ends = lengths[-1].cumsum(0)
        part = torch.full((int(ends[-1]),), EOS, dtype=id_type(tokenizer.vocab_size))
        is_token = torch.ones_like(part, dtype=torch.bool).index_fill(0, ends - 1, False)
        if are_targets:
            is_token[ends - lengths[-1]] = False
            part[ends - lengths[-1]] = BOS
        part[is_token] = ids.to(part.dtype)
        parts.append(part)
    return TokenRows(parts, torch.cat(lengths), tokenizer.vocab_size)


class PairDataModule(TaskDataModule, ABC):
    """Base class of data modules of pairs. Subclasses implement `pairs`.

    The vocabulary and the maximum lengths are known after construction, so a model can be constructed and checked
    before the data are encoded.

    Args:
        tokenizer: the tokenizer of sources and targets.
        max_source_length: maximum length of a source in tokens, including EOS.
        max_target_length: maximum length of a target in tokens, including EOS.
        drop_too_long: whether to drop longer training pairs instead of raising UserError.
        settings: further arguments of TaskDataModule.

    Attributes:
        target_parts: the positions of the parts of a target, by name, if all targets have the same form.
    """

    holds = "pairs of source and target"
    target_parts: ClassVar[Mapping[str, Sequence[int]]] = {}
    datasets: Mapping[str, PairDataset]

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_source_length: int = 64,
        max_target_length: int = 64,
        drop_too_long: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(tokenizer, **settings)
        self.max_source_length = max_source_length
        self.max_target_length = max_target_length
        self.drop_too_long = drop_too_long

    @abstractmethod
    def pairs(self, split: str) -> Sequence[Pair]:
        """Return all pairs of "train", "val" or a test set, the same in every call and on every machine.

        Note:
            Millions of pairs take less memory as `Pairs` than as a list.
        """

    @property
    def longest_source(self) -> int:
        return int(self.datasets["train"].source_lengths.max()) - 1  # without EOS

    @property
    def shortest_source(self) -> int:
        return int(self.datasets["train"].source_lengths.min()) - 1

    def sources(self, split: str) -> Sequence[str]:
        return self.datasets[split].pairs.sources

    def _report_unknown(self, splits: Sequence[str]) -> None:
        for split in splits:
            examples = self.datasets[split]
            for side in ("source", "target") if split != "train" else ():
                symbols = examples.unknown_symbols(side, self.tokenizer)
                if number := sum(map(len, symbols)):
                    hint = ", which only a pointer-generator can predict" if side == "target" else ""
                    rank_zero_print(
                        f"{number:,} symbols in {len(symbols):,} of {len(examples):,} {side}s of {split} are not in "
                        f"the vocabulary: {name_symbols(chain.from_iterable(symbols))}{hint}"
                    )

    def examples(self, split: str) -> PairDataset:
        pairs = self.pairs(split)
        if not pairs:
            raise UserError(f"{split} must hold at least one pair, but {type(self).__name__}.pairs returned none")
        examples = PairDataset(pairs, self.tokenizer)
        sides = (
            ("source", examples.source_lengths, self.max_source_length),
            ("target", examples.target_lengths - 1, self.max_target_length),
        )
        fits = torch.ones(len(examples), dtype=torch.bool)
        for side, lengths, limit in sides:
            fits &= lengths <= limit
            longest = int(lengths.max())
            if longest > limit and not (self.drop_too_long and split == "train"):
                pair = examples.pairs[int(lengths.argmax())]
                hint = "raise it, or set drop_too_long" if split == "train" else "raise it, or delete longer pairs"
                raise UserError(
                    f"max_{side}_length must be at least {longest} for {split}, but is {limit}; {hint}; the longest "
                    f"begins with {getattr(pair, side)[:40]!r}"
                )
        if fits.all():
            return examples
        left_out = int((~fits).sum())
        if left_out == len(examples):
            raise UserError(f"all {left_out} training pairs are too long; raise max_source_length or max_target_length")
        rank_zero_print(f"{left_out} of {len(examples)} training pairs are too long and were dropped")
        pairs = examples.pairs.subset(fits)
        # The examples and the kept pairs may not fit into memory together.
        del examples
        return PairDataset(pairs, self.tokenizer)


class GeneratedDataModule(PairDataModule):
    """Base class of data modules that generate pairs from a seed. Subclasses implement `stream`.

    The split of a pair depends only on the hash of its key, by default its source, and not on the seed: 10% of all
    keys are for validation, 20% for the test splits, and the rest for training. No key is in two of these three parts,
    even for different seeds, but test splits may share keys. Training pairs are drawn with replacement; the sources of
    each other split are distinct.

    Args:
        tokenizer, max_source_length, max_target_length: see PairDataModule.
        sizes: the number of pairs of each split.
        batch_size: number of pairs in a training batch, over all processes.
        eval_batch_size: number of pairs in a validation or test batch per process.
        settings: further arguments of TaskDataModule.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_source_length: int,
        max_target_length: int,
        sizes: dict[str, int],
        batch_size: int = 128,
        eval_batch_size: int = 500,
        **settings: Any,
    ) -> None:
        super().__init__(
            tokenizer,
            max_source_length,
            max_target_length,
            drop_too_long=False,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            **settings,
        )
        self.test_sets = tuple(split for split in sizes if split not in ("train", "val"))
        most = (total_memory() or sys.maxsize) // LEAST_BYTES
        for split, size in sizes.items():
            if size < 1:
                raise UserError(f"{self.size_setting(split)} must be at least 1, but is {size}")
            if size > most:
                raise UserError(f"{self.size_setting(split)} must fit into memory, but is {size:,}; try {most // 10:,}")
        if batch_size > sizes["train"]:
            raise UserError(f"batch_size must be at most train_size ({sizes['train']}), but is {batch_size}")
        self.sizes = sizes

    def size_setting(self, split: str) -> str:
        """Return the name of the setting of the number of pairs of a split."""
        return f"{split}_size"

    def _check_splits(self) -> None:
        """Raise UserError also if a source is in two of training, validation and test."""
        super()._check_splits()
        seen: dict[str, str] = {}
        for split, examples in self.datasets.items():
            for source in set(examples.pairs.sources):
                if (other := seen.setdefault(source, split)) != split and other in ("train", "val"):
                    raise UserError(f"splits must be disjoint, but {source!r} is in {other} and in {split}")

    def split_key(self, pair: Pair) -> str:
        """Return the key of a pair; pairs with the same key are in the same split."""
        return pair.source

    def belongs(self, pair: Pair, split: str) -> bool:
        """Return whether a pair is in a split, or in any test split, by the hash of its key."""
        tenth = stable_hash(self.split_key(pair)) % 10
        home = "val" if tenth < 1 else "test" if tenth < 3 else "train"
        return home == (split if split in ("train", "val") else "test")

    @abstractmethod
    def stream(self, split: str, seed: int) -> Iterator[Pair]:
        """Yield an endless stream of pairs for a seed, from which `pairs` selects those of the split."""

    def pairs(self, split: str) -> list[Pair]:
        size, pairs = self.sizes[split], list[Pair]()
        seen: set[str] = set()
        misses = 0
        is_shown = rank_zero_only.rank == 0 and sys.stderr.isatty()  # type: ignore[attr-defined]  # by Lightning
        with progress_bar(f"generating {split}, pair", is_shown, total=size, leave=False) as bar:
            for pair in self.stream(split, stable_hash(f"{split} {self.seed}")):
                misses += 1
                if self.belongs(pair, split) and (split == "train" or pair.source not in seen):
                    seen.add(pair.source)
                    pairs.append(pair)
                    misses = 0
                    bar.update()
                if len(pairs) == size:
                    return pairs
                if misses > MAX_MISSES:
                    raise UserError(
                        f"{self.size_setting(split)} must be at most the number of distinct sources of {split} "
                        f"({len(pairs)}), but is {size}; try {len(pairs)}"
                    )
        raise UserError(
            f"{type(self).__name__}.stream must yield pairs without end, but ended after {len(pairs)} of {size} pairs "
            f"of {split}; repeat it in a loop"
        )
