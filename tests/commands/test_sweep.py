"""Sweeps: the outcomes of the trials depend on the specification only, whoever runs them and whatever is killed."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import re
import signal
import warnings
from contextlib import suppress
from pathlib import Path

import optuna
import pytest
import yaml

from lightning_tfm.commands.sweep import Worker, make_parser, sweep
from lightning_tfm.errors import UserError
from lightning_tfm.reporting import render_sweep
from lightning_tfm.sweeps import (
    Trials,
    best_experiment,
    full_name,
    importances,
    ranked,
    read_specification,
    save_study,
    table,
)
from lightning_tfm.sweeps.specification import Range
from support.experiments import TINY, new_folders, tiny
from support.pages import assert_fits_every_screen
from support.processes import EXPERIMENTS, in_process, start

LR, WIDTH = "model.init_args.optimizer.init_args.lr", "model.init_args.network.init_args.d_model"
optuna.logging.set_verbosity(optuna.logging.WARNING)

SPECIFICATION = {
    "experiment": "date_gpt",
    "objective": {"metric": "val/loss", "mode": "min"},
    "trials": 24,
    "search": {LR: {"min": 0.001, "max": 0.1, "log": True}, WIDTH: {"values": [16, 32, 64]}},
}
MAX_STEPS, INTERVAL = 90, 10


def specified(folder, **changes):
    """Write a specification, and read it."""
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({name: value for name, value in (SPECIFICATION | changes).items() if value}))
    return read_specification(path)


def metric(settings, step):
    """Return the metric of a pretended run; runs with a learning rate above 0.05 fail after 30 steps."""
    lr, width = settings[LR], settings[WIDTH]
    return (
        abs(math.log(lr / 0.01)) * (1 + 10 / step) + 20 / step + 3 / width + random.Random(f"{lr} {step}").random() / 9
    )


def validate(trials, number, steps):
    """Continue the pretended run of a trial to a step, or to its end."""
    specification, folder = trials.specification, trials.run(number)
    trials.record(number)
    settings, goal = trials.settings[number], specification.objective.reach
    rows, ended = [], None
    for step in range(INTERVAL, steps + 1, INTERVAL):
        if step > 30 and settings[LR] > 0.05:
            ended = "failure.txt"
            break
        rows.append(metric(settings, step) * specification.objective.sign)
        if step == MAX_STEPS or (goal is not None and specification.objective.sign * (rows[-1] - goal) <= 0):
            ended = "summary.json"
            break
    lines = [f"{INTERVAL * (index + 1) - 1},{value!r}" for index, value in enumerate(rows)]
    (folder / "metrics.csv").write_text("\n".join([f"step,{specification.objective.metric}", *lines, ""]))
    if ended:
        (folder / ended).write_text("the loss is not finite")


def simulate(specification, folder, schedule, jobs):
    """Run all trials in a random order, with random restarts of the worker; return the table."""
    trials = Trials(specification, folder, MAX_STEPS)
    while True:
        trials.update()
        if trials.is_complete:
            return table(specification, trials.outcomes.values())
        open_trials = [number for number in range(len(trials.settings)) if number not in trials.outcomes]
        number = schedule.choice(open_trials[:jobs])
        curve = trials.curve(number)
        if not trials.has_ended(number):
            validate(trials, number, (curve[-1].steps if curve else 0) + INTERVAL * schedule.randint(1, 4))
        if schedule.random() < 0.2:
            trials = Trials(specification, folder, MAX_STEPS)


OBJECTIVES = {
    "min": {"metric": "val/loss", "mode": "min"},
    "max": {"metric": "val/exact_match", "mode": "max"},
    "reach": {"metric": "val/loss", "mode": "min", "reach": 1.2},
}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("asha", [None, {"min_steps": 10, "reduction_factor": 3}])
@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_outcomes_do_not_depend_on_the_order_of_the_runs(sampler, asha, objective, tmp_path):
    specification = specified(tmp_path, sampler=sampler, asha=asha, objective=OBJECTIVES[objective])
    tables = [simulate(specification, tmp_path / "serial", random.Random(0), jobs=1)]
    tables += [simulate(specification, tmp_path / f"{seed}", random.Random(seed), jobs=seed) for seed in (2, 4, 8)]
    assert len(set(tables)) == 1
    rows = list(csv.DictReader(tables[0].splitlines()))
    assert [int(row["trial"]) for row in sorted(rows, key=lambda row: int(row["trial"]))] == list(range(24))
    states = {row["state"] for row in rows}
    assert "finished" in states
    assert ("pruned" in states) == (asha is not None)


def test_other_seeds_give_other_trials(tmp_path):
    found = [Trials(specified(tmp_path, seed=seed), tmp_path / "new", MAX_STEPS) for seed in (1, 2)]
    for trials in found:
        trials.update()
    assert found[0].settings != found[1].settings
    for settings in found[0].settings:
        assert 0.001 <= settings[LR] <= 0.1
        assert float(f"{settings[LR]:.4g}") == settings[LR]
    logarithms = sorted(math.log10(settings[LR]) for settings in found[0].settings)
    assert -2.4 < logarithms[12] < -1.6, "the median of a uniform logarithm is near the middle"


def test_a_grid_contains_each_combination_once(tmp_path):
    search = {
        LR: {"min": 0.01, "max": 0.03, "step": 0.01},
        WIDTH: {"values": [16, 32]},
        "data.batch_size": {"min": 1, "max": 2},
    }
    specification = specified(tmp_path, sampler="grid", trials=None, search=search)
    trials = Trials(specification, tmp_path / "new", MAX_STEPS)
    trials.update()
    points = {(round(found[LR], 9), found[WIDTH], found["data.batch_size"]) for found in trials.settings}
    assert points == {(lr, width, size) for lr in (0.01, 0.02, 0.03) for width in (16, 32) for size in (1, 2)}
    assert len(trials.settings) == 12


@pytest.mark.parametrize(
    ("space", "grid"),
    [
        (Range(0, 0.3, step=0.1), [0.0, 0.1, 0.2, 0.3]),
        (Range(0.01, 0.07, step=0.02), [0.01, 0.03, 0.05, 0.07]),
        (Range(-0.3, 0.5, step=0.3), [-0.3, 0.0, 0.3]),
        (Range(1, 7, step=2), [1, 3, 5, 7]),
    ],
)
def test_a_grid_holds_the_decimals_of_its_range(space, grid):
    assert space.grid == grid
    with warnings.catch_warnings(action="ignore"):  # Optuna lowers a maximum that is not in the grid
        distribution = space.distribution()
    for value in space.grid:
        optuna.trial.create_trial(value=0.0, params={"x": value}, distributions={"x": distribution})


def test_asha_prunes_as_optuna_if_trials_run_one_after_the_other(tmp_path):
    asha = {"min_steps": 10, "reduction_factor": 3}
    search = SPECIFICATION["search"] | {LR: {"min": 0.001, "max": 0.04, "log": True}}  # without failures
    specification = specified(tmp_path, asha=asha, search=search, trials=60)
    rows = csv.DictReader(simulate(specification, tmp_path / "ours", random.Random(0), jobs=1).splitlines())
    ours = {int(row["trial"]): (row["state"], int(row["steps"])) for row in rows}
    trials = Trials(specification, tmp_path / "ours", MAX_STEPS)
    trials.update()
    study = optuna.create_study(pruner=optuna.pruners.SuccessiveHalvingPruner(10, 3))
    for number, settings in enumerate(trials.settings):
        trial, found = study.ask(), ("finished", MAX_STEPS)
        for step in range(INTERVAL, MAX_STEPS, INTERVAL):
            trial.report(metric(settings, step), step)
            if trial.should_prune():
                found = ("pruned", step)
                break
        assert ours[number] == found
        pruned = found[0] == "pruned"
        study.tell(trial, **({"state": optuna.trial.TrialState.PRUNED} if pruned else {"values": 0.0}))


def test_tpe_finds_better_settings_than_random_sampling(tmp_path):
    best = {}
    for sampler in ("random", "tpe"):
        values = []
        for seed in range(1, 6):
            specification = specified(tmp_path, sampler=sampler, seed=seed, trials=40)
            trials = Trials(specification, tmp_path / f"{sampler}_{seed}", MAX_STEPS)
            simulate(specification, trials.folder, random.Random(0), jobs=1)
            trials.update()
            outcomes = [trials.outcomes[number] for number in range(20, 40)]
            values += [outcome.metric for outcome in outcomes]
        best[sampler] = sorted(values)[len(values) // 2]
    assert best["tpe"] < best["random"]


def test_trials_are_ranked_by_value_and_failures_are_last(tmp_path):
    specification = specified(tmp_path, objective=OBJECTIVES["reach"], trials=40)
    simulate(specification, tmp_path / "new", random.Random(0), jobs=3)
    trials = Trials(specification, tmp_path / "new", MAX_STEPS)
    trials.update()
    outcomes = ranked(specification, trials.outcomes.values())
    values = [outcome.value for outcome in outcomes if outcome.state == "finished"]
    assert values == sorted(values)
    assert all(outcome.metric <= 1.2 for outcome in outcomes[: len(values)])
    assert [outcome.state for outcome in outcomes[-2:]] == ["failed", "failed"]
    assert all(outcome.message == "the loss is not finite" for outcome in outcomes if outcome.state == "failed")


@pytest.mark.parametrize("objective", ["min", "max"])
def test_a_metric_that_is_nan_is_the_worst(objective, tmp_path):
    specification = specified(tmp_path, objective=OBJECTIVES[objective], trials=4)
    trials = Trials(specification, tmp_path / "new", MAX_STEPS)
    trials.update()
    for number, values in enumerate((["nan", "nan"], ["0.5", "nan"], ["nan", "0.25"], ["0.75", "0.75"])):
        trials.record(number)
        rows = [f"{9 + 10 * index},{value}\n" for index, value in enumerate(values)]
        (trials.run(number) / "metrics.csv").write_text(f"step,{specification.objective.metric}\n" + "".join(rows))
        (trials.run(number) / "summary.json").write_text("{}")
    trials.update()
    outcomes = ranked(specification, trials.outcomes.values())
    order = [2, 1, 3, 0] if objective == "min" else [3, 1, 2, 0]
    assert [outcome.number for outcome in outcomes] == order
    assert outcomes[-1].value is None
    page = render_sweep("sweep", specification, outcomes, {}, {number: trials.curve(number) for number in range(4)}, "")
    assert "Validations" in page
    assert "not finite" in page


def test_the_setting_that_decides_is_the_most_important(tmp_path):
    specification = specified(tmp_path, trials=80)
    simulate(specification, tmp_path / "new", random.Random(0), jobs=3)
    trials = Trials(specification, tmp_path / "new", MAX_STEPS)
    trials.update()
    found = importances(specification, trials.outcomes.values())
    assert next(iter(found)) == LR
    assert sum(found.values()) == pytest.approx(1)
    assert importances(specification, [trials.outcomes[number] for number in range(5)]) == {}


def test_optuna_reads_the_study(tmp_path):
    specification = specified(tmp_path, asha={"min_steps": 10})
    simulate(specification, tmp_path / "new", random.Random(0), jobs=3)
    trials = Trials(specification, tmp_path / "new", MAX_STEPS)
    trials.update()
    for _ in range(2):  # the file is replaced
        save_study(specification, trials.outcomes, tmp_path / "new/study.log")
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(tmp_path / "new/study.log"))
    )
    study = optuna.load_study(study_name="new", storage=storage)
    assert [trial.params for trial in study.trials] == trials.settings
    assert study.best_trial.number == ranked(specification, trials.outcomes.values())[0].number


CONFIG = {
    "model": {
        "class_path": "A",
        "init_args": {"network": {"class_path": "B", "init_args": {"d": 1}}, "lr": {"warmup": 0}},
    },
    "data": {"class_path": "C", "init_args": {"size": 1}},
    "seed": 1,
}


@pytest.mark.parametrize("experiment", [{"model": {"class_path": "A"}, "data": "C"}, CONFIG])
@pytest.mark.parametrize(
    "names", [("model.network.d", "data.size"), ("model.init_args.network.init_args.d", "data.init_args.size")]
)
def test_the_best_experiment_contains_the_settings(names, experiment):
    text = best_experiment(experiment, CONFIG, {names[0]: 7, names[1]: 8, "model.lr.warmup": 9, "seed": 2})
    found = yaml.safe_load(text)
    assert found["model"]["init_args"]["network"] == {"class_path": "B", "init_args": {"d": 7}}
    assert found["model"]["init_args"]["lr"] == {"warmup": 9}
    assert found["data"] == {"class_path": "C", "init_args": {"size": 8}}
    assert found["seed"] == 2
    with pytest.raises(KeyError):
        full_name(CONFIG, "model.network.e")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"objective": {"metric": "test/exact_match", "mode": "max"}},
            "objective.metric must be a metric of the validation",
        ),
        ({"objective": {"metric": "val/loss", "mode": "best"}}, "objective.mode must be min or max, but is 'best'"),
        ({"objective": {"metric": "val/loss"}}, "objective must contain mode"),
        ({"objective": {"metric": "val/loss", "mode": "min", "reach": "1"}}, "objective.reach must be a number"),
        ({"objective": "val/loss"}, "objective must be a mapping"),
        ({"trials": -1}, "trials must be an integer from 1 to 10,000 but is -1"),
        ({"trials": 1.5}, "trials must be an integer"),
        ({"trials": None}, "trials must be set"),
        ({"sampler": "bayes"}, "sampler must be one of random, grid, tpe"),
        ({"sampler": "grid"}, f"search.{LR} must be values or have a step"),
        ({"parallel": 2}, "parallel must not be set with sampler random"),
        ({"pruner": "asha"}, "SPEC has no setting 'pruner'"),
        ({"asha": {"min_steps": 0}}, "asha.min_steps must be an integer of at least 1, but is 0"),
        ({"asha": {"min_steps": 10, "reduction_factor": 1}}, "asha.reduction_factor must be an integer of at least 2"),
        ({"search": {LR: {"min": 1, "max": 1}}}, "min must be below max"),
        ({"search": {LR: {"min": "1e-4", "max": 1}}}, r"min must be a number, but is '1e-4'; write 1.0e-4"),
        ({"search": {LR: {"min": 0.0, "max": 1, "log": True}}}, "must be above 0 and without a step"),
        ({"search": {LR: {"min": 1, "max": 2, "step": 3}}}, "step must be above 0 and at most max - min"),
        ({"search": {LR: {"min": 1}}}, "must contain max"),
        ({"search": {LR: {"values": []}}}, "must be a list of values"),
        ({"search": {LR: {"values": [1, 1]}}}, "must be different"),
        ({"search": {LR: {"values": [[1]]}}}, "must be numbers, texts or booleans"),
        ({"search": {LR: 1}}, "must be a mapping"),
        ({"search": None}, "SPEC must contain search"),
        ({"search": {"checkpoint.monitor": {"values": ["a"]}}}, "must not contain checkpoint.monitor"),
        ({"settings": {LR: 1}}, "must not both contain"),
        ({"seed": -1}, "seed must be an integer from 0"),
        ({"threads": "two"}, "threads must be an integer"),
        ({"experiment": 5}, "experiment must be the name of an experiment"),
    ],
)
def test_mistakes_in_a_specification_are_refused(changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        specified(tmp_path, **changes)


@pytest.mark.parametrize("path", sorted((EXPERIMENTS / "sweeps").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_sweep_of_wandb_is_refused(path):
    with pytest.raises(UserError, match=r"is one of W&B; try wandb sweep"):
        read_specification(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"search": {"model.optimizer.learning_rate": {"values": [1]}}},
            "there is no setting 'learning_rate'|learning_rate",
        ),
        ({"search": {"data.batch_sizes": {"values": [15]}}}, "batch_sizes"),
        ({"search": {"data.batch_size": {"values": ["many"]}}}, "data.batch_size|data.init_args.batch_size"),
        ({"search": {"trainer.max_epochs": {"values": [1, 2]}}}, "trainer.max_epochs must not be set in a sweep"),
        (
            {"settings": {"trainer.check_val_every_n_epoch": 1}},
            "trainer.check_val_every_n_epoch must not be set in a sweep, .*; set val_check_interval",
        ),
        (
            {"search": {"trainer.accumulate_grad_batches": {"values": [1, 2]}}},
            "search must not contain trainer.max_steps, val_check_interval or accumulate_grad_batches",
        ),
        ({"asha": {"min_steps": 5}}, r"asha.min_steps must be a multiple .* \(6, .* but is 5"),
        ({"experiment": "no_such_experiment"}, "'no_such_experiment' must be a YAML file or the name of an experiment"),
    ],
)
def test_mistakes_in_settings_are_refused_before_the_first_trial(changes, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert in_process(monkeypatch, "sweep", tiny(tmp_path, **changes)) == 2
    printed = capsys.readouterr().err.strip()
    assert re.search(message, printed)
    assert len(printed.splitlines()) == 1
    assert not Path("runs").exists()


def test_wandb_groups_the_trials_of_a_sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Worker, "_check_experiment", lambda _: None)
    worker = Worker(make_parser().parse_args([str(tiny(tmp_path)), "--output", "runs/tiny"]))
    worker.check()
    csv_logger, wandb_logger = (logger["init_args"] for logger in worker._loggers(3))
    assert (csv_logger["save_dir"], csv_logger["name"], csv_logger["version"]) == ("runs", "tiny", "trial_0003")
    assert wandb_logger["group"] == "tiny"


def test_without_optuna_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_tfm.commands.sweep.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"needs the package optuna; pip install 'lightning_tfm\[sweep\]'"):
        sweep([str(tiny(tmp_path))])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the folder in which a sweep ran without a disturbance."""
    cwd = tmp_path_factory.mktemp("undisturbed")
    child = start("sweep", tiny(cwd), cwd=cwd, forks=True)
    assert child.wait() == 0, child.err.read_text()
    return cwd


