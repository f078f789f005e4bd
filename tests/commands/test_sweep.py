"""Sweeps: random and grid trials depend on the specification only, whoever runs them and whatever is killed."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import re
import shutil
import signal
import sqlite3
import sys
from contextlib import closing, suppress
from copy import deepcopy
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest
import yaml
from optuna.storages.journal import JournalFileSymlinkLock

from lightning_tfm.commands import sweep
from lightning_tfm.commands.sweep import MAX_KILLS, Worker, describe, make_parser
from lightning_tfm.commands.sweep_file import read_sweep_file
from lightning_tfm.errors import UserError
from lightning_tfm.reporting import render_sweep
from lightning_tfm.reporting.sweep_page import STATES, ranked, state_of, trial_table
from support.experiments import TINY, tiny
from support.pages import assert_fits_every_screen, assert_self_contained, page_data
from support.processes import EXPERIMENTS, start

pytestmark = [
    pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning"),
    pytest.mark.filterwarnings("ignore:Heartbeat of storage", "ignore:All-NaN slice encountered"),
]

LR, WIDTH = "model.optimizer.lr", "model.network.d_model"
HYPERBAND = {"type": "hyperband", "min_iter": 2, "eta": 2}

FILE = {
    "command": ["lightning-tfm", "fit", "--config", "copy_gpt", "${args}"],
    "method": "random",
    "metric": {"name": "val/loss"},
    "run_cap": 16,
    "parameters": {
        LR: {"distribution": "log_uniform_values", "min": 0.001, "max": 0.1},
        WIDTH: {"values": [16, 32, 64]},
        "trainer.max_steps": {"value": 90},
    },
}


def write_file(folder, **changes):
    """Write a specification, in which None deletes a key, and return its path."""
    path = folder / "new.yaml"
    path.write_text(yaml.safe_dump({name: value for name, value in (FILE | changes).items() if value is not None}))
    return path


# Pretended runs, whose processes end when they are asked whether they are running

EVENTS = random.Random(0)
PARSED = {}


class PretendedRun:
    """Replacement of ChildRun that validates a few times per call, with a random order of the runs.

    Runs with a learning rate above 0.05 fail after a validation, and those below 0.002 are never finite. The first
    validation is finite only for a width of 32.
    """

    kills = 0.0
    """Probability that a signal kills a run at a call."""

    num_started = 0

    def __init__(self, arguments, log, pass_fds=()):
        type(self).num_started += 1
        self.process = SimpleNamespace(returncode=None, wait=lambda: self.process.returncode)
        if "--dry-run" in arguments:
            self.process.returncode = -signal.SIGKILL if EVENTS.random() < self.kills else 0
            return
        values = dict(word.removeprefix("--").split("=", 1) for word in arguments if "=" in word)
        self.settings = {name: float(values[name]) for name in (LR, WIDTH)}
        (name,) = re.findall(r'"version": "(trial_\d+)"', " ".join(arguments))
        self.folder = log.parent / name
        self.rows = []
        if "--ckpt_path" in arguments:
            assert Path(arguments[arguments.index("--ckpt_path") + 1]) == self.folder.absolute()
            self.rows = (self.folder / "metrics.csv").read_text().splitlines()[1:]
        (self.folder / "checkpoints").mkdir(parents=True, exist_ok=True)

    @property
    def is_running(self):
        if self.process.returncode is None:
            self.train()
        return self.process.returncode is None

    def train(self):
        for _ in range(EVENTS.choice([0, 1, 1, 4])):
            if EVENTS.random() < self.kills:
                self.process.returncode = -signal.SIGKILL
                return
            step = len(self.rows) + 1
            if self.settings[LR] > 0.05 and step > 1:
                self.process.returncode = 1
                return
            lr, width = self.settings[LR], self.settings[WIDTH]
            value = abs(math.log(lr / 0.01)) * (1 + 3 / step) + 3 / width + random.Random(f"{lr} {step}").random() / 9
            value = math.nan if lr < 0.002 or (step == 1 and width != 32) else value
            self.rows.append(f"{step * 10 - 1},{value!r}")
            (self.folder / "metrics.csv").write_text("\n".join(["step,val/loss", *self.rows, ""]))
            (self.folder / "checkpoints/last.ckpt").touch()
            if step == 9:
                (self.folder / "summary.json").write_text("{}")
                self.process.returncode = 0
                return

    last_line = "the loss is not finite"

    def terminate(self):
        self.process.returncode = self.process.returncode or 143


@pytest.fixture
def pretend(monkeypatch):
    """Replace the processes of runs, and return a function that runs the sweep of a file and returns its worker.

    Equal settings are parsed once in all tests.
    """

    def parse_once(worker, settings, parse=Worker._parsed):
        arguments = tuple(worker._arguments(settings))
        if arguments not in PARSED:
            PARSED[arguments] = parse(worker, settings)
        return deepcopy(PARSED[arguments])

    monkeypatch.setattr(Worker, "_parsed", parse_once)
    monkeypatch.setattr(sweep, "ChildRun", PretendedRun)
    monkeypatch.setattr(sweep, "INTERVAL", 0)
    monkeypatch.setattr(PretendedRun, "kills", 0.0)
    monkeypatch.setattr(sweep, "run_children", lambda starts: [start() for start in starts])

    def work(path, folder, *options):
        worker = make_worker(path, folder, *options)
        worker.work()
        return worker

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return work


def make_worker(path, folder, *options):
    return Worker(make_parser().parse_args([str(path), "--output", str(folder), *options]))


def settings_of(worker):
    """Return the settings of all trials by index."""
    return {trial.user_attrs["index"]: trial.user_attrs["settings"] for trial in worker.study.trials}


@pytest.mark.parametrize("early_terminate", [None, HYPERBAND, {"type": "median", "min_iter": 2}], ids=str)
@pytest.mark.parametrize("method", ["random", "grid"])
def test_trials_are_independent_of_jobs(method, early_terminate, pretend, tmp_path, monkeypatch):
    parameters = FILE["parameters"]
    if method == "grid":
        parameters = parameters | {LR: {"values": [0.003, 0.01, 0.03, 0.06]}}
    path = write_file(tmp_path, method=method, parameters=parameters, early_terminate=early_terminate)
    serial = pretend(path, tmp_path / "serial")
    monkeypatch.setattr(PretendedRun, "kills", 0.1)
    parallel = pretend(path, tmp_path / "parallel", "--jobs", "5")
    assert settings_of(serial) == settings_of(parallel)
    states = {row[2] for row in trial_table(serial.study)[1]}
    assert states >= {"finished", "failed"}
    assert ("pruned" in states) == (early_terminate is not None)
    if early_terminate is None:
        assert trial_table(serial.study) == trial_table(parallel.study)
        if method == "random":
            assert "val/loss was never finite" in {trial.user_attrs.get("error") for trial in serial.study.trials}
    if method == "grid":
        points = {(settings[LR], settings[WIDTH]) for settings in settings_of(serial).values()}
        assert points == set(product((0.003, 0.01, 0.03, 0.06), (16, 32, 64)))


def test_sampled_distributions(pretend, tmp_path):
    spaces = {
        "data.train_size": {"min": 20, "max": 30},
        "data.batch_size": {"distribution": "q_uniform", "min": 8, "max": 32, "q": 8},
        "model.lr_schedule.warmup_steps": {"distribution": "q_log_uniform_values", "min": 1, "max": 64},
        "model.network.dropout": {"min": 0.1, "max": 0.3},
        "model.optimizer.weight_decay": {"distribution": "log_uniform", "min": -4, "max": -2},
    }
    worker = pretend(write_file(tmp_path, parameters=FILE["parameters"] | spaces, run_cap=60), tmp_path / "new")
    columns = {name: [settings[name] for settings in settings_of(worker).values()] for name in (LR, *spaces)}
    assert set(columns["data.train_size"]) == set(range(20, 31))
    assert set(columns["data.batch_size"]) == {8, 16, 24, 32}
    assert all(isinstance(value, int) and 1 <= value <= 64 for value in columns["model.lr_schedule.warmup_steps"])
    assert all(0.1 <= value <= 0.3 for value in columns["model.network.dropout"])
    assert all(math.exp(-4) <= value <= math.exp(-2) for value in columns["model.optimizer.weight_decay"])
    assert all(value == float(f"{value:.4g}") for value in columns[LR])
    assert -2.4 < sorted(map(math.log10, columns[LR]))[30] < -1.6, "the median of a uniform logarithm is in the middle"


def test_bayes_beats_random(pretend, tmp_path):
    medians = {}
    for method in ("random", "bayes"):
        worker = pretend(write_file(tmp_path, method=method, run_cap=60), tmp_path / method)
        values = sorted(math.inf if state_of(trial) == "failed" else trial.value for trial in worker.study.trials[30:])
        medians[method] = values[len(values) // 2]
    assert medians["bayes"] < medians["random"]


@pytest.mark.parametrize(("goal", "best"), [("minimize", min), ("maximize", max)])
def test_trial_ranks(goal, best, pretend, tmp_path):
    metric = {"name": "val/loss", "goal": goal}
    worker = pretend(write_file(tmp_path, metric=metric, early_terminate=HYPERBAND, run_cap=40), tmp_path / "new")
    trials = {state: [] for state in STATES}
    for trial in ranked(worker.study):
        trials[state_of(trial)].append(trial)
    assert ranked(worker.study) == [trial for group in trials.values() for trial in group]
    curves = [trial.intermediate_values.values() for trial in trials["finished"]]
    assert not all(map(math.isfinite, chain(*curves)))
    values = [best(filter(math.isfinite, curve)) for curve in curves]
    assert [trial.value for trial in trials["finished"]] == sorted(values, reverse=goal == "maximize")
    assert {trial.last_step for trial in trials["pruned"]} <= {2, 4, 8}, "min_iter * eta**n validations precede"
    messages = {describe(worker.study, trial).rpartition(": ")[2] for trial in trials["failed"]}
    assert messages == {"the loss is not finite"}


def test_max_kills(pretend, tmp_path, monkeypatch):
    worker = make_worker(write_file(tmp_path, run_cap=1), tmp_path / "new")
    monkeypatch.setattr(PretendedRun, "kills", 1.0)
    monkeypatch.setattr(PretendedRun, "num_started", 0)
    worker.work()
    (trial,) = worker.study.trials
    assert trial.user_attrs["error"].startswith(f"it was killed {MAX_KILLS} times")
    assert PretendedRun.num_started == MAX_KILLS
    with pytest.raises(UserError, match=f"cannot run: it was killed {MAX_KILLS} times"):
        pretend(write_file(tmp_path), tmp_path / "killed_in_dry_run")
    assert PretendedRun.num_started == 2 * MAX_KILLS
    assert not (tmp_path / "killed_in_dry_run").exists()


def test_printed_command_trusts_packages_of_sweep(pretend, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lightning-tfm", "sweep", "--trust-package", "numpy"])
    worker = pretend(write_file(tmp_path, run_cap=1), tmp_path / "new", "--trust-package", "numpy")
    worker.show()
    command = capsys.readouterr().out.strip().splitlines()[-1]
    assert command.startswith("  lightning-tfm fit --config copy_gpt --")
    assert command.endswith(" --trust-package numpy")


def test_larger_run_cap_continues_sweep(pretend, tmp_path):
    few = pretend(write_file(tmp_path, run_cap=5), tmp_path / "new")
    many = pretend(write_file(tmp_path, run_cap=9), tmp_path / "new")
    alone = pretend(write_file(tmp_path, run_cap=9), tmp_path / "alone")
    assert len(few.study.trials) == 9  # the study is shared
    assert trial_table(many.study) == trial_table(alone.study)


def test_trial_of_lost_machine_is_retried(pretend, tmp_path):
    """The machine is lost after its trial has begun, and its folder is shared."""
    path, url = write_file(tmp_path, run_cap=6), f"sqlite:///{tmp_path}/study.db"
    lost = make_worker(path, tmp_path / "new", "--storage", url)
    assert lost._begin()
    (run,) = lost.running
    run.child.train()
    lost._watch(run)
    os.close(run.lock)
    with closing(sqlite3.connect(tmp_path / "study.db")) as database, database:
        database.execute("update trial_heartbeats set heartbeat = '2020-01-01 00:00:00'")
    worker = pretend(path, tmp_path / "new", "--storage", url)
    alone = pretend(path, tmp_path / "alone")
    assert [trial.state.name for trial in worker.study.trials].count("FAIL") == 1
    assert trial_table(worker.study) == trial_table(alone.study)


# Specifications


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "custom"}, "method must be one of random, grid, bayes, but is 'custom'"),
        ({"scheduler": {"engine": "optuna"}}, "SPEC: the sweep does not support the key 'scheduler'"),
        ({"method": None}, "SPEC: missing 'method'"),
        ({"metric": {"name": "test/loss"}}, "metric: name must be a metric of the validation, .* but is 'test/loss'"),
        ({"metric": {"name": "val/loss", "goal": "best"}}, "metric: goal must be minimize or maximize, but is 'best'"),
        ({"metric": {"name": "val/loss", "target": 1}}, "metric: the sweep does not support the key 'target'"),
        ({"metric": "val/loss"}, "metric must be a mapping, NAME: VALUE, but is 'val/loss'"),
        ({"run_cap": None}, "run_cap must be an integer from 1 to 10,000, but is None; try 20"),
        ({"run_cap": 0}, "run_cap must be an integer from 1 to 10,000, but is 0"),
        ({"run_cap": 1.5}, "run_cap must be an integer"),
        ({"command": ["python", "${program}", "${args}"]}, "command must be .lightning-tfm, fit, .* but is .'python'"),
        ({"command": ["lightning-tfm", "fit"]}, "command must be"),
        ({"command": ["lightning-tfm", "fit", "${args_json}"]}, "command must be .* but is .*args_json"),
        ({"early_terminate": {"type": "envelope"}}, "early_terminate: type must be one of hyperband, median, but is"),
        ({"early_terminate": {"type": "hyperband", "min_iter": 0}}, "min_iter must be an integer of at least 1, but"),
        ({"early_terminate": {"type": "hyperband", "s": 2, "max_iter": 9}}, "early_terminate: .*'(s|max_iter)'"),
        ({"early_terminate": HYPERBAND | {"eta": 1}}, "early_terminate: .*reduction_factor"),
        ({"parameters": {}}, "parameters must be a mapping"),
        ({"parameters": {"trainer.logger": {"value": False}}}, "parameters must not contain trainer.logger"),
        ({"parameters": {LR: 1}}, f"parameters.{LR} must be a mapping"),
        ({"parameters": {LR: {"distribution": "normal"}}}, f"parameters.{LR}: distribution must be one of .*'normal'"),
        ({"parameters": {LR: {"parameters": {"a": {"value": 1}}}}}, f"parameters.{LR}: parameters must be a number"),
        ({"parameters": {LR: {"values": [1], "probabilities": [1.0]}}}, "does not support the key 'probabilities'"),
        ({"parameters": {LR: {"min": "1e-4", "max": 1}}}, "min must be a number, such as 1.0e-4, but has '1e-4'"),
        ({"parameters": {LR: {"min": 0.0, "max": math.inf}}}, "max must be a number, .* but has inf"),
        ({"parameters": {LR: {"min": 2, "max": 1}}}, r"`low <= high` must hold, .*low=2"),
        ({"parameters": {LR: {"min": 1}}}, "missing 'max'"),
        ({"parameters": {LR: {"min": 0, "max": 1, "distribution": "log_uniform_values"}}}, "low"),
        ({"parameters": {LR: {"min": 1, "max": 8, "q": 3, "distribution": "q_uniform"}}}, "must be multiples of q"),
        ({"parameters": {LR: {"values": []}}}, "`choices` must contain one or more"),
        ({"parameters": {LR: {"values": [[1]]}}}, "values must be a number"),
        ({"method": "grid"}, f"parameters.{LR} must have values with method grid"),
    ],
)
def test_invalid_specification(changes, message, tmp_path):
    with pytest.raises(UserError, match=message) as error:
        read_sweep_file(write_file(tmp_path, **changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parameters": {"model.optimizer.learning_rate": {"value": 1}}}, "learning_rate"),
        ({"parameters": {"data.batch_sizes": {"value": 15}}}, "batch_sizes"),
        (
            {"command": [*FILE["command"][:-1], "--trainer.logger=false", "${args}"]},
            "trainer.logger must not be false in a sweep",
        ),
        ({"parameters": {"data.batch_size": {"values": [15, "many"]}}}, "batch_size.* many"),
        ({"command": [*FILE["command"][:3], "no_such_file", "${args}"]}, "'no_such_file' must be"),
        ({"command": [*FILE["command"][:4], "--trust-package", "os", "${args}"]}, "--trust-package must be given on"),
    ],
)
def test_invalid_settings(changes, message, tmp_path, command):
    _, err = command("sweep", tiny(tmp_path, **changes), status=2)
    assert re.search(message, err)
    assert err.count("\n") == 1
    assert not Path("runs").exists()


@pytest.mark.parametrize("path", sorted((EXPERIMENTS / "sweeps").glob("*.yaml")), ids=lambda path: path.stem)
def test_wandb_sweeps_run_offline(path, pretend, tmp_path):
    """The settings are accepted; the runs are pretended."""
    content = yaml.safe_load(path.read_text())
    command = [str(EXPERIMENTS.parent / word) if word.endswith(".yaml") else word for word in content["command"]]
    worker = make_worker(write_file(tmp_path, **content | {"command": command}), tmp_path / "new")
    assert worker.file.run_cap >= 10


def test_changed_specification(pretend, tmp_path):
    pretend(write_file(tmp_path, run_cap=1), tmp_path / "new")
    with pytest.raises(UserError, match=r"method must match the sweep in '.*' \('random'\), but is 'bayes'"):
        pretend(write_file(tmp_path, run_cap=1, method="bayes"), tmp_path / "new")
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=f"--output must be a new folder, but '{other}' holds other files"):
        pretend(write_file(tmp_path), other)
    assert [path.name for path in other.iterdir()] == ["notes.txt"]


def test_unknown_database(pretend, tmp_path, command):
    for url, message in (
        ("sqlite:////no/such/folder/study.db", "--storage must be a database that answers, but 'sqlite:////no/such"),
        ("sqlite://user:secret@word@host/study", "'sqlite://user:***@host/study' does not: "),
    ):
        _, err = command("sweep", write_file(tmp_path), "--storage", url, status=2)
        assert message in err
        assert not re.search("secret|word", err)


def test_missing_optuna(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"needs the package optuna; pip install 'lightning_tfm\[sweep\]'"):
        sweep.sweep([str(tiny(tmp_path))])


def test_loggers_of_trial(pretend, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loggers = make_worker(tiny(tmp_path), "runs/tiny")._loggers(Path("runs/tiny/trial_0003"))
    csv_logger, wandb_logger = (logger["init_args"] for logger in loggers)
    assert (csv_logger["save_dir"], csv_logger["name"], csv_logger["version"]) == ("runs", "tiny", "trial_0003")
    assert wandb_logger["group"] == "tiny"


# Real runs


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the folder in which a sweep ran without a disturbance."""
    cwd = tmp_path_factory.mktemp("undisturbed")
    child = start("sweep", tiny(cwd), cwd=cwd, forks=True)
    assert child.wait() == 0, child.err.read_text()
    return cwd


