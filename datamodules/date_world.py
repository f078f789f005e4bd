"""Normalization of dates in thirty locales: 'Thứ Năm, 3 tháng 5, 1979' -> '1979-05-03'."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import date
from functools import cache
from itertools import product
from typing import Any, cast

from babel import Locale

from datamodules.date import PARTS, Pattern, days_between, links
from lightning_tfm.data import GeneratedDataModule, Pair
from lightning_tfm.tokenization import SymbolTokenizer, normalize_text

LOCALES = (
    *("en", "en_GB", "de", "fr", "es", "it", "nl", "pl", "cs", "sv", "tr", "vi", "id", "hu", "ru", "uk", "el"),
    *("he", "ar", "fa", "hi", "bn", "th", "zh", "ja", "ko"),
)
"""Locales of the training data, of which babel has dates in the Gregorian calendar."""

UNSEEN_LOCALES = ("da", "pt", "bg", "mr")
"""Locales of the test set `unseen_locales`. Each has a relative in training: sv, es, ru and hi."""

UNSEEN_PATTERNS = ("EEEE d MMMM y", "E, d MMM y", "MMMM d, y", "dd.MM.yy", "y-MM-dd", "y年M月d日EEEE")
"""Patterns of the test set `unseen_patterns`."""

GROUPS = ("test", "unseen_patterns", "unseen_locales")
"""Test sets. The patterns of "test" are also those of training and validation."""

KINDS = {"plain": 4, "typo": 2, "digits": 1, "lower case": 1, "no blanks": 1, "ordinal": 1}
"""Kinds of texts, which are the categories of the pairs, and their relative frequencies."""

DIGITS = "0123456789"
TO_ZERO = str.maketrans(DIGITS, "0" * 10)

ZEROS = {"arab": 0x660, "arabext": 0x6F0, "beng": 0x9E6, "deva": 0x966, "thai": 0xE50}
"""Code point of the digit 0 of CLDR's native numbering systems. Babel formats dates with 0 to 9 in every locale."""

FIRST, LAST = date(1970, 1, 1), date(2025, 12, 31)
"""Range of dates, of fewer than 100 years, since two digits must identify a year."""

SAMPLE_DAYS = tuple(date(2003, month, day) for month in range(1, 13) for day in range(22, 29))
"""Dates with all months and weekdays, whose texts have the maximum length."""


class DateWorld(GeneratedDataModule):
    """Data module of dates from 1970 to 2025 in many languages, as babel's patterns write them and with variations.

    The patterns of a locale are its short, medium, long and full ones, and those of all skeletons that have year, month
    and day. The kind of a text is its category: "plain", as babel formats it; "digits", with the native digits of the
    locale; "ordinal", an English day as in 3rd; "lower case"; "no blanks"; or "typo", with one character inserted,
    deleted or substituted, or two neighbors transposed.

    Each text is unambiguous. Let a clean text be any date in any pattern of any of the locales, with any variation but
    a typo, and with any weekday, so that no weekday is needed to tell 5/7 from 7/5. A leading zero does not matter
    either. Then all clean texts equal to a text, or for a typo, all clean texts at most one edit from it, stand for the
    same date. So 13/04/2005 occurs and 03/04/2005 does not. A typo in a digit occurs only where no other date is near.

    The splits have different dates: no date of a test set occurs in training in any form. Further test sets have
    patterns ("unseen_patterns") or locales ("unseen_locales") that do not occur in training, nor any text that those of
    training could write.

    Args:
        train_size: number of training pairs.
        val_size: number of validation pairs.
        test_size: number of test pairs.
        unseen_size: number of pairs of "unseen_patterns" and "unseen_locales".
        settings: further arguments of GeneratedDataModule.
    """

    target_parts = PARTS

    def __init__(
        self,
        train_size: int = 100_000,
        val_size: int = 2_000,
        test_size: int = 10_000,
        unseen_size: int = 5_000,
        **settings: Any,
    ) -> None:
        self.grammar = grammar()
        super().__init__(
            SymbolTokenizer(self.grammar.characters),
            max_source_length=self.grammar.longest + 1,
            max_target_length=len("1979-05-03") + 1,
            sizes={"train": train_size, "val": val_size, "test": test_size}
            | dict.fromkeys(("unseen_patterns", "unseen_locales"), unseen_size),
            **settings,
        )

    def split_key(self, pair: Pair) -> str:
        return pair.target

    def size_setting(self, split: str) -> str:
        return "unseen_size" if split.startswith("unseen") else super().size_setting(split)

    def stream(self, split: str, seed: int) -> Iterator[Pair]:
        draw = random.Random(seed)
        group = GROUPS.index(split) if split in GROUPS else 0
        # Only dates of the split are drawn, since a date that is drawn in vain takes time.
        days = [day for day in days_between(FIRST, LAST) if self.belongs(Pair("", day.isoformat()), split)]
        writers = {kind: self.grammar.writers(group, kind) for kind in KINDS}
        kinds, weights = zip(*((kind, weight) for kind, weight in KINDS.items() if writers[kind]), strict=True)
        while True:
            (kind,) = draw.choices(kinds, weights)
            pair = None
            while pair is None:  # so that each kind has its frequency
                day, pattern = draw.choice(days), draw.choice(draw.choice(writers[kind]))
                pair = self.grammar.write(day, pattern, kind, draw)
            yield pair


