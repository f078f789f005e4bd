"""Which run is resumed, and resumptions that are refused before the training."""

import json
import os
import shutil

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_tfm.callbacks import provenance
from lightning_tfm.checkpoint import FORMAT, write
from lightning_tfm.errors import UserError
from lightning_tfm.fit.resuming import Resumption, check_data, find_run, newest_checkpoint, open_run
from lightning_tfm.runs.record import Run
from support.equality import contents
from support.experiments import fit
from support.processes import run
from support.records import SUMMARY

AVERAGING = "[{class_path: lightning_tfm.callbacks.WeightAveraging, init_args: {decay: %s}}]"


def test_resuming_with_other_settings_is_refused(tmp_path, command):
    """The error names the setting, and no file of the run is changed."""
    arguments = {"trainer.callbacks": AVERAGING % 0.99}
    run(*fit("gpt", **arguments), cwd=tmp_path, fault=("in a training step", 8)).die()
    before = contents(tmp_path)
    for name, value, old in (
        ("model.init_args.optimizer.init_args.lr", 0.5, 0.003),
        ("model.init_args.label_smoothing", 0.1, 0.0),
        ("model.init_args.network.init_args.dropout", 0.3, 0.2),
        ("data.init_args.batch_size", 20, 15),
        ("seed_everything", 5, 1),
        ("trainer.gradient_clip_val", 0.5, 1.0),
        ("trainer.gradient_clip_algorithm", "value", "unset"),
        ("trainer.accumulate_grad_batches", 3, 1),
        ("trainer.precision", "bf16-mixed", "unset"),
        ("trainer.val_check_interval", 6, 12),
        ("checkpoint.monitor", "val/exact_match", "val/loss"),
        ("checkpoint.mode", "max", "unset"),
        ("trainer.callbacks.0.init_args.decay", 0.9, 0.99),
    ):
        settings = arguments | ({"trainer.callbacks": AVERAGING % 0.9} if name.endswith("decay") else {name: value})
        message = command(*fit("gpt", "--ckpt_path=last", **settings), status=2).err.splitlines()[-1]
        assert f"{name} must match the run 'runs/copy_gpt/version_0' ({old}) to resume it, but is {value};" in message
        assert contents(tmp_path) == before
    for option in ([], ["--dry-run"]):
        longer = fit("gpt", "--ckpt_path=last", *option, **arguments, **{"trainer.max_steps": 120})
        (line,) = command(*longer, status=2).err.splitlines()
        assert "trainer.max_steps must match the run 'runs/copy_gpt/version_0' (60) to resume it, since the" in line
        assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("stopped", "max_steps", "advice"),
    [
        ("time limit", 400, r"raise trainer.max_steps \(400\)"),
        ("time limit", 500, r"raise trainer.max_steps \(500\)"),
        ("callback", 600, "it has stopped early: .* name '.*/checkpoints/last.ckpt'"),
        (None, 500, r"raise trainer.max_steps \(500\)"),
        (None, None, "it cannot be extended"),
    ],
)
def test_a_finished_run_is_refused_with_advice(stopped, max_steps, advice, tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY | {"steps": 500, "stopped_early": stopped}))
    with pytest.raises(UserError, match=f"has finished; {advice}"):
        find_run(str(tmp_path), tmp_path.parent, max_steps)


def test_the_newest_valid_checkpoint_is_found(reference, tmp_path, capsys):
    resumed = Run(tmp_path)
    resumed.checkpoint_folder.mkdir()
    paths = [resumed.checkpoint_folder / name for name in (Run.LAST, Run.BEST, Run.STEP.format(1))]
    for age, path in enumerate(paths):
        shutil.copy(reference("gpt") / "runs/copy_gpt/version_0/checkpoints/last.ckpt", path)
        os.utime(path, (1000 - age, 1000 - age))
    paths[0].write_bytes(b"damaged")
    os.utime(paths[0], (1000, 1000))
    assert newest_checkpoint([resumed]) == paths[1]
    assert f"skipping {paths[0]}: it is damaged or incomplete" in capsys.readouterr().err


def write_runs(folder, *summaries):
    """Write runs with a checkpoint of step 5 and a summary, unless it is None; the last one is the newest."""
    hyper_parameters = {"network": {"class_path": "none", "init_args": {}}}
    saved = {"format_version": FORMAT, "state_dict": {}, "hyper_parameters": hyper_parameters}
    for version, summary in enumerate(summaries):
        write(saved | {"optimizer_states": [], "global_step": 5}, folder / f"version_{version}/checkpoints/last.ckpt")
        if summary is not None:
            (folder / f"version_{version}/summary.json").write_text(summary)