def read_table(cwd):
    return list(csv.DictReader((cwd / "runs/sweeps/tiny/trials.csv").read_text().splitlines()))


@pytest.mark.run
def test_trials_are_runs_without_test_data(undisturbed):
    rows = read_table(undisturbed)
    assert {row["state"] for row in rows} == {"finished", "failed"}
    log = (undisturbed / "stderr").read_text()
    for row in rows:
        run = undisturbed / f"runs/sweeps/tiny/trial_{int(row['trial']):04}"
        if row["state"] == "failed":
            assert f"trial {row['trial']}: failed, d_model 15, lr {row['lr']}: d_model must be divisible by" in log
            continue
        config = yaml.safe_load((run / "config.yaml").read_text())
        assert config["model"]["init_args"]["optimizer"]["init_args"]["lr"] == float(row["lr"])
        (provenance,) = json.loads((run / "provenance.json").read_text())
        assert provenance["data_fingerprint"].keys() == {"train", "val"}
        assert not any(name.startswith("test/") for name in (run / "metrics.csv").read_text().split("\n")[0].split(","))
        assert json.loads((run / "summary.json").read_text())["val"]["loss"] == float(row["best value"])
    printed = (undisturbed / "stdout").read_text()
    assert re.search(rf"\n  lightning-tfm fit --config \S+ .*--model.optimizer.lr={rows[0]['lr']} ", printed)


