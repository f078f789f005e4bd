"""Resumed runs: which run is continued, where, and from which step."""

import re

import pytest
import yaml

from lightning_tfm.checkpoint import read, write
from lightning_tfm.runs.record import Run
from support.equality import assert_same_run, contents, equal
from support.experiments import STOPPING, fit, folder, new_folders
from support.processes import run, start, start_two

pytestmark = pytest.mark.run

EXTENDABLE = {"model.init_args.lr_schedule.decay": "inverse_sqrt"}
"""Settings of a schedule that does not depend on the number of steps."""

LOGGER = "--trainer.logger={class_path: lightning.pytorch.loggers.CSVLogger, init_args: {%s}}"


def assert_same_weights(*runs):
    """Assert that the last checkpoints of two runs have equal steps, weights and states of the optimizer."""
    contents = [read(run / "checkpoints/last.ckpt") for run in runs]
    for name in ("global_step", "state_dict", "optimizer_states"):
        equal(*(content[name] for content in contents))


def test_an_active_run_is_locked(tmp_path):
    arguments = fit("gpt", "--ckpt_path=last", **{"trainer.max_steps": 100_000})
    first = start(*arguments, cwd=tmp_path)
    first.wait_until(lambda: [*tmp_path.glob("runs/*/*/checkpoints/last.ckpt")])
    (second,) = new_folders(tmp_path, "second")
    (second / "runs").symlink_to(tmp_path / "runs")
    run(*arguments, cwd=second).refuse("/version_0' is locked by another process; stop that process first")
    first.process.terminate()
    assert first.wait() == 143


def test_a_run_cannot_be_resumed_to_fewer_steps_than_it_has(tmp_path, command):
    run(*fit("gpt", **EXTENDABLE), cwd=tmp_path, fault=("in a training step", 33)).die()
    before = contents(tmp_path)
    checkpoint = folder(tmp_path, "gpt") / "checkpoints/last.ckpt"
    saved = read(checkpoint)["global_step"]
    for path, steps, rule in (("last", saved - 1, "at least"), (checkpoint, saved, "above")):
        changed = EXTENDABLE | {"trainer.max_steps": steps}
        _, err = command(*fit("gpt", f"--ckpt_path={path}", **changed), status=2)
        assert f"trainer.max_steps must be {rule} the step of the checkpoint" in err
        assert contents(tmp_path) == before


def test_settings_of_the_hardware_may_change_and_are_recorded(killed, reference, tmp_path):
    settings = {"data.init_args.num_workers": 1, "trainer.enable_progress_bar": "false"}
    run(*fit("gpt", "--ckpt_path=runs/copy_gpt/version_0", **settings), cwd=tmp_path).finish()
    assert_same_run(tmp_path, reference("gpt"), "gpt")
    assert [start["changed_settings"] for start in Run(killed).starts] == [{}, {"data.init_args.num_workers": [0, 1]}]


def metrics_of(run):
    """Return the logged metrics but those of the speed, and the metrics of the test."""
    rows = [{name: row[name] for name in row if name != "trainer/tokens_per_second"} for row in run.metrics()]
    return [row for row in rows if row.keys() - {"step"}], run.summary.test


def test_a_finished_run_is_extended_in_a_new_folder(tmp_path):
    """The extended run equals one of that length, and the finished one stays as it is."""
    whole, extended = new_folders(tmp_path, "whole", "extended")
    settings = EXTENDABLE | {"trainer.max_steps": 36}
    run(*fit("gpt", **settings), cwd=whole).finish()
    run(*fit("gpt", **settings | {"trainer.max_steps": 24}), cwd=extended).finish()
    before = contents(extended / "runs")
    for named in ("last", "runs/copy_gpt/version_0"):
        child = run(*fit("gpt", f"--ckpt_path={named}", **settings | {"trainer.max_steps": 24}), cwd=extended)
        child.refuse("(has|have) (not )?finished")
        assert contents(extended / "runs") == before
    run(*fit("gpt", "--ckpt_path=last", **settings), cwd=extended).finish()
    first, second = (extended / f"runs/copy_gpt/version_{version}" for version in (0, 1))
    assert contents(first).items() <= before.items()
    assert_same_weights(second, whole / "runs/copy_gpt/version_0")
    assert metrics_of(Run(second)) == metrics_of(Run(whole / "runs/copy_gpt/version_0"))
    starts = [(start["step"], start["changed_settings"]) for start in Run(second).starts]
    assert starts == [(0, {}), (24, {"trainer.max_steps": [24, 36]})]
    assert yaml.safe_load((second / "config.yaml").read_text())["trainer"]["max_steps"] == 36


