"""Dates in thirty languages, with variations."""

from __future__ import annotations

import itertools
import random
import unicodedata
from collections import Counter
from datetime import date

import pytest

from datamodules import DateWorld, date_world
from lightning_tfm.tokenization import normalize_text
from support.data import set_up

KNOWN_DATES = {  # written by hand
    "plain": (
        ("2004-05-13", "5/13/04", "Thursday, May 13, 2004", "Thu, 13 May 2004", "Do., 13. Mai 2004", "13.05.04"),
        ("1999-02-28", "28.2.1999", "dimanche 28 février 1999", "niedziela, 28 lutego 1999", "28. února 1999"),
        ("1984-08-20", "20 de agosto de 1984", "lunedì 20 agosto 1984", "20 aug. 1984", "1984-08-20"),
        ("1984-08-20", "20 Ağustos 1984"),
        ("2011-11-11", "11 tháng 11, 2011", "Jumat, 11 November 2011", "2011. november 11., péntek", "11/11/11"),
        ("2003-01-17", "17 января 2003\u202fг.", "17 січня 2003\u202fр.", "17 Ιανουαρίου 2003", "17 בינואר 2003"),
        ("1995-06-30", "30 يونيو 1995", "30 ژوئن 1995", "30 जून 1995", "30 জুন, 1995", "30 มิถุนายน ค.ศ. 1995"),
        ("2020-12-31", "2020年12月31日", "2020/12/31", "2020년 12월 31일 목요일", "西暦2020年12月31日"),
        ("1971-11-02", "tirsdag den 2. november 1971", "2 de novembro de 1971", "2 ноември 1971\u202fг."),
        ("1971-10-02", "2 ऑक्टोबर, 1971", "2 октомври 1971\u202fг."),
        ("2019-12-30", "30 December 2019", "30 décembre 2019"),  # in the first week of 2020
    ),
    "digits": (("1995-06-30", "٣٠ يونيو ١٩٩٥", "۱۹۹۵/۶/۳۰", "३० जून १९९५", "৩০/৬/৯৫", "๓๐ มิ.ย. ๑๙๙๕", "३० जून, १९९५"),),
    "ordinal": (("2003-03-03", "March 3rd, 2003", "Mon, 3rd Mar 2003"), ("2003-03-11", "11th March 2003")),
    "lower case": (("2003-03-03", "monday, march 3, 2003", "3. märz 2003", "δευτέρα 3 μαρτίου 2003"),),
    "no blanks": (("2003-03-03", "March3,2003", "3.März2003", "3марта2003г.", "2003년3월3일", "3tháng3,2003"),),
}

AMBIGUOUS = (
    *("3/4/2005", "03/04/2005", "٣/٤/٢٠٠٥", "Mon, 4/3/2005", "05/03/10", "3/4/05"),
    *("13/13/2005", "2/30/2005", "1/20/1969", "12.31.26", "May 3", ""),  # no date at all
)


def dates_of(readings):
    return {day.isoformat() for day, _ in readings}


def test_dates_written_by_hand_have_one_reading():
    grammar = date_world.grammar()
    for day, *texts in itertools.chain(*KNOWN_DATES.values()):
        for text in texts:
            assert dates_of(grammar.read(text)) == {day}, text
    for text in AMBIGUOUS:
        assert len(dates_of(grammar.read(text))) != 1, text


def test_babel_writes_the_dates_written_by_hand():
    grammar, draw = date_world.grammar(), random.Random(0)
    for kind, dates in KNOWN_DATES.items():
        writers = [pattern for group in range(3) for own in grammar.writers(group, kind) for pattern in own]
        for day, *texts in dates:
            pairs = [grammar.write(date.fromisoformat(day), pattern, kind, draw) for pattern in writers]
            written = {pair.source: pair.target for pair in pairs if pair}
            assert {text: written.get(text) for text in texts} == dict.fromkeys(texts, day)


@pytest.fixture(scope="module")
def world():
    return set_up(DateWorld(train_size=4000, val_size=500, test_size=3000, unseen_size=1500))


def normal(text):
    """Return a text in lower case, with ASCII digits and without blanks and leading zeros."""
    characters = [str(unicodedata.decimal(character, character)) for character in "".join(text.lower().split())]
    return "".join(
        character
        for i, character in enumerate(characters)
        if character != "0" or not characters[i + 1 :][:1] > ["/"] or (i and characters[i - 1].isdigit())
    )