def kill_something(worker, chance):
    """Kill the worker, one of its runs, or both; return whether the worker is killed."""
    children = []
    with suppress(OSError):
        children = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
    victims = chance.choice([[worker], children[:1], [worker, *children]])
    for victim in victims:
        with suppress(ProcessLookupError):
            os.kill(int(victim), signal.SIGKILL)
    return worker in victims


@pytest.mark.parametrize("number", [10, pytest.param(50, marks=pytest.mark.soak)])
@pytest.mark.run
def test_killed_sweep_equals_undisturbed_sweep(number, undisturbed, tmp_path):
    """The sweep gets more trials when it has ended before the last kill."""
    chance, child, kills, run_cap = random.Random(1), None, 0, TINY["run_cap"]
    while True:
        if child is None:
            path = tiny(tmp_path, run_cap=run_cap)
            child = start("sweep", path, "--jobs", chance.choice([1, 2]), cwd=tmp_path, forks=True)
        child.process.join(chance.uniform(0.2, 3) if kills < number else 300)
        if child.process.exitcode is not None:
            assert child.process.exitcode == 0, child.err.read_text()
            if kills == number:
                break
            child, run_cap = None, run_cap + 2
            continue
        assert kills < number, "the sweep does not end"
        kills += 1
        if kill_something(child.process.pid, chance):
            child.process.join()
            child = None
    trials, expected = ({row.pop("trial"): row for row in read_table(cwd)} for cwd in (tmp_path, undisturbed))
    for trial, row in expected.items():
        assert trials[trial] | {"rank": ""} == row | {"rank": ""}
    assert len(trials) == run_cap


