"""The same again: twice, on any workers, killed and gone on with."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from children import run

from lightning_tfm.checkpoint import read

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
NAMES = ["copy_transformer", "copy_gpt", "copy_attention_lstm"]
NETWORKS = {
    "transformer": {"d_model": 16, "num_heads": 2, "num_layers": 1, "d_ff": 32},
    "gpt": {"d_model": 16, "num_heads": 2, "num_layers": 1},
    "attention_lstm": {"d_model": 16},
}
"""Small, and with dropout, so that its random numbers must come again too."""

SETTINGS = {
    "data.init_args.train_size": 200,
    "data.init_args.val_size": 30,
    "data.init_args.test_size": 30,
    "data.init_args.longer_size": 30,
    "data.init_args.eval_batch_size": 10,
    "data.init_args.batch_size": 15,
    "trainer.max_steps": 60,
    "trainer.val_check_interval": 12,
    "trainer.log_every_n_steps": 1,
    "checkpoint.every_n_train_steps": 5,
    "model.init_args.network.init_args.dropout": 0.2,
    "model.init_args.optimization.warmup_steps": 10,
}


def fit(model, *options, **settings):
    """The arguments of a short run."""
    network = {f"model.init_args.network.init_args.{name}": value for name, value in NETWORKS[model].items()}
    settings = {name.replace("__", "."): value for name, value in settings.items()}
    settings = SETTINGS | network | settings
    return (
        "fit",
        *("--config", EXPERIMENTS / f"copy_{model}.yaml"),
        *(f"--{name}={value}" for name, value in settings.items()),
        *options,
    )


def folder(cwd, model):
    """The run's folder. One that was killed before it was saved leaves a folder, too."""
    (path,) = (path for path in (cwd / f"runs/copy_{model}").iterdir() if (path / "checkpoints/last.ckpt").exists())
    return path


def equal(ours, theirs, where=""):
    """Whether two nested values are the same to the bit; fails naming the first difference."""
    assert type(ours) is type(theirs), where
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype, where
        assert ours.shape == theirs.shape, where
        assert ours.flatten().view(torch.uint8).equal(theirs.flatten().view(torch.uint8)), where
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs), where
        for key in ours:
            equal(ours[key], theirs[key], f"{where}/{key}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), where
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            equal(*pair, f"{where}/{index}")
    else:
        assert ours == theirs, where


def assert_same_run(cwd, reference, model):
    """Weights, optimizer, schedule, position in the data, the best checkpoint, every logged loss, the test metrics."""
    ours, theirs = folder(cwd, model), folder(reference, model)
    for name in ("last", "best"):
        contents = [read(path / f"checkpoints/{name}.ckpt") for path in (ours, theirs)]
        for content in contents:
            for state in content["callbacks"].values():
                state.pop("train_seconds", None)  # time alone may differ
        equal(*contents, name)
    logs = [list(csv.DictReader((path / "metrics.csv").read_text().splitlines())) for path in (ours, theirs)]
    trained = [[row for row in log if row["train/loss"] or row["val/loss"]] for log in logs]
    assert trained[0] == trained[1]
    tests = [json.loads((path / "summary.json").read_text())["test"] for path in (ours, theirs)]
    assert tests[0] == tests[1]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Where the run that nothing has disturbed lies, by model."""
    folders = {}

    def reference(model):
        if model not in folders:
            cwd = tmp_path_factory.mktemp(model)
            child = run(*fit(model), cwd=cwd)
            assert child.wait() == 0, child.err.read_text()
            folders[model] = cwd
        return folders[model]

    return reference


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
    assert_same_run(tmp_path, reference(model), model)
