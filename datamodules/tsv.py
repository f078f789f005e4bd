"""User-defined sequence transduction from a table: 'cat' -> 'K AE T', 'run V;PST' -> 'ran'."""

from __future__ import annotations

from typing import Any

from lightning_tfm.data import PairDataModule, Pairs, TableReader, resolve_path
from lightning_tfm.tokenization import UNKNOWN, SymbolTokenizer, build_vocab


class Tsv(PairDataModule):
    """Data module of pairs over small symbol sets, such as spelling and pronunciation, or word and inflected form.

    A symbol is a character, or the text between two separators. Symbols that are not in the vocabulary are mapped to a
    single unknown symbol.

    Args:
        train, val: tables of tab-separated columns, or .csv files; plain or .gz.
        test: test data, as for train; by default, the model is tested on the validation split, whose metrics are named
            "val".
        source, target: columns, by number from 1, or by name in the first line; by default, those whose names in the
            first line say so, such as lemma and form, or else the first columns.
        features: column of features of the source, such as an inflection; they become symbols in brackets.
            In the input of a trained model, they follow the source and a tab.
        source_separator, target_separator: separator of symbols; empty if symbols are characters.
        feature_separator: separator of features.
        encoding: encoding of the files, by Python's name.
        vocab_size: maximum size of the vocabulary, which keeps the most frequent symbols of the training split.
        header: whether the first line of a table names its columns; by default, if a column is set by name, or inferred
            from known names, such as source and target, or from names unlike the fields below; a message says so.
        settings: further arguments of PairDataModule.
    """

    def __init__(
        self,
        train: str,
        val: str,
        test: str | None = None,
        source: int | str | None = None,
        target: int | str | None = None,
        features: int | str | None = None,
        source_separator: str = "",
        target_separator: str = "",
        feature_separator: str = ";",
        encoding: str = "utf-8",
        vocab_size: int = 1_000,
        header: bool | None = None,
        **settings: Any,
    ) -> None:
        names = {"train": train, "val": val} | ({"test": test} if test else {})
        columns = {"source": source, "target": target} | ({} if features is None else {"features": features})
        table = TableReader(columns, encoding, header)
        tables = {split: table.read(resolve_path(name, {})) for split, name in names.items()}
        separators = source_separator, target_separator, None if features is None else feature_separator
        splitter = SymbolTokenizer((), *separators)
        self.splits = {split: Pairs(_sides(splitter, *texts) for texts in parts) for split, parts in tables.items()}
        pairs = self.splits["train"]
        counts = splitter.count(pairs.sources, are_targets=False) + splitter.count(pairs.targets, are_targets=True)
        super().__init__(SymbolTokenizer([UNKNOWN, *build_vocab(counts, vocab_size)], *separators), **settings)
        self.test_sets = ("test",) if test else ("val",)

    def pairs(self, split: str) -> Pairs:
        return self.splits[split]


def _sides(
    splitter: SymbolTokenizer, sources: list[str], targets: list[str], *features: list[str]
) -> tuple[list[str], list[str]]:
    """Return the sources, with their features after a tab, and the targets."""
    if features:
        sources = [*map("\t".join, zip(sources, *features, strict=True))]
    if splitter.target_separator:  # decoded targets have single separators, so references must, too
        targets = [splitter.target_separator.join(splitter.split_target(target)) for target in targets]
    return sources, targets
