"""Forks: runs that begin as another run was at a step, with other settings."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger

from lightning_tfm.checkpoint import read
from lightning_tfm.comparison import compare
from lightning_tfm.comparison.groups import group_runs
from lightning_tfm.fit.forking import compare_replay
from lightning_tfm.loggers import TensorBoardLogger, describe_run
from lightning_tfm.optimizers import LRSchedule
from lightning_tfm.reporting.charts import draw_charts
from lightning_tfm.reporting.collect import add_forks, collect_run
from lightning_tfm.runs.record import Run
from support.equality import assert_same_files, contents
from support.experiments import NETWORKS, fit, made_once, new_folders
from support.processes import run, start_two
from support.records import START, write_run

pytestmark = pytest.mark.run

STEP = 25
"""Step of a kept checkpoint of `parent`."""

LR = "model.init_args.optimizer.init_args.lr"


@pytest.fixture
def parent(request, tmp_path, tmp_path_factory):
    """Copy a run of 60 steps that keeps the checkpoint of each 25th to the folder of the test; return its folder."""
    model = getattr(request, "param", "gpt")

    def train(cwd):
        run(*fit(model, **{"checkpoint.keep_every": STEP}), cwd=cwd).finish()

    shutil.copytree(made_once(f"parent_{model}", train, tmp_path_factory) / "runs", tmp_path / "runs")
    return tmp_path / f"runs/copy_{model}/version_0"


def fork(parent, step, *options, **settings):
    """Fork a run in a child process, and return the folder of the fork and the messages."""
    cwd, before = parent.parents[2], contents(parent)
    name = f"copy_{parent.parent.name.removeprefix('copy_')}/version_0"
    arguments = [f"--{setting}={value}" for setting, value in settings.items()]
    child = run("fit", "--fork", f"{name}@{step}" if step else name, *arguments, *options, cwd=cwd).finish()
    assert contents(parent) == before
    newest = max(parent.parent.glob("version_*"), key=lambda folder: int(folder.name.removeprefix("version_")))
    return newest, child.err.read_text()


@pytest.mark.parametrize("parent", [*NETWORKS], indirect=True)
@pytest.mark.parametrize("step", [STEP, 33, 7])
def test_a_fork_without_a_change_equals_its_parent(parent, step):
    """There is a checkpoint of step 25 but of no other, so that steps 26 to 33, and 1 to 7, are repeated."""
    folder, printed = fork(parent, step)
    assert f"fork of {parent.relative_to(parent.parents[2])} at step {step}: no setting has changed" in printed
    assert ("repeating the steps" in printed) == (step != STEP)
    assert "the repeated steps differ" not in printed
    assert_same_files(folder, parent)


def test_trace_refuses_a_fork_without_equal_checkpoints(parent, mistake):
    folder, _ = fork(parent, STEP, **{LR: 0.0015})
    assert "--trace needs runs with equal checkpoints if one is a fork" in mistake("diff", parent, folder, "--trace")


def test_a_changed_learning_rate_takes_effect_and_moments_are_kept(parent):
    """The update of AdamW is proportional to the learning rate, from equal weights, moments and gradients."""
    at_fork = read(parent / f"checkpoints/step_{STEP}.ckpt")["state_dict"]
    updates, rates = {}, {}
    for lr in (0.003, 0.0015, 0.03):
        folder, _ = fork(parent, STEP, **{LR: lr, "checkpoint.every_n_train_steps": 1, "checkpoint.keep_every": 26})
        after = read(folder / "checkpoints/step_26.ckpt")["state_dict"]
        updates[lr] = torch.cat([(after[name] - weight).flatten().double() for name, weight in at_fork.items()])
        rates[lr] = [row["trainer/learning_rate"] for row in Run(folder).metrics() if "trainer/learning_rate" in row]
        scale = LRSchedule(10).scale
        assert rates[lr] == pytest.approx([(0.003 if step < STEP else lr) * scale(step, 60) for step in range(60)])
    assert updates[0.003].norm() > 0
    for lr in (0.0015, 0.03):
        torch.testing.assert_close(updates[lr], updates[0.003] * (lr / 0.003), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "changed",
    [
        {
            "model.init_args.lr_schedule.decay": ("cosine", "linear"),
            "model.init_args.optimizer.init_args.weight_decay": (0.01, 0.1),
            "model.init_args.network.init_args.dropout": (0.2, 0.0),
            "model.init_args.label_smoothing": (0.0, 0.1),
            "trainer.gradient_clip_val": (1.0, 0.1),
        },
        {"data.init_args.batch_size": (15, 20), "data.init_args.train_size": (200, 100), "trainer.max_steps": (60, 50)},
        {"data.init_args.val_size": (30, 20), "seed_everything": (1, 2), "trainer.precision": ("unset", "bf16-mixed")},
    ],
    ids=["the model", "the data", "the run"],
)
def test_settings_of_the_training_can_change(parent, changed):
    """The losses are those of the parent up to the step, and others after it."""
    folder, printed = fork(parent, STEP, **{name: value for name, (_, value) in changed.items()})
    for name, (old, value) in changed.items():
        assert f"{name} {old} -> {value}" in printed
    rows = [Run(each).metrics() for each in (folder, parent)]
    log, before = ([row["train/loss"] for row in each if "train/loss" in row] for each in rows)
    assert log[:STEP] == before[:STEP]
    assert log[STEP:] != before[STEP : len(log)]
    assert len(log) == changed.get("trainer.max_steps", (60, 60))[1]


def test_other_settings_are_refused_before_anything_is_written(parent, command, monkeypatch):
    """Also if steps would be repeated first."""
    monkeypatch.chdir(parent.parents[2])
    before = contents(parent.parents[1])
    for step, option, value, message in (
        (STEP, "model.network.d_model", 32, "model.network.d_model must match the checkpoint"),
        (33, "model.network.d_model", 32, "model.network.d_model must match the checkpoint"),
        (STEP, "model.network.num_heads", 4, "model.network.num_heads must match the checkpoint"),
        (STEP, "model.optimizer", "lightning_tfm.optimizers.Muon", "model.optimizer.class_path must match"),
        (STEP, "trainer.accumulate_grad_batches", 2, "trainer.accumulate_grad_batches must match the checkpoint"),
        (STEP, "data.num_symbols", 9, "the vocabulary of the data must match the checkpoint"),
    ):
        (line,) = command("fit", f"--fork=copy_gpt/version_0@{step}", f"--{option}={value}", status=2).err.splitlines()
        assert message in line
        assert contents(parent.parents[1]) == before


def test_a_step_that_the_run_does_not_have_is_refused(parent, command, monkeypatch):
    monkeypatch.chdir(parent.parents[2])
    before = contents(parent.parents[1])
    for name, message in (
        ("copy_gpt/version_0@61", "must name a step from 1 to 60 of 'runs/copy_gpt/version_0', but is 'copy_gpt/vers"),
        ("copy_gpt/version_0@0", "must name a step from 1 to 60"),
        ("copy_gpt/version_0@last", "must name a step from 1 to 60"),
        ("copy_gpt/version_9@5", "there is no run 'copy_gpt/version_9'"),
        ("copy_gpt/version_0", "trainer.max_steps must be above the step of the checkpoint"),
    ):
        assert message in command("fit", "--fork", name, status=2).err
        assert contents(parent.parents[1]) == before


def test_the_lineage_is_recorded_and_shown(parent, command, monkeypatch):
    monkeypatch.chdir(parent.parents[2])
    folder, _ = fork(parent, 33, **{LR: 0.001, "trainer.max_steps": 40})
    start = Run(folder).starts[-1]
    assert (start["step"], start["fork"]["run"], start["fork"]["step"]) == (33, "runs/copy_gpt/version_0", 33)
    kept = (parent / f"checkpoints/step_{STEP}.ckpt").read_bytes()
    assert start["fork"]["checkpoint"] == kept[-64:].decode()
    assert start["changed_settings"] == {LR: [0.003, 0.001], "trainer.max_steps": [60, 40]}
    assert yaml.safe_load((folder / "config.yaml").read_text())["ckpt_path"] is None
    changes = "trainer.max_steps 40, model.optimizer.lr 0.001"
    assert re.search(f"\n *  copy_gpt/version_1 .* fork copy_gpt/version_0@33, {changes}\n", command("runs").out)
    assert collect_run(folder, "fork", 100, []).facts["fork of"] == "runs/copy_gpt/version_0 at step 33"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Write a run of 60 steps, two forks of it and a fork of the second one; return the folders by their names."""
    monkeypatch.chdir(tmp_path)
    config = {"trainer": {"max_steps": 60}, "seed_everything": 1}
    points = {"a/version_0": (), "a/version_1": (("a/version_0", 20),), "b/version_0": (("a/version_0", 40),)}
    points["a/version_2"] = (*points["b/version_0"], ("b/version_0", 50))
    for shift, (name, forks) in enumerate(points.items()):
        written = write_run(tmp_path / "runs" / name, config, {"steps": 60})
        starts = [
            START
            | {
                "step": step,
                "fork": {"run": f"runs/{origin}", "step": step, "checkpoint": None},
                "changed_settings": {LR: [0.003, 0.001], "seed_everything": [1, 2]},
            }
            for origin, step in forks
        ]
        written.write_starts([START, *starts])
        begin = forks[-1][1] if forks else 0
        rows = [{"step": step, "train/loss": 1 / (step + 1) + shift * (step >= begin)} for step in range(60)]
        written.write_rows(rows, [*rows[0]])
    return {name: tmp_path / "runs" / name for name in points}