@pytest.mark.run
@pytest.mark.soak  # half a minute without work
def test_a_sweep_goes_on_if_a_worker_was_killed_while_it_wrote_the_study(undisturbed, tmp_path):
    """The worker leaves the lock of the study."""
    shutil.copytree(undisturbed, tmp_path, dirs_exist_ok=True)
    (study,) = tmp_path.glob("runs/sweeps/*/study.log")
    JournalFileSymlinkLock(str(study)).acquire()
    start("sweep", tiny(tmp_path, run_cap=TINY["run_cap"] + 1), cwd=tmp_path, forks=True).finish()
    assert len(read_table(tmp_path)) == TINY["run_cap"] + 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("val/exact_matches", "metric.name must be a metric of the validation, but is 'val/exact_matches'"),
        ("val/exact_match", "metric.goal must be max for val/exact_match"),
    ],
)
@pytest.mark.run
def test_invalid_metric(name, message, tmp_path):
    child = start("sweep", tiny(tmp_path, metric={"name": name}), cwd=tmp_path, forks=True)
    child.refuse(f"cannot run: {message}")
    assert not (tmp_path / "runs").exists()


# The page


@pytest.fixture
def page(pretend, tmp_path):
    """Return the page of a sweep with all states."""
    worker = pretend(write_file(tmp_path, early_terminate=HYPERBAND, run_cap=60), tmp_path / "new")
    path = tmp_path / "sweep.html"
    path.write_text(render_sweep(worker.study, "</script><b>new", "val/loss", "lightning-tfm fit"))
    return path


def test_page_is_self_contained(page):
    text = page.read_text()
    assert_self_contained(text)
    assert "<h1>&lt;/script&gt;&lt;b&gt;new</h1>" in text
    charts = page_data(text)["charts"]
    assert [chart["id"] for chart in charts] == ["validations", "by-1", "by-5", "by-6"]
    axes = [chart["spec"].get("layer", [chart["spec"]])[0]["encoding"]["x"]["axis"] for chart in charts]
    ticks = [axis.get("tickMinStep") for axis in axes]
    assert ticks == [1, 1, 1, None], "integers have no ticks between them"
    lr, width = (float(re.search(rf"{name} (\d\.\d+)", text)[1]) for name in ("lr", "d_model"))
    assert lr > width, "the setting that decides is the most important"
    assert lr + width == pytest.approx(1, abs=0.02)


@pytest.mark.browser
def test_page_layout_and_accessibility(page, browser):
    assert_fits_every_screen(page, browser)
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
