"""Every experiment, and the commands as users run them."""

from __future__ import annotations

import csv
import inspect
import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ProgressBar as AnyProgressBar

import datamodules
from datamodules import Copy
from datamodules.date import FORMATS
from lightning_tfm import networks, tasks
from lightning_tfm.__main__ import COMMANDS
from lightning_tfm.checkpoint import read, write
from lightning_tfm.commands.seeds import SettingsCLI
from lightning_tfm.config.experiments import list_experiments
from lightning_tfm.config.settings import flatten
from lightning_tfm.data import BatchDivision, GeneratedDataModule
from lightning_tfm.errors import shell_quote
from lightning_tfm.fit.cli import run as cli_run
from lightning_tfm.fit.help import BASE_CLASSES
from lightning_tfm.inference.loading import load
from lightning_tfm.runs.record import Run
from lightning_tfm.system import versions
from lightning_tfm.tasks import TaskModule
from support.corpora import TEXT, reviews, sentences, write_lines
from support.experiments import fit, made_once, trained_run, write_task
from support.processes import in_process, in_terminal, run, start, start_two

TAB = "\t"

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
YAMLS = [experiment.path for experiment in list_experiments(EXPERIMENTS)]
DATE = EXPERIMENTS / "date_attention_lstm.yaml"
COPY = EXPERIMENTS / "copy_transformer.yaml"


GENERATED = {
    f"{task}_{model}"
    for task in ("copy", "toy_translation", "date")
    for model in ("transformer", "gpt", "attention_lstm")
}


def test_each_task_is_paired_with_each_model():
    assert {path.stem for path in YAMLS} >= GENERATED


def settings_with_small_files(data, folder):
    """Return settings that replace downloads by small files."""
    if data == "Text":
        (folder / "text.txt").write_text(10 * TEXT)
        settings = {"path": folder / "text.txt", "batch_size": 2, "tokenizer_file": "null", "vocab_size": 300}
    elif data == "Sentiment":
        settings = {"train": [write_lines(folder / "table.tsv", map(TAB.join, reviews(400)))]}
    else:
        table = write_lines(folder / "table.tsv", map(TAB.join, sentences(300)))
        table = [table] if data == "ParallelText" else table
        settings = {"train": table, "val": table, "test": table, "vocab_size": 400}
        if data == "ParallelText":
            settings["batch_tokens"] = 600
    return [f"--data.init_args.{name}={value}" for name, value in settings.items()]


LARGE = {"multi30k_transformer_gpu", "shakespeare_gpt2"}
"""Experiments with networks of more than forty million parameters."""


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.run] if path.stem in LARGE else []) for path in YAMLS],
    ids=lambda path: path.stem,
)
def test_experiment_runs(path, monkeypatch, tmp_path):
    """Train and validate on one batch each, of fewer pairs and otherwise as configured.

    Note:
        Large networks are trained in float32: on CPUs without instructions for bfloat16, a step would take minutes.
    """
    monkeypatch.chdir(tmp_path)
    tested = []
    monkeypatch.setattr(TaskModule, "on_validation_end", lambda module: tested.append(module))
    if path.stem.startswith(("copy", "toy_translation", "date")):
        sizes = ["--data.init_args.train_size=600", "--data.init_args.val_size=20", "--data.init_args.test_size=30"]
    else:
        config = yaml.safe_load(path.read_text())
        sizes = settings_with_small_files(config["data"]["class_path"], tmp_path)
        if "pretrained" in config["model"]["init_args"]:  # half a gigabyte of weights
            sizes += ["--model.init_args.pretrained=null", "--data.init_args.max_length=64"]
    if path.stem in LARGE:
        sizes.append("--trainer.precision=32-true")
    assert in_process(monkeypatch, "fit", "--config", path, "--trainer.fast_dev_run=true", *sizes) == 0
    (module,) = tested
    assert module.network.hyper_parameters["vocab_size"] == module.tokenizer.vocab_size
    assert module.trainer.global_step == 1
    config = yaml.safe_load(path.read_text())
    assert type(config["seed_everything"]) is int
    assert 12 <= len(path.read_text().splitlines()) <= 20


@pytest.mark.parametrize("text", ["run\tV;PST", "it's a\ttab \\t", "plain", "two words", "a 'quote' and $HOME"])
def test_quoted_arguments_can_be_pasted_into_a_shell(text):
    quoted = shell_quote(text)
    assert "\t" not in quoted
    shell = subprocess.run(["bash", "-c", f"printf %s {quoted}"], capture_output=True, text=True, check=True)
    assert shell.stdout == text


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    """Train briefly on dates by the console script, without a W&B login and without standard input."""
    return made_once("user", train_on_dates, tmp_path_factory) / "runs/date_attention_lstm/version_0"


