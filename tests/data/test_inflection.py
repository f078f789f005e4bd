"""Data of the SIGMORPHON 2022 task on inflection."""

import random
import unicodedata
from collections import Counter

import pytest

from datamodules import Inflection
from datamodules.inflection import ENDINGS, FILES, LANGUAGES
from lightning_tfm.errors import UserError
from support.corpora import write_inflections, write_mirror
from support.data import set_up


@pytest.fixture(autouse=True)
def mirror(tmp_path, monkeypatch):
    write_inflections(tmp_path, monkeypatch)
    return tmp_path


def rows(mirror, language, split):
    """Return the (lemma, form, features) of all lines of a language."""
    text = (mirror / f"sigmorphon2022/{language}{ENDINGS[split]}").read_text(encoding="utf-8")
    return [tuple(line.split("\t")) for line in text.splitlines()]


def test_each_of_33_languages_has_three_files():
    assert len(LANGUAGES) == len({*LANGUAGES}) == 33
    names = [f"sigmorphon2022/{language}{ending}" for language in LANGUAGES for ending in ENDINGS.values()]
    assert list(FILES) == names
    folders = [FILES[f"sigmorphon2022/{language}.gold"].address.split("/")[-2] for language in LANGUAGES]
    assert Counter(folders) == {"development_languages": 30, "surprise_languages": 3}


@pytest.mark.parametrize("split", ENDINGS)
def test_the_language_is_the_last_feature_and_the_category(split, mirror):
    data = set_up(Inflection())
    expected = Counter(
        (f"{lemma}\t{features};{language}", form, language)
        for language in LANGUAGES
        for lemma, form, features in rows(mirror, language, split)
    )
    assert Counter((pair.source, pair.target, pair.category) for pair in data.datasets[split].pairs) == expected


@pytest.mark.parametrize(("decompose", "unicode"), [(False, "NFC"), (True, "NFD")])
def test_features_are_symbols_and_the_others_are_characters(mirror, decompose, unicode):
    lemma, form, features = rows(mirror, "hun", "train")[0]
    tokenizer = Inflection(decompose=decompose).tokenizer
    source = f"{lemma}\t{features};hun"
    assert tokenizer.split(source) == [
        *unicodedata.normalize(unicode, lemma),
        *(f"[{feature}]" for feature in [*features.split(";"), "hun"]),
    ]
    assert tokenizer.split_target(form) == [*unicodedata.normalize(unicode, form)]
    assert tokenizer.unknown_id not in tokenizer.encode(source) + tokenizer.encode_target(form)
    assert tokenizer.decode(tokenizer.encode_target(form)) == form


def test_a_single_language_has_the_features_of_its_table(mirror):
    data = set_up(Inflection(["hun"]))
    sources = [f"{lemma}\t{features}" for lemma, _, features in rows(mirror, "hun", "train")]
    assert sorted(data.datasets["train"].pairs.sources) == sorted(sources)
    assert {pair.category for pair in data.datasets["train"].pairs} == {"hun"}


@pytest.mark.parametrize("split", ["val", "test"])
def test_partitions_are_relative_to_the_training_table_of_the_language(split, mirror, monkeypatch):
    def draw_rows(number, seed):
        draw = random.Random(seed)
        return [(f"lemma{draw.randrange(20)}", "form", f"N;{draw.randrange(12)}") for _ in range(number)]

    write_mirror(mirror, monkeypatch, FILES, draw_rows)
    names = {"both": {"lemma", "features"}, "lemma": {"lemma"}, "features": {"features"}, "neither": set()}
    expected = {}
    for language in LANGUAGES:
        lemmas, _, features = zip(*rows(mirror, language, "train"), strict=True)
        sides = [
            {side for side, seen in (("lemma", row[0] in lemmas), ("features", row[2] in features)) if seen}
            for row in rows(mirror, language, split)
        ]
        expected[language] = [name for side in sides for name in names if names[name] == side]
    together = Inflection(partition=True).pairs(split)
    assert [pair.category for pair in together] == [name for language in LANGUAGES for name in expected[language]]
    assert {pair.category for pair in together} == {*names}
    for language in ("hun", "tur"):
        assert [pair.category for pair in Inflection([language], partition=True).pairs(split)] == expected[language]


@pytest.mark.parametrize(
    ("languages", "message"),
    [
        (["hun", "fin"], "languages must be of SIGMORPHON 2022, but is 'fin'; available: ang, ara"),
        ([], "languages must be of SIGMORPHON 2022, but is 'empty'; available: ang, ara"),
    ],
)
def test_unknown_languages(languages, message):
    with pytest.raises(UserError, match=message):
        Inflection(languages)
