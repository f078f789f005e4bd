"""'cat' -> 'K AE T', 'run V;PST' -> 'ran': a user's own task, from a table whose columns tabs set apart."""

from __future__ import annotations

from pathlib import Path

from lightning_tfm.data import Pair, PairDataModule, located, read_table
from lightning_tfm.errors import UserError
from lightning_tfm.tokenizer import UNKNOWN, SymbolTokenizer, commonest


class Tsv(PairDataModule):
    """Sources and targets of few different symbols: spelling and sound, a word and its inflected form.

    A symbol is a character, or what stands between separators. Those that training has not seen are taken for one
    and the same unknown symbol.

    Args:
        train, val: tables; plain or .gz.
        test: another; without it, the validation part is tested.
        source, target: the columns, counted from 1.
        features: a column of features of the source, as an inflection's; they are symbols in brackets. Where the
            model is asked, they come after the source and a tab.
        source_separator, target_separator: what stands between two symbols; none between characters.
        feature_separator: what stands between two features.
        encoding: of the files, as Python calls it.
        vocab_size: how many different symbols there are at most: the commonest.
        max_source_length, max_target_length: the longest, in symbols, EOS included.
        drop_longer: whether training pairs that are longer are left out, instead of refused.
        batch_size, eval_batch_size, num_workers, seed: see PairDataModule.
    """

    def __init__(
        self,
        train: str,
        val: str,
        test: str | None = None,
        source: int = 1,
        target: int = 2,
        features: int | None = None,
        source_separator: str = "",
        target_separator: str = "",
        feature_separator: str = ";",
        encoding: str = "utf-8",
        vocab_size: int = 1_000,
        max_source_length: int = 64,
        max_target_length: int = 64,
        drop_longer: bool = False,
        batch_size: int = 64,
        eval_batch_size: int = 256,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        parts = {"train": train, "val": val} | ({"test": test} if test else {})
        columns = {"source": source, "target": target} | ({} if features is None else {"features": features})
        tables = {split: read_columns(located(name, {}), encoding, columns) for split, name in parts.items()}
        separators = source_separator, target_separator, None if features is None else feature_separator
        splitter = SymbolTokenizer((), *separators)
        self.parts = {
            split: [
                # As it is written, with one space where there are several.
                Pair("\t".join([row[0], *row[2:]]), target_separator.join(splitter.split_target(row[1])))
                for row in rows
            ]
            for split, rows in tables.items()
        }
        self.parts.setdefault("test", self.parts["val"])
        symbols = [
            symbol
            for pair in self.parts["train"]
            for symbol in splitter.split(pair.source) + splitter.split_target(pair.target)
        ]
        super().__init__(
            SymbolTokenizer([UNKNOWN, *commonest(symbols, vocab_size)], *separators),
            max_source_length=max_source_length,
            max_target_length=max_target_length,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            seed=seed,
            drop_longer=drop_longer,
        )

    def pairs(self, split: str) -> list[Pair]:
        return self.parts[split]


def read_columns(path: Path, encoding: str, columns: dict[str, int]) -> list[list[str]]:
    """Of each line of a table, the fields of these columns, counted from 1.

    Raises:
        UserError: if there is no such column, or a field is empty.
    """
    rows = read_table(path, encoding)
    for name, column in columns.items():
        if not 1 <= column <= len(rows[0]):
            raise UserError(f"{name} must be a column of {str(path)!r}, from 1 to {len(rows[0])}, but is {column}")
        for number, row in enumerate(rows, start=1):
            if not row[column - 1].strip():
                raise UserError(
                    f"each line must hold a {name}, but column {column} of line {number} of {str(path)!r} is empty; "
                    "delete the line"
                )
    return [[row[column - 1].strip() for column in columns.values()] for row in rows]