def test_forks_are_listed_below_their_parents(tree, command):
    rows = [line for line in command("runs").out.splitlines() if "version_" in line]
    names = [row.split("  finished")[0].rstrip() for row in rows]
    assert [name.lstrip() for name in names] == ["a/version_0", "a/version_1", "b/version_0", "a/version_2"]
    margins = [len(name) - len(name.lstrip()) for name in names]
    assert [margin - margins[0] for margin in margins] == [0, 2, 2, 4]
    assert [row.split("fork ")[-1] for row in rows[1:]] == [
        f"{point}, model.optimizer.lr 0.001" for point in ("a/version_0@20", "a/version_0@40", "b/version_0@50")
    ]
    listed = json.loads(command("runs", "--json", "--sort=seed").out)
    assert [(row["parent"], row["fork_step"]) for row in listed[1:]] == [
        ("a/version_0", 20),
        ("a/version_0", 40),
        ("b/version_0", 50),
    ]
    shutil.rmtree(tree["a/version_0"])
    rows = [line.strip() for line in command("runs").out.splitlines() if "version_" in line]
    assert [row.split()[0] for row in rows] == ["a/version_1", "b/version_0", "a/version_2"]
    assert "fork a/version_0@20" in rows[0]


@pytest.mark.parametrize("named", [["a/version_0"], ["a/version_0", "b/version_0"], ["b/version_0"]])
def test_the_curves_of_forks_begin_at_the_branches(named, tree):
    """Also those of forks that are not named; a fork without its parent has the whole curve."""
    pages = [collect_run(tree[name], name, 100, []) for name in named]
    add_forks(pages, 100)
    (chart,) = draw_charts(pages)
    steps = {}
    for point in chart["spec"]["data"]["values"]:
        steps.setdefault(point["run"], []).append(point["step"])
    begins = {"a/version_0": 1, "a/version_1": 20, "b/version_0": 40, "a/version_2": 50}
    if named == ["b/version_0"]:
        begins = {"b/version_0": 1, "a/version_2": 50}
    assert steps == {name: [*range(begin, 61)] for name, begin in begins.items()}


