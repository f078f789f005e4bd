"""The list of runs below a folder: `lightning-tfm runs`."""

from __future__ import annotations

import csv
import json
import re
import shutil

import pytest

from lightning_tfm.checkpoint import read
from lightning_tfm.run_lock import lock_run
from runs import in_process


@pytest.fixture
def copies(reference, tmp_path):
    """Return a function that copies a finished run to a folder of the given name."""
    original = reference("gpt") / "runs/copy_gpt/version_0"
    return lambda name: shutil.copytree(original, tmp_path / "runs" / name)


@pytest.fixture
def listed(tmp_path, monkeypatch, capsys):
    """Return a function that lists the runs, and returns the row of each by name."""
    monkeypatch.chdir(tmp_path)

    def listed():
        assert in_process(monkeypatch, "runs") == 0
        rows = [line.strip() for line in capsys.readouterr().out.splitlines()]
        return {row.split()[0]: re.split(r" {2,}", row) for row in rows if row and set(row) != {"─"}}

    return listed


def test_each_state_of_a_run_is_listed(copies, listed):
    finished, stopped, running, damaged, new = map(copies, ("finished", "stopped", "running", "damaged", "new"))
    for run in (stopped, running, new):
        (run / "summary.json").unlink()
    lock = lock_run(running)
    (damaged / "summary.json").write_text("{")
    shutil.rmtree(new / "checkpoints")
    (new / "metrics.csv").unlink()
    summary = json.loads((finished / "summary.json").read_text())
    rows = list(csv.DictReader((finished / "metrics.csv").read_text().splitlines()))
    best = f"val/loss {min(float(row['val/loss']) for row in rows if row['val/loss']):.4f}"
    result = f"test/exact_match {summary['test']['exact_match']:.4f}"
    saved = read(stopped / "checkpoints/last.ckpt")["callbacks"]["Summary"]["train_seconds"]
    assert listed() == {
        "run": ["run", "state", "best", "result", "training"],
        "finished": ["finished", "finished", best, result, f"{summary['train_seconds']:.0f} s"],
        "stopped": ["stopped", f"stopped at step {summary['steps']}", best, f"{saved:.0f} s"],
        "running": ["running", "running", best, f"{saved:.0f} s"],
        "damaged": ["damaged", "damaged"],
        "new": ["new", "stopped at step 0"],
    }
    lock.release()


@pytest.mark.parametrize(
    ("folder", "message"),
    [("nothing", "there is no folder 'nothing'; train a run with lightning-tfm fit"), (".", "'.' holds none")],
)
def test_a_folder_without_runs_is_an_error(folder, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert in_process(monkeypatch, "runs", folder) == 2
    assert message in capsys.readouterr().err
