"""Properties of every data module, and those of each generated dataset."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import resource
import subprocess
import sys
import tracemalloc
import unicodedata
from collections import Counter
from datetime import UTC, date, datetime

import pytest
import torch
from faker import Faker

from datamodules import Copy, Date, DateWorld, ToyTranslation, date_world, toy_translation
from datamodules.date import FORMATS
from lightning_tfm.data import BatchDivision, EvaluationSampler, LengthGroupedSampler, Pair, Pairs, stable_hash
from lightning_tfm.data.pairs import LEAST_BYTES
from lightning_tfm.data.rows import TextRows, TokenRows
from lightning_tfm.errors import UserError
from lightning_tfm.system import memory
from lightning_tfm.tasks.metrics import all_gather_list
from lightning_tfm.tokenization import (
    BOS,
    EOS,
    PAD,
    UNKNOWN,
    SymbolTokenizer,
    WordTokenizer,
    normalize_text,
    tokenizer_from_dict,
)

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
    known = data.vocab_size, data.max_source_length, data.max_target_length
    assert data.datasets == {}
    data.setup("fit")
    assert known == (data.tokenizer.vocab_size, data.max_source_length, data.max_target_length)
    lengths = [dataset.source_lengths.max() for dataset in data.datasets.values()]
    assert max(lengths) <= data.max_source_length
    assert max(dataset.target_lengths.max() - 1 for dataset in data.datasets.values()) <= data.max_target_length


def test_splits_have_their_sizes_and_are_disjoint(make_data):
    data = make_data()
    data.setup("fit")
    assert {split: len(dataset) for split, dataset in data.datasets.items()} == data.sizes
    sources = {split: {pair.source for pair in dataset.pairs} for split, dataset in data.datasets.items()}
    for split, own in sources.items():
        others = set().union(*(theirs for name, theirs in sources.items() if name != split))
        assert not own & others, split
        assert split == "train" or len(own) == data.sizes[split]


def test_splits_of_different_seeds_are_disjoint_too(make_data):
    first, second = make_data(seed=1), make_data(seed=2)
    trained = {pair.source for pair in first.pairs("train")}
    assert not trained & {pair.source for split in ("val", "test") for pair in second.pairs(split)}
    assert trained & {pair.source for pair in second.pairs("train")} != trained


def test_overlapping_splits_are_refused(make_data, monkeypatch):
    data = make_data()
    training = data.pairs("train")
    monkeypatch.setattr(data, "pairs", lambda split: training)
    with pytest.raises(UserError, match="is in train and in val"):
        data.setup("fit")


def test_fingerprints_distinguish_data(make_data):
    same, again, other = make_data(seed=1), make_data(seed=1), make_data(seed=2)
    for data in (same, again, other):
        data.setup("fit")
    assert same.fingerprint == again.fingerprint
    assert all(same.fingerprint[split] != other.fingerprint[split] for split in same.fingerprint)


@pytest.mark.run
def test_data_do_not_depend_on_process_time_zone_locale_or_date():
    fingerprints = []
    for zone, hash_seed, language, year in (
        ("Pacific/Kiritimati", "1", "C", "1999"),
        ("America/Los_Angeles", "2", "de_DE.UTF-8", "2031"),
    ):
        environment = {**os.environ, "TZ": zone, "PYTHONHASHSEED": hash_seed, "LANG": language}
        run = subprocess.run(
            [sys.executable, "-c", FINGERPRINTS, year], env=environment, capture_output=True, text=True, check=True
        )
        fingerprints.append(json.loads(run.stdout))
    assert fingerprints[0] == fingerprints[1]
    assert len(fingerprints[0]) == 4


def test_targets_are_shifted_once_and_batches_padded_on_the_right(make_data):
    data = make_data(batch_size=16)
    data.setup("fit")
    for batch in data.train_dataloader():
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


def test_rows_of_similar_length_are_batched_as_by_sorting_a_list():
    lengths, batch_size, seed = torch.randint(1, 9, (1_000,), generator=torch.Generator().manual_seed(0)), 7, 3
    sampler = LengthGroupedSampler(lengths, batch_size, seed)
    generator = torch.Generator().manual_seed(1)
    batches = sampler._epoch(0, generator).tolist()
    generator.manual_seed(1)
    rows = torch.randperm(1_000, generator=generator).tolist()[: 1_000 // batch_size * batch_size]
    size = sampler.POOL * batch_size
    pools = [
        sorted(rows[begin : begin + size], key=lengths.tolist().__getitem__) for begin in range(0, len(rows), size)
    ]
    whole = torch.tensor([row for pool in pools for row in pool]).view(-1, batch_size)
    assert batches == whole[torch.randperm(len(whole), generator=generator)].tolist()


@pytest.mark.parametrize("part", [7, memory.PART])
def test_batches_contain_the_pairs_in_whatever_parts_they_are_encoded(make_data, part, monkeypatch):
    monkeypatch.setattr(memory, "PART", part)
    data = make_data()
    data.setup("fit")
    (loader, *_) = data.test_dataloader()
    seen = Counter(
        (data.tokenizer.decode(source), data.tokenizer.decode(target))
        for batch in loader
        for source, target in zip(batch.source.tolist(), batch.target_out.tolist(), strict=True)
    )
    assert seen == Counter((pair.source, pair.target) for pair in data.datasets["test"].pairs)


def test_more_workers_than_the_limit_of_open_files_allows_are_refused(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 256))
    data = Copy(num_workers=24)
    message = (
        "data.num_workers must be at most 12 with at most 256 open files, but is 24; lower it, or .*`ulimit -n 448`"
    )
    with pytest.raises(UserError, match=message):
        data.setup("fit")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_stream_does_not_depend_on_workers_or_resuming(num_workers):
    """Three epochs are read in full, and resumed from every step."""

    def loader(workers):
        data = Copy(train_size=200, val_size=20, test_size=20, longer_size=20, num_workers=workers)
        data.setup("fit")
        return data.train_dataloader()

    def equal(ours, theirs):
        return all(a.equal(b) for pair in zip(ours, theirs, strict=True) for a, b in zip(*pair, strict=True))

    whole = loader(0)
    batches = [batch for _ in range(3) for batch in whole]
    assert len(batches) == 3 * len(whole) == 9
    stream = itertools.islice(LengthGroupedSampler(whole.sampler.lengths, 64, seed=0), 9)
    assert equal(batches, [whole.dataset[rows] for rows in stream])

    ours = loader(num_workers)
    assert equal(batches, [batch for _ in range(3) for batch in ours])
    for stop in range(9):
        first, second = loader(0), loader(num_workers)
        assert equal(batches[:stop], itertools.islice((batch for _ in range(3) for batch in first), stop))
        second.load_state_dict(first.state_dict())
        assert equal(batches[stop:], itertools.islice((batch for _ in range(3) for batch in second), 9 - stop))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 32}, r"the batch_size must match the checkpoint \(64\) to resume its run, but is 32"),
        ({"seed": 1}, r"the seed_everything must match the checkpoint \(0\)"),
        ({"train_size": 201}, "the fingerprint of the training data must match the checkpoint"),
    ],
)
def test_resuming_with_another_stream_is_refused(settings, message):
    loaders = []
    for changes in ({}, settings):
        data = Copy(**{"train_size": 200, "val_size": 20, "test_size": 20, "longer_size": 20} | changes)
        data.setup("fit")
        loaders.append(data.train_dataloader())
    with pytest.raises(UserError, match=message):
        loaders[1].load_state_dict(loaders[0].state_dict())


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_processes_share_the_same_global_batches(world_size):
    lengths = torch.randint(1, 20, (100,))
    whole = LengthGroupedSampler(lengths, 16, seed=3)
    samplers = [
        LengthGroupedSampler(lengths, 16, 3, BatchDivision(rank, world_size, world_size)) for rank in range(world_size)
    ]
    for start in (0, 4, 6):
        for stream in (whole, *samplers):
            stream.start = start
        for batch, *shares in itertools.islice(zip(whole, *samplers, strict=True), 18):
            assert sorted(batch.tolist()) == sorted(torch.cat(shares).tolist())
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_each_epoch_has_its_own_order_determined_by_the_seed():
    def order(seed, number):
        stream = LengthGroupedSampler(torch.arange(64) % 7, 16, seed)
        stream.start = 4 * number
        return torch.cat(list(itertools.islice(stream, 4))).tolist()

    orders = [order(seed, number) for seed in (0, 1) for number in (0, 1)]
    assert all(sorted(rows) == list(range(64)) for rows in orders)
    assert len(set(map(tuple, orders))) == 4
    assert order(1, 1) == orders[-1]


def test_batches_group_similar_lengths_and_are_shuffled():
    lengths = torch.randint(1, 50, (4096,))
    stream = LengthGroupedSampler(lengths, 32, seed=0)
    batches = [lengths[rows].float() for rows in itertools.islice(stream, stream.batches_per_epoch)]
    assert torch.stack([batch.std() for batch in batches]).mean() < 0.1 * lengths.float().std()
    means = torch.stack([batch.mean() for batch in batches])
    assert torch.corrcoef(torch.stack((means[:-1], means[1:])))[0, 1].abs() < 0.3


@pytest.mark.parametrize("size", [3, 7, 64, 101])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 8])
def test_evaluation_visits_each_row_once(size, world_size, batch_size):
    lengths = torch.randint(1, 20, (size,))
    samplers = [
        EvaluationSampler(lengths, batch_size, BatchDivision(rank, world_size, world_size))
        for rank in range(world_size)
    ]
    batches = [list(sampler) for sampler in samplers]
    assert sorted(row for share in batches for batch in share for row in batch.tolist()) == list(range(size))
    most_rows = math.ceil(size / world_size)
    assert {len(share) for share in batches} == {min(size // world_size, math.ceil(most_rows / batch_size))}
    assert all(1 <= len(batch) <= batch_size + 1 for share in batches for batch in share)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_the_batches_of_a_micro_batch_do_not_depend_on_the_number_of_processes(world_size):
    lengths = torch.randint(1, 20, (101,))
    for make in (
        lambda division: itertools.islice(LengthGroupedSampler(lengths, 18, 3, division), 9 * len(division.own)),
        lambda division: iter(EvaluationSampler(lengths, 4, division)),
    ):
        batches = {}
        for rank in range(world_size):
            division = BatchDivision(rank, world_size, 8)
            for number, rows in enumerate(make(division)):
                step, index = divmod(number, len(division.own))
                batches[step, division.own[index]] = rows.tolist()
        alone = [[rows.tolist() for rows in make(BatchDivision(index, 8, 8))] for index in range(8)]
        assert batches == {
            (step, index): rows for index, stream in enumerate(alone) for step, rows in enumerate(stream)
        }


def test_lists_of_all_processes_are_concatenated(monkeypatch):
    assert all_gather_list([1]) == [1]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)

    def gather(gathered, lines, group):
        gathered[:] = [lines, [3]]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    assert all_gather_list([1, 2]) == [1, 2, 3]


@pytest.mark.parametrize(
    "tokenizer",
    [
        SymbolTokenizer([UNKNOWN, *"ab é\U0001f600"]),
        SymbolTokenizer([UNKNOWN, "a", "b", "ab"], " "),
        SymbolTokenizer([UNKNOWN, *"ab", "[V]", "[a]"], "", " ", ";"),
        SymbolTokenizer([UNKNOWN, *"ab", "[V]", "[a]"], "", "", ";"),
        WordTokenizer(["a", "ab"]),
    ],
    ids=["characters", "words", "features and words", "features and characters", "words and punctuation"],
)
@pytest.mark.parametrize("are_targets", [False, True])
def test_texts_encoded_together_equal_texts_encoded_one_by_one(tokenizer, are_targets):
    texts = ["ab a", "", "\U0001f600 xé", "b\tV;a;N", " ", "\ud800a", "aab"]
    encode = tokenizer.encode_target if are_targets else tokenizer.encode
    for some in (texts, texts[:1], ["", ""]):
        ids, lengths = tokenizer.encode_flat(some, are_targets)
        assert [part.tolist() for part in ids.split(lengths.tolist())] == [encode(text) for text in some]


@pytest.mark.parametrize("vocab_size", [10, 40_000])
def test_rows_are_stored_without_padding_and_read_with_it(vocab_size):
    torch.manual_seed(0)
    lengths = torch.tensor([3, 0, 7, 1])
    rows = [torch.randint(1, vocab_size, (length,)) for length in lengths.tolist()]
    for parts in ([torch.cat(rows)], rows):
        stored = TokenRows(parts, lengths, vocab_size)
        for indices in ([0], [1, 3], [3, 2, 2, 0], [1]):
            expected = torch.nn.utils.rnn.pad_sequence([rows[index] for index in indices], batch_first=True)
            assert stored[torch.tensor(indices)].equal(expected)


TEXTS = ["May", "", "größe\n\t", "日本", "\N{GRINNING FACE}a", "", "x" * 50]


@pytest.mark.parametrize("part", [1, 3, memory.PART])
@pytest.mark.parametrize("texts", [TEXTS, TEXTS * 40, [""] * 4, []])
def test_stored_texts_are_those_of_a_list(texts, part, monkeypatch):
    monkeypatch.setattr(memory, "PART", part)
    stored = TextRows()
    for some in memory.in_parts(texts):
        stored.extend(some)
    assert [*stored] == texts
    assert [stored[row] for row in range(-len(texts), len(texts))] == [*texts, *texts]
    for rows in (slice(None), slice(1, 3), slice(-2, None), slice(2, 1), slice(None, None, -2), slice(9, 20)):
        assert stored[rows] == texts[rows]
    with pytest.raises(IndexError):
        stored[len(texts)]


def test_texts_with_zero_bytes_are_refused():
    stored = TextRows()
    stored.extend(["a"])
    with pytest.raises(UserError, match=r"texts must not contain zero bytes, but one does: 'b\\x00c'; remove them"):
        stored.extend(["b", "b\0c"])
    assert [*stored] == ["a"]


def test_stored_pairs_are_those_of_a_list():
    whole = [Pair(text, text[::-1], ((0, row),), "long" if row else None) for row, text in enumerate(TEXTS)]
    stored = Pairs.of(whole)
    assert [*stored] == stored[:] == whole
    assert Pairs.of(stored) is stored
    assert stored.are_aligned
    assert not Pairs.of([*whole, Pair("May", "05")]).are_aligned
    assert not Pairs([(TEXTS, TEXTS)]).are_aligned
    mask = torch.tensor([len(text) > 1 for text in TEXTS])
    assert [*stored.subset(mask)] == [pair for pair in whole if len(pair.source) > 1]
    assert [*Pairs([(TEXTS, TEXTS), (TEXTS, TEXTS)]).subset(mask.repeat(2))] == [
        Pair(text, text) for text in TEXTS * 2 if len(text) > 1
    ]


@pytest.mark.parametrize("part", [2, memory.PART])
@pytest.mark.parametrize(
    "tokenizer",
    [
        SymbolTokenizer(()),
        SymbolTokenizer((), " "),
        SymbolTokenizer((), "", " "),
        SymbolTokenizer((), "", feature_separator=";"),
    ],
)
@pytest.mark.parametrize("are_targets", [False, True])
def test_counts_of_symbols_are_those_of_split_texts(tokenizer, are_targets, part, monkeypatch):
    monkeypatch.setattr(memory, "PART", part)
    texts = [*TEXTS, "run\tV;PST", "a a b"]
    split = tokenizer.split_target if are_targets else tokenizer.split
    assert tokenizer.count(iter(texts), are_targets) == Counter(symbol for text in texts for symbol in split(text))


def test_unknown_characters_of_texts_encoded_together_are_refused():
    with pytest.raises(UserError, match=r"no character 'x' \(position 2 of 'bx'\)"):
        SymbolTokenizer("ab").encode_flat(["ab", "bx"], are_targets=False)


@pytest.mark.parametrize(("text", "separator"), [("3 May", ""), ("ein großer Hund", " ")])
def test_tokenizers_restore_the_text(text, separator):
    symbols = sorted(set(text.split() if separator else text))
    tokenizer = SymbolTokenizer(symbols, separator)
    ids = tokenizer.encode(text)
    assert min(ids) > EOS
    assert max(ids) < tokenizer.vocab_size == 3 + len(symbols)
    assert tokenizer.decode([BOS, *ids, EOS, ids[0], PAD]) == text
    assert tokenizer_from_dict(tokenizer.to_dict()).encode(text) == ids


def test_unknown_symbols_are_reported_with_their_position():
    with pytest.raises(UserError, match=r"no character 'x' \(position 3 of 'abxa'\)"):
        SymbolTokenizer("ab").encode("abxa")
    with pytest.raises(UserError, match=r"no word 'Hund' \(position 2 of 'der Hund'\)"):
        SymbolTokenizer(["der"], " ").encode("der Hund")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Copy(batch_size=0), "batch_size must be at least 1, but is 0"),
        (lambda: Copy(train_size=8, batch_size=9), r"batch_size must be at most train_size \(8\), but is 9"),
        (lambda: Date(test_size=0), "test_size must be at least 1, but is 0"),
        (lambda: Date(locales=("en", "xx_YY")), "locales must be known to babel, but 'xx_YY' is not"),
        (lambda: Date(first_year=1900, last_year=2000), "fewer than 100 years.* 1900 and 2000"),
        (lambda: DateWorld(unseen_size=0), "unseen_size must be at least 1, but is 0"),
        (lambda: Copy(max_length=5, longer_max_length=5), "longer_max_length must be at least 1 and increase"),
        (lambda: ToyTranslation(max_words=10), "max_words must be at least 4 and less than 10"),
    ],
)
def test_invalid_settings_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_test_sets_may_share_sources():
    data = Copy(
        2, max_length=4, longer_max_length=8, multiples=(2,), train_size=99, val_size=1, test_size=1, longer_size=40
    )
    data.setup("fit")
    longer, double = ({*data.datasets[name].pairs.sources} for name in ("longer", "x2"))
    assert longer & double


def test_copy_respects_its_length_ranges():
    data = Copy(
        num_symbols=5,
        min_length=2,
        max_length=6,
        longer_max_length=9,
        multiples=(2, 4, 10),
        train_size=2000,
        test_size=200,
        longer_size=100,
    )
    data.setup("fit")
    for split, lengths in (
        ("train", range(2, 7)),
        ("val", range(2, 7)),
        ("test", range(2, 7)),
        ("longer", range(7, 10)),
        ("x2", [12]),
        ("x4", [24]),
        ("x10", [60]),
    ):
        pairs = data.datasets[split].pairs
        assert {len(pair.source.split()) for pair in pairs} == set(lengths), split
        assert all(pair.source == pair.target for pair in pairs)
    assert data.test_sets == ("test", "longer", "x2", "x4", "x10")


# Dates


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
    found = {}
    for name, pattern in PYTHON_PATTERNS.items():
        try:
            day = datetime.strptime(text, pattern).date()
        except ValueError:
            continue
        if pattern.endswith("%Y") and not text.endswith(f"{day.year:04}"):
            continue
        found.setdefault(day, []).append(name)
    return found


def test_each_date_is_labeled_with_the_day_it_expresses():
    data = Date(train_size=5000)
    used = Counter()
    for pair in data.pairs("train"):
        found = readings(pair.source)
        if "/" in pair.source:  # the month comes first with a short year, the day with a full one
            wanted = "short" if len(pair.source.split("/")[2]) == 2 else "dd/MM/y"
            found = {day: [wanted] for day, names in found.items() if wanted in names}
        assert [day.isoformat() for day in found] == [pair.target], pair
        used.update(*found.values())
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
    data = Date(locales=("en", "fr"), first_year=2000, last_year=2010, train_size=2000, val_size=100, test_size=100)
    ambiguous = data._ambiguous()
    assert "01/02/2003" not in ambiguous  # day first in both
    data = Date(
        locales=("en", "en_GB", "de", "es"), first_year=2000, last_year=2003, train_size=500, val_size=9, test_size=9
    )
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


def test_dates_cover_their_range_to_the_last_day():
    data = Date(first_year=2003, last_year=2003, train_size=4000, val_size=5, test_size=5, batch_size=5)
    days = {pair.target for pair in data.pairs("train")}
    assert min(days) == "2003-01-01"
    assert max(days) == "2003-12-31"


@pytest.mark.parametrize("locale", ["de", "ja", "ar", "fr_CA", "hi", "vi"])
def test_dates_of_any_locale_are_in_the_vocabulary(locale):
    data = Date(locales=(locale,), first_year=1999, last_year=2004, train_size=300, val_size=30, test_size=60)
    data.setup("fit")
    assert len(data.datasets["train"]) == 300
    assert all(normalize_text(pair.source) == pair.source for pair in data.datasets["train"].pairs), (
        "prompts are normalized, too"
    )


# Dates in many languages


KNOWN_DATES = {  # written by hand
    "plain": (
        ("2004-05-13", "5/13/04", "Thursday, May 13, 2004", "Thu, 13 May 2004", "Do., 13. Mai 2004", "13.05.04"),
        ("1999-02-28", "28.2.1999", "dimanche 28 février 1999", "niedziela, 28 lutego 1999", "28. února 1999"),
        (
            "1984-08-20",
            "20 de agosto de 1984",
            "lunedì 20 agosto 1984",
            "20 aug. 1984",
            "1984-08-20",
            "20 Ağustos 1984",
        ),
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
    for known in KNOWN_DATES.values():
        for day, *texts in known:
            for text in texts:
                assert dates_of(grammar.read(text)) == {day}, text
    for text in AMBIGUOUS:
        assert len(dates_of(grammar.read(text))) != 1, text


def test_babel_writes_the_dates_written_by_hand():
    grammar, draw = date_world.grammar(), random.Random(0)
    for kind, known in KNOWN_DATES.items():
        writers = [pattern for group in range(3) for own in grammar.writers(group, kind) for pattern in own]
        for day, *texts in known:
            pairs = [grammar.write(date.fromisoformat(day), pattern, kind, draw) for pattern in writers]
            found = {pair.source: pair.target for pair in pairs if pair}
            for text in texts:
                assert found.get(text) == day, text


@pytest.fixture(scope="module")
def world():
    data = DateWorld(train_size=4000, val_size=500, test_size=3000, unseen_size=1500)
    data.setup("fit")
    return data


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
    for dataset in world.datasets.values():
        for pair in dataset.pairs:
            assert targets.setdefault(normal(pair.source), pair.target) == pair.target, pair
    found = 0
    for pattern in date_world.grammar().groups:
        for day in itertools.islice(date_world.days_between(date_world.FIRST, date_world.LAST), 0, None, 5):
            text = normal(pattern.format(day)[0])
            if text in targets:
                found += 1
                assert targets[text] == day.isoformat(), text
    assert found > 1000


def edits(text, alphabet):
    """Return all texts at most one insertion, deletion, substitution or transposition from a text."""
    found = {text}
    for i in range(len(text) + 1):
        found |= {text[:i] + new + text[i:] for new in alphabet}
        found |= {text[:i] + new + text[i + 1 :] for new in ("", *alphabet)}
        found.add(text[:i] + text[i : i + 2][::-1] + text[i + 2 :])
    return found


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
    known = [pattern for pattern, group in grammar.groups.items() if group == 0]
    assert len({pattern.locale for pattern in grammar.groups}) == 30
    for split in ("unseen_patterns", "unseen_locales"):
        for pair in world.datasets[split].pairs[:200]:
            written = {normal(pattern.format(date.fromisoformat(pair.target))[0]) for pattern in known}
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


# Toy translation


@pytest.fixture(scope="module")
def sentences():
    data = ToyTranslation(train_size=20_000, val_size=1_000, test_size=3_000)
    data.setup("fit")
    return data


def test_a_german_sentence_has_one_translation(sentences):
    translations = {}
    for dataset in sentences.datasets.values():
        for pair in dataset.pairs:
            assert translations.setdefault(pair.source, pair.target) == pair.target, pair.source


def test_no_two_sentences_are_spelled_alike_without_umlauts(sentences):
    translations = {}
    for dataset in sentences.datasets.values():
        for pair in dataset.pairs:
            plain = toy_translation.spelled_plainly(pair.source)
            assert translations.setdefault(plain, pair.target) == pair.target, pair.source


def test_longer_sentences_are_only_in_their_own_test_set():
    data = ToyTranslation(max_words=6, train_size=2_000, val_size=100, test_size=300, longer_size=200)
    data.setup("fit")
    lengths = {split: {len(pair.source.split()) for pair in data.datasets[split].pairs} for split in data.datasets}
    assert max(lengths["train"] | lengths["val"] | lengths["test"]) == 6
    assert (min(lengths["longer"]), max(lengths["longer"])) == (7, 10)


def test_the_three_original_sentences_are_included(sentences):
    pairs = {pair.source: pair.target for dataset in sentences.datasets.values() for pair in dataset.pairs}
    assert pairs["ich mochte ein bier"] == "i want a beer ."
    assert pairs["ich mochte ein cola"] == "i want a coke ."
    assert pairs["ich mag das Buch"] == "i like the book ."


KNOWN_BEGINNINGS = {
    # inversion after an adverb, and the accusative
    "heute kaufe ich einen": ("today i buy a", {("heute", "today"), ("kaufe", "buy"), ("einen", "a")}),
    # a modal verb
    "ich kann das": ("i can", {("ich", "i"), ("kann", "can"), ("das", "the")}),
    # kein before an indefinite object
    "ich brauche keine": ("i do not need", {("keine", "not"), ("keine", "do"), ("brauche", "need")}),
    # the verb distinguishes she from they
    "sie trinkt einen": ("she drinks a", {("sie", "she"), ("trinkt", "drinks")}),
    "sie trinken einen": ("they drink a", {("sie", "they"), ("trinken", "drink")}),
}


def test_grammar_and_alignment_of_known_sentences():
    draw = random.Random(0)
    found = Counter()
    for _ in range(150_000):
        pair = toy_translation._sentence(draw, with_kept_back=True)
        for beginning, (translation, aligned) in KNOWN_BEGINNINGS.items():
            if pair.source.startswith(beginning + " ") or pair.source == beginning:
                found[beginning] += 1
                german, english = pair.source.split(), pair.target.split()
                assert " ".join(english).startswith(translation.removesuffix(" .")), pair
                assert aligned <= {(german[i], english[j]) for i, j in pair.alignment}, pair
    assert set(found) == set(KNOWN_BEGINNINGS)


def test_alignments_cover_every_german_word(sentences):
    infinitives = {"lesen", "trinken", "essen", "malen"}
    for dataset in sentences.datasets.values():
        for pair in dataset.pairs:
            german, english = pair.source.split(), pair.target.split()
            assert all(0 <= i < len(german) and 0 <= j < len(english) for i, j in pair.alignment)
            assert {i for i, _ in pair.alignment} == set(range(len(german))), pair
            unaligned = {english[j] for j in set(range(len(english))) - {j for _, j in pair.alignment}}
            assert unaligned <= {"."}, pair
            words = {(german[i], english[j]) for i, j in pair.alignment}
            assert ("nicht" in german) == (("nicht", "not") in words)
            if german[-1] in infinitives and len(german) > 3:  # last in German, but not in English
                assert pair.alignment[-1][1] < len(english) - 2


def test_two_spellings_of_a_sentence_are_in_one_split(sentences):
    homes = {}
    for split, dataset in sentences.datasets.items():
        for pair in dataset.pairs:
            assert homes.setdefault(toy_translation.spelled_plainly(pair.source), split) == split, pair.source


def test_the_language_has_reordering_negation_modals_and_inflection(sentences):
    pairs = sentences.datasets["train"].pairs
    crossing = sum(any(a[0] < b[0] and a[1] > b[1] for a in pair.alignment for b in pair.alignment) for pair in pairs)
    assert crossing / len(pairs) > 0.4  # a word-for-word translation would be wrong

    def share(*words):
        return sum(any(word in pair.source.split() for word in words) for pair in pairs) / len(pairs)

    assert share("nicht") > 0.05
    assert share("kein", "keine", "keinen") > 0.03
    assert share("kann", "kannst", "können", "könnt") > 0.03
    assert share("den") > 0.03
    assert share("Bücher", "Äpfel", "Häuser", "Stühle") > 0.01
    assert sum("ö" in pair.source or "ü" in pair.source or "ä" in pair.source for pair in pairs) / len(pairs) > 0.2
    assert len({pair.source for pair in pairs}) > 15_000


def test_the_test_set_has_combinations_that_training_lacks(sentences):
    nouns = {form: noun for noun in toy_translation.NOUNS for form in (noun.german, noun.german_plural) if form}

    def held_out(pair):
        words = pair.source.split()
        return any(
            second in nouns and toy_translation.held_out(adjective, nouns[second])
            for first, second in zip(words, words[1:], strict=False)
            for adjective in toy_translation.ADJECTIVES
            if first in {adjective + ending for ending in ("e", "en", "er", "es")}
        )

    shares = {split: sum(map(held_out, dataset.pairs)) for split, dataset in sentences.datasets.items()}
    assert shares["train"] == shares["val"] == 0
    assert shares["test"] > 100
    known = {word for pair in sentences.datasets["train"].pairs for word in pair.source.split()}
    assert all(word in known for pair in sentences.datasets["test"].pairs for word in pair.source.split())


def test_a_split_that_exceeds_the_memory_is_refused():
    with pytest.raises(UserError, match="train_size must fit into memory, but is 1,000,000,000,000; try"):
        Copy(train_size=10**12)


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
    with pytest.raises(UserError, match=rf"val_size must be .* distinct sources of val \({most}\), but is 30000"):
        Copy(max_length=3, val_size=30_000).pairs("val")
    assert len(Copy(max_length=3, val_size=most).pairs("val")) == most


def test_a_stream_that_ends_is_refused(monkeypatch):
    stream = Copy.stream
    monkeypatch.setattr(Copy, "stream", lambda *arguments: itertools.islice(stream(*arguments), 50))
    with pytest.raises(UserError, match=r"Copy.stream must yield pairs without end, but ended after .* of 300 pairs"):
        Copy(train_size=300).setup("fit")