def test_other_data_are_refused_on_resuming(killed, tmp_path):
    before = contents(tmp_path / "runs")
    for split, size in (("val", 40), ("test", 40), ("train", 220)):
        checkpoint = killed / "checkpoints/last.ckpt"
        content = read(checkpoint)
        config = re.sub(rf"\b{split}_size: \d+", f"{split}_size: {size}", content["experiment"]["config"])
        write(content | {"experiment": content["experiment"] | {"config": config}}, checkpoint)
        child = run(*fit("gpt", "--ckpt_path=last", **{f"data.init_args.{split}_size": size}), cwd=tmp_path)
        child.refuse(f"the {split} data must match the run 'runs/copy_gpt/version_0'")
        checkpoint.write_bytes(before[checkpoint])
        assert contents(tmp_path / "runs") == before


def test_a_run_may_be_resumed_with_or_without_its_test(tmp_path):
    for first, second in (((), ("--skip-test",)), (("--skip-test",), ())):
        (cwd,) = new_folders(tmp_path, str(len(first)))
        run(*fit("gpt", *first), cwd=cwd, fault=("in a training step", 33)).die()
        run(*fit("gpt", "--ckpt_path=last", *second), cwd=cwd).finish()
        assert bool(Run(folder(cwd, "gpt")).summary.test) == (not second)


def test_a_run_that_starts_from_a_checkpoint_records_it(killed, tmp_path):
    (killed / "checkpoints/last.ckpt").replace(tmp_path / "begin.ckpt")
    run(*fit("gpt", "--ckpt_path=begin.ckpt", **{"trainer.val_check_interval": 15}), cwd=tmp_path).finish()
    new = tmp_path / "runs/copy_gpt/version_1"
    (entry,) = Run(new).starts
    assert (entry["step"], entry["checkpoint"]) == (30, "begin.ckpt")
    assert entry["changed_settings"] == {"trainer.val_check_interval": [12, 15]}
    assert yaml.safe_load((new / "config.yaml").read_text())["ckpt_path"] == "begin.ckpt"


def test_the_saved_settings_name_the_experiment(tmp_path):
    run(*fit("gpt", **{"trainer.max_steps": 2}), cwd=tmp_path).finish()
    run("fit", "--config", "runs/copy_gpt/version_0/config.yaml", cwd=tmp_path).finish()
    assert sorted(path.name for path in (tmp_path / "runs").glob("*/*")) == ["version_0", "version_1"]


def test_commands_that_start_together_have_folders_of_their_own(tmp_path):
    folders, logger = new_folders(tmp_path, "first", "second"), LOGGER % f"save_dir: {tmp_path}, name: mine"
    checkpoint = tmp_path / "mine/version_0/checkpoints/last.ckpt"
    for arguments in (fit("gpt", logger, **{"trainer.max_steps": 2}), ("test", checkpoint, logger)):
        for child in [start(*arguments, cwd=cwd) for cwd in folders]:
            child.finish()
    names = {path.parent.name for path in tmp_path.glob("mine/*/summary.json")}
    assert names == {"version_0", "version_1", "test_0", "test_1"}


def test_the_folder_of_another_run_is_not_entered(reference, tmp_path):
    checkpoint = folder(reference("gpt"), "gpt") / "checkpoints/last.ckpt"
    for name, arguments in (("fit", fit("gpt", **{"trainer.max_steps": 1})), ("test", ("test", checkpoint))):
        arguments = (*arguments, LOGGER % f"save_dir: runs, name: {name}, version: 0")
        run(*arguments, cwd=tmp_path).finish()
        before = contents(tmp_path / "runs")
        run(*arguments, cwd=tmp_path).refuse("trainer.logger must name a new folder")
        assert contents(tmp_path / "runs") == before
    run("test", "runs/fit/version_0", cwd=tmp_path).finish()
    assert contents(tmp_path / "runs/fit/version_0").items() <= before.items()


