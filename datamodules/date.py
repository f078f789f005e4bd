"""Normalization of dates: 'Thursday, May 3, 1979' -> '1979-05-03'."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time, timedelta
from functools import cache
from operator import attrgetter
from typing import Any, cast

from babel import Locale, UnknownLocaleError
from babel.dates import DateTimeFormat, DateTimePattern, get_date_format, parse_pattern
from faker import Faker

from lightning_tfm.data import GeneratedDataModule, Pair
from lightning_tfm.errors import UserError
from lightning_tfm.tokenization import SymbolTokenizer

FORMATS = (
    "short",
    "medium",
    "long",
    "full",
    "d MMM y",
    "d MMMM y",
    "dd/MM/y",
    "dd-MM-y",
    "EE d, MMM y",
    "EEEE d, MMMM y",
)
"""Babel's format names and patterns. The year is `y`, since `Y`, the week-based year, differs around New Year."""

DAY = 24 * 60 * 60
"""Number of seconds in a day."""

PARTS = {"year": (0, 1, 2, 3), "month": (5, 6), "day": (8, 9)}
"""Positions of the digits of each part of an ISO 8601 date."""

DIGITS = {"y": PARTS["year"], "M": PARTS["month"], "L": PARTS["month"], "d": PARTS["day"]}
"""Positions of the digits of each field in an ISO 8601 date, by the first letter of the field in a pattern."""

MONTH, WEEKDAY = attrgetter("month"), date.weekday
FIELD_VALUES: dict[str, Callable[[date], int]] = {
    "y": attrgetter("year"),
    "M": MONTH,
    "L": MONTH,
    "d": attrgetter("day"),
    "E": WEEKDAY,
    "c": WEEKDAY,
    "G": lambda day: 1,  # one era
}
"""Functions that return the value of a field for a date, by the first letter of the field."""


