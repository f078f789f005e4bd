"""Translation from parallel corpora: 'Zwei Männer gehen.' -> 'Two men are walking.'."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, zip_longest
from typing import Any, Literal

import torch

from lightning_tfm.data import (
    BatchDivision,
    Download,
    MaxTokensSampler,
    PairDataModule,
    Pairs,
    TableReader,
    TrainingSampler,
    read_text,
    resolve_path,
    skip_blank,
    split_lines,
    strip_columns,
)
from lightning_tfm.errors import UserError
from lightning_tfm.tokenization import train_tokenizer

MULTI30K = "https://raw.githubusercontent.com/multi30k/dataset/a3d2e0d26b56f3846f66a952536ffed4e401d05a/data/task1/raw/"
FILES = {
    f"multi30k/{name}.gz": Download(f"{MULTI30K}{name}.gz", sha256)
    for name, sha256 in {
        "train.de": "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6",
        "train.en": "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f",
        "val.de": "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a",
        "val.en": "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28",
        "test_2016_flickr.de": "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8",
        "test_2016_flickr.en": "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9",
    }.items()
}
"""Downloadable files: Multi30k, descriptions of photographs in German and English (Elliott et al. 2016)."""


class ParallelText(PairDataModule):
    """Data module of sentences and their translations, from two line-aligned files or from a table of two columns.

    Args:
        train: training data: a file of sources and a file of targets, or a table of both (.tsv or .csv), whose header
            may name further columns; plain or .gz. Names in `FILES` are downloaded unless such files exist.
        val: validation data, as for train.
        test: test data, as for train; by default, the model is tested on the validation split, whose metrics are named
            "val".
        encoding: encoding of the files, by Python's name.
        tokenizer: characters, space-separated words, or byte-level subwords; trained on the training split.
        vocab_size: maximum size of the vocabulary, which keeps the most frequent tokens.
        batch_tokens: maximum number of tokens in a training batch on the longer side, including padding; replaces
            batch_size.
        header: whether the first line of a table names its columns; inferred by default from known names, such as
            source and target, or from names unlike the fields below; a message says so.
        eval_batch_size: number of pairs in a validation or test batch per process.
        settings: further arguments of PairDataModule.

    Note:
        Lines that are blank in both files are skipped. So are, in training, those that are blank in one of two files,
        such as the sentences of Europarl that have no translation; in a table, they are an error. A message gives the
        number.
    """

    def __init__(
        self,
        train: list[str] | str,
        val: list[str] | str,
        test: list[str] | str | None = None,
        encoding: str = "utf-8",
        tokenizer: Literal["character", "word", "subword"] = "subword",
        vocab_size: int = 6_000,
        batch_tokens: int | None = None,
        header: bool | None = None,
        eval_batch_size: int = 128,
        **settings: Any,
    ) -> None:
        names = {"train": train, "val": val} | ({} if test is None else {"test": test})
        self.splits = {}
        hint = "set data.class_path to datamodules.Tsv, which can select columns"
        table = TableReader({"source": None, "target": None}, encoding, header, hint)
        for split, files in names.items():
            parts = read_pairs([files] if isinstance(files, str) else files, table, split)
            if tokenizer == "word":  # decoded texts have single spaces, so references must, too
                parts = ([[" ".join(text.split()) for text in side] for side in part] for part in parts)
            self.splits[split] = Pairs(parts)
        train_sides = self.splits["train"].sources, self.splits["train"].targets
        trained = train_tokenizer(chain.from_iterable(zip(*train_sides, strict=True)), tokenizer, vocab_size)
        super().__init__(trained, eval_batch_size=eval_batch_size, **settings)
        self.test_sets = ("val",) if test is None else ("test",)
        longest = max(self.max_source_length, self.max_target_length)
        if batch_tokens is not None and batch_tokens < longest:
            raise UserError(f"batch_tokens must be at least the longest text ({longest}), but is {batch_tokens}")
        self.batch_tokens = batch_tokens

    def pairs(self, split: str) -> Pairs:
        return self.splits[split]

    def check_micro_batches(self, num_micro_batches: int) -> None:
        """Check the batch size as the base class does; with `batch_tokens`, `training_batches` checks it instead."""
        if self.batch_tokens is None:
            super().check_micro_batches(num_micro_batches)

    def training_batches(self, division: BatchDivision) -> TrainingSampler:
        if self.batch_tokens is None:
            return super().training_batches(division)
        examples = self.datasets["train"]
        lengths = torch.maximum(examples.source_lengths, examples.target_lengths - 1)
        batches = MaxTokensSampler(lengths, self.batch_tokens, self.seed, division)
        if (fewest := min(batches.sizes)) < division.num_micro_batches:
            raise UserError(
                f"batch_tokens must allow at least one row for each of {division.num_micro_batches} processes or "
                f"micro-batches, but {self.batch_tokens} gives a batch of {fewest}; raise it"
            )
        return batches


def read_pairs(names: list[str], table: TableReader, split: str) -> Iterator[list[list[str]]]:
    """Yield the sources and the targets of two line-aligned files or of a table, a part at a time.

    The reader of tables also names the encoding.

    Raises:
        UserError: if the numbers of lines or columns are wrong, or a line lacks a source or a target, except in files
            for training.
    """
    if len(names) not in (1, 2):
        raise UserError(f"{split} must be two files or a TSV, but is {len(names)} files: {', '.join(names) or 'none'}")
    paths = [resolve_path(name, FILES, split) for name in names]
    if len(paths) == 1:
        yield from table.read(paths[0])
        return
    contents = [read_text(path, table.encoding) for path in paths]
    lines = [content.count("\n") + (not content.endswith("\n")) for content in contents]
    if lines[0] != lines[1] and len({content.rstrip().count("\n") for content in contents}) > 1:
        raise UserError(
            f"{str(paths[0])!r} and {str(paths[1])!r} must have equally many lines, but have {lines[0]} and {lines[1]}"
        )
    noun, kept = f"pairs of {paths[0]} and {paths[1]} without a text", any
    if split == "train":  # such as Europarl, where many sentences have no translation
        noun, kept = f"pairs of {paths[0]} and {paths[1]} without a source or a target", all
    rows = skip_blank(enumerate(zip_longest(*map(split_lines, contents), fillvalue=""), start=1), noun, kept)

    def empty(side: int, line: int) -> UserError:
        return UserError(
            f"each line must hold a text, but line {line} of {str(paths[side])!r} is empty; delete the pair"
        )

    yield from strip_columns(rows, (0, 1), empty)
