"""Tokenizer of words and punctuation marks, with character n-grams."""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from lightning_tfm.tokenization.tokenizer import PAD, UNKNOWN, UNKNOWN_ID, Ids, Tokenizer, strip_special


class WordTokenizer(Tokenizer):
    """Tokenizer of lower-case words and punctuation marks, for inputs only.

    Combining marks, and the joiners of Indic and Persian words and of emoji, are part of the preceding character, which
    keeps words of all scripts whole.

    With n-grams, each word, known or unknown, has several ids: its own, and the ids of its first MAX_NGRAMS character
    n-grams of the lengths NGRAMS, in this order, padded with PAD. Unknown words thus share n-grams with known words,
    such as `watch` in `unwatchable` (Bojanowski et al. 2017, 3.2).

    Args:
        words: the vocabulary; other words are unknown.
        num_ngrams: number of ids to which n-grams are hashed; 0 disables n-grams.
    """

    unknown_id, is_word_based = UNKNOWN_ID, True

    # The longest come first, since `NaiveBayes` reads only the first, and long words lose the last ones.
    NGRAMS = (5, 4, 3)
    MAX_NGRAMS = 32

    def __init__(self, words: Iterable[str], num_ngrams: int = 0) -> None:
        self.words = tuple(words)
        self.num_ngrams = num_ngrams
        self._ids = {word: id for id, word in enumerate(self.words, start=UNKNOWN_ID + 1)}
        self._first_ngram = UNKNOWN_ID + 1 + len(self.words)
        self.vocab_size = self._first_ngram + num_ngrams
        self.ids_per_token = 1 + self.MAX_NGRAMS if num_ngrams else 1
        self._spelled: dict[str, tuple[int, ...]] = {}  # cached results of `_spell`

    def split(self, text: str) -> list[str]:
        return _word_pattern().findall(re.sub(r"<br\s*/?>", " ", text).lower())

    def normalize(self, text: str) -> str:
        return " ".join(self.split(text))

    def encode(self, text: str) -> Ids:
        words = self.split(text)
        if not self.num_ngrams:
            return [self._ids.get(word, UNKNOWN_ID) for word in words]
        for word in words:
            if word not in self._spelled:
                self._spelled[word] = self._spell(word)
        return [self._spelled[word] for word in words]

    def _spell(self, word: str) -> tuple[int, ...]:
        """Return the ids of a word and of the n-grams of the word enclosed in `<` and `>`."""
        marked = f"<{word}>"
        ngrams = [marked[i : i + n] for n in self.NGRAMS for i in range(len(marked) - n + 1)][: self.MAX_NGRAMS]
        ids = [self._first_ngram + zlib.crc32(ngram.encode()) % self.num_ngrams for ngram in ngrams]
        return self._ids.get(word, UNKNOWN_ID), *ids, *[PAD] * (self.MAX_NGRAMS - len(ids))

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join((UNKNOWN, *self.words)[id - UNKNOWN_ID] for id in strip_special(ids))

    def to_dict(self) -> dict[str, Any]:
        return {"type": "words", "words": list(self.words), "num_ngrams": self.num_ngrams}


@functools.cache
def _word_pattern() -> re.Pattern[str]:
    r"""Return the pattern of a word or any other symbol.

    Python's `\w` excludes Unicode marks (categories Mn, Mc and Me). These, ZERO WIDTH NON-JOINER, ZERO WIDTH JOINER
    and the skin tones of emoji extend the preceding character.
    """
    planes = itertools.chain(range(0x300, 0x20000), range(0xE0000, 0xE1000))  # no other code points are marks
    marks = [code for code in planes if unicodedata.category(chr(code)).startswith("M")]
    runs = [[*run] for _, run in itertools.groupby(enumerate(marks), lambda mark: mark[1] - mark[0])]
    ranges = "".join(f"{chr(run[0][1])}-{chr(run[-1][1])}" for run in runs)
    extend = rf"(?:(?=[^\0-\u02ff])[{ranges}\u200c\u200d\U0001f3fb-\U0001f3ff])"  # lookahead: fast on Latin text
    return re.compile(rf"[\w']+(?:{extend}+[\w']*)*|[^\w\s]{extend}*(?:(?<=\u200d)[^\w\s]{extend}*)*")
