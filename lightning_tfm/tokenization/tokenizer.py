"""Base class of tokenizers, and special ids."""

from __future__ import annotations

import hashlib
import itertools
import json
import unicodedata
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

PAD, BOS, EOS = 0, 1, 2
"""Ids of padding, beginning of sequence and end of sequence, the same in every vocabulary."""

NUM_SPECIAL = 3
"""Number of special ids, which precede the ids of symbols."""

Ids = list[int] | list[tuple[int, ...]]
"""Ids of a text: one id per token, or a tuple per token for tokenizers with several ids per token."""

UNKNOWN, UNKNOWN_ID = "\N{REPLACEMENT CHARACTER}", NUM_SPECIAL
"""Symbol and id of out-of-vocabulary symbols."""

END_OF_DOCUMENT = "\udfff"
"""Mark of the end of a document in a text of several documents: a lone surrogate, which no valid text contains."""


NAMED = 3
"""Maximum number of symbols that a message names."""


def name_symbols(symbols: Iterable[str]) -> str:
    """Return the names of the most frequent symbols, for a message."""
    names = [repr(symbol) for symbol, _ in Counter(symbols).most_common()]
    return ", ".join([*names[:NAMED], *(["..."] if len(names) > NAMED else [])])


def normalize_text(text: str) -> str:
    """Convert a text to Unicode's normalization form NFC.

    This is applied to files, label names and user input, so an accented letter is always the same code point.
    """
    return unicodedata.normalize("NFC", text)


class Tokenizer(ABC):
    """Base class of tokenizers, which map texts to ids, without BOS and EOS, and back.

    Attributes:
        vocab_size: number of ids, including PAD, BOS and EOS.
        num_columns: number of tab-separated columns of a source; None if a source may contain tabs.
        num_sources: number of these columns that are sources; a further one holds features.
        ids_per_token: number of ids per token of a source.
        unknown_id: id of all symbols outside the vocabulary; None if these raise UserError or do not exist.
        is_word_based: whether targets consist of words, as required by word-level metrics (BLEU).
        scored_symbols: what the symbol error rate counts: "characters", or symbols that are separated by this text.
        spaced_ids: ids of the tokens that begin with a space; empty if a space is a token, or no part of one.
        feature_ids: ids of the features of a source, such as those of an inflection; empty if there are none.
        target_ids: ids of the symbols of the training targets; empty if they are unknown or all.
    """

    vocab_size: int
    num_columns: int | None = None
    num_sources: int = 1
    ids_per_token = 1
    unknown_id: int | None
    is_word_based: bool
    scored_symbols = "characters"
    spaced_ids: Sequence[int] = ()
    feature_ids: Sequence[int] = ()
    target_ids: Sequence[int] = ()

    @abstractmethod
    def split(self, text: str) -> list[str]:
        """Split a source into the symbols represented by its ids, including symbols outside the vocabulary."""

    @abstractmethod
    def encode(self, text: str) -> Ids:
        """Encode a source.

        Raises:
            UserError: if a symbol is outside the vocabulary and the tokenizer has no unknown id; the message names the
                symbol and its position, counted from 1.
        """

    def encode_rest(self, text: str) -> Ids:
        """Encode the end of a source, which follows another token, see `encode`."""
        return self.encode(text)

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Decode the ids of a target, without PAD and BOS, up to EOS."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the tokenizer as plain values for a checkpoint, see `tokenizer_from_dict`."""

    def unknown_symbols(self, text: str, is_target: bool = False) -> list[str]:
        """Return the symbols of a source, or of a target, that are encoded as the unknown id."""
        if self.unknown_id is None:
            return []
        split, encode = (self.split_target, self.encode_target) if is_target else (self.split, self.encode)
        pairs = zip(split(text), encode(text), strict=True)
        return [symbol for symbol, id in pairs if id == self.unknown_id]

    def normalize(self, text: str) -> str:
        """Return a text that is the same for sources of the same symbols, including symbols outside the vocabulary."""
        return text

    @property
    def fingerprint(self) -> str:
        """Return a hash of the tokenizer."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def word_indices(self, text: str) -> list[int] | None:
        """Return the word index of each token of a text; None if tokens are not parts of words."""
        return None

    def split_target(self, text: str) -> list[str]:
        """Split a target into the symbols represented by its ids."""
        return self.split(text)

    def split_scored(self, text: str) -> list[str]:
        """Split a target into the symbols that the symbol error rate counts."""
        return self.split_target(text)

    def encode_target(self, text: str) -> list[int]:
        """Encode a target, see `encode`."""
        return cast(list[int], self.encode(text))  # only sources have several ids per token

    def encode_all(self, texts: Sequence[str], are_targets: bool = False) -> Sequence[Ids]:
        """Encode several sources, or several targets."""
        return [*map(self.encode_target if are_targets else self.encode, texts)]

    def encode_flat(self, texts: Sequence[str], are_targets: bool) -> tuple[Tensor, Tensor]:
        """Encode N texts, sources or targets, to one tensor, for tokenizers with one id per token.

        Returns:
            The ids of all texts, one text after the other, as int32, and the number of tokens of each text (N).

        Raises:
            UserError: see `encode`.
        """
        rows = self.encode_all(texts, are_targets)
        ids = torch.tensor([*itertools.chain.from_iterable(rows)], dtype=torch.int32)
        return ids, torch.tensor([*map(len, rows)], dtype=torch.long)

    def encode_parts(self, parts: Sequence[str], continued: bool) -> Tensor:
        """Encode a source in parts, for tokenizers with one id per token.

        Args:
            parts: consecutive parts of the source, which are encoded in parallel where possible. After a part that
                ends with END_OF_DOCUMENT, which is encoded as EOS, another source begins.
            continued: whether other parts of the source precede them.

        Returns:
            The ids of all parts, as int32 (N).
        """
        return self.encode_flat(parts, are_targets=False)[0]


def strip_special(ids: Iterable[int]) -> list[int]:
    """Return the ids before the first EOS, without special ids."""
    return [id for id in itertools.takewhile(lambda id: id != EOS, ids) if id >= NUM_SPECIAL]


def pad_sequences(rows: Sequence[Ids]) -> tuple[Tensor, Tensor]:
    """Right-pad N sequences, whose tokens are ids or tuples of G ids, with PAD.

    Returns:
        The ids (N, longest) or (N, longest, G), and the lengths (N).
    """
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.tensor([*itertools.chain.from_iterable(rows)], dtype=torch.long)
    ids = torch.full((len(rows), int(lengths.max()), *tokens.shape[1:]), PAD)
    ids[torch.arange(ids.size(1)) < lengths.unsqueeze(1)] = tokens
    return ids, lengths
