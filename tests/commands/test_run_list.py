"""The list of runs below a folder: `lightning-tfm runs`."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil

import pytest

from lightning_tfm.checkpoint import read
from lightning_tfm.checkpoint.archive import write
from lightning_tfm.commands.runs import COLUMNS
from lightning_tfm.runs.record import Run
from support.processes import ENVIRONMENT, SCRIPT, in_terminal
from support.records import write_run


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
    steps, size = f"{summary['steps']} of {summary['steps']}", r"\d+\.\d MB"
    trained, changed = f"{summary['train_seconds']:.0f} s", "trainer.max_steps 60"
    assert listed()["run"] == [*COLUMNS]
    rows = {name: "|".join(cells) for name, cells in listed().items()}
    expected = {
        "finished": f"finished|{steps}|{trained}|1|SIZE|{best}|{result}|.*{changed}.*",
        "stopped": f"interrupted|{steps}|{saved:.0f} s|1|SIZE|{best}|.*{changed}.*",
        "running": f"running, 0 s left|{steps}|{saved:.0f} s|1|SIZE|{best}|.*{changed}.*",
        **{f"damaged_{number}": "damaged|SIZE" for number in range(3)},
        "new": f"interrupted|0 of {summary['steps']}|1|SIZE|.*{changed}.*",
    }
    for name, pattern in expected.items():
        assert re.fullmatch(f"{name}|{pattern}".replace("|", r"\|").replace("SIZE", size), rows[name]), name
    assert len(rows) == len(expected) + 1
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
    assert listed()["finished"][6] == "val/exact_match 0.5000"
    checkpoint = read(run / "checkpoints/last.ckpt")
    checkpoint["step_settings"]["checkpoint.monitor"] = "val/exact_match"
    checkpoint["callbacks"]["Checkpoints"]["higher_is_better"] = True
    write(checkpoint, run / "checkpoints/last.ckpt")
    (run / "summary.json").unlink()
    assert listed()["stopped"][6] == "val/exact_match 0.5000"


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


def test_json_has_every_value(copies, command):
    run = Run(copies("a/version_0"))
    (row,) = json.loads(command("runs", "--json").out)
    summary = run.summary
    assert row["run"] == "a/version_0"
    assert row["bytes"] == sum(path.stat().st_size for path in run.folder.rglob("*") if path.is_file())
    assert (row["step"], row["max_steps"], row["seed"]) == (summary.steps, summary.steps, summary.seed)
    assert (row["best"], row["result"]) == (dict([run.best()]), dict([summary.headline]))
    assert row["changed"]["data.init_args.train_size"] == "200"
    assert "seed_everything" not in row["changed"]


def test_time_left(copies, command):
    run = Run(copies("running"))
    (run.folder / Run.SUMMARY).unlink()
    config = (run.folder / Run.CONFIG).read_text()
    (run.folder / Run.CONFIG).write_text(config.replace("max_steps: 60", "max_steps: 100"))
    run.write_rows([{"step": "74", "train/loss": "1.0"}], ["step", "train/loss"])
    lock = run.lock()
    (row,) = json.loads(command("runs", "--json").out)
    assert (row["state"], row["step"], row["max_steps"]) == ("running", 75, 100)
    assert row["seconds_left"] == pytest.approx(run.last_checkpoint[1] / 60 * 25)
    lock.release()


COMMANDS = {
    "lightning-tfm fit copy_gpt": {},
    "python -m lightning_tfm fit --config copy_gpt --data.batch_size=3 --trainer.logger=false": {
        "data.batch_size": "3"
    },
    "lightning-tfm fit copy_gpt -c elastic --skip-test --data.path 'a b' --ckpt_path last": {
        "data.path": "a b",
        "config": "elastic",
    },
    "lightning-tfm fit copy_gpt --seed_everything 3 --model.lr_schedule.warmup_steps -1": {
        "model.lr_schedule.warmup_steps": "-1"
    },
}


@pytest.mark.parametrize("text", COMMANDS)
def test_changed_settings_are_those_of_the_command_line(text, tmp_path):
    assert write_run(tmp_path, start={"command": text}).given_settings == COMMANDS[text]


@pytest.fixture
def five(tmp_path):
    """Return the names of runs that have finished after 1 to 4 steps, and of one without a summary."""
    config = {"trainer": {"max_steps": 9}, "seed_everything": 1}
    for number in (3, 1, 4, 2):
        write_run(tmp_path / f"runs/e/version_{number}", config, {"steps": number, "seed": 10 - number})
    write_run(tmp_path / "runs/e/version_5", config | {"seed_everything": 0})
    return [f"e/version_{number}" for number in range(1, 6)]


@pytest.mark.parametrize(("column", "order"), [("run", "12345"), ("step", "51234"), ("seed", "54321")])
def test_sort(column, order, five, listed, command):
    rows = json.loads(command("runs", "--json", "--sort", column).out)
    assert "".join(row["run"][-1] for row in rows) == order


def test_older_runs_are_listed_and_deleted(five, tmp_path, command):
    for name in five[:2]:
        for path in (tmp_path / "runs" / name).iterdir():
            os.utime(path, (0, 0))
    assert [row["run"] for row in json.loads(command("runs", "--json", "--older-than", "30").out)] == five[:2]
    out = command("runs", "--delete", "--older-than", "30", "--yes").out
    assert out.splitlines() == [f"deleted runs/{name}" for name in five[:2]]
    assert [row["run"] for row in json.loads(command("runs", "--json").out)] == five[2:]
    assert command("runs", "--older-than", "30").out == "no run is older\n"


def test_delete_asks_in_a_terminal_and_refuses_running_runs(five, tmp_path, command, monkeypatch):
    run = Run(tmp_path / "runs" / five[0])
    lock = run.lock()
    assert "'e/version_1' is running; stop it first" in command("runs", "--delete", five[1], five[0], status=2).err
    lock.release()
    monkeypatch.setattr("builtins.input", lambda prompt: print(prompt) or answer)
    assert "--delete needs a terminal" in command("runs", "--delete", five[0], stdin=b"y\n", status=2).err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    answer = "n"
    assert command("runs", "--delete", five[0], status=1).out.endswith("Delete 1 run? [y/N] \nnothing was deleted\n")
    assert run.exists
    answer = "y"
    command("runs", "--delete", f"runs/{five[0]}/", five[1])
    assert [each.folder.name for each in Run.below(tmp_path / "runs")] == ["version_3", "version_4", "version_5"]
    assert not run.folder.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--delete"], "--delete needs the names of runs or --older-than, but has neither"),
        (["--delete", "e"], "--delete must name listed runs, but 'e' is none"),
        (["--delete", "e/version_6"], "'e/version_6' is none; did you mean 'e/version_"),
        (["--older-than", "-1"], "--older-than must be a number of days of at least 0, but is -1.0; try 30"),
        (["--older-than", "nan"], "but is nan"),
        (["--sort", "age"], "invalid choice: 'age'"),
    ],
)
def test_invalid_options(arguments, message, five, tmp_path, command):
    assert message in command("runs", *arguments, status=2).err
    assert len(Run.below(tmp_path / "runs")) == 5


def test_a_pipe_has_a_line_per_run_without_padding(copies, command):
    copies("long_name")
    (Run(copies("short")).folder / Run.PROVENANCE).unlink()  # the last column, its settings, is empty
    lines = command("runs").out.splitlines()
    assert [line for line in lines if line.endswith(" ")] == []
    long, short = (line for line in lines if "finished" in line)
    assert "trainer.max_steps 60" in long
    assert len(short) < len(long)


@pytest.mark.parametrize("columns", [50, 80, 300])
def test_a_terminal_breaks_no_word(columns, copies, tmp_path):
    copies("date_attention_lstm/version_0")
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "COLUMNS"}
    status, printed = in_terminal([SCRIPT, "runs"], tmp_path, environment, columns)
    assert status == 0, printed
    lines = re.sub(r"\x1b\[[0-9;]*[mK]", "", printed).splitlines()
    assert max(map(len, lines)) <= columns
    words = " ".join(lines).replace(",", "").replace(";", "").split()
    assert {"date_attention_lstm/version_0", "finished", "MB", "val/loss", "test/exact_match"} <= {*words}