class Grammar:
    """All clean texts, which decide whether a text is unambiguous.

    Texts are normalized to lower case, digits from 0 to 9 and no blanks. The shapes of the clean texts, which have 0
    for every digit, form a trie: a node maps a character to the next node, and "" to the meanings of the shape that
    ends there. A meaning is the field of each digit, by its letter in a pattern, and the month, if it is written as a
    name. It is mapped to the first group that has it.

    Normalization does not increase the edit distance of two texts, so all texts that are near are found.
    """

    def __init__(self) -> None:
        self.groups: dict[Pattern, int] = {}
        self.alphabets: dict[Locale, str] = {}
        texts: list[str] = []
        for name in LOCALES + UNSEEN_LOCALES:
            locale = Locale.parse(name)
            patterns = find_patterns(locale)
            for pattern, written in patterns.items():
                self.groups[pattern] = 2 if name in UNSEEN_LOCALES else int(written in UNSEEN_PATTERNS)
            own = [pattern.format(day)[0] for pattern in patterns for day in SAMPLE_DAYS]
            self.alphabets[locale] = "".join(sorted({*"".join("".join(own).split())}))
            texts += own
            texts.append(native_digits(locale))
        self.characters = sorted({*DIGITS, *"-sthndr", *"".join(texts), *"".join(texts).lower()})
        self.longest = max(map(len, texts)) + len("th")
        self._normal = {ord(character): _normalize(character) for character in self.characters}
        self._trie: dict[str, Any] = {}
        self._windows: set[str] = set()
        for pattern, group in self.groups.items():
            for written, meaning in find_shapes(pattern):
                shape = written.translate(self._normal).translate(TO_ZERO)
                self._windows.update(shape[i : i + 5] for i in range(len(shape) - 4))
                node = self._trie
                for character in shape:
                    node = node.setdefault(character, {})
                meanings = node.setdefault("", {})
                meanings[meaning] = min(group, meanings.get(meaning, group))

    def writers(self, group: int, kind: str) -> list[list[Pattern]]:
        """Return the patterns of a group that can write a kind, by locale."""
        by_locale: dict[Locale, list[Pattern]] = {}
        for pattern, own in self.groups.items():
            able = {"digits": bool(native_digits(pattern.locale)), "ordinal": has_ordinals(pattern)}
            if own == group and able.get(kind, True):
                by_locale.setdefault(pattern.locale, []).append(pattern)
        return list(by_locale.values())

    def write(self, day: date, pattern: Pattern, kind: str, draw: random.Random) -> Pair | None:
        """Return a date written as a text of a kind.

        It is None if the text does not differ as the kind requires, is not normalized, is ambiguous, or is of an
        earlier group, or if a typing error leads to a clean text.
        """
        plain, spans = pattern.format(day)
        written: Written = list(enumerate(plain))
        if kind == "digits":
            digits = native_digits(pattern.locale)
            written = [(i, digits[int(c)] if c in DIGITS else c) for i, c in written]
        elif kind == "ordinal":
            end = next(end for letter, _, end, _ in spans if letter == "d")
            written[end:end] = [(None, c) for c in ordinal_suffix(day.day)]
        elif kind == "lower case":
            written = [(i, c.lower()) for i, c in written]
        elif kind == "no blanks":
            written = [(i, c) for i, c in written if not c.isspace()]
        elif kind == "typo":
            mistype(written, self.alphabets[pattern.locale], draw)
        text = "".join(c for _, c in written)
        if (text == plain) != (kind == "plain") or text != normalize_text(text.strip()):  # as inputs of `generate` are
            return None
        clean = self.read(text)
        if kind == "typo" and next(clean, None):
            return None
        first = len(GROUPS)
        for reading, group in self.near(text) if kind == "typo" else clean:
            if reading != day:
                return None
            first = min(first, group)
        if first != self.groups[pattern]:
            return None
        alignment = links(spans)
        if kind in ("ordinal", "no blanks", "typo"):  # the characters have moved
            places = {i: place for place, (i, _) in enumerate(written)}
            alignment = tuple(sorted(_link(places[i], j) for i, j in alignment if i in places))
        return Pair(text, day.isoformat(), alignment, kind)

    def read(self, text: str) -> Iterator[tuple[date, int]]:
        """Yield each date that a clean text stands for, and the first group that can write it."""
        normal = text.translate(self._normal)
        return _dates(_meanings(self._trie, normal), normal)

    def near(self, text: str) -> Iterator[tuple[date, int]]:
        """Yield each date of the clean texts that are equal to a text or one edit from it, and their first group.

        An edit is an insertion, deletion, substitution or transposition (optimal string alignment distance).
        """
        normal = text.translate(self._normal)
        shape = normal.translate(TO_ZERO)
        # The edit cannot be before the last five characters that no shape has in a row; this saves much time.
        earliest = max((i - 1 for i in range(len(shape) - 4) if shape[i : i + 5] not in self._windows), default=0)
        node: dict[str, Any] | None = self._trie  # of normal[:i], which the edit follows
        for i in range(len(normal) + 1):
            if node is None:
                return
            start, here, rest = normal[:i], normal[i : i + 1], normal[i + 1 :]
            if i >= earliest:
                for character, child in node.items():
                    for after in (here + rest, rest):  # inserted, substituted
                        if character and (meanings := _meanings(child, after)):
                            for new in DIGITS if character == "0" else character:
                                yield from _dates(meanings, start + new + after)
                for after in (rest, rest[:1] + here + rest[1:]):  # deleted, transposed
                    yield from _dates(_meanings(node, after), start + after)
            node = node.get(shape[i : i + 1])


