"""Symbols, words or parts of words to ids and back: one tokenizer per data module, shared by source and target."""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning_tfm.errors import UserError

PAD, BOS, EOS = 0, 1, 2
"""Padding, begin and end of sequence: the same ids in every vocabulary."""

NUM_SPECIAL = 3

Ids = list[int] | list[tuple[int, ...]]
"""Of each token its id, or, where a tokenizer has several for each, all of them."""

UNKNOWN, UNKNOWN_ID = "\N{REPLACEMENT CHARACTER}", NUM_SPECIAL
"""Stands for what training has not seen, where that is not refused: the first symbol of a vocabulary."""


class Tokenizer(ABC):
    """Texts to ids and back, without BOS and EOS.

    Attributes:
        vocab_size: number of ids, PAD, BOS and EOS among them.
        ids_per_token: how many ids a token of a source has.
        unknown_id: what stands for all symbols that the vocabulary lacks; None if they are refused, or there are none.
        writes_sentences: whether a target is made of words, so that a score over words (BLEU) makes sense.
    """

    vocab_size: int
    ids_per_token = 1
    unknown_id: int | None
    writes_sentences: bool

    @abstractmethod
    def split(self, text: str) -> list[str]:
        """What of a source each id stands for, whether the vocabulary has it or not."""

    @abstractmethod
    def encode(self, text: str) -> Ids:
        """A source to ids.

        Raises:
            UserError: if the vocabulary lacks a symbol, and that is refused; names it and its position, from 1.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The ids of a target to text: PAD and BOS are left out, and EOS ends it."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint: `restored(tokenizer.to_dict())` is the same tokenizer."""

    def split_target(self, text: str) -> list[str]:
        """What of a target each id stands for."""
        return self.split(text)

    def encode_target(self, text: str) -> list[int]:
        """A target to ids; raises as `encode` does."""
        return self.encode(text)

    def encode_all(self, texts: Sequence[str]) -> list[Ids]:
        """Many sources to ids."""
        return [self.encode(text) for text in texts]

    def encode_all_targets(self, texts: Sequence[str]) -> list[list[int]]:
        """Many targets to ids."""
        return [self.encode_target(text) for text in texts]


class SymbolTokenizer(Tokenizer):
    """A fixed vocabulary of symbols, which are characters, or what stands between separators.

    Args:
        symbols: the distinct symbols, in the order of their ids; the first gets id 3. If it is UNKNOWN, it stands for
            all that are not among them; otherwise they are refused.
        separator: what stands between two symbols of a text: `""` for characters, `" "` for words.
        target_separator: that of targets, where it is another.
        feature_separator: a source may have features after a tab, with this between two; they become symbols in
            brackets.
    """

    def __init__(
        self,
        symbols: Iterable[str],
        separator: str = "",
        target_separator: str | None = None,
        feature_separator: str | None = None,
    ) -> None:
        self.symbols = tuple(symbols)
        self.separator = separator
        self.target_separator = separator if target_separator is None else target_separator
        self.feature_separator = feature_separator
        self._ids = {symbol: id for id, symbol in enumerate(self.symbols, start=NUM_SPECIAL)}
        if len(self._ids) != len(self.symbols):
            raise ValueError(f"symbols must be distinct, but {len(self.symbols)} have {len(self._ids)} values")
        self.vocab_size = NUM_SPECIAL + len(self.symbols)
        self.unknown_id = self._ids.get(UNKNOWN)
        self.writes_sentences = self.target_separator != "" or " " in self._ids

    def split(self, text: str) -> list[str]:
        if self.feature_separator is None:
            return _split(text, self.separator)
        text, _, features = text.partition("\t")
        symbols = _split(features, self.feature_separator) if features else []
        return _split(text, self.separator) + [f"[{feature}]" for feature in symbols]

    def split_target(self, text: str) -> list[str]:
        return _split(text, self.target_separator)

    def encode(self, text: str) -> list[int]:
        return self._encode(text, self.split(text))

    def encode_target(self, text: str) -> list[int]:
        return self._encode(text, self.split_target(text))

    def _encode(self, text: str, symbols: list[str]) -> list[int]:
        if self.unknown_id is not None:
            return [self._ids.get(symbol, self.unknown_id) for symbol in symbols]
        try:
            return [self._ids[symbol] for symbol in symbols]
        except KeyError as error:
            symbol = error.args[0]
            kind = "word" if self.separator else "character"
            position = symbols.index(symbol) + 1
            shown = text if len(text) <= 60 else text[:57] + "..."
            raise UserError(f"the vocabulary has no {kind} {symbol!r} (position {position} of {shown!r})") from None

    def decode(self, ids: Sequence[int]) -> str:
        return self.target_separator.join(self.symbols[id - NUM_SPECIAL] for id in _written(ids))

    def to_dict(self) -> dict[str, Any]:
        separators = {"separator": self.separator, "target_separator": self.target_separator}
        return {"symbols": list(self.symbols), **separators, "feature_separator": self.feature_separator}


