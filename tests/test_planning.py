"""Predicted costs of a step against measured memory and independent counts."""

from __future__ import annotations

import sys
from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lightning_tfm.commands.plan import costs, planned
from lightning_tfm.planning import largest_batch
from runs import CONTEXT


def measure(settings, results):
    """Send the predicted and the measured peak of three steps of `fit` on the largest batch, in bytes."""
    torch.set_num_threads(1)
    cli = planned([*settings, "--trainer.max_steps=3", "--trainer.limit_val_batches=0"])
    ((_, cost),) = list(costs(cli, [1]))[:1]
    data = cli.datamodule
    stream, rows = data.training_batches, largest_batch(data).rows

    def repeated(sharding):
        batches = stream(sharding)
        batches.batches = lambda number: [rows]
        return batches

    data.training_batches = repeated
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        cli.trainer.fit(cli.make_module(), datamodule=data)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    results.put((cost.memory, max(allocated)))


def peaks(*settings):
    results = CONTEXT.SimpleQueue()
    process = CONTEXT.Process(target=measure, args=(settings, results))
    process.start()
    process.join()
    assert process.exitcode == 0
    return results.get()


@pytest.mark.run
@pytest.mark.parametrize("experiment", ["copy_transformer", "date_gpt", "date_attention_lstm"])
def test_the_peak_of_a_step_is_predicted_within_10_percent(experiment):
    predicted, measured = peaks(experiment)
    assert predicted == pytest.approx(measured, rel=0.1)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        predicted, measured = peaks(*name.split())
        print(f"{name:32} {predicted / 2**20:8.2f} {measured / 2**20:8.2f} {predicted / measured - 1:+.1%}", flush=True)
