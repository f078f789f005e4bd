"""Data of the SIGMORPHON 2021 task on pronunciation."""

import unicodedata
from collections import Counter

import pytest

from datamodules import Pronunciation
from datamodules.pronunciation import FILES, LANGUAGES
from lightning_tfm.errors import UserError
from support.corpora import write_pronunciations
from support.data import set_up


@pytest.fixture(autouse=True)
def mirror(tmp_path, monkeypatch):
    write_pronunciations(tmp_path, monkeypatch)
    return tmp_path


def lines(mirror, level, split):
    """Return the (word, pronunciation, language) of all lines of a level."""
    for language in LANGUAGES[level]:
        for line in (mirror / f"sigmorphon2021/{level}/{language}_{split}.tsv").read_text().splitlines():
            yield (*line.split("\t"), language)


def test_each_level_has_the_files_of_ten_languages():
    assert [len(languages) for languages in LANGUAGES.values()] == [10, 10]
    names = [f"{level}/{name}_{split}" for level in LANGUAGES for name in LANGUAGES[level] for split in SPLITS]
    assert list(FILES) == [f"sigmorphon2021/{name}.tsv" for name in names]
    assert len({file.sha256 for file in FILES.values()}) > 50


SPLITS = ("train", "dev", "test")


@pytest.mark.parametrize("level", LANGUAGES)
@pytest.mark.parametrize(("decompose", "unicode"), [(False, "NFC"), (True, "NFD")])
def test_the_language_is_a_feature_and_the_category(level, decompose, unicode, mirror):
    data = set_up(Pronunciation(level, decompose=decompose))
    for split, name in (("train", "train"), ("val", "dev"), ("test", "test")):
        expected = Counter((f"{word}\t{code}", target, code) for word, target, code in lines(mirror, level, name))
        pairs = data.datasets[split].pairs
        assert Counter((pair.source, pair.target, pair.category) for pair in pairs) == expected
    source, target, code = next(iter(expected))
    assert data.tokenizer.split(source) == [*unicodedata.normalize(unicode, source.partition("\t")[0]), f"[{code}]"]
    assert data.tokenizer.split_target(target) == target.split(" ")
    assert data.tokenizer.decode(data.tokenizer.encode_target(target)) == target


def test_a_single_language_has_no_feature():
    data = set_up(Pronunciation("low", ["ice"]))
    assert {pair.category for pair in data.datasets["train"].pairs} == {"ice"}
    assert all("\t" not in pair.source for pair in data.datasets["train"].pairs)


def test_a_validation_reads_no_test_files(mirror):
    """A training does, at its start, unless it ends without a test."""
    for path in mirror.rglob("*_test.tsv"):
        path.unlink()
    data = Pronunciation("low", ["ice", "gre"])
    data.setup("validate")
    assert data.datasets.keys() == {"train", "val"}
    for stage in ("test", "fit"):
        with pytest.raises(UserError, match=r"must name a folder that holds 'sigmorphon2021/low/ice_test\.tsv'"):
            Pronunciation("low", ["ice", "gre"]).setup(stage)
    untested = Pronunciation("low", ["ice", "gre"])
    untested.skip_test()
    assert set_up(untested).fingerprint == data.fingerprint


@pytest.mark.parametrize(
    ("languages", "message"),
    [
        (["ice", "fre"], "languages must be of the level 'low', but is 'fre'; .*'gre'"),
        ([], "languages must be of the level 'low', but is 'empty'; available: ady, gre"),
    ],
)
def test_unknown_languages(languages, message):
    with pytest.raises(UserError, match=message):
        Pronunciation("low", languages)
