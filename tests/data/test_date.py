"""Dates in English and other languages."""

from __future__ import annotations

import calendar
import itertools
from collections import Counter
from datetime import UTC, date, datetime

import pytest
from faker import Faker

from datamodules import Date
from datamodules.date import FORMATS
from lightning_tfm.tokenization import normalize_text
from support.data import DATA, set_up

PYTHON_PATTERNS = {  # the formats of babel as English strptime patterns
    "short": "%m/%d/%y",
    "medium": "%b %d, %Y",
    "long": "%B %d, %Y",
    "full": "%A, %B %d, %Y",
    "d MMM y": "%d %b %Y",
    "d MMMM y": "%d %B %Y",
    "dd/MM/y": "%d/%m/%Y",
    "dd-MM-y": "%d-%m-%Y",
    "EE d, MMM y": "%a %d, %b %Y",
    "EEEE d, MMMM y": "%A %d, %B %Y",
}


def readings(text):
    """Return every date that an English text can express, with the matching formats."""
    days = {}
    for name, pattern in PYTHON_PATTERNS.items():
        try:
            day = datetime.strptime(text, pattern).date()
        except ValueError:
            continue
        if not pattern.endswith("%Y") or text.endswith(f"{day.year:04}"):
            days.setdefault(day, []).append(name)
    return days


def test_each_date_is_labeled_with_the_day_it_expresses():
    data = Date(train_size=5000)
    used = Counter()
    for pair in data.pairs("train"):
        days = readings(pair.source)
        if "/" in pair.source:  # the month comes first with a short year, the day with a full one
            pattern = "short" if len(pair.source.split("/")[2]) == 2 else "dd/MM/y"
            days = {day: [pattern] for day, patterns in days.items() if pattern in patterns}
        assert [day.isoformat() for day in days] == [pair.target], pair
        used.update(*days.values())
    assert set(PYTHON_PATTERNS) == set(FORMATS) == set(used)
    assert min(used.values()) > 200


def test_the_year_is_the_calendar_year():
    """30 December 2019 is in the first week of 2020, but in the year 2019."""
    texts = Date()._texts(date(2019, 12, 30))
    assert len(texts) == 10
    assert not any("2020" in text or text.endswith("20") for text in texts)


def test_english_dates_have_one_reading():
    english = Date(locales=("en_US",))  # the same formats, but searched for ambiguous texts
    assert english._ambiguous() == set()
    assert english._texts(date(1979, 5, 3)) == Date()._texts(date(1979, 5, 3))


def test_ambiguous_dates_are_excluded():
    both_day_first = Date(locales=("en", "fr"), first_year=2000, last_year=2010, train_size=2000)
    assert "01/02/2003" not in both_day_first._ambiguous()
    sizes = {"train_size": 500, "val_size": 9, "test_size": 9}
    data = Date(locales=("en", "en_GB", "de", "es"), first_year=2000, last_year=2003, **sizes)
    ambiguous = data._ambiguous()
    assert "1/2/03" in ambiguous  # February in Spain, January in America
    assert "1/13/03" not in ambiguous
    data.setup("fit")
    assert not ambiguous & {pair.source for dataset in data.datasets.values() for pair in dataset.pairs}


@pytest.mark.parametrize(("first_year", "last_year"), [(1970, 2025), (1930, 1980)])
def test_dates_are_those_that_faker_draws_between_two_dates(first_year, last_year):
    stream = Date(first_year=first_year, last_year=last_year).stream("train", 3)
    faker = Faker()
    faker.seed_instance(3)
    limits = datetime(first_year, 1, 1, tzinfo=UTC), datetime(last_year, 12, 31, 23, 59, 59, tzinfo=UTC)
    for pair in itertools.islice(stream, 500):
        assert pair.target == faker.date_time_between_dates(*limits, tzinfo=UTC).date().isoformat()
        faker.random.choice(FORMATS)


@pytest.mark.parametrize("locale", ["de", "ja", "ar", "fr_CA", "hi", "vi"])
def test_dates_of_any_locale_are_in_the_vocabulary(locale):
    data = set_up(Date(locales=(locale,), first_year=1999, last_year=2004, train_size=300, val_size=30, test_size=60))
    assert len(data.datasets["train"]) == 300
    # prompts are normalized, too
    assert all(normalize_text(pair.source) == pair.source for pair in data.datasets["train"].pairs)


def linked_characters(pair, digits):
    """Return the source characters that are linked with these digits of the target."""
    links = {digit: {i for i, j in pair.alignment if j == digit} for digit in digits}
    for digit, places in links.items():
        if len(places) == 1:  # numbers are linked digit by digit; the source may omit a leading 0
            (place,) = places
            assert pair.source[place] == pair.target[digit] or pair.target[digit] == "0", pair
    return "".join(pair.source[i] for i in sorted(set().union(*links.values())))


def test_dates_are_aligned_with_the_characters_that_express_them():
    """The characters linked with the digits of day, month and year express these, in every format."""
    formats = set()
    for pair in DATA["Date"](train_size=2_000).pairs("train"):
        day = date.fromisoformat(pair.target)
        formats.add(pair.category)
        assert int(linked_characters(pair, (8, 9))) == day.day, pair
        assert linked_characters(pair, (0, 1, 2, 3)) in (f"{day.year}", f"{day.year % 100:02}"), pair
        month = linked_characters(pair, (5, 6))
        names = (calendar.month_name[day.month], calendar.month_abbr[day.month])
        assert month in names or int(month) == day.month, pair
        assert not {j for _, j in pair.alignment} & {4, 7}
    assert len(formats) == 10
