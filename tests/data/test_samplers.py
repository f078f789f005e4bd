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
    pools = [
        sorted(rows[begin : begin + size], key=lengths.tolist().__getitem__) for begin in range(0, len(rows), size)
    ]
    whole = torch.tensor([row for pool in pools for row in pool]).view(-1, batch_size)
    assert batches == whole[torch.randperm(len(whole), generator=generator)].tolist()


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


STREAMS = {
    "rows": lambda seed=0, **share: LengthGroupedSampler(torch.arange(100) % 7 + 1, 16, seed, **share),
    "tokens": lambda seed=0, **share: MaxTokensSampler(torch.arange(100) % 7 + 1, 40, seed, **share),
    "windows": lambda seed=0, **share: WindowSampler(2000, 16, 8, seed, **share),
}


def test_token_batches_are_full_and_the_last_two_balanced():
    sampler = MaxTokensSampler(torch.full((24,), 5), 50, seed=2)
    assert sampler.sizes == [10, 7, 7]
    assert sorted(len(rows) for rows in sampler.batches(0)) == [7, 7, 10]
    assert sampler.fewest_rows == 7
    assert MaxTokensSampler(torch.full((12,), 5), 50, seed=2).sizes == [6, 6]
    assert MaxTokensSampler(torch.full((7,), 5), 50, seed=2).sizes == [7]


@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)
def test_the_settings_of_a_stream_include_its_seed(make):
    assert make(seed=5).settings["seed_everything"] == 5
    assert make(seed=5).settings == make(seed=5).settings != make(seed=6).settings


@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)
def test_streams_do_not_depend_on_the_start_or_the_world_size(make):
    whole = [rows.tolist() for rows in itertools.islice(make(), 50)]
    assert whole == [rows.tolist() for rows in itertools.islice(make(), 50)]
    assert whole != [rows.tolist() for rows in itertools.islice(make(seed=1), 50)]
    for start in (1, 7, 33):
        stream = make()
        stream.start = start
        assert whole[start:] == [rows.tolist() for rows in itertools.islice(stream, 50 - start)]
        assert make().samples_seen(start) == sum(map(len, whole[:start]))
    for number in (2, 3):
        streams = [itertools.islice(make(division=BatchDivision(rank, number, number)), 50) for rank in range(number)]
        for batch, *shares in zip(whole, *streams, strict=True):
            assert sorted(batch) == sorted(row for share in shares for row in share.tolist())
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
            assert all(map(len, shares))
    passes = make()
    first, second = ([rows.tolist() for rows in passes.batches(number)] for number in (0, 1))
    assert first != second
