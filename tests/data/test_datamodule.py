"""Properties of every generated dataset."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tracemalloc
from collections import Counter

import pytest
import torch

from datamodules import Copy, Date, DateWorld, Text, ToyTranslation, Tsv
from lightning_tfm.data import stable_hash
from lightning_tfm.data.pairs import LEAST_BYTES
from lightning_tfm.errors import UserError
from lightning_tfm.system import memory
from lightning_tfm.tokenization import BOS, EOS, PAD
from support.corpora import reviews, sentiment, text_file, write_lines
from support.data import set_up

FINGERPRINTS = """
import datetime, json, sys
import faker.providers.date_time
from datamodules import Copy, Date, DateWorld, ToyTranslation

class Another(datetime.datetime):  # the clock that faker reads
    @classmethod
    def now(cls, tz=None):
        return cls(int(sys.argv[1]), 2, 3, tzinfo=tz)

faker.providers.date_time.datetime = Another
fingerprints = {}
sizes = {"train_size": 200, "test_size": 50}
for data in (Copy(train_size=200), Date(**sizes), DateWorld(**sizes, unseen_size=50), ToyTranslation(**sizes)):
    data.setup("fit")
    fingerprints[type(data).__name__] = data.fingerprint
print(json.dumps(fingerprints))
"""


def test_vocabulary_and_lengths_are_known_before_setup(make_data):
    data = make_data()
    before = data.vocab_size, data.max_source_length, data.max_target_length
    assert data.datasets == {}
    data.setup("fit")
    assert before == (data.tokenizer.vocab_size, data.max_source_length, data.max_target_length)
    for dataset in data.datasets.values():
        assert dataset.source_lengths.max() <= data.max_source_length
        assert dataset.target_lengths.max() - 1 <= data.max_target_length


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_a_stage_encodes_the_training_data_and_what_it_evaluates(stage, make_data):
    """The examples and the batches are those after the setup for training."""
    whole, data = set_up(make_data()), make_data()
    data.setup(stage)
    evaluated = ("val",) if stage == "validate" else data.test_sets
    assert data.fingerprint == {split: whole.fingerprint[split] for split in ("train", *evaluated)}
    for other in (whole, data):
        other.loaders = [other.val_dataloader()] if stage == "validate" else other.test_dataloader()
    for expected, loader in zip(whole.loaders, data.loaders, strict=True):
        for batch, same in zip(expected, loader, strict=True):
            assert all(map(torch.equal, batch, same))
    data.setup("fit")
    assert data.fingerprint == whole.fingerprint


def test_each_stage_reports_its_own_splits_only(tmp_path, capsys):
    train, val, test = (write_lines(tmp_path / f"{n}.tsv", ["a\tb", f"{n}\tb"]) for n in range(3))
    data = Tsv(train, val, test, batch_size=1)
    for stage, splits in (("validate", ["val"]), ("test", ["test"]), ("fit", [])):
        data.setup(stage)
        lines = capsys.readouterr().err.splitlines()
        assert [line for line in lines if "also occur" in line] == [
            f"lightning-tfm: 1 of 2 sources of {split} also occur in train" for split in splits
        ]
        assert sum("not in the vocabulary" in line for line in lines) == len(splits)


def test_splits_have_their_sizes_and_are_disjoint(make_data):
    data = set_up(make_data())
    assert {split: len(dataset) for split, dataset in data.datasets.items()} == data.sizes
    sources = {split: {pair.source for pair in dataset.pairs} for split, dataset in data.datasets.items()}
    for first, second in itertools.combinations(sources, 2):
        assert not sources[first] & sources[second], (first, second)
        assert len(sources[second]) == data.sizes[second]
    assert all(pair.category and pair.alignment for pair in data.datasets["val"].pairs)


def test_splits_of_different_seeds_differ_and_are_disjoint(make_data):
    first, again, second = (set_up(make_data(seed=seed)) for seed in (1, 1, 2))
    assert first.fingerprint == again.fingerprint
    assert all(first.fingerprint[split] != second.fingerprint[split] for split in first.fingerprint)
    trained = {pair.source for pair in first.pairs("train")}
    assert not trained & {pair.source for split in ("val", "test") for pair in second.pairs(split)}
    assert trained & {pair.source for pair in second.pairs("train")} != trained


def test_overlapping_splits_are_refused(make_data, monkeypatch):
    data = make_data()
    training = data.pairs("train")
    monkeypatch.setattr(data, "pairs", lambda split: training)
    with pytest.raises(UserError, match="is in train and in val"):
        data.setup("fit")


@pytest.mark.run
def test_data_do_not_depend_on_process_time_zone_locale_or_date():
    fingerprints = []
    for zone, hash_seed, language, year in (
        ("Pacific/Kiritimati", "1", "C", "1999"),
        ("America/Los_Angeles", "2", "de_DE.UTF-8", "2031"),
    ):
        environment = {**os.environ, "TZ": zone, "PYTHONHASHSEED": hash_seed, "LANG": language}
        output = subprocess.check_output([sys.executable, "-c", FINGERPRINTS, year], env=environment, text=True)
        fingerprints.append(json.loads(output))
    assert fingerprints[0] == fingerprints[1]
    assert len(fingerprints[0]) == 4


def test_targets_are_shifted_once_and_batches_padded_on_the_right(make_data):
    for batch in set_up(make_data(batch_size=16)).train_dataloader():
        assert batch.target_in.shape == batch.target_out.shape
        assert batch.source.size(0) == 16
        for source, target_in, target_out in zip(*batch[:3], strict=True):
            source, target_in, target_out = (row[row != PAD].tolist() for row in (source, target_in, target_out))
            assert source[-1] == target_out[-1] == EOS
            assert target_in[0] == BOS
            assert target_in[1:] == target_out[:-1]
            assert EOS not in source[:-1] + target_in
        for padded in batch[:3]:
            assert (padded != PAD).any(0).all()  # no wider than the longest row
            assert ((padded != PAD).long().diff(dim=1) <= 0).all()


@pytest.mark.parametrize("part", [7, memory.PART])
def test_batches_contain_the_pairs_in_whatever_parts_they_are_encoded(make_data, part, monkeypatch):
    monkeypatch.setattr(memory, "PART", part)
    data = set_up(make_data())
    (loader, *_) = data.test_dataloader()
    seen = Counter(
        (data.tokenizer.decode(source), data.tokenizer.decode(target))
        for batch in loader
        for source, target in zip(batch.source.tolist(), batch.target_out.tolist(), strict=True)
    )
    assert seen == Counter((pair.source, pair.target) for pair in data.datasets["test"].pairs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Copy(batch_size=0), "batch_size .* 1, but is 0"),
        (lambda: Copy(train_size=8, batch_size=9), r"batch_size .* train_size \(8\), but is 9"),
        (lambda: Copy(train_size=10**12), r"train_size .* memory, but is 1,000,000,000,000"),
        (lambda: Date(test_size=0), "test_size .* 1, but is 0"),
        (lambda: Date(locales=("en", "xx_YY")), "locales .* 'xx_YY'"),
        (lambda: Date(first_year=1900, last_year=2000), "fewer than 100 years.* 1900 and 2000"),
        (lambda: DateWorld(unseen_size=0), "unseen_size .* 1, but is 0"),
        (lambda: Copy(max_length=5, longer_max_length=5), "longer_max_length"),
        (lambda: ToyTranslation(max_words=10), "max_words .* 4 and less than 10"),
    ],
)
def test_invalid_settings_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_test_sets_may_share_sources():
    sizes = {"train_size": 99, "val_size": 1, "test_size": 1, "longer_size": 40}
    data = set_up(Copy(2, max_length=4, longer_max_length=8, multiples=(2,), **sizes))
    longer, double = ({*data.datasets[name].pairs.sources} for name in ("longer", "x2"))
    assert longer & double


def test_copy_respects_its_length_ranges():
    sizes = {"train_size": 2000, "test_size": 200, "longer_size": 100}
    data = set_up(Copy(5, min_length=2, max_length=6, longer_max_length=9, multiples=(2, 4, 10), **sizes))
    lengths = dict.fromkeys(("train", "val", "test"), range(2, 7))
    for split, numbers in (lengths | {"longer": range(7, 10), "x2": [12], "x4": [24], "x10": [60]}).items():
        pairs = data.datasets[split].pairs
        assert {len(pair.source.split()) for pair in pairs} == set(numbers), split
        assert all(pair.source == pair.target for pair in pairs)
    assert data.test_sets == ("test", "longer", "x2", "x4", "x10")


def test_a_pair_takes_about_the_memory_by_which_its_split_is_refused():
    data = Copy(train_size=5000)
    tracemalloc.start()
    pairs = data.pairs("train")
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert LEAST_BYTES <= taken / len(pairs) <= 1.5 * LEAST_BYTES


def test_a_split_has_at_most_all_distinct_sources():
    """There are 7 + 7² + 7³ sources of up to 3 symbols."""
    sources = [" ".join(row) for n in (1, 2, 3) for row in itertools.product("0123456", repeat=n)]
    most = sum(stable_hash(source) % 10 == 0 for source in sources)
    with pytest.raises(UserError, match=rf"val_size .* \({most}\), but is 30000"):
        Copy(max_length=3, val_size=30_000).pairs("val")
    assert len(Copy(max_length=3, val_size=most).pairs("val")) == most


def test_a_stream_that_ends_is_refused(monkeypatch):
    stream = Copy.stream
    monkeypatch.setattr(Copy, "stream", lambda *arguments: itertools.islice(stream(*arguments), 50))
    with pytest.raises(UserError, match=r"Copy.stream .* ended after .* of 300 pairs"):
        Copy(train_size=300).setup("fit")


def test_a_fingerprint_is_that_of_the_texts_not_of_their_ids(tmp_path):
    path = text_file(tmp_path)
    texts = [set_up(Text(path, max_length=16, vocab_size=300, tokenizer=name)) for name in ("character", "subword")]
    train = write_lines(tmp_path / "train.tsv", map("\t".join, reviews()))
    labeled = [set_up(sentiment([train], max_length=length, truncate=True)) for length in (3, 50)]
    assert texts[0].fingerprint == texts[1].fingerprint
    assert texts[0].tokenizer.fingerprint != texts[1].tokenizer.fingerprint
    assert labeled[0].fingerprint == labeled[1].fingerprint
    with pytest.raises(UserError, match="number of training tokens"):
        labeled[0].train_dataloader().load_state_dict(labeled[1].train_dataloader().state_dict())
