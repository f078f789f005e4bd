"""Test the files and the output of a finished run."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ProgressBar as AnyProgressBar
from torchmetrics.functional.text import edit_distance

from datamodules.date import FORMATS
from lightning_tfm.callbacks import training_progress
from lightning_tfm.checkpoint import read
from lightning_tfm.fit.cli import SettingsCLI
from lightning_tfm.fit.cli import run as cli_run
from lightning_tfm.inference.loading import load
from lightning_tfm.runs.record import Run
from support.experiments import COPY, DATE, fit
from support.processes import run


def test_fit_writes_a_summary_and_checkpoints(run_folder):
    summary = json.loads((run_folder / "summary.json").read_text())
    names = "test higher_is_better token_metrics signatures train_seconds samples_per_second steps parameters seed"
    assert set(summary) == set(names.split())
    assert summary["steps"] == 400
    whole = {name for name in summary["test"] if "/" not in name}
    assert whole == {"loss", "perplexity", "token_accuracy", "exact_match", "ser", "macro_exact_match", "macro_ser"}
    errors = {"ser", "macro_ser", *(f"ser/{format}" for format in FORMATS)}
    lower = {"loss", "perplexity", *errors, *(f"nll/{format}" for format in FORMATS)}
    directions = summary["higher_is_better"]
    assert {name: directions[name] for name in summary["test"]} == {name: name not in lower for name in summary["test"]}
    validated = {name.rpartition("/")[2]: directions[name] for name in directions if name.startswith("alignment/")}
    assert validated == {"accuracy": True, "aer": False}
    assert set(summary["token_metrics"]) == {"loss", "perplexity", "token_accuracy", *errors}
    lines = Run(run_folder).predictions
    categories = {}
    for format in FORMATS:
        of_format = [line for line in lines if line["category"] == format]
        categories[f"exact_match/{format}"] = sum(line["correct"] for line in of_format) / len(of_format)
        categories[f"nll/{format}"] = sum(line["nll"] for line in of_format) / len(of_format)
        errors = [edit_distance(line["prediction"], line["target"], reduction="sum").item() for line in of_format]
        categories[f"ser/{format}"] = sum(errors) / sum(len(line["target"]) for line in of_format)
    by_category = {name: value for name, value in summary["test"].items() if "/" in name}
    assert by_category == pytest.approx(categories, rel=1e-4)
    for name in ("exact_match", "ser"):
        mean = fmean(categories[f"{name}/{format}"] for format in FORMATS)
        assert summary["test"][f"macro_{name}"] == pytest.approx(mean, rel=1e-4)
    assert summary["test"]["exact_match"] > 0.9
    assert summary["seed"] == yaml.safe_load(DATE.read_text())["seed_everything"]
    assert summary["samples_per_second"] * summary["train_seconds"] == pytest.approx(400 * 32, rel=0.01)
    best, last = (read(run_folder / f"checkpoints/{name}.ckpt") for name in ("best", "last"))
    assert last["global_step"] == 400
    assert best["global_step"] in (200, 400)
    network = load(run_folder / "checkpoints/best.ckpt").network
    assert summary["parameters"] == sum(parameter.numel() for parameter in network.parameters())


def test_fit_prints_its_metrics_and_examples(run_folder):
    user = run_folder.parents[2]
    out = (user / "stdout").read_text()
    assert "\x1b" not in out + (user / "stderr").read_text(), "colors are for terminals"
    for name, value in Run(run_folder).summary.test.items():
        assert bool(re.search(rf"^ *{re.escape(name)} +{value:.4f} *$", out, re.M)) == ("/" not in name)
    lines = Run(run_folder).predictions
    right = [f"correct  {line['source']} → {line['prediction']}" for line in lines if line["correct"]]
    assert [line for line in out.splitlines() if line.startswith("correct")] == right[:3]
    form = "wrong    {source} → {prediction} (expected {target})"
    wrong = {form.format(**line) for line in lines if not line["correct"]}
    examples = [line for line in out.splitlines() if line.startswith("wrong")]
    assert set(examples) <= wrong
    assert len(examples) == min(3, len(lines) - len(right))


@pytest.mark.parametrize(("interval", "seconds", "between"), [(12, 60, []), (60, 0, range(1, 61))])
def test_a_file_has_a_line_per_validation_and_per_minute_between(interval, seconds, between, monkeypatch, command):
    monkeypatch.setattr(training_progress, "SECONDS", seconds)
    printed = command(*fit("gpt", **{"trainer.val_check_interval": interval})).out
    number = r"\d+\.\d{4}"
    lines = re.findall(rf"^step (\d+)/60: loss {number}(, val/loss {number})?(?:, \d+ s left)?$", printed, re.M)
    assert [int(step) for step, loss in lines if loss] == [*range(interval, 61, interval)]
    assert [int(step) for step, loss in lines if not loss] == [*between]


def test_a_run_records_its_provenance(run_folder):
    (start,) = Run(run_folder).starts  # has all keys
    assert start["step"] == 0
    assert "fit --config" in start["command"]
    assert set(start["data_fingerprint"]) == {"train", "val", "test"}
    assert start["data_sizes"]["test"] == len(Run(run_folder).predictions)
    assert start["data_sizes"].keys() == start["data_fingerprint"].keys()
    assert start["versions"]["torch"] == torch.__version__
    assert {"python", "lightning", "babel", "faker"} <= set(start["versions"])
    assert start["hardware"]["cores"] >= start["hardware"]["threads"] >= 1
    assert start["hardware"]["processor"]
    repository = Path(__file__).parents[2]
    head = subprocess.run(["git", "-C", repository, "rev-parse", "HEAD"], capture_output=True, text=True)
    assert start["framework"]["commit"] == (head.stdout.strip() if head.returncode == 0 else None)
    assert start["git"] == {"commit": None, "dirty": None}, "the working directory is in no repository"
    assert not (run_folder / "uncommitted_0.diff").exists()


@pytest.mark.parametrize("threads", [None, 2])
def test_the_number_of_threads_depends_on_the_setting_only(threads, tmp_path):
    """The environment asks for three threads."""
    options = [] if threads is None else [f"--num_threads={threads}"]
    run(*fit("gpt", *options, **{"trainer.max_steps": 1}), cwd=tmp_path, OMP_NUM_THREADS="3").finish()
    (folder,) = (tmp_path / "runs/copy_gpt").iterdir()
    (start,) = Run(folder).starts
    assert start["hardware"]["threads"] == Run(folder).config["num_threads"] == (threads or 1)


def test_the_state_of_the_working_directory_is_recorded(tmp_path):
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", "-C", str(tmp_path)]
    (tmp_path / "mine.py").write_text("one\n")
    (tmp_path / ".gitignore").write_text("std*\nruns\n")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "mine.py").write_text("two\n")
    run(*fit("gpt", **{"trainer.max_steps": 1}), cwd=tmp_path).finish()
    (folder,) = (tmp_path / "runs/copy_gpt").iterdir()
    (start,) = Run(folder).starts
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert start["git"] == {"commit": commit, "dirty": True, "untracked": []}
    difference = folder / "uncommitted_0.diff"
    assert "-one\n+two\n" in difference.read_text()
    assert difference.stat().st_mode & 0o777 == 0o600


def test_fit_logs_to_csv_and_offline_to_wandb(run_folder):
    run = Run(run_folder)
    names = {name for row in run.metrics() for name in row}
    expected = ("train/loss", "val/loss", "val/exact_match", "val/token_accuracy", "val/perplexity", "test/exact_match")
    assert names >= set(expected)
    assert run.starts[0]["data_fingerprint"]["test"] in (run_folder / "hparams.yaml").read_text()
    assert (run_folder / "config.yaml").is_file()
    (offline,) = (run_folder.parent.parent / "wandb").glob("offline-run-*")
    assert list(offline.glob("*.wandb"))


def test_test_scores_a_checkpoint(run_folder, checkpoint, tmp_path, command):
    settings = ["--data.init_args.test_size=500", "--trainer.logger=false", f"--ckpt_path={checkpoint}"]
    out, _ = command("test", "--config", DATE, *settings)
    printed = re.search(r"^ *exact_match +([\d.]+) *$", out, re.MULTILINE)
    assert printed[1] == f"{Run(run_folder).summary.test['exact_match']:.4f}"
    assert list(tmp_path.iterdir()) == []  # no file is left in the current folder


def test_an_offline_wandb_test_prints_the_command_that_uploads_it(
    checkpoint, monkeypatch, tmp_path, new_wandb, command
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = ["--data.init_args.test_size=100", f"--ckpt_path={checkpoint}"]
    program, verb, folder = shlex.split(command("test", "--config", DATE, *settings).out.splitlines()[-1])
    assert (Path(program).name, verb) == ("wandb", "sync")
    assert list(tmp_path.glob(folder))


@pytest.mark.parametrize("bar", ["RichProgressBar", "TQDMProgressBar"])
def test_a_progress_bar_is_shown_in_a_terminal_only(bar, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for is_terminal, bars in ((False, []), (True, [bar])):
        monkeypatch.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
        cli = cli_run(["fit", "--config", str(COPY), "--dry-run", f"--trainer.callbacks+={bar}"], SettingsCLI)
        names = [type(callback).__name__ for callback in cli.trainer.callbacks if isinstance(callback, AnyProgressBar)]
        assert names == bars


def test_the_table_of_a_profiler_is_shown(tmp_path):
    child = run(*fit("gpt", "--trainer.profiler=simple", **{"trainer.max_steps": 2}), cwd=tmp_path).finish()
    assert "run_training_batch" in child.err.read_text() + child.out.read_text()


@pytest.mark.run
def test_a_named_run_is_found_by_its_name(tmp_path):
    run(*fit("gpt", "--name=small.1", **{"trainer.max_steps": 3}), cwd=tmp_path).finish()
    assert Run(tmp_path / "runs/small.1/version_0").config["name"] == "small.1"
    run("test", "small.1", "--data.test_size=9", cwd=tmp_path).finish()
    tested = Run(tmp_path / "runs/small.1/test_0")
    assert tested.summary.checkpoint == "runs/small.1/version_0/checkpoints/best.ckpt"
    assert not (tmp_path / "runs/copy_gpt").exists()