def train_on_dates(folder):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environment |= {"HOME": str(folder), "NETRC": str(folder / "none")}
    script = Path(sys.executable).with_name("lightning-tfm")
    settings = ["--trainer.max_steps=400", "--trainer.val_check_interval=200"]
    settings += ["--data.init_args.train_size=12000", "--data.init_args.val_size=500", "--data.init_args.test_size=500"]
    run = subprocess.run(
        [script, "fit", "--config", DATE, *settings],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr
    (folder / "stdout").write_text(run.stdout)
    (folder / "stderr").write_text(run.stderr)


@pytest.fixture
def checkpoint(run_folder):
    return run_folder / "checkpoints/best.ckpt"


def test_fit_writes_a_summary_and_checkpoints(run_folder):
    summary = json.loads((run_folder / "summary.json").read_text())
    assert set(summary) == {
        "test",
        "higher_is_better",
        "token_metrics",
        "signatures",
        "train_seconds",
        "samples_per_second",
        "steps",
        "parameters",
        "seed",
    }
    assert summary["steps"] == 400
    whole = {name for name in summary["test"] if "/" not in name}
    assert whole == {"loss", "perplexity", "token_accuracy", "exact_match", "ser"}
    lower = {"loss", "perplexity", "ser", *(f"nll/{format}" for format in FORMATS)}
    directions = summary["higher_is_better"]
    assert {name: directions[name] for name in summary["test"]} == {name: name not in lower for name in summary["test"]}
    validated = {name.rpartition("/")[2]: directions[name] for name in directions if name.startswith("alignment/")}
    assert validated == {"accuracy": True, "aer": False}
    assert set(summary["token_metrics"]) == {"loss", "perplexity", "token_accuracy", "ser"}
    lines = [json.loads(line) for line in (run_folder / "predictions.jsonl").read_text().splitlines()]
    categories = {}
    for format in FORMATS:
        of_format = [line for line in lines if line["category"] == format]
        categories[f"exact_match/{format}"] = sum(line["correct"] for line in of_format) / len(of_format)
        categories[f"nll/{format}"] = sum(line["nll"] for line in of_format) / len(of_format)
    assert {name: value for name, value in summary["test"].items() if "/" in name} == pytest.approx(
        categories, rel=1e-4
    )
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
    for name, value in json.loads((run_folder / "summary.json").read_text())["test"].items():
        assert bool(re.search(rf"^ *{re.escape(name)} +{value:.4f} *$", out, re.M)) == ("/" not in name)
    lines = [json.loads(line) for line in (run_folder / "predictions.jsonl").read_text().splitlines()]
    right = [f"correct  {line['source']} → {line['prediction']}" for line in lines if line["correct"]]
    assert [line for line in out.splitlines() if line.startswith("correct")] == right[:3]
    wrong = {
        f"wrong    {line['source']} → {line['prediction']} (expected {line['target']})"
        for line in lines
        if not line["correct"]
    }
    shown = [line for line in out.splitlines() if line.startswith("wrong")]
    assert set(shown) <= wrong
    assert len(shown) == min(3, len(lines) - len(right))


@pytest.mark.run
def test_the_commands_that_fit_prints_run(run_folder):
    user = run_folder.parents[2]
    generate, report, upload = map(shlex.split, (user / "stdout").read_text().splitlines()[-3:])
    assert (Path(upload[0]).name, upload[1]) == ("wandb", "sync")
    first = json.loads((run_folder / "predictions.jsonl").read_text().splitlines()[0])
    for command, expected in ((generate, first["prediction"]), (report, "report.html")):
        child = subprocess.run(command, cwd=user, capture_output=True, text=True, timeout=120)
        assert child.returncode == 0, child.stderr
        assert child.stdout == f"{expected}\n"


@pytest.mark.run
@pytest.mark.parametrize("columns", [80, 110])
def test_a_terminal_shows_progress_bars(columns, checkpoint, tmp_path):
    environment = {**os.environ, "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    environment.pop("COLUMNS", None)
    script = Path(sys.executable).with_name("lightning-tfm")
    status, printed = in_terminal([script, *map(str, fit("gpt"))], tmp_path, environment, columns)
    assert status == 0, printed
    bars = [line for line in re.split(r"[\r\n]|\x1b\[A", printed) if " left" in line]
    assert max(map(len, bars)) < columns, "a longer line would break"
    for shown in ("validation, batch 0/3 |", "test, batch 0/6 |", "drawing the attention of example 0/4 |"):
        assert any(line.startswith(shown) for line in bars), shown
    last = r"step 60/60 \|.*\| 00:00 left, loss \d\.\d{4}, best \d\.\d{4} val/loss"
    assert any(re.fullmatch(last, line) for line in bars), bars
    assert "starting ..." in printed
    assert "generating train" in printed
    config = yaml.safe_load(next(tmp_path.glob("runs/*/version_0/config.yaml")).read_text())
    assert config["trainer"]["enable_progress_bar"] is None, "the setting does not depend on the terminal"
    assert "Epoch" not in printed
    (tmp_path / "input").write_text("May 3, 1979\n" * 600)
    files = ["--input", tmp_path / "input", "--output", tmp_path / "output"]
    status, printed = in_terminal([script, "generate", checkpoint, *files], tmp_path, environment)
    assert status == 0, printed
    assert "processing" in printed
    assert "/600" in printed
    assert (tmp_path / "output").read_text() == "1979-05-03\n" * 600


@pytest.mark.run
def test_no_warning_about_workers_is_printed_on_many_cores(tmp_path):
    """Lightning would suggest more workers on many cores, but data in memory need none."""
    script = "import os, sys; os.sched_getaffinity = lambda pid: set(range(8)); os.cpu_count = lambda: 8; "
    script += "from lightning_tfm.__main__ import main; sys.exit(main())"
    environment = {**os.environ, "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, *map(str, fit("gpt", **{"trainer.max_steps": 3}))]
    child = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert child.returncode == 0, child.stderr
    assert child.stderr == ""


@pytest.mark.run
def test_a_run_works_in_an_ascii_terminal(tmp_path):
    environment = {**os.environ, "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "lightning_tfm", *map(str, fit("gpt"))]
    child = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=200)
    assert child.returncode == 0, child.stderr
    assert b"\\u2192" in child.stdout, "the arrow before a prediction"


def test_a_run_records_its_provenance(run_folder):
    (start,) = Run(run_folder).starts  # has all keys
    assert start["step"] == 0
    assert "fit --config" in start["command"]
    assert set(start["data_fingerprint"]) == {"train", "val", "test"}
    assert start["versions"]["torch"] == torch.__version__
    assert {"python", "lightning", "babel", "faker"} <= set(start["versions"])
    assert start["hardware"]["cores"] >= start["hardware"]["threads"] >= 1
    assert start["hardware"]["processor"]
    repository = Path(__file__).parents[2]
    head = subprocess.run(["git", "-C", repository, "rev-parse", "HEAD"], capture_output=True, text=True)
    assert start["framework"]["commit"] == (head.stdout.strip() if head.returncode == 0 else None)
    assert start["git"] == {"commit": None, "dirty": None}, "the working directory is in no repository"
    assert not (run_folder / "uncommitted_0.diff").exists()


def test_the_state_of_the_working_directory_is_recorded(tmp_path):
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", "-C", str(tmp_path)]
    (tmp_path / "mine.py").write_text("one\n")
    (tmp_path / ".gitignore").write_text("std*\nruns\n")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "mine.py").write_text("two\n")
    assert run(*fit("gpt", **{"trainer.max_steps": 1}), cwd=tmp_path).wait() == 0
    (folder,) = (tmp_path / "runs/copy_gpt").iterdir()
    (start,) = json.loads((folder / "provenance.json").read_text())
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert start["git"] == {"commit": commit, "dirty": True, "untracked": []}
    difference = folder / "uncommitted_0.diff"
    assert "-one\n+two\n" in difference.read_text()
    assert difference.stat().st_mode & 0o777 == 0o600


PROGRAM = 'touch "$CANARY"'

ENVIRONMENT = (".env", "prod.env", ".env.d/key")


@pytest.fixture
def git(tmp_path, monkeypatch):
    """Return a function that runs git in the current folder, a repository with uncommitted changes."""

    def git(*arguments):
        names = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "protocol.file.allow=always")
        return subprocess.run(["git", *names, *arguments], check=True, capture_output=True, text=True).stdout

    monkeypatch.setenv("CANARY", str(tmp_path / "canary"))
    (tmp_path / "repository").mkdir()
    monkeypatch.chdir(tmp_path / "repository")
    git("init", "-q")
    changed = ("mine.py", "filtered.py", *ENVIRONMENT)
    Path(".env.d").mkdir()
    for name in ("other.py", *changed):
        Path(name).write_text("one\n")
    Path(".gitattributes").write_text("mine.py diff=evil\nfiltered.py filter=a=b\n")
    git("add", "-A")
    git("commit", "-q", "-m", "first")
    for name in changed:
        Path(name).write_text("two\n")
    return git


def plant_hook(git):
    hook = Path(".git/hooks/post-index-change")
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\n{PROGRAM}\n")
    hook.chmod(0o755)
    os.utime("other.py", (1, 1))  # so that git would refresh the index


def plant_submodule(git):
    git("clone", "-q", ".", "sub")
    git("submodule", "add", "-q", "./sub", "sub")
    git("-C", "sub", "config", "core.fsmonitor", f"{PROGRAM}; false")


def plant_bare_repository(git):
    git("init", "-q", "--bare", "sub")
    os.chdir("sub")
    for setting in (("core.bare", "false"), ("core.worktree", "."), ("core.fsmonitor", f"{PROGRAM}; false")):
        git("config", *setting)


def plant_promisor(git):
    """Delete an object, which git would fetch from a remote whose address is a program."""
    git("config", "remote.origin.url", f"ext::sh -c {PROGRAM.replace(' ', '% ')}")
    for name, value in {
        "protocol.ext.allow": "always",
        "remote.origin.promisor": "true",
        "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "origin",
    }.items():
        git("config", name, value)
    blob = git("rev-parse", "HEAD:mine.py").strip()
    Path(".git/objects", blob[:2], blob[2:]).unlink()


PROGRAMS = {
    "fsmonitor": lambda git: git("config", "core.fsmonitor", f"{PROGRAM}; false"),
    "hook": plant_hook,
    "text conversion": lambda git: git("config", "diff.evil.textconv", f"{PROGRAM}; cat"),
    "driver of diff": lambda git: git("config", "diff.evil.command", PROGRAM),
    "external diff": lambda git: git("config", "diff.external", PROGRAM),
    "filter": lambda git: git("config", "filter.a=b.clean", f"{PROGRAM}; cat"),
    "process of a filter": lambda git: git("config", "filter.a=b.process", PROGRAM),
    "required filter": lambda git: (
        git("config", "filter.a=b.clean", f"{PROGRAM}; cat"),
        git("config", "filter.a=b.required", "true"),
    ),
    "submodule": plant_submodule,
    "bare repository": plant_bare_repository,
    "partial clone": plant_promisor,
}
"""Ways in which a repository names a program that git runs when it is asked for the state of the files."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_of_a_repository_are_not_run(name, git, tmp_path):
    PROGRAMS[name](git)
    state, diff = versions.git(Path.cwd())
    assert not (tmp_path / "canary").exists()
    if name in ("bare repository", "partial clone"):
        assert state == {"commit": None, "dirty": None}
    else:
        assert "-one\n+two\n" in diff


def test_changes_of_environment_files_are_not_saved(git):
    Path("sub").mkdir()
    for folder in ("sub", "."):
        assert "mine.py" in versions.git(Path(folder))[1]
        assert ".env" not in versions.git(Path(folder))[1]


def test_files_with_a_filter_are_not_compared(git):
    """The working tree holds the content of a file of Git LFS, and the commit a pointer to it."""
    assert "filtered.py" not in versions.git(Path.cwd())[1]
    git("checkout", "-q", "mine.py", *ENVIRONMENT)
    copy = Path.cwd().with_name("copy")
    shutil.copytree(Path.cwd(), copy, copy_function=shutil.copyfile)
    assert versions.git(copy)[0]["dirty"] is False


def test_fit_logs_to_csv_and_offline_to_wandb(run_folder):
    header = (run_folder / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {
        "train/loss",
        "val/loss",
        "val/exact_match",
        "val/token_accuracy",
        "val/perplexity",
        "test/exact_match",
    } <= set(header)
    assert summary_fingerprint(run_folder) in (run_folder / "hparams.yaml").read_text()
    assert (run_folder / "config.yaml").is_file()
    (offline,) = (run_folder.parent.parent / "wandb").glob("offline-run-*")
    assert list(offline.glob("*.wandb"))


def summary_fingerprint(run_folder):
    return json.loads((run_folder / "provenance.json").read_text())[0]["data_fingerprint"]["test"]


def test_the_saved_config_runs_again(run_folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert in_process(monkeypatch, "fit", "--config", run_folder / "config.yaml", "--trainer.fast_dev_run=true") == 0


def test_test_scores_a_checkpoint(run_folder, checkpoint, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    settings = ["--data.init_args.test_size=500", "--trainer.logger=false"]
    settings.append(f"--ckpt_path={checkpoint}")
    assert in_process(monkeypatch, "test", "--config", DATE, *settings) == 0
    printed = re.search(r"^ *exact_match +([\d.]+) *$", capsys.readouterr().out, re.MULTILINE)
    exact_match = json.loads((run_folder / "summary.json").read_text())["test"]["exact_match"]
    assert printed[1] == f"{exact_match:.4f}"
    assert list(tmp_path.iterdir()) == []  # no file is left in the current folder


def test_an_offline_wandb_test_prints_the_command_that_uploads_it(checkpoint, monkeypatch, tmp_path, capsys, new_wandb):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = ["--data.init_args.test_size=100", f"--ckpt_path={checkpoint}"]
    assert in_process(monkeypatch, "test", "--config", DATE, *settings) == 0
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert (Path(command[0]).name, command[1]) == ("wandb", "sync")
    assert list(tmp_path.glob(command[2]))


INPUTS = ["Thursday, May 3, 1979", "31/12/1999", "Feb 29, 2000", "7 October 2011"]
OUTPUTS = ["1979-05-03", "1999-12-31", "2000-02-29", "2011-10-07"]


@pytest.mark.parametrize(
    "options", [[], ["--beam-size", "4"], ["--temperature", "0.1", "--top-k", "3", "--top-p", "0.9"]]
)
def test_generate_normalizes_typed_dates(options, checkpoint, monkeypatch, capsys):
    assert in_process(monkeypatch, "generate", checkpoint, *INPUTS, *options) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == OUTPUTS
    assert err == ""
    assert in_process(monkeypatch, "generate", checkpoint, *options, INPUTS[0]) == 0
    assert capsys.readouterr().out.splitlines() == OUTPUTS[:1]


@pytest.mark.parametrize(
    ("begin", "options"),
    [(start, ["--trainer.precision=bf16-mixed"]), (start_two, [])],
    ids=["bf16", "two_processes"],
)
@pytest.mark.parametrize("model", ["transformer", "gpt", "attention_lstm"])
@pytest.mark.run
def test_precision_and_devices_are_set_by_the_flags_of_lightning(model, begin, options, tmp_path):
    """Training and generation work for all three models, in half precision and with two processes."""
    sizes = ["--data.init_args.train_size=600", "--data.init_args.val_size=51", "--data.init_args.test_size=51"]
    sizes += ["--data.init_args.longer_size=51", "--data.init_args.batch_size=15", "--trainer.max_steps=20"]
    child = begin("fit", "--config", EXPERIMENTS / f"copy_{model}.yaml", *sizes, *options, cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()
    (folder,) = (tmp_path / f"runs/copy_{model}").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert {"exact_match", "longer/exact_match", "x10/exact_match"} <= set(summary["test"])
    assert summary["samples_per_second"] * summary["train_seconds"] == pytest.approx(20 * 15, rel=0.1)
    assert read(folder / "checkpoints/last.ckpt")["global_step"] == 20

    longest = "1 " * 140
    lines = ["3 1 2", "", longest + longest, longest]
    child = run("generate", folder / "checkpoints/best.ckpt", "--beam-size", "2", *lines, cwd=tmp_path)
    assert child.wait() == 1
    assert len(child.out.read_text().splitlines()) == 4
    empty, *notes = child.err.read_text().splitlines()
    assert empty == "lightning-tfm: line 2: the text is empty"
    assert "lightning-tfm: line 4: it has 140 tokens, more than any training text (14)" in notes
    too_long = [note for note in notes if "more than any training text" not in note]
    if model == "attention_lstm":  # it has no maximal number of positions
        assert not too_long
    else:
        assert len(too_long) == 1
        assert re.match(r"lightning-tfm: line 3: .* 281 .*max_length", too_long[0])


@pytest.mark.run
def test_a_run_without_validation_is_tested_at_its_end(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    sizes = ["--data.init_args.train_size=600", "--data.init_args.val_size=20", "--data.init_args.test_size=30"]
    settings = [*sizes, "--data.init_args.longer_size=30", "--trainer.limit_val_batches=0", "--trainer.max_steps=5"]
    assert in_process(monkeypatch, "fit", "--config", COPY, *settings) == 0
    folder = tmp_path / "runs/copy_transformer/version_0"
    assert "exact_match" in json.loads((folder / "summary.json").read_text())["test"]
    assert read(folder / "checkpoints/last.ckpt")["global_step"] == 5


def test_a_mistake_prints_one_line_to_standard_error(tmp_path):
    script = Path(sys.executable).with_name("lightning-tfm")
    setting = "--model.init_args.network.init_args.max_length=20"
    run = subprocess.run([script, "fit", "--config", COPY, setting], cwd=tmp_path, capture_output=True, text=True)
    assert (run.returncode, run.stdout, len(run.stderr.splitlines())) == (2, "", 1)
    assert "has 141 tokens, but the model has max_length 20 positions" in run.stderr


def test_control_characters_of_a_mistake_are_escaped(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a\x1b[2J.yaml").write_text("seed_everything: 1\x1b")
    for arguments in (["runs", "a\x1b]0;b\x07"], ["list", "\x1b"], ["fit", "--config", "a\x1b[2J.yaml"]):
        assert in_process(monkeypatch, *arguments) == 2
        error = capsys.readouterr().err
        assert error.isascii()
        assert error.rstrip("\n").isprintable(), error


@pytest.mark.run
def test_generate_ends_quietly_if_its_output_is_closed(checkpoint, tmp_path):
    (tmp_path / "input").write_text("31/12/1999\n" * 20_000)
    script = Path(sys.executable).with_name("lightning-tfm")
    command = f"{script} generate {checkpoint} --input input | head -n 1"
    run = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("1999-12-31\n", "")


def test_a_very_long_line_does_not_affect_the_others(checkpoint, monkeypatch, capsys, tmp_path):
    lines = [INPUTS[0], "1/" * 20_000, INPUTS[1]]
    (tmp_path / "input").write_text("\n".join(lines))
    assert in_process(monkeypatch, "generate", checkpoint, "--input", tmp_path / "input") == 0
    outputs = capsys.readouterr().out.splitlines()
    assert len(outputs) == 3
    assert [outputs[0], outputs[2]] == OUTPUTS[:2]


def test_generate_reports_lines_that_are_not_utf8(checkpoint, monkeypatch, capsys, tmp_path):
    (tmp_path / "input").write_bytes(b"\xef\xbb\xbf31/12/1999\n3 M\xff 1979\n29/02/2000")
    assert in_process(monkeypatch, "generate", checkpoint, "--input", tmp_path / "input") == 1
    out, err = capsys.readouterr()
    assert out.splitlines() == ["1999-12-31", "", "2000-02-29"]
    assert "line 2: it is not valid UTF-8" in err


def test_generate_reads_lines_as_training_does(checkpoint, monkeypatch, capsys, tmp_path):
    """Surrounding blanks are stripped, and only line feeds end a line, so that outputs stay aligned."""
    (tmp_path / "input").write_bytes(b" 31/12/1999\t\r\n29/02/2000\r\n3 May\r1979\n29/02/2000 \n")
    assert in_process(monkeypatch, "generate", checkpoint, "--input", tmp_path / "input") == 1
    out, err = capsys.readouterr()
    assert out.split("\n") == ["1999-12-31", "2000-02-29", "", "2000-02-29", ""]
    assert r"line 3: the vocabulary has no character '\r' (position 6" in err


@pytest.mark.run
def test_generate_loses_no_output_in_an_ascii_terminal(tmp_path_factory, tmp_path):
    checkpoint = trained_run("translation_transformer", tmp_path_factory) / "checkpoints/best.ckpt"
    command = [sys.executable, "-m", "lightning_tfm", "generate", checkpoint, "--max-tokens", "9", "--temperature", "9"]
    repeated = [*command, *["der Hund"] * 40]
    run = subprocess.run(repeated, cwd=tmp_path, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.split(b"\n")) == 40 + 1
    assert b"\\u" in run.stdout or b"\\x" in run.stdout, "some sampled bytes are not ASCII"


@pytest.mark.run
def test_generate_as_a_module_reads_standard_input(checkpoint, tmp_path):
    text = "\n".join([INPUTS[0], "", "3 Mäy 1979", INPUTS[1], "   ", "x" * 3]) + "\n"
    run = subprocess.run(
        [sys.executable, "-m", "lightning_tfm", "generate", checkpoint],
        input=text,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        encoding="utf-8",
    )
    assert run.returncode == 1
    assert run.stdout.splitlines() == [OUTPUTS[0], "", "", OUTPUTS[1], "", ""]
    assert run.stderr.splitlines() == [
        "lightning-tfm: line 2: the text is empty",
        "lightning-tfm: line 3: the vocabulary has no character 'ä' (position 4 of '3 Mäy 1979')",
        "lightning-tfm: line 5: the text is empty",
        "lightning-tfm: line 6: the vocabulary has no character 'x' (position 1 of 'xxx')",
    ]


def test_generate_reads_and_writes_files(checkpoint, monkeypatch, tmp_path, capsys):
    """Outputs of several batches are in the order of the lines."""
    lines = [f"{day:02}/{month:02}/{year}" for year in range(1990, 2010) for month in (1, 11) for day in range(10, 28)]
    (tmp_path / "input").write_text("\n".join(lines))
    options = ["--input", tmp_path / "input", "--output", tmp_path / "output"]
    assert in_process(monkeypatch, "generate", checkpoint, *options) == 0
    outputs = (tmp_path / "output").read_text().splitlines()
    assert len(outputs) == len(lines) == 720
    right = sum(output.split("-")[::-1] == line.split("/") for output, line in zip(outputs, lines, strict=True))
    assert right / len(lines) > 0.9
    assert capsys.readouterr().out == ""


# Errors of users


@pytest.fixture
def no_data(monkeypatch):
    """Fail the test if data are generated."""

    def generated(self, split):
        raise AssertionError("data were generated")

    monkeypatch.setattr(GeneratedDataModule, "pairs", generated)


def mistake(monkeypatch, capsys, *arguments):
    """Run a command that fails, and return its error message, which is one line."""
    assert in_process(monkeypatch, *arguments) == 2
    err = capsys.readouterr().err
    (line,) = err.splitlines()
    assert line.startswith("lightning-tfm: error: ")
    return line


@pytest.mark.parametrize(
    ("replaced", "by", "message"),
    [
        (
            "d_model:",
            "d_modle:",
            "there is no setting 'd_modle' of lightning_tfm.Transformer; did you mean 'd_model'?",
        ),
        (
            "batch_size:",
            "batchsize:",
            "there is no setting 'batchsize' of datamodules.Copy; did you mean 'batch_size'?",
        ),
        ("warmup_steps:", "warmup_step:", "did you mean 'warmup_steps'?"),
        ("max_steps:", "max_stpes:", "there is no setting 'trainer.max_stpes'; did you mean 'trainer.max_steps'?"),
        ("\ndata:", "\ndatas:", "there is no setting 'datas'; did you mean 'data'?"),
        (
            ": Copy",
            ": datamodules.Cpoy",
            "data must name a class of datamodules, which has no 'Cpoy'; did you mean 'Copy'?",
        ),
        (": Transformer", ": lightning_tfm.networks.Trnsformer", "did you mean 'Transformer'?"),
        (": Copy", ": datamodulez.Copy", "--trust-package datamodulez"),
        (r"d_model: \d+", "d_model: wide", "model.network.d_model must be of type int, but is wide"),
        (r"max_steps: \d+", "accelerator: off", "but is False; in YAML, quote words such as no, yes, on and off"),
        (r"d_model: \d+", "d_model: 130", "d_model must be divisible by num_heads (8), but is 130; try 128 or 136"),
        (
            r"d_ff: \d+",
            "d_ff: 512, max_length: 20",
            "the longest source has 141 tokens, but the model has max_length 20 positions",
        ),
        (r"dropout: [\d.]+", "dropout: 1.5", "dropout must be at least 0 and below 1, but is 1.5"),
        (
            r"warmup_steps: \d+",
            "decay: cosinus",
            "model.lr_schedule.decay must be one of 'linear', 'cosine', 'inverse_sqrt', 'one_cycle', but is cosinus",
        ),
        (r"batch_size: \d+", "batch_size: 0", "batch_size must be at least 1, but is 0"),
        (r"warmup_steps: \d+", "warmup_steps: -5", "warmup_steps must be at least 0, but is -5"),
        (r"max_steps: \d+", "max_epochs: 0", "trainer.max_epochs must be at least 1, but is 0"),
        (r"max_steps: \d+", "max_steps: -1", "trainer.max_steps must be at least 1"),
        (r"max_steps: \d+", "limit_train_batches: 9", "trainer.limit_train_batches must not be set"),
        (r"seed_everything: \d+", "seed_everything: one", "seed_everything"),
        (r"seed_everything: \d+", "seed_everything: -1", "seed_everything must be from 0 to 4294967295, but is -1"),
        ("class_path: Seq2SeqModule", "class_path: lightning_tfm.tasks.Optimization", "model"),
        ("trainer:", "trainer: {", "while parsing"),
    ],
)
def test_a_mistake_in_a_yaml_is_reported_in_one_line(replaced, by, message, no_data, monkeypatch, capsys, tmp_path):
    text, count = re.subn(replaced, by, COPY.read_text(), count=1)
    assert count == 1
    path = tmp_path / "mistake.yaml"
    path.write_text(text)
    monkeypatch.chdir(tmp_path)
    assert message in mistake(monkeypatch, capsys, "fit", "--config", path)
    assert sorted(tmp_path.iterdir()) == [path]


SPEC = "{class_path: PACKAGE.CLASS, init_args: {NAME: VALUE}}"
PLACES = {
    "data": "data: %s",
    "model": "model: %s",
    "model.network": "model: {class_path: lightning_tfm.tasks.Seq2SeqModule, init_args: {network: %s}}",
    "trainer.callbacks": "trainer: {callbacks: [%s]}",
    "trainer.logger": "trainer: {logger: [%s]}",
    "trainer.plugins": "trainer: {plugins: [%s]}",
    "trainer.profiler": "trainer: {profiler: %s}",
    "trainer.strategy": "trainer: {strategy: %s}",
}


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *((place, "{class_path: [a, b]}") for place in PLACES),
        ("data", "{class_path: {a: b}}"),
        ("model.network", "{class_path: 3}"),
        ("trainer.callbacks", "{class_path: true}"),
        ("trainer.logger", "{class_path: null}"),
        ("data", "{class_path: datamodules.Copy, init_args: [a, b]}"),
        ("data", "{class_path: datamodules.Copy, init_args: text}"),
        ("model", "{class_path: lightning_tfm.tasks.Seq2SeqModule, init_args: [a, b]}"),
        ("model.network", "{class_path: lightning_tfm.networks.Transformer, init_args: 3}"),
        ("trainer.callbacks", "{class_path: lightning_tfm.callbacks.Compile, init_args: [a, b]}"),
        ("trainer.logger", "{class_path: lightning.pytorch.loggers.CSVLogger, init_args: null}"),
    ],
)
def test_a_class_has_a_name_and_a_mapping_of_arguments(place, value, no_data, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("mistake.yaml").write_text(PLACES[place] % value)
    line = mistake(monkeypatch, capsys, "fit", "--config", COPY, "--config", "mistake.yaml")
    rule, _, refused = line.partition(", but is ")
    assert rule.startswith(f"lightning-tfm: error: {place} must be ")
    assert SPEC in rule
    assert str(yaml.safe_load(value)) in refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: 3", f"data must be a class, such as {SPEC}, but is 3"),
        ("data: [1]", f"data must be a class, such as {SPEC}, but is [1]"),
        ("data: {class_path: Dtae}", f"must be a class, such as {SPEC}, but is Dtae; did you mean 'Date'?"),
        ("data:", "data must be set, but is missing; add it to a YAML file"),
        ("data:\nseed_everything: 1", "data must be set, but is missing"),
        ("model:\nseed_everything: 1", "model must be set, but is missing"),
        ("model: {class_path: lightning_tfm.tasks.TaskModule}", "lightning_tfm.tasks.TaskModule is abstract"),
        ("trainer: 3", "trainer must be a mapping of settings, NAME: VALUE, but is 3 in 'mistake.yaml'"),
        ("trainer:\nseed_everything: 1", "trainer must be a mapping of settings, NAME: VALUE, but is None"),
        ("trainer: [max_steps]", "trainer must be a mapping of settings, NAME: VALUE, but is ['max_steps']"),
        ("seed_everything: [1]", "seed_everything must be of type int, but is [1]"),
        ("seed_everything: true", "seed_everything must be of type int, but is True"),
        ("trainer: {val_check_interval: 0}", "trainer.val_check_interval must be at least 1, but is 0; try 1"),
        (
            "trainer: {accumulate_grad_batches: -1}",
            "trainer.accumulate_grad_batches must be at least 1, but is -1; try 1",
        ),
        (
            "trainer: {check_val_every_n_epoch: 0}",
            "trainer.check_val_every_n_epoch must be at least 1, but is 0; try 1",
        ),
        ("trainer: {min_steps: 2}", "trainer.min_steps must not be set, since"),
        ("trainer: {val_check_interval: 0.5}", "trainer.val_check_interval must be a number of training batches"),
        ("trainer: {val_check_interval: '00:00:00:01'}", "must be a number of training batches, but is 00:00:00:01"),
        (
            "model: {class_path: lightning_tfm.tasks.Seq2SeqModule, init_args: {lr_schedule: [1]}}",
            "model.lr_schedule must be {NAME: VALUE}, but are of type list",
        ),
        ("trainer: text", "trainer must be a mapping of settings, NAME: VALUE, but is text"),
        ("checkpoint: 3", "checkpoint must be a mapping of settings, NAME: VALUE, but is 3 in 'mistake.yaml'"),
        ("trainer: {precision: x}", "trainer.precision must be of type int or one of 'transformer-engine'"),
        (
            "trainer: {logger: CSVLogger}",
            "save_dir must be set, but is missing; add it to the init_args of lightning",
        ),
    ],
)
def test_a_malformed_section_is_refused(text, message, no_data, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("mistake.yaml").write_text(text)
    arguments = ["fit", "--config", COPY, "--config", "mistake.yaml", "--trainer.max_steps", "3"]
    assert message in mistake(monkeypatch, capsys, *arguments)


def test_model_needs_a_class_path(no_data, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = yaml.safe_load(COPY.read_text())
    del config["model"]["class_path"]
    Path("mistake.yaml").write_text(yaml.safe_dump(config))
    assert f"model must be a class, such as {SPEC}" in mistake(monkeypatch, capsys, "fit", "--config", "mistake.yaml")


TOO_LARGE = "it must have at most 10,000 values, with aliases replaced, and at most 100 levels of nesting"
BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 9)
)
INVALID = {
    "trainer:\n  max_steps: 3\n max_epochs: 4\n": (3, "expected <block end>"),
    "trainer:\n\tmax_steps: 3\n": (2, "indent with spaces"),
    "trainer: {max_steps: 3\ndata: 3\n": (2, "while parsing a flow mapping from line 1, expected ',' or '}'"),
    "trainer:\n  max_steps: 3\n  devices: 1\n  max_steps: 4\n": (4, "duplicate key 'max_steps' (first in line 2)"),
    "trainer: {max_steps: 3, max_steps: 3}\n": (1, "duplicate key 'max_steps' (first in line 1)"),
    "trainer: {}\nseed_everything: 1\ntrainer: {}\n": (3, "duplicate key 'trainer' (first in line 1)"),
    "data: 3\ntrainer: *settings\n": (2, "found undefined alias 'settings'"),
    "data: 3\ntrainer: a\x07b\n": (2, r"the character '\x07'"),
    "data: 3\ntrainer: !!python/name:os.system\n": (2, "could not determine a constructor"),
    "data: 3\n---\ntrainer: 3\n": (2, "but found another document"),
    "data: 3\ntrainer: !!int three\n": (2, "invalid literal for int"),
    f"data: 3\ntrainer: {{max_steps: {'9' * 400}}}\n": (2, "an integer must be at most 9223372036854775807"),
    f"data: 3\ntrainer: {{max_steps: {'9' * 5000}}}\n": (2, "Exceeds the limit"),
    "data: 3\ntrainer: &it [*it]\n": (2, TOO_LARGE),
    f"data: 3\ntrainer: {'[' * 3000}{']' * 3000}\n": (2, TOO_LARGE),
    f"data: 3\ntrainer: {'[' * 200_000}\n": (2, TOO_LARGE),
    "data: 3\ntrainer:\n" + "- " * 3000 + "a\n": (3, TOO_LARGE),
    f"data: 3\n{BOMB}": (6, TOO_LARGE),
    f"[{'x, ' * 20_000}]": (1, TOO_LARGE),
    f"%YAML 1.3\n---\na: {'[' * 3000}{']' * 3000}\n": (3, TOO_LARGE),  # an error of libyaml, but not of PyYAML
    f"a: &a {'x' * 20_000}\nb: [{'*a, ' * 5_000}]\n": (2, TOO_LARGE),
}


@pytest.mark.parametrize("text", INVALID, ids=lambda text: repr(text[:40]))
def test_invalid_yaml_is_reported_with_its_file_and_line(text, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("a folder").mkdir()
    Path("a folder/mistake.yaml").write_text(text)
    line, problem = INVALID[text]
    message = mistake(
        monkeypatch, capsys, "fit", "--config", COPY, "--config", "a folder/mistake.yaml", "--config", COPY
    )
    start = f"error: --config must name a valid YAML file, but line {line} of 'a folder/mistake.yaml' is not: "
    assert start in message
    assert problem in message.partition(start)[2]


@pytest.mark.parametrize("value", [BOMB, "[" * 200_000, "9" * 400], ids=["aliases", "nesting", "integer"])
@pytest.mark.parametrize("setting", ["trainer.max_steps", "trainer.callbacks", "data.batch_size", "model.optimizer.lr"])
def test_the_limits_of_yaml_apply_to_single_settings(setting, value, no_data, monkeypatch, capsys, tmp_path):
    """The parser reads the value of an option, and a string in a YAML file, as YAML."""
    monkeypatch.chdir(tmp_path)
    assert mistake(monkeypatch, capsys, "fit", "--config", COPY, f"--{setting}={value}")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "--config must name a YAML file of settings, NAME: VALUE, but 'mistake.yaml' is empty"),
        (b"# trainer:\n", "but 'mistake.yaml' is empty"),
        (b"- trainer\n- data\n", "but 'mistake.yaml' holds ['trainer', 'data']"),
        (b"trainer\n", "but 'mistake.yaml' holds 'trainer'"),
        (b'data: "\\U00ffffff"\n', "but 'mistake.yaml' has an escape above \\U0010ffff; delete it"),
        (b'data: "\\Uffffffff"\n', "but 'mistake.yaml' has an escape above \\U0010ffff; delete it"),
        (b"data: 3\nname: caf\xe9\n", "a YAML file in UTF-8, but line 2 of 'mistake.yaml' is not; save it in UTF-8"),
        (b"\xff\xfed\0a\0t\0a\0", "a YAML file in UTF-8, but line 1 of 'mistake.yaml' is not"),
    ],
)
def test_a_file_without_settings_is_reported(data, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("mistake.yaml").write_bytes(data)
    assert message in mistake(monkeypatch, capsys, "fit", "--config", COPY, "--config", "mistake.yaml")


def test_a_yaml_may_be_a_pipe_or_start_with_a_byte_order_mark(tmp_path, monkeypatch, capsys):
    """A pipe can be read only once."""
    mark = tmp_path / "mark.yaml"
    mark.write_bytes(b"\xef\xbb\xbf" + COPY.read_bytes())
    theirs, ours = os.pipe()
    os.write(ours, COPY.read_bytes())
    os.close(ours)
    configs = ["--config", mark, "--config", f"/dev/fd/{theirs}"]
    assert in_process(monkeypatch, "fit", *configs, "--trainer.max_steps=0") == 2
    assert "trainer.max_steps must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "--config", "none.yaml"], "none.yaml"),
        (["fit", "--config", "none.yaml"], "--config must name a readable YAML file, but "),
        (["fit", "--config", COPY, "--config", EXPERIMENTS], "experiments' is not: Is a directory"),
        (["fit", "--config", COPY, "--data", "a/b.yaml"], f"data must be a class, such as {SPEC}, but is a/b.yaml"),
        (["fit", "--config", COPY, "--data.class_path=[a, b]"], "data must be a class"),
        (["fit", "--config", COPY, "--data.init_args=[a]"], "data must be a class"),
        (
            ["fit", "--config", COPY, "--model.init_args.network.class_path=[a, b]"],
            "model.network must be a class",
        ),
        (
            ["fit", "--config", COPY, "--model.init_args.network=GTP"],
            "but is GTP; did you mean 'GPT'?",
        ),
        (
            ["fit", "--config", COPY, "--trainer.callbacks+={class_path: [a]}"],
            "trainer.callbacks must be a class",
        ),
        (["fit", "--config", COPY, COPY], "an argument must be --SETTING VALUE, such as --config YAML, but is "),
        (["fit", "--config", ""], "--config must name a readable YAML file, but '.' is not: Is a directory"),
        (["fit", "--config", COPY, "--data=null"], "data must be set, but is missing; add it to a YAML"),
        (["fit", "--config", COPY, "--trainer=3"], "trainer must be a mapping of settings, NAME: VALUE, but is 3"),
        (
            ["fit", "--config", COPY, "--model.init_args.network.init_args.d_model", "130"],
            "d_model must be divisible by",
        ),
        (
            ["fit", "--config", COPY, "--trainer.max_step", "3"],
            "there is no setting 'trainer.max_step'; did you mean 'trainer.max_steps'?",
        ),
        (["fit", "--config", COPY, "--skip_test"], "there is no setting 'skip_test'; did you mean 'skip-test'?"),
        (["fit", "--config", COPY, "--ckpt_path", "none.ckpt"], "there is no checkpoint 'none.ckpt'"),
        (["test", "--config", COPY], "--ckpt_path must name the checkpoint to test"),
        (["fit", "--trainer.max_steps=3"], "pass that with --config"),
        (["fit", "--config", COPY, "--trainer.overfit_batches", "1"], "trainer.overfit_batches must be 0, but is 1"),
        (
            ["fit", "--config", COPY, "--config", "elastic", "--trainer.strategy.num_micro_batches", "3"],
            "error: num_micro_batches must be a power of two, but is 3; try 2",
        ),
        (["fit", "--config", sys.executable], "must name a YAML file in UTF-8"),
        (["generate", EXPERIMENTS, "3 May"], "is a folder"),
        (["train"], f"one of {', '.join(COMMANDS)} and come first, but is 'train'"),
        (["--config", COPY, "fit"], "and come first, but is '--config'"),
        (["generate"], "CHECKPOINT"),
        (["generate", "none.ckpt", "3 May"], "there is no checkpoint 'none.ckpt'"),
        (["generate", COPY, "3 May"], "must be a checkpoint of lightning_tfm"),
    ],
)
def test_a_mistake_on_the_command_line_is_reported_in_one_line(
    arguments, message, no_data, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    assert message in mistake(monkeypatch, capsys, *arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--beam-size", "0"], "beam_size must be at least 1, but is 0"),
        (["--beam-size", "many"], "--beam-size"),
        (["--temperature", "-1"], "temperature must be 0 or from 0.01 to 100, but is -1.0"),
        (["--temperature", "nan"], "temperature must be 0 or from 0.01 to 100, but is nan"),
        (["--temperature", "1", "--top-k", "0"], "top_k must be at least 1, but is 0"),
        (["--temperature", "1", "--top-p", "2"], "top_p must be above 0 and at most 1, but is 2.0"),
        (["--top-k", "3"], "need a temperature above 0"),
        (["--beam-size", "2", "--temperature", "1"], "mutually exclusive"),
        (["--input", "none.txt"], "--input must be a file, but 'none.txt' cannot be opened: No such file or directory"),
        (["--output", "no/such/folder"], "--output must be a file, but 'no/such/folder' cannot be opened"),
        (["--seed", "-1"], "seed must be from 0 to 4294967295, but is -1; try 1"),
        (["--seed", str(2**70)], "seed must be from 0 to 4294967295, but is 1180591620717411303424; try 1"),
        (["--input", __file__, "--output", __file__], "--output must be another file than --input"),
        (["--beem-size", "3"], "unrecognized arguments: --beem-size 3"),
    ],
)
def test_a_mistake_in_generate_is_reported_in_one_line(options, message, checkpoint, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    texts = [] if "--input" in options else ["3 May 1979"]
    assert message in mistake(monkeypatch, capsys, "generate", checkpoint, *texts, *options)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--config", COPY], "class_path must match the checkpoint"),
        (
            ["--config", DATE, "--model.init_args.network.init_args.d_model=32"],
            "d_model must match the checkpoint",
        ),
        (
            ["--config", DATE, "--data.init_args.locales=[en,de]"],
            "the vocabulary of the data must match the checkpoint",
        ),
    ],
)
@pytest.mark.parametrize("command", ["fit", "test"])
def test_a_checkpoint_of_another_model_or_vocabulary_is_refused(
    command, settings, message, checkpoint, no_data, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    assert message in mistake(monkeypatch, capsys, command, *settings, "--ckpt_path", checkpoint)


def test_an_inconsistent_checkpoint_is_refused(checkpoint, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    content = read(checkpoint)
    del content["state_dict"]["network.head.bias"]
    write(content, "partial.ckpt")
    assert "must fit its own hyper-parameters" in mistake(monkeypatch, capsys, "generate", "partial.ckpt", "3 May")
    torch.save(content, "unsummed.ckpt")
    assert "its checksum is wrong or missing" in mistake(monkeypatch, capsys, "generate", "unsummed.ckpt", "3 May")


def test_help_lists_every_command(monkeypatch, capsys):
    assert in_process(monkeypatch, "--help") == 0
    printed = capsys.readouterr().out
    assert all(f"\n  {command:<10}  {summary}\n" in printed for command, summary in COMMANDS.items())
    assert "generate \\\n    runs/" in printed
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize("command", ["fit", "validate", "test"])
def test_help_fits_a_screen_and_names_what_exists(command, monkeypatch, capsys):
    assert in_process(monkeypatch, command, "--help") == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 24
    assert max(map(len, shown.splitlines())) <= 80
    for package in (datamodules, tasks, networks):
        for name in package.__all__:
            cls = getattr(package, name)
            assert (inspect.isabstract(cls) or name in BASE_CLASSES) is (name not in re.split(r"\W+", shown)), name
    options = set(re.findall(r"--([a-z_.-]+)", shown)) - {"help-all"}
    assert in_process(monkeypatch, "fit", "--config", COPY, "--print_config") == 0
    known = flatten(yaml.safe_load(capsys.readouterr().out)).keys()
    for option in options - {"config", "dry-run", "print_config", "data.help", "model.network.help", "seeds", "jobs"}:
        name = option.replace("model.", "model.init_args.")
        assert any(other == name or other.startswith(f"{name}.") for other in known), option


@pytest.mark.parametrize(
    ("task", "arguments", "steps"),
    [
        ("spelling_gpt", [], 15),  # 3 passes over 100 pairs in batches of 20
        ("spelling_gpt", ["--data.batch_size=30", "--trainer.accumulate_grad_batches=2"], 5),  # 9 batches
        ("translation_transformer", [], None),  # batches of a number of tokens
        ("text_gpt", [], None),
    ],
)
def test_max_epochs_is_the_number_of_steps_of_all_passes(task, arguments, steps, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    cli = cli_run(
        ["fit", "--config", str(write_task(task, tmp_path)), "--dry-run", "--trainer.max_epochs=3", *arguments],
        SettingsCLI,
    )
    settings = cli.settings()["trainer"]
    assert settings["max_epochs"] is None
    cli.datamodule.setup("fit")
    stream = cli.datamodule.training_batches(BatchDivision())
    seen = [stream.samples_seen(settings["max_steps"] * settings["accumulate_grad_batches"] - more) for more in (0, 1)]
    one_pass = sum(len(rows) for rows in stream.batches(0))
    assert seen[0] >= 3 * one_pass
    assert settings["accumulate_grad_batches"] > 1 or seen[1] < 3 * one_pass
    assert steps in (None, settings["max_steps"])
    assert f"corresponds to trainer.max_steps {settings['max_steps']}" in capsys.readouterr().err


@pytest.mark.run
@pytest.mark.parametrize(
    ("options", "steps", "validations"),
    [
        (["--trainer.max_epochs=3", "--trainer.check_val_every_n_epoch=1"], 15, [5, 10, 15]),
        (["--trainer.max_epochs=3", "--trainer.check_val_every_n_epoch=2"], 15, [10]),
        (["--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=2"], 5, [5]),
        (["--trainer.max_steps=9", "--trainer.check_val_every_n_epoch=1"], 9, [5]),
        (["--trainer.max_epochs=2", "--trainer.val_check_interval=4"], 10, [4, 8]),
        (
            ["--trainer.max_epochs=3", "--trainer.check_val_every_n_epoch=1", "--trainer.accumulate_grad_batches=2"],
            8,
            [3, 6],
        ),
    ],
)
def test_a_run_validates_after_passes_over_the_data(options, steps, validations, monkeypatch, tmp_path):
    """A pass over 100 pairs has 5 batches of 20."""
    monkeypatch.chdir(tmp_path)
    arguments = ["fit", "--config", str(write_task("spelling_gpt", tmp_path)), "--trainer.log_every_n_steps=1"]
    assert in_process(monkeypatch, *arguments, *options) == 0
    rows = list(csv.DictReader(Path("runs/spelling_gpt/version_0/metrics.csv").read_text().splitlines()))
    assert [int(row["step"]) + 1 for row in rows if row["val/loss"]] == validations
    assert max(int(row["step"]) for row in rows if row["train/loss"]) + 1 == steps


def test_training_data_that_epochs_count_are_built_once(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    built, encode = [], Copy.examples
    monkeypatch.setattr(Copy, "examples", lambda data, split: built.append(split) or encode(data, split))
    sizes = [f"--data.{name}=30" for name in ("train_size", "val_size", "test_size", "longer_size", "batch_size")]
    assert in_process(monkeypatch, "fit", "copy_gpt", "--dry-run", "--trainer.max_epochs=2", *sizes) == 0
    assert built.count("train") == 1
    assert len(built) == len(set(built))


@pytest.mark.parametrize(
    ("epochs", "converted"), [("max_epochs", "max_steps"), ("check_val_every_n_epoch", "val_check_interval")]
)
def test_passes_and_their_conversion_are_mutually_exclusive(epochs, converted, monkeypatch, capsys):
    message = f"trainer.{epochs} (2) and trainer.{converted} (9) are mutually exclusive"
    assert message in mistake(monkeypatch, capsys, "fit", COPY, f"--trainer.{epochs}=2", f"--trainer.{converted}", "9")


@pytest.mark.parametrize("bar", ["RichProgressBar", "TQDMProgressBar"])
def test_a_progress_bar_is_shown_in_a_terminal_only(bar, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for is_terminal, bars in ((False, []), (True, [bar])):
        monkeypatch.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
        cli = cli_run(["fit", "--config", str(COPY), "--dry-run", f"--trainer.callbacks+={bar}"], SettingsCLI)
        shown = [type(callback).__name__ for callback in cli.trainer.callbacks if isinstance(callback, AnyProgressBar)]
        assert shown == bars


@pytest.mark.parametrize(
    ("arguments", "name", "setting"),
    [
        (["--data.help", "date"], "datamodules.Date", "--data.first_year"),
        (["--data.help=Tsv"], "datamodules.Tsv", "--data.target_separator"),
        (["copy_gpt", "--model.help", "classifier", "--trainer.max_steps=1"], "Classifier", "--model.labels"),
        (["--model.network.help", "gpt"], "GPT", "--network.num_heads"),
        (["copy_gpt", "--model.init_args.network.help=EncoderClassifier"], "EncoderClassifier", "--network.d_ff"),
    ],
)
def test_the_help_of_a_class_is_shown_by_its_name(arguments, name, setting, monkeypatch, capsys):
    assert in_process(monkeypatch, "fit", *arguments) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"^Help for .*\b{name}$", shown, re.MULTILINE)
    assert f"  {setting}" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--data.help", "dates"],
            "--data.help must name a class of datamodules, but is 'dates'; did you mean 'Date'?",
        ),
        (["--model.help", "gpt"], "but is 'gpt'; try --model.network.help GPT"),
        (["--model.network.help"], "but is ''; available: GPT, AttentionLSTM, "),
        (["--data.help", "transformer"], "but is 'transformer'; try --model.network.help Transformer"),
    ],
)
def test_the_help_of_an_unknown_class_names_what_exists(arguments, message, monkeypatch, capsys):
    assert message in mistake(monkeypatch, capsys, "fit", *arguments)


def test_all_settings_are_listed_without_markup(monkeypatch, capsys):
    assert in_process(monkeypatch, "fit", "--help-all") == 0
    shown = capsys.readouterr().out
    assert "--trainer.gradient_clip_algorithm" in shown
    assert not re.search(r":(class|meth|func|attr):`|``", shown)
    for refused in ("overfit_batches", "limit_train_batches"):
        assert f"--trainer.{refused}" not in shown


@pytest.mark.parametrize("experiment", ["copy_gpt", COPY])
def test_an_experiment_is_fit_by_its_name_alone(experiment, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    sizes = [f"--data.{name}=30" for name in ("train_size", "val_size", "test_size", "longer_size", "batch_size")]
    assert in_process(monkeypatch, "fit", experiment, "--dry-run", *sizes) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("dry run passed")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["gen"], ["generate"]),
        (["fit", "date_att"], ["date_attention_lstm"]),
        (["fit", "date_gpt", "--trainer.max_s"], ["--trainer.max_steps"]),
        (["plan", "date_g"], ["date_gpt"]),
        (["plan", "date_gpt", "--dev"], ["--devices"]),
        (["generate", "best.ckpt", "--n-"], ["--n-best"]),
        (["fit", "date_gpt", "--trainer.overf"], []),  # hidden
        (["test", "pyproj"], ["pyproject.toml"]),
    ],
)
def test_commands_are_completed_in_bash(words, completed, monkeypatch, capsys):
    monkeypatch.chdir(EXPERIMENTS.parent)
    assert in_process(monkeypatch, "completion", "bash") == 0
    script = capsys.readouterr().out
    typed = f"COMP_WORDS=({' '.join(['lightning-tfm', *words])}); COMP_CWORD={len(words)}; _shtab_lightning_tfm"
    command = ["bash", "-c", f'{script}\n{typed}\nprintf "%s\\n" "${{COMPREPLY[@]}}"']
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == completed


def test_the_version_is_printed(monkeypatch, capsys):
    assert in_process(monkeypatch, "--version") == 0
    assert re.fullmatch(r"lightning-tfm \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)
    assert in_process(monkeypatch, "help", "runs") == 0
    assert "List the runs below a folder" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.network.d_model=1000000"], r"must fit into memory, but \d+ bytes for one tensor do not; lower"),
        (
            ["--trainer.callbacks+={class_path: StochasticWeightAveraging, init_args: {swa_lrs: 0.1}}"],
            "must not contain StochasticWeightAveraging, .*; try lightning_tfm.callbacks.WeightAveraging",
        ),
        (
            ["--trainer.callbacks+=LearningRateFinder"],
            "must not contain LearningRateFinder, .*; try lightning-tfm sweep",
        ),
        (["--trainer.callbacks+=BatchSizeFinder"], "must not contain BatchSizeFinder, .*; try lightning-tfm plan"),
        (
            ["--trainer.callbacks+={class_path: Timer, init_args: {interval: epoch}}", "--dry-run"],
            "interval of Timer must not count epochs",
        ),
        (["--trainer.max_time=999999999999:00:00:00"], "trainer.max_time must be below 100,000,000 days"),
        (["--trainer.max_time={days: 999999999999}"], "Python int too large"),
        (["--trainer.limit_test_batches=0"], "trainer.limit_test_batches must be above 0"),
        (
            ["--trainer.limit_test_batches=0.001", "--dry-run"],
            r"limit_test_batches must leave at least one of \d+ batch",
        ),
        (["--trainer.limit_val_batches=0.001", "--dry-run"], r"limit_val_batches must leave at least one of \d+ batch"),
    ],
)
def test_a_mistake_found_by_torch_or_lightning_is_one_line(options, message, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    options = [*options, "--trust-package=lightning.pytorch.callbacks", "--data.train_size=100"]
    assert in_process(monkeypatch, "fit", "copy_gpt", *options) == 2
    assert re.search(message, capsys.readouterr().err.splitlines()[-1])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["fit", "validate", "test"])
def test_a_missing_argument_is_named(command, monkeypatch, capsys):
    assert in_process(monkeypatch, command) == 2
    wanted = "an experiment; `lightning-tfm list` shows them" if command == "fit" else "a checkpoint"
    assert capsys.readouterr().err == f"lightning-tfm: error: lightning-tfm {command} needs the name of {wanted}\n"


def test_the_table_of_a_profiler_is_shown(tmp_path):
    child = run(*fit("gpt", "--trainer.profiler=simple", **{"trainer.max_steps": 2}), cwd=tmp_path)
    assert child.wait() == 0
    assert "run_training_batch" in child.err.read_text() + child.out.read_text()


def test_generate_refuses_a_binary_file(checkpoint, monkeypatch, tmp_path, capsys):
    (tmp_path / "input").write_bytes(bytes(range(256)))
    assert in_process(monkeypatch, "generate", checkpoint, "--input", tmp_path / "input") == 2
    assert re.search("--input must be a text in UTF-8, but '.*input' has zero bytes", capsys.readouterr().err)


def test_generate_warns_of_a_text_longer_than_any_in_training(checkpoint, monkeypatch, capsys):
    assert in_process(monkeypatch, "generate", checkpoint, "Thursday, May 3, 1979" * 3) == 0
    assert re.fullmatch(
        r"lightning-tfm: line 1: it has 63 tokens, more than any training text \(\d+\)\n",
        capsys.readouterr().err,
    )


@pytest.mark.run
def test_generate_prompts_in_a_terminal(checkpoint, tmp_path):
    ours, theirs = pty.openpty()
    script = Path(sys.executable).with_name("lightning-tfm")
    process = subprocess.Popen(
        [script, "generate", checkpoint], cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    printed = b""
    while b"> " not in printed:
        printed += os.read(ours, 4096)
    os.write(ours, b"31/12/1999\n\x04")
    while b"1999-12-31" not in printed:
        printed += os.read(ours, 4096)
    assert process.wait(60) == 0
    assert b"Type a text and press Enter; Ctrl-D ends." in printed
