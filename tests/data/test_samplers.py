"""Samplers: which rows form a batch, in which process and in which order."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from lightning_tfm.data import (
    BatchDivision,
    EvaluationSampler,
    LengthGroupedSampler,
    MaxTokensSampler,
    MixtureSampler,
    WindowSampler,
)


def test_rows_of_similar_length_are_batched_as_by_sorting_a_list():
    lengths, batch_size, seed = torch.randint(1, 9, (1_000,), generator=torch.Generator().manual_seed(0)), 7, 3
    sampler = LengthGroupedSampler(lengths, batch_size, seed)
    generator = torch.Generator().manual_seed(1)
    batches = sampler._epoch(0, generator).tolist()
    generator.manual_seed(1)
    rows = torch.randperm(1_000, generator=generator).tolist()[: 1_000 // batch_size * batch_size]
    size = sampler.POOL * batch_size
    pools = (rows[begin : begin + size] for begin in range(0, len(rows), size))
    ordered = [row for pool in pools for row in sorted(pool, key=lengths.tolist().__getitem__)]
    whole = torch.tensor(ordered).view(-1, batch_size)
    assert batches == whole[torch.randperm(len(whole), generator=generator)].tolist()


def by_length(lengths):
    return lengths.argsort(stable=True).__getitem__


@pytest.mark.parametrize("size", [3, 7, 64, 101])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 8])
def test_evaluation_visits_each_row_once(size, world_size, batch_size):
    lengths = torch.randint(1, 20, (size,))
    divisions = (BatchDivision(rank, world_size, world_size) for rank in range(world_size))
    batches = [list(EvaluationSampler(size, by_length(lengths), batch_size, division)) for division in divisions]
    assert sorted(row for share in batches for batch in share for row in batch.tolist()) == list(range(size))
    most_rows = math.ceil(size / world_size)
    assert {len(share) for share in batches} == {min(size // world_size, math.ceil(most_rows / batch_size))}
    assert all(1 <= len(batch) <= batch_size + 1 for share in batches for batch in share)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_the_batches_of_a_micro_batch_do_not_depend_on_the_number_of_processes(world_size):
    lengths = torch.randint(1, 20, (101,))
    for make in (
        lambda division: itertools.islice(LengthGroupedSampler(lengths, 18, 3, division), 9 * len(division.own)),
        lambda division: iter(EvaluationSampler(len(lengths), by_length(lengths), 4, division)),
    ):
        batches = {}
        for rank in range(world_size):
            division = BatchDivision(rank, world_size, 8)
            for number, rows in enumerate(make(division)):
                step, index = divmod(number, len(division.own))
                batches[step, division.own[index]] = rows.tolist()
        alone = [[rows.tolist() for rows in make(BatchDivision(index, 8, 8))] for index in range(8)]
        assert batches == {(step, index): rows for index, own in enumerate(alone) for step, rows in enumerate(own)}


class LargeText(WindowSampler):
    LISTED = 10


STREAMS = {
    "rows": lambda seed=0, **share: LengthGroupedSampler(torch.arange(96) % 7 + 1, 16, seed, **share),
    "tokens": lambda seed=0, **share: MaxTokensSampler(torch.arange(96) % 7 + 1, 40, seed, **share),
    "windows": lambda seed=0, **share: WindowSampler(2000, 16, 8, seed, **share),
    "mixture": lambda seed=0, **share: MixtureSampler([1500, 500], {"a": 0.7, "b": 0.3}, 16, 8, seed, **share),
    "many windows": lambda seed=0, **share: LargeText(2000, 16, 8, seed, **share),
}


def test_token_batches_are_full_and_the_last_two_balanced():
    sampler = MaxTokensSampler(torch.full((24,), 5), 50, seed=2)
    assert sampler.sizes == [10, 7, 7]
    assert sorted(len(rows) for rows in sampler.batches(0)) == [7, 7, 10]
    assert min(sampler.sizes) == 7
    assert MaxTokensSampler(torch.full((12,), 5), 50, seed=2).sizes == [6, 6]
    assert MaxTokensSampler(torch.full((7,), 5), 50, seed=2).sizes == [7]


@pytest.mark.parametrize("name", ["rows", "tokens"])
def test_each_epoch_visits_all_rows_in_an_order_of_its_own(name):
    orders = [torch.cat([*STREAMS[name](seed).batches(epoch)]).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(rows) == list(range(96)) for rows in orders)
    assert len(set(map(tuple, orders))) == 4


@pytest.mark.parametrize("max_length", [1, 16])
@pytest.mark.parametrize("windows", [11, 16, 17, 120, 1001])
def test_an_epoch_of_a_large_text_visits_adjacent_windows_once(windows, max_length):
    orders = set()
    for seed, epoch in itertools.product((0, 1), repeat=2):
        batches = LargeText((windows + 1) * max_length + 1, max_length, 1, seed).batches(epoch)
        begins = torch.cat([*batches]).tolist()
        first = min(begins)
        assert sorted(begins) == [first + number * max_length for number in range(windows)]
        assert first < max_length
        orders.add(tuple(begin - first for begin in begins))
    assert len(orders) == 4


def test_successive_windows_of_a_large_text_are_not_correlated():
    begins = torch.cat([*WindowSampler(10_000_001, 2, 1_000, 0).batches(0)][:100])
    drawn = torch.cat([WindowSampler(10**11, 2, 1_000, 0).batches(0)[index] for index in range(100)])
    for numbers in (begins / 1e7, drawn / 1e11):
        assert abs(torch.corrcoef(torch.stack([numbers[1:], numbers[:-1]]))[0, 1]) < 0.02
        assert torch.histc(numbers, 10, 0, 1).div(len(numbers)).sub(0.1).abs().max() < 0.01


@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)
def test_streams_are_determined_by_their_seed_not_by_the_start_or_the_world_size(make):
    def first(number, start=0, **settings):
        stream = make(**settings)
        stream.start = start
        return [rows.tolist() for rows in itertools.islice(stream, number)]

    assert make(seed=5).settings["seed_everything"] == 5
    assert make(seed=5).settings == make(seed=5).settings != make(seed=6).settings
    whole = first(50)
    assert whole == first(50) != first(50, seed=1)
    for start in (1, 7, 33):
        assert whole[start:] == first(50 - start, start)
        assert make().samples_seen(start) == sum(map(len, whole[:start]))
    for number, start in itertools.product((2, 3, 5), (0, 7)):
        streams = [first(50 - start, start, division=BatchDivision(rank, number, number)) for rank in range(number)]
        for batch, *shares in zip(whole[start:], *streams, strict=True):
            assert sorted(batch) == sorted(itertools.chain(*shares))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
            assert all(shares)