@pytest.mark.run
def test_each_trial_is_an_ordinary_run_that_never_reads_the_test_data(undisturbed):
    rows = list(csv.DictReader((undisturbed / "runs/tiny/trials.csv").read_text().splitlines()))
    assert {row["state"] for row in rows} >= {"finished", "pruned"}
    for row in rows:
        run = undisturbed / f"runs/tiny/trial_{int(row['trial']):04}"
        settings = json.loads((run / "trial.json").read_text())["settings"]
        assert {name: str(value) for name, value in settings.items()} == {name: row[name] for name in settings}
        if row["state"] == "failed":
            assert "d_model must be divisible by num_heads (2), but is 15" in row["message"]
            continue
        (provenance,) = json.loads((run / "provenance.json").read_text())
        assert provenance["data_fingerprint"].keys() == {"train", "val"}
        assert not any(name.startswith("test/") for name in (run / "metrics.csv").read_text().split("\n")[0].split(","))
        if row["state"] == "finished":
            assert json.loads((run / "summary.json").read_text())["val"]["loss"] == float(row["value"])
    (best,) = [row for row in rows if row["rank"] == "1"]
    found = yaml.safe_load((undisturbed / "runs/tiny/best.yaml").read_text())
    assert found["model"]["init_args"]["optimizer"]["init_args"]["lr"] == float(best["model.optimizer.lr"])