class Date(GeneratedDataModule):
    """Data module of dates as people write them and in ISO 8601, drawn by faker and formatted by babel.

    Args:
        locales: babel's names of languages and regions, such as `en` or `de_AT`.
        first_year: first year of the dates.
        last_year: last year of the dates; fewer than 100 in all, since two digits must identify a year.
        train_size: number of training pairs.
        val_size: number of validation pairs.
        test_size: number of test pairs.
        settings: further arguments of GeneratedDataModule.

    Note:
        Texts that stand for more than one date in these formats and locales are excluded. The splits have different
        texts, but not different dates: by default, with seed 1, 87.6% of the test dates occur in training in another
        format. `DateWorld` splits by date.
    """

    target_parts = PARTS

    def __init__(
        self,
        locales: tuple[str, ...] = ("en",),
        first_year: int = 1970,
        last_year: int = 2025,
        train_size: int = 50_000,
        val_size: int = 2_000,
        test_size: int = 10_000,
        **settings: Any,
    ) -> None:
        if not locales:
            raise UserError("locales must name at least one locale, but is empty; try [en]")
        # Patterns are looked up once, since the lookup takes longer than formatting a date.
        self.patterns: list[Pattern] = []
        for name in locales:
            try:
                locale = Locale.parse(name)
            except (UnknownLocaleError, ValueError):
                raise UserError(f"locales must be known to babel, but {name!r} is not; try en or de_AT") from None
            for format in FORMATS:
                pattern = get_date_format(cast(Any, format), locale) if format.isalpha() else parse_pattern(format)
                category = format if len(locales) == 1 else f"{name} {format}"
                self.patterns.append(Pattern(pattern, locale, category))
        if not 1000 <= first_year <= last_year <= 9998 or last_year - first_year >= 99:
            raise UserError(
                "first_year and last_year must have four digits and span fewer than 100 years, so that two digits "
                f"identify a year, but are {first_year} and {last_year}; try 1970 and 2025"
            )
        self.locales = locales
        self.first, self.last = date(first_year, 1, 1), date(last_year, 12, 31)
        # The dates of a single year contain all characters and the longest text.
        texts = [text for day in days_between(date(last_year, 1, 1), self.last) for text in self._texts(day)]
        characters = sorted({*"0123456789-", *"".join(texts)})
        super().__init__(
            SymbolTokenizer(characters),
            max_source_length=max(map(len, texts)) + 1,
            max_target_length=len("1979-05-03") + 1,
            sizes={"train": train_size, "val": val_size, "test": test_size},
            **settings,
        )

    def _texts(self, day: date) -> list[str]:
        """Format a date in all formats and locales."""
        return [pattern.format(day)[0] for pattern in self.patterns]

    def _ambiguous(self) -> set[str]:
        """Return the texts that stand for several dates, such as 3/4/79, which is March 4 or April 3 by locale."""
        if self.locales == ("en",):  # no text is ambiguous; saves seconds
            return set()
        first_reading: dict[str, date] = {}
        ambiguous = set()
        for day in days_between(self.first, self.last):
            for text in self._texts(day):
                if first_reading.setdefault(text, day) != day:
                    ambiguous.add(text)
        return ambiguous

    def stream(self, split: str, seed: int) -> Iterator[Pair]:
        faker = Faker()
        faker.seed_instance(seed)
        draw, choose = faker.unix_time, faker.random.choice  # attribute lookups in faker are slow
        # In UTC and up to a fixed day: the dates must depend neither on the time zone nor on the current day.
        days = list(days_between(self.first, self.last))
        start = int(datetime.combine(self.first, time(), UTC).timestamp())
        end = start + len(days) * DAY - 1
        ambiguous = self._ambiguous()
        while True:
            day = days[int(draw(end, start) - start) // DAY]
            pattern = choose(self.patterns)
            text, spans = pattern.format(day)
            if text not in ambiguous:
                yield Pair(text, day.isoformat(), links(spans), pattern.category)


Span = tuple[str, int, int, bool]
"""First letter of a field, start and end of its value in the text, and whether the value is numeric."""


class Pattern:
    """Date format in a locale, as parsed by babel, and the category of its pairs, by which metrics are grouped."""

    def __init__(self, pattern: DateTimePattern, locale: Locale, category: str) -> None:
        # Literal text and fields alternate: text, field, text, ..., text.
        format = cast(str, pattern.format)  # babel declares a different type
        self.parts = [part.replace("%%", "%") for part in re.split(r"%\((\w+)\)s", format)]
        self.locale = locale
        self.category = category
        # Each field is formatted once for each of its values, since babel is slow.
        self._fields: list[tuple[str, Callable[[date], int | date], dict[int | date, str], str]] = [
            (field, FIELD_VALUES.get(field[0], lambda day: day), {}, after)
            for field, after in zip(self.parts[1::2], self.parts[2::2], strict=True)
        ]

    def format(self, day: date) -> tuple[str, tuple[Span, ...]]:
        """Format a date, and return the text and the spans of its year, month and day."""
        text, spans = self.parts[0], []
        for field, value_of, texts, after in self._fields:
            value = value_of(day)
            formatted = texts.get(value)
            if formatted is None:
                formatted = texts[value] = DateTimeFormat(day, self.locale)[field]
            if field[0] in DIGITS:  # a weekday is not part of the target
                begin = len(text)
                spans.append((field[0], begin, begin + len(formatted), formatted.isdigit()))
            text += formatted + after
        return text, tuple(spans)


# There are few distinct results, and one copy per pair would take more memory than the texts.
@cache
def links(spans: tuple[Span, ...]) -> tuple[tuple[int, int], ...]:
    """Return the alignment of a text with its target, as (source index, target index).

    Numbers are aligned digit by digit from the right. Target digits that a number omits, and those of a name, are
    aligned with all characters of the field.
    """
    linked = []
    for letter, begin, end, is_number in spans:
        places = DIGITS[letter]
        written_out = list(zip(range(begin, end)[::-1], places[::-1], strict=False)) if is_number else []
        others = places[: len(places) - len(written_out)]
        linked += written_out + [(i, j) for j in others for i in range(begin, end)]
    return tuple(sorted(linked))


def days_between(first: date, last: date) -> Iterator[date]:
    """Yield the dates from the first to the last."""
    return (first + timedelta(days=n) for n in range((last - first).days + 1))
