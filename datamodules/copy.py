"""Copying of sequences of numbers: '4 1 1 6' -> '4 1 1 6'."""

from __future__ import annotations

import random
from collections.abc import Iterator

from lightning_tfm.data import GeneratedDataModule, Pair
from lightning_tfm.errors import UserError
from lightning_tfm.tokenization import SymbolTokenizer


class Copy(GeneratedDataModule):
    """Data module of sequences of numbers to copy.

    The second test set, "longer", contains sequences longer than any in training.

    Args:
        num_symbols: number of distinct symbols, the numbers from 0.
        min_length: minimum number of symbols in a sequence.
        max_length: maximum number of symbols in a sequence.
        longer_max_length: maximum number of symbols in the "longer" test set, whose minimum is max_length + 1.
        train_size, val_size, test_size, longer_size: number of pairs of each split.
        batch_size, eval_batch_size, num_workers, seed: see TaskDataModule.
    """

    def __init__(
        self,
        num_symbols: int = 7,
        min_length: int = 1,
        max_length: int = 14,
        longer_max_length: int = 20,
        train_size: int = 100_000,
        val_size: int = 1_000,
        test_size: int = 10_000,
        longer_size: int = 1_000,
        batch_size: int = 64,
        eval_batch_size: int = 500,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        if num_symbols < 2:
            raise UserError(f"num_symbols must be at least 2, but is {num_symbols}")
        if not 1 <= min_length <= max_length < longer_max_length:
            raise UserError(
                "min_length, max_length and longer_max_length must be at least 1 and increase, "
                f"but are {min_length}, {max_length} and {longer_max_length}; try 1, 14 and 20"
            )
        self.symbols = [str(number) for number in range(num_symbols)]
        self.diagonals = [tuple((i, i) for i in range(length)) for length in range(longer_max_length + 1)]
        self.lengths = {"longer": (max_length + 1, longer_max_length)}
        self.training_lengths = (min_length, max_length)
        super().__init__(
            SymbolTokenizer(self.symbols, separator=" "),
            max_source_length=longer_max_length + 1,
            max_target_length=longer_max_length + 1,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            seed=seed,
            sizes={"train": train_size, "val": val_size, "test": test_size, "longer": longer_size},
        )

    def stream(self, split: str, seed: int) -> Iterator[Pair]:
        draw = random.Random(seed)
        shortest, longest = self.lengths.get(split, self.training_lengths)
        while True:
            length = draw.randint(shortest, longest)
            text = " ".join(draw.choices(self.symbols, k=length))
            yield Pair(text, text, self.diagonals[length], category=f"{length:02} symbols")
