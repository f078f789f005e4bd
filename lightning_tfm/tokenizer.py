"""Symbols or parts of words to ids and back: one tokenizer per data module, shared by source and target."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning_tfm.errors import UserError

PAD, BOS, EOS = 0, 1, 2
"""Padding, begin and end of sequence: the same ids in every vocabulary."""

NUM_SPECIAL = 3

UNKNOWN, UNKNOWN_ID = "\N{REPLACEMENT CHARACTER}", NUM_SPECIAL
"""Stands for symbols that training has not seen, where they are not refused: the first symbol of a vocabulary."""


class Tokenizer:
    """A fixed vocabulary of symbols, which are characters, or what stands between separators.

    Args:
        symbols: the distinct symbols, in the order of their ids; the first gets id 3.
        separator: what stands between two symbols of a text: `""` for characters, `" "` for words.
        unknown: the symbol that stands for all that are not in the vocabulary; without it they are refused.
        target_separator: that of targets, where it is another.
        feature_separator: a source may have features after a tab, with this between two; they become symbols in
            brackets.
    """

    def __init__(
        self,
        symbols: Iterable[str],
        separator: str = "",
        unknown: str | None = None,
        target_separator: str | None = None,
        feature_separator: str | None = None,
    ) -> None:
        self.symbols = tuple(symbols)
        self.separator = separator
        self.unknown = unknown
        self.target_separator = separator if target_separator is None else target_separator
        self.feature_separator = feature_separator
        self._ids = {symbol: id for id, symbol in enumerate(self.symbols, start=NUM_SPECIAL)}
        if len(self._ids) != len(self.symbols):
            raise ValueError(f"symbols must be distinct, but {len(self.symbols)} have {len(self._ids)} values")

    @property
    def vocab_size(self) -> int:
        """Number of ids, PAD, BOS and EOS among them."""
        return NUM_SPECIAL + len(self.symbols)

    @property
    def unknown_id(self) -> int | None:
        """The id that unknown symbols have; None if they are refused."""
        return None if self.unknown is None else self._ids[self.unknown]

    @property
    def writes_sentences(self) -> bool:
        """Whether a target is made of words, so that a score over words (BLEU) makes sense."""
        return self.target_separator != "" or " " in self._ids

    def split(self, text: str) -> list[str]:
        """The symbols of a source, known or not."""
        text, tab, features = text.partition("\t") if self.feature_separator is not None else (text, "", "")
        symbols = _split(text, self.separator)
        return symbols + [f"[{feature}]" for feature in _split(features, self.feature_separator)] if tab else symbols

    def split_target(self, text: str) -> list[str]:
        """The symbols of a target, known or not."""
        return _split(text, self.target_separator)

    def encode(self, text: str) -> list[int]:
        """A source to ids, without BOS and EOS.

        Raises:
            UserError: if the vocabulary lacks a symbol; names it and its position, counted from 1.
        """
        return self._encode(text, self.split(text))

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many sources."""
        return [self.encode(text) for text in texts]

    def encode_all_targets(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many targets."""
        return [self.encode_target(text) for text in texts]

    def encode_target(self, text: str) -> list[int]:
        """A target to ids, without BOS and EOS; raises as `encode` does."""
        return self._encode(text, self.split_target(text))

    def _encode(self, text: str, symbols: list[str]) -> list[int]:
        if self.unknown is not None:
            unknown = self._ids[self.unknown]
            return [self._ids.get(symbol, unknown) for symbol in symbols]
        try:
            return [self._ids[symbol] for symbol in symbols]
        except KeyError as error:
            symbol = error.args[0]
            kind = "character" if len(symbol) == 1 and not self.separator else "word"
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
        return self.target_separator.join(symbols)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint: `restored(tokenizer.to_dict())` is the same tokenizer."""
        values = {"symbols": list(self.symbols), "separator": self.separator}
        more = {"unknown": self.unknown, "feature_separator": self.feature_separator}
        if self.target_separator != self.separator:
            more["target_separator"] = self.target_separator
        return values | {name: value for name, value in more.items() if value is not None}


def _split(text: str, separator: str) -> list[str]:
    return list(text) if separator == "" else text.split(None if separator.isspace() else separator)


class WordTokenizer(Tokenizer):
    """Words and punctuation marks in small letters, for texts that are only read; those that are unknown are so.

    Args:
        words: the vocabulary.
    """

    def __init__(self, words: Iterable[str]) -> None:
        super().__init__([UNKNOWN, *words], " ", UNKNOWN)

    @classmethod
    def learned(cls, texts: Iterable[str], vocab_size: int) -> WordTokenizer:
        """The commonest words, until there are so many ids, those of PAD, BOS, EOS and unknown words among them."""
        return cls(commonest((word for text in texts for word in _words(text)), vocab_size))

    def split(self, text: str) -> list[str]:
        return _words(text)

    def to_dict(self) -> dict[str, Any]:
        return {"words": list(self.symbols[1:])}


def _words(text: str) -> list[str]:
    return re.findall(r"[\w']+|[^\w\s]", re.sub(r"<br\s*/?>", " ", text).lower())


def commonest(symbols: Iterable[str], vocab_size: int) -> list[str]:
    """The commonest symbols, the commonest first, as many as fit beside PAD, BOS, EOS and UNKNOWN."""
    counts = Counter(symbols)
    counts.pop(UNKNOWN, None)
    ordered = sorted(counts.items(), key=lambda count: (-count[1], count[0]))
    return [symbol for symbol, _ in ordered[: vocab_size - NUM_SPECIAL - 1]]


class SubwordTokenizer:
    """Byte-level byte-pair encoding (Sennrich et al. 2016, Radford et al. 2019): it can write every text.

    Its ids are those of the model and NUM_SPECIAL more.

    Args:
        model: a Hugging Face tokenizer as JSON, which is what a `tokenizer.json` holds.
    """

    writes_sentences, unknown_id = True, None

    def __init__(self, model: str) -> None:
        from tokenizers import Tokenizer as Model

        self.model = Model.from_str(model)

    @classmethod
    def read(cls, path: Path) -> SubwordTokenizer:
        """That of a tokenizer.json."""
        try:
            return cls(path.read_text(encoding="utf-8"))
        except Exception as error:  # tokenizers raises no other
            raise UserError(f"{str(path)!r} must be a Hugging Face tokenizer.json, but is not: {error}") from None

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

    split_target = split

    def encode(self, text: str) -> list[int]:
        """Text to ids, without BOS and EOS."""
        return [id + NUM_SPECIAL for id in self.model.encode(text).ids]

    encode_target = encode

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Many texts at once, on all cores."""
        return [[id + NUM_SPECIAL for id in encoding.ids] for encoding in self.model.encode_batch(texts)]

    encode_all_targets = encode_all

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text: PAD and BOS are left out, and EOS ends it."""
        kept = [id - NUM_SPECIAL for id in itertools.takewhile(lambda id: id != EOS, ids) if id >= NUM_SPECIAL]
        return self.model.decode(kept).removeprefix(" ")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint: `restored(tokenizer.to_dict())` is the same tokenizer."""
        return {"model": self.model.to_str()}


def learned(texts: Iterable[str], tokens: str, vocab_size: int) -> Tokenizer | SubwordTokenizer:
    """The tokenizer of at most so many ids that is learned from texts: of the commonest tokens.

    Args:
        tokens: "character", "word" or "subword".
    """
    if tokens == "subword":
        return SubwordTokenizer.learned(texts, vocab_size)
    separator = {"character": "", "word": " "}[tokens]
    symbols = (symbol for text in texts for symbol in _split(text, separator))
    return Tokenizer([UNKNOWN, *commonest(symbols, vocab_size)], separator, UNKNOWN)


def restored(values: dict[str, Any]) -> Tokenizer | SubwordTokenizer:
    """The tokenizer of a checkpoint, from what its `to_dict` gave."""
    kind = {"model": SubwordTokenizer, "words": WordTokenizer}.get(next(iter(values)), Tokenizer)
    return kind(**values)