@cache  # it takes a second
def grammar() -> Grammar:
    """Return the grammar of all locales."""
    return Grammar()


def find_patterns(locale: Locale) -> dict[Pattern, str]:
    """Return the distinct patterns of a locale that have year, month and day."""
    formats = [locale.date_formats[length] for length in ("short", "medium", "long", "full")]
    skeletons = locale.datetime_skeletons.items()
    formats += [pattern for skeleton, pattern in skeletons if {*"yMd"} <= {*skeleton} <= {*"GyMEd"}]
    distinct = {cast(str, pattern.pattern): pattern for pattern in formats}
    return {Pattern(pattern, locale, ""): written for written, pattern in sorted(distinct.items())}


Meaning = tuple[str, int | None]
"""Letter of the field of each digit, and the month if it has no digits."""


def find_shapes(pattern: Pattern) -> Iterator[tuple[str, Meaning]]:
    """Yield each shape of the texts of a pattern, with and without leading zeros, and its meaning."""
    for day in SAMPLE_DAYS:
        text, spans = pattern.format(day)
        parts: list[list[tuple[str, str]]] = []  # alternatives: text, and the letter of its field
        done = 0
        for letter, begin, end, is_number in spans:
            value, letter = text[begin:end], letter.replace("L", "M")
            parts.append([(text[done:begin], "E")])
            parts.append([("0", letter), ("00", letter)] if is_number and letter != "y" else [(value, letter)])
            if letter == "d" and has_ordinals(pattern):
                parts.append([(suffix, "") for suffix in ("", "st", "nd", "rd", "th")])
            done = end
        parts.append([(text[done:], "E")])
        for chosen in product(*parts):
            fields = "".join(letter for part, letter in chosen for character in part if character.isdecimal())
            yield "".join(part for part, _ in chosen), (fields, None if "M" in fields else day.month)