def test_a_dry_run_of_a_resumed_run_trains_a_batch(killed, tmp_path):
    before = contents(tmp_path / "runs")
    child = run(*fit("gpt", "--ckpt_path=last", "--dry-run"), cwd=tmp_path).finish()
    assert "dry run passed: trained and validated on one batch" in child.out.read_text()
    assert contents(tmp_path / "runs") == before
    child = run("test", killed / "checkpoints/last.ckpt", "--dry-run", cwd=tmp_path).finish()
    assert child.out.read_text() == "dry run passed: evaluated one batch; nothing was written\n"
    assert contents(tmp_path / "runs") == before


def test_two_processes_extend_a_finished_run(tmp_path):
    """Both resume from the same checkpoint, although the best one is copied to the new folder."""
    settings = EXTENDABLE | {"trainer.val_check_interval": 12}
    start_two(*fit("gpt", **settings, **{"trainer.max_steps": 18}), cwd=tmp_path).finish()
    start_two(*fit("gpt", "--ckpt_path=last", **settings, **{"trainer.max_steps": 24}), cwd=tmp_path).finish()
    extended = tmp_path / "runs/copy_gpt/version_1"
    assert [start["step"] for start in Run(extended).starts] == [0, 18]
    assert read(extended / "checkpoints/last.ckpt")["global_step"] == 24


def test_a_run_that_stopped_early_has_finished(tmp_path):
    arguments = fit("gpt", "--ckpt_path=last", **{"trainer.callbacks": STOPPING % "val/loss"})
    run(*arguments, cwd=tmp_path).finish()
    before = contents(tmp_path / "runs")
    message = run(*arguments, cwd=tmp_path).refuse("needs an unfinished run")
    assert contents(tmp_path / "runs") == before
    (path,) = re.findall("train on in a new folder, name '(.*?)'", message)
    for version, settings, steps in ((1, {"trainer.callbacks": STOPPING % "val/loss"}, 48), (2, {}, 60)):
        run(*fit("gpt", f"--ckpt_path={path}", **settings), cwd=tmp_path).finish()
        assert Run(tmp_path / f"runs/copy_gpt/version_{version}").summary.steps == steps
    assert contents(tmp_path / "runs").items() >= before.items()


def test_a_run_is_continued_after_a_time_limit(tmp_path):
    """Each run has its own time limit, and the last one the weights of a run without any."""
    whole, limited = new_folders(tmp_path, "whole", "limited")
    settings, steps = EXTENDABLE | {"trainer.max_steps": 10**6}, [0]
    for version in (0, 1):
        run(*fit("gpt", "--ckpt_path=last", **settings, **{"trainer.max_time": "00:00:00:01"}), cwd=limited).finish()
        summary = Run(limited / f"runs/copy_gpt/version_{version}").summary
        assert summary.stopped_early == "time limit"
        steps.append(summary.steps)
    assert 0 < steps[1] < steps[2]
    settings["trainer.max_steps"] = steps[2] + 3
    arguments = fit("gpt", "--ckpt_path=last", **settings)
    run(*arguments, cwd=limited).finish()
    run(*arguments, cwd=whole).finish()
    assert_same_weights(limited / "runs/copy_gpt/version_2", whole / "runs/copy_gpt/version_0")
    run(*arguments, cwd=limited).refuse("but all have finished; raise trainer.max_steps")


def test_a_resumed_run_of_epochs_equals_one_of_steps(reference, tmp_path):
    """A pass over 200 pairs has 13 batches of 15."""
    arguments = [argument for argument in fit("gpt", "--trainer.max_epochs=4") if "max_steps" not in str(argument)]
    run(*arguments, cwd=tmp_path, fault=("in a training step", 20)).die()
    run(*arguments, "--ckpt_path=last", cwd=tmp_path).finish()
    assert_same_run(tmp_path, reference("gpt", **{"trainer.max_steps": 52}), "gpt")
