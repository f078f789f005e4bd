"""The stream of batches: workers and resuming."""

from __future__ import annotations

import itertools
import resource

import pytest

from datamodules import Copy
from lightning_tfm.data import LengthGroupedSampler
from lightning_tfm.errors import UserError


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