def _split(text: str, separator: str) -> list[str]:
    return list(text) if separator == "" else text.split(None if separator.isspace() else separator)


def _written(ids: Iterable[int]) -> list[int]:
    """Those of symbols, up to EOS."""
    return [id for id in itertools.takewhile(lambda id: id != EOS, ids) if id >= NUM_SPECIAL]


class WordTokenizer(Tokenizer):
    """Words and punctuation marks in small letters, of texts that are read, and not written.

    A combining mark belongs to the character before it, so that words of all scripts stay whole; so do the joiners of
    Indic and Persian words and of emoji.

    With n-grams, what a word is made of stands beside it, whether the vocabulary has it or not: `unwatchable` shares
    `watch` with what is known (Bojanowski et al. 2017, 3.2). Each word has then several ids: its own, and those of its
    NGRAMS, the first MOST of them; for fewer there is PAD.

    Args:
        words: the vocabulary; others are unknown.
        num_ngrams: how many ids the n-grams share, by their hashes; 0 for none.
    """

    unknown_id, writes_sentences = UNKNOWN_ID, True

    NGRAMS, MOST = (3, 4, 5), 32

    def __init__(self, words: Iterable[str], num_ngrams: int = 0) -> None:
        self.words = tuple(words)
        self.num_ngrams = num_ngrams
        self._ids = {word: id for id, word in enumerate(self.words, start=UNKNOWN_ID + 1)}
        self._first_ngram = UNKNOWN_ID + 1 + len(self.words)
        self.vocab_size = self._first_ngram + num_ngrams
        self.ids_per_token = 1 + self.MOST if num_ngrams else 1
        self._spelled: dict[str, tuple[int, ...]] = {}  # what `_spell` has said

    def split(self, text: str) -> list[str]:
        return _word_pattern().findall(re.sub(r"<br\s*/?>", " ", text).lower())

    def encode(self, text: str) -> Ids:
        words = self.split(text)
        if not self.num_ngrams:
            return [self._ids.get(word, UNKNOWN_ID) for word in words]
        for word in words:
            if word not in self._spelled:
                self._spelled[word] = self._spell(word)
        return [self._spelled[word] for word in words]

    def _spell(self, word: str) -> tuple[int, ...]:
        """The ids of a word and of its n-grams, with marks where it begins and ends."""
        marked = f"<{word}>"
        ngrams = [marked[i : i + n] for n in self.NGRAMS for i in range(len(marked) - n + 1)][: self.MOST]
        ids = [self._first_ngram + zlib.crc32(ngram.encode()) % self.num_ngrams for ngram in ngrams]
        return self._ids.get(word, UNKNOWN_ID), *ids, *[PAD] * (self.MOST - len(ids))

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join((UNKNOWN, *self.words)[id - UNKNOWN_ID] for id in _written(ids))

    def to_dict(self) -> dict[str, Any]:
        return {"words": list(self.words), "num_ngrams": self.num_ngrams}


@functools.cache
def _word_pattern() -> re.Pattern[str]:
    """Return the pattern of a word or of another symbol.

    Python's `\\w` lacks Unicode's marks (the categories Mn, Mc and Me). They, ZERO WIDTH NON-JOINER, ZERO WIDTH JOINER
    and the skin tones of emoji extend the character before them.
    """
    planes = itertools.chain(range(0x300, 0x20000), range(0xE0000, 0xE1000))  # no others have marks
    marks = [code for code in planes if unicodedata.category(chr(code)).startswith("M")]
    runs = [[*run] for _, run in itertools.groupby(enumerate(marks), lambda mark: mark[1] - mark[0])]
    ranges = "".join(f"{chr(run[0][1])}-{chr(run[-1][1])}" for run in runs)
    extend = rf"(?:(?=[^\0-\u02ff])[{ranges}\u200c\u200d\U0001f3fb-\U0001f3ff])"  # tells Latin text apart fast
    return re.compile(rf"[\w']+(?:{extend}+[\w']*)*|[^\w\s]{extend}*(?:(?<=\u200d)[^\w\s]{extend}*)*")


