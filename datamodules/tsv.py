"""User-defined sequence transduction from a table: 'cat' -> 'K AE T', 'run V;PST' -> 'ran'."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from lightning_tfm.data import PairDataModule, Pairs, TableReader, partition_by, resolve_path
from lightning_tfm.errors import UserError, rank_zero_print
from lightning_tfm.tokenization import SymbolTokenizer, train_pair_tokenizer

FEATURE_SEPARATORS = ";+,| "
"""Separators of features, which a message names if features seem to have another one than `feature_separator`."""


class Tsv(PairDataModule):
    """Data module of pairs over small symbol sets, such as spelling and pronunciation, or word and inflected form.

    A symbol is a character, or the text between two separators. Symbols that are not in the vocabulary are mapped to a
    single unknown symbol.

    Args:
        train: training table of tab-separated columns, or a .csv file; plain or .gz.
        val: validation table, as for train.
        test: test table, as for train; by default, the model is tested on the validation split, whose metrics are named
            "val".
        source: column of the sources, by number from 1, or by name in the first line; by default, the one whose name
            in the first line says so, such as lemma, or else the first one. Several columns, such as a word and its
            left context, are joined to one source by tabs, which are symbols; so is the input of a trained model.
        target: column of the targets, as for source; by default, the one whose name says so, such as form, or else the
            next one.
        features: column of features of the source, such as an inflection; they become symbols in brackets.
            In the input of a trained model, they follow the source and a tab. By default, there are none.
        category: column of the category of a pair, such as its language; the test logs the exact match, the symbol
            error rate and the loss of each category, and their means over the categories. By default, there is none.
        partition: whether the category of a validation or test pair is what of it occurs in the training table:
            "both" its source (lemma) and its features, though maybe not together, only the "lemma", only the
            "features", or "neither", as in SIGMORPHON 2022; requires `features`, and no `category`.
        source_separator: separator of the symbols of a source; empty if they are characters.
        target_separator: separator of the symbols of a target; empty if they are characters.
        feature_separator: separator of features. A message says so if the features seem to have another one.
        decompose: whether characters are decomposed into letters and marks (Unicode's form NFD), such as Korean
            syllables.
        encoding: encoding of the files, by Python's name.
        vocab_size: maximum size of the vocabulary, which keeps the most frequent symbols of the training split.
        max_target_length: maximum length of a target and of an output in tokens, including EOS; by default, that of the
            longest target of all tables, so that an output that repeats itself ends.
        header: whether the first line of a table names its columns; by default, if a column is set by name, or inferred
            from known names, such as source and target, or from names unlike the fields below; a message says so.
        settings: further arguments of PairDataModule.
    """

    def __init__(
        self,
        train: str,
        val: str,
        test: str | None = None,
        source: Sequence[int | str] | int | str | None = None,
        target: int | str | None = None,
        features: int | str | None = None,
        category: int | str | None = None,
        partition: bool = False,
        source_separator: str = "",
        target_separator: str = "",
        feature_separator: str = ";",
        decompose: bool = False,
        encoding: str = "utf-8",
        vocab_size: int = 1_000,
        max_target_length: int | None = None,
        header: bool | None = None,
        **settings: Any,
    ) -> None:
        if partition and features is None:
            raise UserError("features must be a column if partition is true, but is null; set it, such as 3")
        if partition and category is not None:
            raise UserError(f"category must be null if partition is true, but is {category!r}; leave one of them out")
        sources = [source] if source is None or isinstance(source, int | str) else [*source]
        if not sources:
            raise UserError("source must be at least one column, but is empty; set it to a column, such as 1")
        names = {"train": train, "val": val} | ({} if test is None else {"test": test})
        columns = {f"source {n}" if n > 1 else "source": column for n, column in enumerate(sources, start=1)}
        optional = {"features": features, "category": category}
        columns |= {"target": target} | {name: c for name, c in optional.items() if c is not None}
        table = TableReader(columns, encoding, header)
        tables = {split: table.read(resolve_path(name, {}, split)) for split, name in names.items()}
        symbols: dict[str, Any] = {
            "separator": source_separator,
            "target_separator": target_separator,
            "feature_separator": None if features is None else feature_separator,
            "num_sources": len(sources),
            "decompose": decompose,
        }
        splitter = SymbolTokenizer((), **symbols)
        self.splits = {
            split: Pairs(_sides(splitter, dict(zip(columns, texts, strict=True))) for texts in parts)
            for split, parts in tables.items()
        }
        pairs = self.splits["train"]
        if partition:
            name = partition_by(pairs.sources)
            self.splits |= {split: _categorized(self.splits[split], name) for split in names if split != "train"}
        if features is not None:
            _report_other_separator(pairs.sources, feature_separator)
        tokenizer = train_pair_tokenizer(pairs.sources, pairs.targets, vocab_size, **symbols)
        if max_target_length is None:
            targets = chain.from_iterable(pairs.targets for pairs in self.splits.values())
            max_target_length = 1 + max(len(splitter.split_target(target)) for target in targets)
        super().__init__(tokenizer, max_target_length=max_target_length, **settings)
        self.test_sets = ("val",) if test is None else ("test",)

    def pairs(self, split: str) -> Pairs:
        return self.splits[split]


def _categorized(pairs: Pairs, category: Callable[[str], str]) -> Pairs:
    """Return pairs with the category of each source."""
    return Pairs([[[*pairs.sources], [*pairs.targets], [*map(category, pairs.sources)]]])


def _sides(splitter: SymbolTokenizer, columns: Mapping[str, list[str]]) -> list[list[str]]:
    """Return the sources, joined by tabs with their features, the targets and, if there are any, the categories."""
    joined = [texts for name, texts in columns.items() if name.startswith(("source", "features"))]
    sources, targets = [*map("\t".join, zip(*joined, strict=True))], columns["target"]
    if splitter.target_separator:  # decoded targets have single separators, so references must, too
        targets = [splitter.target_separator.join(splitter.split_target(target)) for target in targets]
    return [sources, targets, *([columns["category"]] if "category" in columns else [])]


def _report_other_separator(sources: Iterable[str], separator: str) -> None:
    """Print a message if no features contain the separator, but most contain another one."""
    features = [source.rpartition("\t")[2] for source in sources]
    if any(separator in text for text in features):
        return
    for other in FEATURE_SEPARATORS:
        containing = [text for text in features if other in text]
        if 2 * len(containing) > len(features):
            rank_zero_print(
                f"no features of train contain the feature_separator {separator!r}, but most contain {other!r}, such "
                f"as {containing[0]!r:.60}, which is one symbol; set feature_separator to {other!r}"
            )
            return
