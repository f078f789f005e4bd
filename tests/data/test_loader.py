"""The stream of batches: workers and resuming."""

from __future__ import annotations

import itertools
import resource

import pytest

from datamodules import Copy
from lightning_tfm.data import LengthGroupedSampler
from lightning_tfm.errors import UserError
from support.data import set_up

SIZES = {"train_size": 200, "val_size": 20, "test_size": 20, "longer_size": 20}


def loader(**settings):
    return set_up(Copy(**SIZES | settings)).train_dataloader()


def test_more_workers_than_the_limit_of_open_files_allows_are_refused(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 256))
    data = Copy(num_workers=24)
    with pytest.raises(UserError, match=r"data.num_workers .* 12 .* 256 open files, but is 24; .*`ulimit -n 448`"):
        data.setup("fit")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_stream_does_not_depend_on_workers_or_resuming(num_workers):
    """Three epochs are read in full, and resumed from every step."""

    def equal(batches, others):
        return all(a.equal(b) for pair in zip(batches, others, strict=True) for a, b in zip(*pair, strict=True))

    def stream(loader, number=9):
        return itertools.islice((batch for _ in range(3) for batch in loader), number)

    whole = loader()
    batches = [*stream(whole)]
    assert len(batches) == 3 * len(whole) == 9
    rows_of_batches = itertools.islice(LengthGroupedSampler(whole.sampler.lengths, 64, seed=0), 9)
    assert equal(batches, [whole.dataset[rows] for rows in rows_of_batches])
    assert equal(batches, stream(loader(num_workers=num_workers)))
    for stop in range(9):
        first, second = loader(), loader(num_workers=num_workers)
        assert equal(batches[:stop], stream(first, stop))
        second.load_state_dict(first.state_dict())
        assert equal(batches[stop:], stream(second, 9 - stop))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 32}, r"batch_size must match the checkpoint \(64\) .* but is 32"),
        ({"seed": 1}, r"seed_everything must match the checkpoint \(0\)"),
        ({"train_size": 201}, "fingerprint of the training data"),
    ],
)
def test_resuming_with_another_stream_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        loader(**settings).load_state_dict(loader().state_dict())