class SubwordTokenizer(Tokenizer):
    """Byte-level byte-pair encoding (Sennrich et al. 2016, Radford et al. 2019): it can write every text.

    Its ids are those of the model and NUM_SPECIAL more.

    Args:
        model: a Hugging Face tokenizer as JSON, which is what a `tokenizer.json` holds.
    """

    unknown_id, writes_sentences = None, True

    def __init__(self, model: str) -> None:
        from tokenizers import Tokenizer as Model

        self.model = Model.from_str(model)
        self.model.no_truncation()  # a tokenizer of others may have been made for one model's inputs
        self.model.no_padding()
        self.vocab_size = NUM_SPECIAL + self.model.get_vocab_size()

    def split(self, text: str) -> list[str]:
        return [text[begin:end] for begin, end in self.model.encode(text, add_special_tokens=False).offsets]

    def encode(self, text: str) -> list[int]:
        return [id + NUM_SPECIAL for id in self.model.encode(text, add_special_tokens=False).ids]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """On all cores at once."""
        encodings = self.model.encode_batch(texts, add_special_tokens=False)
        return [[id + NUM_SPECIAL for id in encoding.ids] for encoding in encodings]

    def encode_all_targets(self, texts: Sequence[str]) -> list[list[int]]:
        return self.encode_all(texts)

    def decode(self, ids: Sequence[int]) -> str:
        return self.model.decode([id - NUM_SPECIAL for id in _written(ids)]).removeprefix(" ")

    def to_dict(self) -> dict[str, Any]:
        return {"model": self.model.to_str()}


def learned(texts: Iterable[str], tokens: str, vocab_size: int, num_ngrams: int = 0) -> Tokenizer:
    """The tokenizer of at most so many ids that is learned from texts: of the commonest tokens.

    Args:
        tokens: "character"; "word", between spaces; "reader's word", as WordTokenizer has it; or "subword".
        num_ngrams: how many more ids the n-grams of a reader's words have.

    Raises:
        UserError: if there are fewer ids than a tokenizer of that kind must have.
    """
    if tokens == "subword":
        return _learned_subwords(texts, vocab_size)
    if tokens == "reader's word":
        split = WordTokenizer(()).split
        return WordTokenizer(commonest((word for text in texts for word in split(text)), vocab_size), num_ngrams)
    separator = {"character": "", "word": " "}[tokens]
    symbols = (symbol for text in texts for symbol in _split(text, separator))
    return SymbolTokenizer([UNKNOWN, *commonest(symbols, vocab_size)], separator)


def commonest(symbols: Iterable[str], vocab_size: int) -> list[str]:
    """The commonest symbols, the commonest first, as many as fit beside PAD, BOS, EOS and UNKNOWN.

    Raises:
        UserError: if none does.
    """
    if vocab_size <= NUM_SPECIAL + 1:
        raise UserError(
            f"vocab_size must be above {NUM_SPECIAL + 1}, the ids of padding, begin, end and what is unknown, but is "
            f"{vocab_size}; try 1000"
        )
    counts = Counter(symbols)
    counts.pop(UNKNOWN, None)
    ordered = sorted(counts.items(), key=lambda count: (-count[1], count[0]))
    return [symbol for symbol, _ in ordered[: vocab_size - NUM_SPECIAL - 1]]


def _learned_subwords(texts: Iterable[str], vocab_size: int) -> SubwordTokenizer:
    """The merges of the commonest pairs, until there are so many ids."""
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
    return SubwordTokenizer(model.to_str())


def read_tokenizer(path: Path) -> SubwordTokenizer:
    """That of a Hugging Face tokenizer.json.

    Raises:
        UserError: if it is none.
    """
    try:
        return SubwordTokenizer(path.read_text(encoding="utf-8"))
    except Exception as error:  # tokenizers raises no other
        raise UserError(f"{str(path)!r} must be a Hugging Face tokenizer.json, but is not: {error}") from None


def restored(values: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a checkpoint, from what its `to_dict` gave."""
    if "model" in values:
        return SubwordTokenizer(**values)
    return WordTokenizer(**values) if "words" in values else SymbolTokenizer(**values)