def kill_something(worker, chance):
    """Kill the worker, one of its runs, or both."""
    try:
        children = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
    except OSError:
        children = []
    victims = chance.choice([[worker], children[:1], [worker, *children]])
    for victim in victims:
        with suppress(ProcessLookupError):
            os.kill(int(victim), signal.SIGKILL)
    return worker in victims


@pytest.mark.parametrize("number", [10, pytest.param(50, marks=pytest.mark.soak)])
@pytest.mark.run
def test_a_repeatedly_killed_sweep_ends_as_an_undisturbed_one(number, undisturbed, tmp_path):
    chance = random.Random(1)
    child, kills = None, 0
    while kills < number:
        if child is None:
            child = start("sweep", tiny(tmp_path), "--jobs", chance.choice([1, 2]), cwd=tmp_path, forks=True)
        child.process.join(chance.uniform(0.2, 3))
        if child.process.exitcode is not None:  # the sweep has ended: some of its results are lost
            assert child.process.exitcode == 0, child.err.read_text()
            for path in chance.sample(sorted((tmp_path / "runs/tiny").glob("trial_*/checkpoints")), 2):
                (path.parent / "summary.json").unlink(missing_ok=True)
            child = None
            continue
        kills += 1
        if kill_something(child.process.pid, chance):
            child.process.join()
            child = None
    if child is None:
        child = start("sweep", tiny(tmp_path), cwd=tmp_path, forks=True)
    assert child.wait() == 0, child.err.read_text()
    assert_same_sweep(tmp_path, undisturbed)


