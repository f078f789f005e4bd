"""Copying of sequences of numbers: '4 1 1 6' -> '4 1 1 6'."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from lightning_tfm.data import GeneratedDataModule, Pair
from lightning_tfm.errors import UserError
from lightning_tfm.tokenization import SymbolTokenizer


class Copy(GeneratedDataModule):
    """Data module of sequences of numbers to copy.

    Further test sets contain sequences longer than any in training: "longer" those of up to longer_max_length symbols,
    and, if set, "x2", "x4" and so on those of exactly 2, 4 and so on times max_length.

    Args:
        num_symbols: number of distinct symbols, the numbers from 0.
        min_length: minimum number of symbols in a sequence.
        max_length: maximum number of symbols in a sequence.
        longer_max_length: maximum number of symbols in the "longer" test set, whose minimum is max_length + 1.
        multiples: the multiples of max_length with a test set of their own, such as 2, 4 and 10.
        train_size: number of training pairs.
        val_size: number of validation pairs.
        test_size: number of test pairs.
        longer_size: number of pairs of "longer" and of each multiple.
        batch_size: number of pairs in a training batch, over all processes.
        settings: further arguments of GeneratedDataModule.
    """

    def __init__(
        self,
        num_symbols: int = 7,
        min_length: int = 1,
        max_length: int = 14,
        longer_max_length: int = 20,
        multiples: Sequence[int] = (),
        train_size: int = 100_000,
        val_size: int = 1_000,
        test_size: int = 10_000,
        longer_size: int = 1_000,
        batch_size: int = 64,
        **settings: Any,
    ) -> None:
        if num_symbols < 2:
            raise UserError(f"num_symbols must be at least 2, but is {num_symbols}")
        if not 1 <= min_length <= max_length < longer_max_length:
            raise UserError(
                "min_length, max_length and longer_max_length must be at least 1 and increase, "
                f"but are {min_length}, {max_length} and {longer_max_length}; try 1, 14 and 20"
            )
        if any(multiple < 2 for multiple in multiples):
            raise UserError(f"multiples must be at least 2, but are {', '.join(map(str, multiples))}; try 2, 4 and 10")
        exact = {f"x{multiple}": (multiple * max_length, multiple * max_length) for multiple in multiples}
        self.lengths = {"longer": (max_length + 1, longer_max_length)} | exact
        longest = max(maximum for _, maximum in self.lengths.values())
        self.symbols = [str(number) for number in range(num_symbols)]
        self.diagonals = [tuple((i, i) for i in range(length)) for length in range(longest + 1)]
        self.training_lengths = (min_length, max_length)
        super().__init__(
            SymbolTokenizer(self.symbols, separator=" "),
            max_source_length=longest + 1,
            max_target_length=longest + 1,
            sizes={"train": train_size, "val": val_size, "test": test_size} | dict.fromkeys(self.lengths, longer_size),
            batch_size=batch_size,
            **settings,
        )

    def size_setting(self, split: str) -> str:
        return "longer_size" if split in self.lengths else super().size_setting(split)

    def stream(self, split: str, seed: int) -> Iterator[Pair]:
        draw = random.Random(seed)
        shortest, longest = self.lengths.get(split, self.training_lengths)
        while True:
            length = draw.randint(shortest, longest)
            text = " ".join(draw.choices(self.symbols, k=length))
            yield Pair(text, text, self.diagonals[length], category=f"{length:02} symbols")