def test_tensorboard_shows_forks_below_their_parents(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loggers = [CSVLogger("runs", "low", "version_3"), TensorBoardLogger()]
    describe_run(loggers, [], None, {}, ["gpt/version_0", "gpt/version_1"])
    assert Path(loggers[1].log_dir) == Path("runs/tensorboard/gpt_version_0/gpt_version_1/low_version_3")


def test_forks_of_several_seeds_are_a_group_of_their_own(parent):
    """Neither the parent nor a run with the settings of the fork from the start belongs to it."""
    cwd = parent.parents[2]
    run(*fit("gpt", **{"checkpoint.keep_every": STEP, "seed_everything": 2}), cwd=cwd).finish()
    run(*fit("gpt", **{"checkpoint.keep_every": STEP, LR: 0.001}), cwd=cwd).finish()
    arguments = (f"--{LR}=0.001", "--seeds=1,2")
    run("fit", f"--fork=copy_gpt@{STEP}", *arguments, cwd=cwd).refuse(f"only in their seeds .* differ in {LR}; name")
    child = run("fit", f"--fork=copy_gpt/version_[01]@{STEP}", *arguments, cwd=cwd, forks=True).finish()
    assert child.out.read_text().splitlines()[-1] == "  lightning-tfm compare runs/copy_gpt"
    runs = [Run(cwd / f"runs/copy_gpt/version_{version}") for version in range(5)]
    groups = [[run.folder.name for run in group.runs] for group in group_runs([("", run) for run in runs])]
    assert groups == [["version_0", "version_1"], ["version_2"], ["version_3", "version_4"]]
    assert [run.summary.seed for run in runs[3:]] == [1, 2]
    assert [run.forks[0]["fork"]["run"] for run in runs[3:]] == ["runs/copy_gpt/version_0", "runs/copy_gpt/version_1"]
    (difference,) = compare(group_runs([("", run) for run in runs if run != runs[2]]), None, []).differences
    assert difference.matched


def test_forks_of_seeds_are_resumed_and_further_ones_begin_at_the_same_runs(parent):
    cwd = parent.parents[2]
    arguments = ("fit", "--fork=copy_gpt@33", f"--{LR}=0.001", "--seeds=1")
    run(*arguments, cwd=cwd, forks=True).finish()
    child = run(*arguments, "--ckpt_path=last", cwd=cwd).finish()
    assert child.out.read_text().startswith("seed 1: finished before, runs/copy_gpt/version_1\n")
    child = run(*arguments[:-1], "--seeds=1", "--name=low", cwd=cwd, forks=True).finish()
    assert child.out.read_text().splitlines()[-1] == "  lightning-tfm compare runs/copy_gpt runs/low"
    assert_same_files(cwd / "runs/low/version_0", cwd / "runs/copy_gpt/version_1")
    run(*arguments[:-1], "--seeds=1..3", cwd=cwd).refuse("none with 2, 3; its seeds are 1")
    run("fit", "--fork=copy_gtp@33", "--seeds=1", cwd=cwd).refuse("--fork must name runs, but 'copy_gtp' names none")


def test_a_killed_fork_is_resumed(parent):
    whole, _ = fork(parent, 33, **{LR: 0.001})
    arguments = ("fit", "--fork=copy_gpt/version_0@33", f"--{LR}=0.001")
    run(*arguments, cwd=parent.parents[2], fault=("in a training step", 20)).die()  # of 8 and 27
    killed = whole.with_name("version_2")
    run(*arguments, "--ckpt_path=runs/copy_gpt/version_2", cwd=parent.parents[2]).finish()
    assert_same_files(killed, whole)
    assert [start["step"] for start in Run(killed).starts if "fork" in start] == [33]


def test_a_fork_is_forked(parent):
    """The steps before a fork began are those of its parent, also where a checkpoint has been copied."""
    first, _ = fork(parent, STEP, **{LR: 0.001})
    cwd, name = parent.parents[2], "copy_gpt/version_1"
    run("fit", f"--fork={name}@{STEP - 1}", cwd=cwd).refuse(f"from {STEP} to 60 .* those of .*copy_gpt/version_0'")
    run("fit", f"--fork={name}@50", f"--{LR}=0.01", cwd=cwd).finish()
    second = Run(first.with_name("version_2"))
    assert second.settings["fork"] == f"step {STEP}, {LR} 0.003; step 50, {LR} 0.001"
    run("fit", f"--fork={name}@50", cwd=cwd).finish()
    assert_same_files(first.with_name("version_3"), first)


def test_two_processes_fork_a_run_at_a_kept_checkpoint(tmp_path):
    start_two(*fit("gpt", **{"checkpoint.keep_every": STEP}), cwd=tmp_path).finish()
    before = contents(tmp_path / "runs")
    start_two("fit", "--fork=copy_gpt/version_0@33", cwd=tmp_path).refuse("must name a step of a kept checkpoint")
    assert contents(tmp_path / "runs") == before
    start_two("fit", f"--fork=copy_gpt/version_0@{STEP}", cwd=tmp_path).finish()
    assert_same_files(*(tmp_path / f"runs/copy_gpt/version_{version}" for version in (1, 0)))


def test_kept_checkpoints_are_those_of_an_interval_and_of_the_last_validations(tmp_path):
    settings = {"checkpoint.keep_every": 10, "checkpoint.keep_last": 2, "trainer.max_steps": 40}
    child = run(*fit("gpt", **settings), cwd=tmp_path).finish()
    folder = tmp_path / "runs/copy_gpt/version_0/checkpoints"
    assert {path.name for path in folder.glob("step_*")} == {f"step_{step}.ckpt" for step in (10, 20, 24, 30, 36, 40)}
    (needed,) = re.findall(r"needs about ([\d.]+) MB of disk space: 4 x", child.err.read_text())
    size = 4 * (folder / "step_40.ckpt").stat().st_size / 1e6
    assert 0.3 * size < float(needed) < size  # small networks have more metadata than weights


def test_repeated_steps_with_other_losses_are_reported(tmp_path, capsys):
    parent, replay = (Run(folder) for folder in new_folders(tmp_path, "parent", "replay"))
    rows = [{"step": step, "train/loss": 1 / (step + 3)} for step in range(9)]
    parent.write_rows(rows, [*rows[0]])
    for last in (7, 4):
        changed = [row | {"train/loss": row["train/loss"] * (1 + (row["step"] >= last) * 1e-15)} for row in rows[:7]]
        replay.write_rows(changed, [*rows[0]])
        compare_replay(replay, parent)
        assert ("differ from" in capsys.readouterr().err) == (last == 4)


def test_a_named_experiment_gives_the_settings_of_the_fork(parent):
    arguments = fit("gpt", **{LR: 0.001, "checkpoint.keep_every": STEP})
    child = run(*arguments, f"--fork=copy_gpt/version_0@{STEP}", cwd=parent.parents[2]).finish()
    assert f"at step {STEP}: {LR} 0.003 -> 0.001\n" in child.err.read_text()
