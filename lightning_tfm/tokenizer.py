"""Symbols to ids and back: one tokenizer per data module, shared by source and target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lightning_tfm.errors import UserError

PAD, BOS, EOS = 0, 1, 2
"""Padding, begin and end of sequence: the same ids in every vocabulary."""

NUM_SPECIAL = 3


class Tokenizer:
    """A fixed vocabulary of symbols, which are characters or words.

    Args:
        symbols: the distinct symbols, in the order of their ids; the first gets id 3.
        separator: what stands between two symbols in a text: `""` for characters, `" "` for words.
    """

    def __init__(self, symbols: Iterable[str], separator: str = "") -> None:
        self.symbols = tuple(symbols)
        self.separator = separator
        self._ids = {symbol: id for id, symbol in enumerate(self.symbols, start=NUM_SPECIAL)}
        if len(self._ids) != len(self.symbols):
            raise ValueError(f"symbols must be distinct, but {len(self.symbols)} have {len(self._ids)} values")

    @property
    def vocab_size(self) -> int:
        """Number of ids, PAD, BOS and EOS among them."""
        return NUM_SPECIAL + len(self.symbols)

    @property
    def has_words(self) -> bool:
        """Whether a symbol is a word, so that a score over words (BLEU) makes sense."""
        return self.separator != ""

    def split(self, text: str) -> list[str]:
        """The symbols of a text, known or not."""
        return text.split() if self.has_words else list(text)

    def encode(self, text: str) -> list[int]:
        """Text to ids, without BOS and EOS.

        Raises:
            UserError: if the vocabulary lacks a symbol; names it and its position, counted from 1.
        """
        symbols = self.split(text)
        try:
            return [self._ids[symbol] for symbol in symbols]
        except KeyError as error:
            symbol = error.args[0]
            kind = "word" if self.has_words else "character"
            position = symbols.index(symbol) + 1
            shown = text if len(text) <= 60 else text[:57] + "..."
            raise UserError(f"the vocabulary has no {kind} {symbol!r} (position {position} of {shown!r})") from None

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text: PAD and BOS are left out, and EOS ends it."""
        symbols = []
        for id in ids:
            if id == EOS:
                break
            if id >= NUM_SPECIAL:
                symbols.append(self.symbols[id - NUM_SPECIAL])
        return self.separator.join(symbols)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint: `Tokenizer(**tokenizer.to_dict())` is the same tokenizer."""
        return {"symbols": list(self.symbols), "separator": self.separator}
