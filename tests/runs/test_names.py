"""Names of runs: which run and which checkpoint an argument of a command means."""

from __future__ import annotations

import os
import re

import pytest

from lightning_tfm.errors import UserError
from lightning_tfm.runs.names import named_checkpoint, named_run
from lightning_tfm.runs.record import Run
from support.records import write_run


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Return a function that writes a run whose summary, unless it is None, was written at a time."""
    monkeypatch.chdir(tmp_path)

    def make(folder, finished, checkpoints=("best", "last"), **summary):
        run = write_run(tmp_path / folder, summary=None if finished is None else summary)
        run.checkpoint_folder.mkdir()
        for name in checkpoints:
            (run.checkpoint_folder / f"{name}.ckpt").touch()
        if finished is not None:
            os.utime(run.folder / Run.SUMMARY, (finished, finished))
        return run

    return make


@pytest.fixture
def five(make):
    """Write runs of an experiment, of which version_2 has finished last; a later test and a damaged run are no runs."""
    for number, finished in enumerate((30, 10, 50, None)):
        make(f"runs/lstm/version_{number}", finished)
    make("runs/lstm/test_0", 90, checkpoints=(), train_seconds=None, checkpoint="best.ckpt")
    damaged = make("runs/lstm/version_9", 99)
    (damaged.folder / Run.SUMMARY).write_text("{")


NAMES = {
    "lstm": "version_2/checkpoints/best.ckpt",
    "lstm/": "version_2/checkpoints/best.ckpt",
    "runs/lstm": "version_2/checkpoints/best.ckpt",
    "lstm/version_0": "version_0/checkpoints/best.ckpt",
    "runs/lstm/version_3": "version_3/checkpoints/best.ckpt",
    "runs/lstm/version_3/checkpoints/last.ckpt": "version_3/checkpoints/last.ckpt",
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_checkpoints(name, five, tmp_path):
    assert named_checkpoint(name).resolve() == tmp_path / "runs/lstm" / NAMES[name]
    assert named_run(name).folder.resolve() == (tmp_path / "runs/lstm" / NAMES[name]).parents[1]


def test_the_newest_finished_run_is_named(five, capsys):
    named_run("lstm")
    damaged, used = capsys.readouterr().err.splitlines()
    assert damaged.startswith("lightning-tfm: skipping runs/lstm/version_9: 'runs/lstm/version_9/summary.json' must be")
    assert used == "lightning-tfm: using runs/lstm/version_2"
    named_run("lstm/version_0")
    assert capsys.readouterr().err == ""


def test_a_folder_in_the_current_folder_precedes_a_run(make):
    make("runs/lstm/version_0", 9)
    here = make("lstm/version_1", 1)
    assert named_run("lstm").folder.resolve() == here.folder
    assert named_run("lstm/version_0").folder.name == "version_0"


def test_a_run_that_finished_in_the_same_moment_has_the_highest_version(make):
    for number in (9, 10, 2):
        make(f"runs/lstm/version_{number}", 7)
    assert named_run("lstm").folder.name == "version_10"


def test_the_last_checkpoint_replaces_a_missing_best_one(make):
    make("runs/lstm/version_0", None, checkpoints=["last"])
    assert named_checkpoint("lstm/version_0").name == "last.ckpt"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lstn", "there is no run 'lstn'; did you mean 'lstm'?"),
        ("runs/lstm/version_7", "there is no run 'runs/lstm/version_7'; did you mean 'lstm/version_0'?"),
        ("date_gpt", "there is no run 'date_gpt'; train this experiment first with: lightning-tfm fit date_gpt"),
        ("", "there is no run ''; available: lstm, young"),
        ("runs", "'runs' is a folder without runs; try runs/NAME/version_0"),
        ("young", "but 'young' has none, only 'runs/young/version_1', which is running; name this folder to use its"),
        ("lstm/version_0", "RUN must be a run with a checkpoint, but 'runs/lstm/version_0' has none"),
    ],
)
def test_unknown_names(name, message, make):
    make("runs/lstm/version_0", 1, checkpoints=())
    make("runs/young/version_0", None)
    lock = make("runs/young/version_1", None).lock()
    with pytest.raises(UserError, match=re.escape(message)):
        named_checkpoint(name)
    lock.release()


def test_a_name_without_any_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no run 'x'; train one with: lightning-tfm fit EXPERIMENT"):
        named_run("x")
    (tmp_path / "x.ckpt").touch()
    with pytest.raises(UserError, match=r"RUN must be in the folder of a run, but 'x\.ckpt' is not"):
        named_run("x.ckpt")