def _meanings(node: dict[str, Any], normal: str) -> dict[Meaning, int]:
    """Return the meanings of a normalized text from a node on; empty if no shape ends there."""
    for character in normal:
        node = node.get("0" if character in DIGITS else character)  # type: ignore[assignment]
        if node is None:
            return {}
    return node.get("", {})


def _dates(meanings: dict[Meaning, int], normal: str) -> Iterator[tuple[date, int]]:
    """Yield the date and the group of each meaning of a normalized text that is a date of the range."""
    for (fields, month), group in meanings.items():
        values = {"M": month or 0, "d": 0, "y": 0}
        for field, digit in zip(fields, filter(DIGITS.__contains__, normal), strict=True):
            if field in values:
                values[field] = 10 * values[field] + int(digit)
        if fields.count("y") == 2:
            values["y"] += 1900 if values["y"] >= FIRST.year % 100 else 2000
        try:
            day = date(values["y"], values["M"], values["d"])
        except ValueError:
            continue
        if FIRST <= day <= LAST:
            yield day, group


Written = list[tuple[int | None, str]]
"""Characters of a text, each with its index in the plain text."""


def mistype(written: Written, alphabet: str, draw: random.Random) -> None:
    """Insert, delete or substitute a character of a text, or transpose two neighbors."""
    edit = draw.choice(("insert", "delete", "substitute", "transpose"))
    i = draw.randrange(len(written) + (edit == "insert"))
    if edit == "insert":
        written.insert(i, (None, draw.choice(alphabet)))
    elif edit == "delete":
        del written[i]
    elif edit == "substitute":
        written[i] = (written[i][0], draw.choice(alphabet))
    else:
        written[i : i + 2] = written[i : i + 2][::-1]


def has_ordinals(pattern: Pattern) -> bool:
    """Return whether a pattern may have an ordinal day: the English ones with the name of the month."""
    return pattern.locale.language == "en" and any(field.startswith("MMM") for field in pattern.parts[1::2])


def ordinal_suffix(number: int) -> str:
    """Return the ending of an English ordinal number."""
    return "th" if number in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")


def native_digits(locale: Locale) -> str:
    """Return the digits from 0 to 9 of the native numbering system of a locale; empty if it has no other digits."""
    zero = ZEROS.get(locale.other_numbering_systems["native"])
    return "".join(chr(zero + value) for value in range(10)) if zero else ""


def _normalize(character: str) -> str:
    return "" if character.isspace() else str(int(character)) if character.isdecimal() else character.lower()


# One object per link takes less memory than one for each pair.
@cache
def _link(i: int, j: int) -> tuple[int, int]:
    return i, j