def assert_same_sweep(ours, theirs):
    for name in ("trials.csv", "best.yaml"):
        assert (ours / "runs/tiny" / name).read_text() == (theirs / "runs/tiny" / name).read_text()


@pytest.mark.run
def test_a_changed_specification_is_refused_except_for_more_trials(undisturbed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(undisturbed)
    for changes, message in (
        ({"seed": 2}, r"seed must match the sweep in 'runs/tiny' \(3\), but is 2"),
        ({"trials": 4}, r"trials must match the sweep in 'runs/tiny' \(12\), but is 4"),
        ({"settings": TINY["settings"] | {"data.val_size": 11}}, "settings must match the sweep"),
    ):
        (path := tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY | changes))
        assert in_process(monkeypatch, "sweep", path) == 2
        assert re.search(message, capsys.readouterr().err)
    monkeypatch.chdir(tmp_path)
    new_folders(tmp_path, "mine")
    (tmp_path / "mine/notes.txt").write_text("mine")
    assert in_process(monkeypatch, "sweep", path, "--output", "mine") == 2
    assert "--output must be a new folder or one of this sweep" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (
            {"metric": "val/exact_matches", "mode": "max"},
            "objective.metric must be a metric of the validation, but is 'val/exact_matches'",
        ),
        ({"metric": "val/exact_match", "mode": "min"}, "objective.mode must be max for val/exact_match"),
    ],
)
@pytest.mark.run
def test_a_wrong_objective_is_refused_before_the_first_trial(objective, message, tmp_path):
    child = start("sweep", tiny(tmp_path, objective=objective), cwd=tmp_path, forks=True)
    assert child.wait() == 2
    assert f"cannot run: {message}" in child.err.read_text()
    assert not (tmp_path / "runs/tiny").exists()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Return the page of a sweep with all states."""
    folder = tmp_path_factory.mktemp("page")
    specification = specified(folder, asha={"min_steps": 10}, objective=OBJECTIVES["reach"], trials=40)
    simulate(specification, folder / "new", random.Random(0), jobs=3)
    trials = Trials(specification, folder / "new", MAX_STEPS)
    trials.update()
    outcomes = ranked(specification, trials.outcomes.values())
    curves = {number: trials.curve(number) for number in trials.outcomes}
    text = render_sweep(
        "</script><b>new", specification, outcomes, importances(specification, outcomes), curves, "best: 1"
    )
    path = folder / "sweep.html"
    path.write_text(text)
    return path


def test_the_page_needs_no_network_and_escapes_names(page):
    text = page.read_text()
    elements = re.sub(r"(<script[^>]*>).*?</script>", r"\1", text, flags=re.DOTALL)
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=\"(?!data:)", elements)
    assert "<h1>&lt;/script&gt;&lt;b&gt;new</h1>" in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert [chart["id"] for chart in data["charts"]] == ["history", "curves", "parallel", "importance"]


@pytest.mark.browser
def test_the_page_fits_every_screen_and_has_no_violation_of_accessibility(page, browser):
    assert_fits_every_screen(page, browser)
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