@pytest.mark.run
def test_no_text_of_any_date_is_a_source_of_another(world):
    """Every fifth date is written in every pattern; leading zeros, blanks, case and the digit system do not matter."""
    targets = {}
    for pair in itertools.chain(*(dataset.pairs for dataset in world.datasets.values())):
        assert targets.setdefault(normal(pair.source), pair.target) == pair.target, pair
    sources = 0
    for pattern in date_world.grammar().groups:
        for day in itertools.islice(date_world.days_between(date_world.FIRST, date_world.LAST), 0, None, 5):
            text = normal(pattern.format(day)[0])
            if text in targets:
                sources += 1
                assert targets[text] == day.isoformat(), text
    assert sources > 1000


def edits(text, alphabet):
    """Return all texts at most one insertion, deletion, substitution or transposition from a text."""
    texts = {text}
    for i in range(len(text) + 1):
        texts |= {text[:i] + new + text[i:] for new in alphabet}
        texts |= {text[:i] + new + text[i + 1 :] for new in ("", *alphabet)}
        texts.add(text[:i] + text[i : i + 2][::-1] + text[i + 2 :])
    return texts


def test_texts_near_a_typing_error_stand_for_its_date(world):
    """All texts that are one edit away are read, for typing errors of all test sets."""
    grammar = date_world.grammar()
    assert dates_of(grammar.near("5/13/2004")) > {"2004-05-13", "2004-05-12", "2004-05-23"}
    for split in world.test_sets:
        pairs = [pair for pair in world.datasets[split].pairs if pair.category == "typo"]
        for pair in pairs[:8]:
            readings = [grammar.read(text) for text in edits(pair.source, grammar.characters)]
            assert {day for reading in readings for day in dates_of(reading)} == {pair.target}, pair
            assert not dates_of(grammar.read(pair.source)), pair


def test_a_typing_error_is_one_edit():
    draw, edited = random.Random(0), Counter()
    for _ in range(500):
        written = list(enumerate("3 May"))
        date_world.mistype(written, "xyz", draw)
        text = "".join(character for _, character in written)
        assert text in edits("3 May", "xyz")
        assert all("3 May"[i] == character for i, character in written if i is not None and character not in "xyz")
        edited[len(text)] += text != "3 May"
    assert min(edited[4], edited[5], edited[6]) > 80


def test_splits_have_different_dates(world):
    days = {split: {pair.target for pair in dataset.pairs} for split, dataset in world.datasets.items()}
    test = set().union(*(days[split] for split in world.test_sets))
    assert not days["train"] & (days["val"] | test)
    assert not days["val"] & test
    assert world.test_sets == date_world.GROUPS


def test_kinds_have_their_shares(world):
    for split in ("train", "test"):
        kinds = Counter(pair.category for pair in world.datasets[split].pairs)
        for kind, share in date_world.KINDS.items():
            assert kinds[kind] / kinds.total() == pytest.approx(share / 10, abs=0.03), (split, kind)
    assert {pair.category for pair in world.datasets["unseen_patterns"].pairs} == {*date_world.KINDS}
    assert {pair.category for pair in world.datasets["unseen_locales"].pairs} == {*date_world.KINDS} - {"ordinal"}


def test_nothing_of_training_can_write_unseen_patterns_and_locales(world):
    """Each known pattern writes each date, and texts without blanks and in lower case are compared."""
    grammar = date_world.grammar()
    trained = [pattern for pattern, group in grammar.groups.items() if group == 0]
    assert len({pattern.locale for pattern in grammar.groups}) == 30
    for split in ("unseen_patterns", "unseen_locales"):
        for pair in world.datasets[split].pairs[:200]:
            written = {normal(pattern.format(date.fromisoformat(pair.target))[0]) for pattern in trained}
            assert normal(pair.source) not in written, pair


def test_the_gold_alignment_of_a_variation_links_the_same_characters(world):
    for pair in world.datasets["train"].pairs:
        if pair.category != "typo":
            year = {i for i, j in pair.alignment if j == 3}
            assert len(year) == 1, pair
            assert int(pair.source[year.pop()]) == int(pair.target[3]), pair
            assert int(pair.source[max(i for i, j in pair.alignment if j == 9)]) == int(pair.target[9]), pair


def test_sources_are_normalized_as_the_inputs_of_generate(world):
    for dataset in world.datasets.values():
        assert all(normalize_text(pair.source.strip()) == pair.source for pair in dataset.pairs)
