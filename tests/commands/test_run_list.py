"""The list of runs below a folder: `lightning-tfm runs`."""

from __future__ import annotations

import csv
import json
import re
import shutil

import pytest

from lightning_tfm.checkpoint import read
from lightning_tfm.checkpoint.archive import write
from lightning_tfm.runs.record import Run


@pytest.fixture
def copies(reference, tmp_path):
    """Return a function that copies a finished run to a folder of the given name."""
    original = reference("gpt") / "runs/copy_gpt/version_0"
    return lambda name: shutil.copytree(original, tmp_path / "runs" / name)


@pytest.fixture
def listed(command):
    """Return a function that lists the runs, and returns the row of each by name."""

    def listed():
        rows = [line.strip() for line in command("runs")[0].splitlines()]
        return {row.split()[0]: re.split(r" {2,}", row) for row in rows if row and set(row) != {"─"}}

    return listed


def test_states(copies, listed):
    finished, stopped, running, new = map(copies, ("finished", "stopped", "running", "new"))
    for run in (stopped, running, new):
        (run / "summary.json").unlink()
    lock = Run(running).lock()
    for number, content in enumerate((b"{", b"{}", b"\xff")):
        (copies(f"damaged_{number}") / "summary.json").write_bytes(content)
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
        **{f"damaged_{number}": [f"damaged_{number}", "damaged"] for number in range(3)},
        "new": ["new", "stopped at step 0"],
    }
    lock.release()


def test_best_value_follows_direction_of_metric(copies, listed):
    for name in ("finished", "stopped"):
        run = copies(name)
        config = (run / "config.yaml").read_text()
        (run / "config.yaml").write_text(config.replace("monitor: val/loss", "monitor: val/exact_match"))
        rows = list(csv.DictReader((run / "metrics.csv").read_text().splitlines()))
        validated = [row for row in rows if row["val/exact_match"]]
        for row, value in zip(validated, ("nan", "0.25", "0.5", *["0.125"] * len(validated)), strict=False):
            row["val/exact_match"] = value
        with (run / "metrics.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    assert "mode: null" in config
    assert listed()["finished"][2] == "val/exact_match 0.5000"
    checkpoint = read(run / "checkpoints/last.ckpt")
    checkpoint["step_settings"]["checkpoint.monitor"] = "val/exact_match"
    checkpoint["callbacks"]["Checkpoints"]["higher_is_better"] = True
    write(checkpoint, run / "checkpoints/last.ckpt")
    (run / "summary.json").unlink()
    assert listed()["stopped"][2] == "val/exact_match 0.5000"


@pytest.mark.parametrize(
    ("name", "shown"), [("gpt[bold]", "gpt[bold]"), ("x[/b]", "x[/b]"), (":cat:", ":cat:"), ("x\x1b[31m", r"x\x1b[31m")]
)
def test_names_are_printed_literally(name, shown, copies, listed):
    copies(name)
    assert listed()[shown][1] == "finished"


@pytest.mark.parametrize(
    ("folder", "message"),
    [("nothing", "there is no folder 'nothing'; train a run with lightning-tfm fit"), (".", "'.' holds none")],
)
def test_folder_without_runs(folder, message, command):
    assert message in command("runs", folder, status=2)[1]
