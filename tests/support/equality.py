"""Comparison of the files of two runs to the bit."""

import csv
import json

import torch

from lightning_tfm.checkpoint import read
from lightning_tfm.runs.record import Run
from support.experiments import folder


def contents(folder):
    """Return the bytes of all files below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def equal(actual, expected, where=""):
    """Assert that two nested values are bitwise equal, naming the first difference."""
    assert type(actual) is type(expected), where
    if isinstance(actual, torch.Tensor):
        assert actual.dtype == expected.dtype, where
        assert actual.shape == expected.shape, where
        assert actual.flatten().view(torch.uint8).equal(expected.flatten().view(torch.uint8)), where
    elif isinstance(actual, dict):
        assert list(actual) == list(expected), where
        for key in actual:
            equal(actual[key], expected[key], f"{where}/{key}")
    elif isinstance(actual, list | tuple):
        assert len(actual) == len(expected), where
        for index, pair in enumerate(zip(actual, expected, strict=True)):
            equal(*pair, f"{where}/{index}")
    else:
        assert actual == expected, where


def assert_same_run(cwd, reference, model, rows_lost=0, best=True, same_processes=True):
    """Assert that two runs have equal checkpoints, logged metrics and test metrics, see `assert_same_files`."""
    assert_same_files(folder(cwd, model), folder(reference, model), rows_lost, best, same_processes)


def assert_same_files(actual, expected, rows_lost=0, best=True, same_processes=True):
    """Assert that the folders of two runs have bitwise equal checkpoints, metrics, histories of attention and results.

    Args:
        actual: the folder of a run.
        expected: the folder of the run that it must equal.
        rows_lost: the most rows that the log of the first may lack.
        best: whether there is a best checkpoint.
        same_processes: whether both have the same number of processes, which divide the validation batches.
    """
    for name in ("last", "best") if best else ("last",):
        contents = [read(path / f"checkpoints/{name}.ckpt") for path in (actual, expected)]
        for content in contents:
            for state in content["callbacks"].values():
                state.pop("train_seconds", None)  # may differ
            content.pop("experiment")  # the settings, such as the number of workers
            if not same_processes:
                content["loops"]["fit_loop"].pop("epoch_loop.val_loop.batch_progress")
        equal(*contents, name)
    logs = [list(csv.DictReader((path / "metrics.csv").read_text().splitlines())) for path in (actual, expected)]
    for row in (row for log in logs for row in log):
        row.pop("trainer/tokens_per_second")  # may differ
    trained = [[row for row in log if row["train/loss"] or row.get("val/loss")] for log in logs]
    missing = [row for row in trained[1] if row not in trained[0]]
    assert len(missing) <= rows_lost
    assert trained[0] == [row for row in trained[1] if row not in missing]
    if not missing:
        equal(*(Run(path).attention_history for path in (actual, expected)), "attention")
    tests = [json.loads((path / "summary.json").read_text())["test"] for path in (actual, expected)]
    assert tests[0] == tests[1]
