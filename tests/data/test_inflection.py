"""Data of the SIGMORPHON 2022 task on inflection."""

import unicodedata
from collections import Counter

import pytest

from datamodules import Inflection
from datamodules.inflection import ENDINGS, FILES, LANGUAGES
from lightning_tfm.errors import UserError
from support.corpora import write_inflections
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