@pytest.mark.parametrize("steps", [10, 5])
def test_last_is_the_newest_run_that_has_not_finished(steps, tmp_path):
    """A finished run is newer than one that was stopped, and one of fewer steps could be extended."""
    write_runs(tmp_path, None, json.dumps(SUMMARY | {"steps": steps}))
    resumption = find_run("last", tmp_path, 10)
    assert (resumption.run.name, resumption.extends) == ("version_0", False)


@pytest.mark.parametrize("name", ["version_0", "date/version_0"])
def test_a_run_is_named_without_its_parent_folders(name, tmp_path):
    write_runs(tmp_path / "date", None, None)
    assert find_run(name, tmp_path / "date", 10).run == tmp_path / "date/version_0"


def test_last_without_an_intact_checkpoint_is_refused(tmp_path):
    write_runs(tmp_path, None)
    last = tmp_path / "version_0/checkpoints/last.ckpt"
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"--ckpt_path needs an undamaged checkpoint below '.*', but there is none"):
        find_run("last", tmp_path, 10)
    assert last.exists()


@pytest.mark.parametrize("content", ["[]", "{}", '{"steps": "1"}', "null", "{"])
def test_a_damaged_summary_does_not_stop_other_runs(content, tmp_path, capsys):
    write_runs(tmp_path, content, json.dumps(SUMMARY | {"steps": 5}))
    resumption = find_run("last", tmp_path, 10)
    assert (resumption.run.name, resumption.extends) == ("version_1", True)
    message = "version_0/summary.json' must be an intact file"
    assert message in capsys.readouterr().err
    with pytest.raises(UserError, match=f"{message}, but is damaged"):
        find_run(str(tmp_path / "version_0"), tmp_path, 10)


def test_data_that_are_not_read_are_not_compared(tmp_path):
    saved = {"train": "1", "val": "2", "test": "3"}
    check_data(tmp_path, saved, {"train": "1", "val": "2"}, skips_test=True)
    check_data(tmp_path, {"train": "1", "val": "2"}, saved, skips_test=False)
    for fingerprint, skips_test in (({"train": "1", "val": "0"}, True), ({"train": "1", "val": "2"}, False)):
        with pytest.raises(UserError, match="data must match the run"):
            check_data(tmp_path, saved, fingerprint, skips_test)


def test_a_run_that_another_process_has_continued_is_refused(reference, tmp_path):
    folder = shutil.copytree(reference("gpt") / "runs/copy_gpt/version_0", tmp_path / "runs/copy_gpt/version_0")
    (folder / "summary.json").unlink()
    resumed = Resumption(folder / "checkpoints/last.ckpt", modified=0, extends=False)
    metrics = (folder / "metrics.csv").read_bytes()
    with pytest.raises(UserError, match="has just saved a later one; run the command again"):
        open_run(CSVLogger(tmp_path / "runs", "copy_gpt", "version_0"), resumed, 50)
    assert (folder / "metrics.csv").read_bytes() == metrics


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_refused(tmp_path):
    checkpoint = tmp_path / "runs/new/version_0/checkpoints/last.ckpt"
    write({"optimizer_states": []}, checkpoint)

    def read_and_replace(path):
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
        return {"optimizer_states": [{}]}

    resumed = find_run(str(checkpoint.parents[1]), tmp_path, None, read_and_replace)
    with pytest.raises(UserError, match="has just saved a later one; run the command again"):
        open_run(CSVLogger(tmp_path / "runs", "new", "version_0"), resumed, 50)


def test_a_run_of_another_format_is_refused_unchanged(tmp_path):
    checkpoint = tmp_path / "runs/new/version_0/checkpoints/last.ckpt"
    write({}, checkpoint)
    (checkpoint.parents[1] / Run.PROVENANCE).write_text('[{"format": 1000000}]')
    (checkpoint.parents[1] / Run.METRICS).write_text("step,loss\n9,0.5\n")
    before = contents(tmp_path)
    resumed = Resumption(checkpoint, checkpoint.stat().st_mtime_ns, extends=False)
    with pytest.raises(UserError, match="use the version of lightning_tfm that wrote it"):
        open_run(CSVLogger(tmp_path / "runs", "new", "version_0"), resumed, 5)
    with pytest.raises(UserError, match="use the version of lightning_tfm that wrote it"):
        provenance._earlier_starts(Run(checkpoint.parents[1]))
    assert {name: content for name, content in contents(tmp_path).items() if name.name != ".lock"} == before
