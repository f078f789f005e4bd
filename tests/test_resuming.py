"""The same again: twice, on any workers, killed and gone on with."""

from __future__ import annotations

import pytest
from runs import NETWORKS, assert_same_run, fit, run


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("model", NETWORKS)
def test_the_same_run_twice_is_the_same_to_the_bit(model, num_workers, reference, tmp_path):
    child = run(*fit(model, data__init_args__num_workers=num_workers), cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()
    assert_same_run(tmp_path, reference(model), model)


KILLS = [
    ("before an update of the weights", 3),
    ("while a checkpoint is written", 40),
    ("in a validation", 2),
    ("after an update of the weights", 8),
    ("before a checkpoint is on the disk", 7),
    ("at the edge of a pass over the data", 2),
    ("after a validation", 1),
    ("after a checkpoint is in its place", 3),
    ("after a checkpoint is in its place", 1),
    ("after a checkpoint is in its place", 1),
    ("in the test", 2),
]
"""A chain: each start of one run is killed so, at this call of its own."""


@pytest.mark.parametrize("model", NETWORKS)
def test_a_run_killed_again_and_again_is_the_same_to_the_bit(model, reference, tmp_path):
    for sabotage in KILLS:
        child = run(*fit(model, "--ckpt_path=last"), cwd=tmp_path, sabotage=sabotage)
        assert child.wait() == -9, (sabotage, child.err.read_text())
    child = run(*fit(model, "--ckpt_path=last"), cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()
    # Lightning logs a step after it is saved: a kill in between, less than a millisecond, costs its row of metrics.csv
    assert_same_run(tmp_path, reference(model), model, rows_lost=2)
