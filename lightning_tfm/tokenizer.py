"""Symbols or parts of words to ids and back: one tokenizer per data module, shared by source and target."""

from __future__ import annotations

import itertools
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
        unknown: the symbol that stands for all that are not in the vocabulary; without it they are refused.
    """

    def __init__(self, symbols: Iterable[str], separator: str = "", unknown: str | None = None) -> None:
        self.symbols = tuple(symbols)
        self.separator = separator
        self.unknown = unknown
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
        if self.unknown is not None:
            unknown = self._ids[self.unknown]
            return [self._ids.get(symbol, unknown) for symbol in symbols]
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
        """Plain values, for a checkpoint: `restored(tokenizer.to_dict())` is the same tokenizer."""
        values = {"symbols": list(self.symbols), "separator": self.separator}
        return values if self.unknown is None else values | {"unknown": self.unknown}


class SubwordTokenizer:
    """Byte-level byte-pair encoding (Sennrich et al. 2016, Radford et al. 2019): it can write every text.

    Its ids are those of the model and NUM_SPECIAL more.

    Args:
        model: a Hugging Face tokenizer as JSON, which is what a `tokenizer.json` holds.
    """

    has_words = True

    def __init__(self, model: str) -> None:
        from tokenizers import Tokenizer as Model

        self.model = Model.from_str(model)

    @classmethod
    def learned(cls, texts: Iterable[str], vocab_size: int) -> SubwordTokenizer:
        """The merges of the commonest pairs, until there are so many ids, PAD, BOS and EOS among them."""
        from tokenizers import Tokenizer as Model
        from tokenizers import decoders, models, pre_tokenizers, trainers

        alphabet = pre_tokenizers.ByteLevel.alphabet()
        if vocab_size < NUM_SPECIAL + len(alphabet):
            raise UserError(
                f"vocab_size must be at least {NUM_SPECIAL + len(alphabet)}, for every byte has an id, "
                f"but is {vocab_size}; try 6000"
            )
        model = Model(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        model.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - NUM_SPECIAL, initial_alphabet=sorted(alphabet), show_progress=False
        )
        model.train_from_iterator(texts, trainer)
        return cls(model.to_str())

    @property
    def vocab_size(self) -> int:
        """Number of ids, PAD, BOS and EOS among them."""
        return NUM_SPECIAL + self.model.get_vocab_size()

    def split(self, text: str) -> list[str]:
        """What of a text each token stands for."""
        return [text[begin:end] for begin, end in self.model.encode(text).offsets]

    def encode(self, text: str) -> list[int]:
        """Text to ids, without BOS and EOS."""
        return [id + NUM_SPECIAL for id in self.model.encode(text).ids]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Many texts at once, on all cores."""
        return [[id + NUM_SPECIAL for id in encoding.ids] for encoding in self.model.encode_batch(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text: PAD and BOS are left out, and EOS ends it."""
        kept = [id - NUM_SPECIAL for id in itertools.takewhile(lambda id: id != EOS, ids) if id >= NUM_SPECIAL]
        return self.model.decode(kept).strip()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint: `restored(tokenizer.to_dict())` is the same tokenizer."""
        return {"model": self.model.to_str()}


def restored(values: dict[str, Any]) -> Tokenizer | SubwordTokenizer:
    """The tokenizer of a checkpoint, from what its `to_dict` gave."""
    return SubwordTokenizer(**values) if "model" in values else Tokenizer(**values)
