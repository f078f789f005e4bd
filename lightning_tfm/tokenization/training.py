"""Training of tokenizers on texts, and restoring from a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Any

from lightning_tfm.errors import UserError
from lightning_tfm.tokenization.subwords import SubwordTokenizer
from lightning_tfm.tokenization.symbols import SymbolTokenizer
from lightning_tfm.tokenization.tokenizer import NUM_SPECIAL, UNKNOWN, Tokenizer
from lightning_tfm.tokenization.words import WordTokenizer


def train_tokenizer(texts: Iterable[str], tokens: str, vocab_size: int) -> Tokenizer:
    """Train a tokenizer on texts, with the most frequent "character", "word" (separated by spaces) or "subword" tokens.

    Raises:
        UserError: if vocab_size is below the minimum for these tokens.
    """
    if tokens == "subword":
        return _train_subwords(texts, vocab_size)
    separator = {"character": "", "word": " "}[tokens]
    counts = SymbolTokenizer((), separator).count(texts, are_targets=False)
    return SymbolTokenizer([UNKNOWN, *build_vocab(counts, vocab_size)], separator)


def train_pair_tokenizer(
    sources: Iterable[str], targets: Iterable[str], vocab_size: int | None = None, **settings: Any
) -> SymbolTokenizer:
    """Train a tokenizer on the symbols of sources and targets, with UNKNOWN for all others.

    Args:
        sources: the sources.
        targets: the targets.
        vocab_size: maximum number of ids, see `build_vocab`; None for all symbols, in alphabetical order.
        settings: further arguments of SymbolTokenizer.
    """
    splitter = SymbolTokenizer((), **settings)
    of_targets = splitter.count(targets, are_targets=True)
    counts = splitter.count(sources, are_targets=False) + of_targets
    symbols = sorted(counts) if vocab_size is None else build_vocab(counts, vocab_size)
    tokenizer = SymbolTokenizer([UNKNOWN, *symbols], **settings)
    known = {*symbols}
    outputs = {symbol if symbol in known else UNKNOWN for symbol in of_targets}
    tokenizer.target_ids = [id for id, symbol in enumerate(tokenizer.symbols, NUM_SPECIAL) if symbol in outputs]
    return tokenizer


def train_word_tokenizer(texts: Iterable[str], vocab_size: int, num_ngrams: int = 0) -> WordTokenizer:
    """Train a tokenizer of the most frequent lower-case words, with num_ngrams additional ids for n-grams.

    Raises:
        UserError: if vocab_size is below the minimum, see `build_vocab`.
    """
    split = WordTokenizer(()).split
    counts = Counter(word for text in texts for word in split(text))
    return WordTokenizer(build_vocab(counts, vocab_size), num_ngrams)


def build_vocab(counts: Mapping[str, int], vocab_size: int) -> list[str]:
    """Return the most frequent symbols in descending order of frequency, given their numbers of occurrences.

    The vocabulary has at most `vocab_size` ids, including PAD, BOS, EOS and UNKNOWN.

    Raises:
        UserError: if vocab_size leaves no id for a symbol.
    """
    if vocab_size <= NUM_SPECIAL + 1:
        raise UserError(
            f"vocab_size must be above {NUM_SPECIAL + 1}, the number of special ids (padding, begin, end and unknown), "
            f"but is {vocab_size}; try 1000"
        )
    ordered = sorted(counts.keys() - {UNKNOWN}, key=lambda symbol: (-counts[symbol], symbol))
    return ordered[: vocab_size - NUM_SPECIAL - 1]


def _train_subwords(texts: Iterable[str], vocab_size: int) -> SubwordTokenizer:
    """Train a byte-pair encoding, which merges the most frequent pairs up to vocab_size ids."""
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < NUM_SPECIAL + len(alphabet):
        raise UserError(
            f"vocab_size must be at least {NUM_SPECIAL + len(alphabet)}, since every byte has an id, "
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


TYPES: dict[str, type[Tokenizer]] = {"symbols": SymbolTokenizer, "words": WordTokenizer, "subwords": SubwordTokenizer}
"""Tokenizer classes by the `type` entry of `Tokenizer.to_dict`."""

KINDS: dict[str, type | UnionType] = {
    "symbols": list,
    "words": list,
    "num_ngrams": int,
    "num_sources": int,
    "decompose": bool,
    "target_separator": str | None,
    "feature_separator": str | None,
}
"""Types of the arguments of tokenizers other than text."""


def tokenizer_from_dict(values: dict[str, Any]) -> Tokenizer:
    """Construct a tokenizer from the values of `Tokenizer.to_dict`; raise ValueError if one is of another type."""
    settings = {name: value for name, value in values.items() if name != "type"}
    for name, value in settings.items():
        texts = value if isinstance(value, list) else []
        if not isinstance(value, KINDS.get(name, str)) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{name} is of another type: {value!r:.50}")
    return TYPES[values["type"]](**settings)
