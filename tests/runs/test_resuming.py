"""Reproducibility bit for bit: of repeated runs, with any number of workers, killed and resumed."""

from __future__ import annotations

import csv
import errno
import fcntl
import json
import os
import pty
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger

from lightning_tfm.callbacks import provenance
from lightning_tfm.checkpoint import FORMAT, read, write
from lightning_tfm.errors import Interrupted, UserError
from lightning_tfm.fit.resuming import Resumption, check_data, find_run, open_run
from lightning_tfm.runs.metrics_writer import MetricsWriter
from lightning_tfm.runs.record import Run
from support.equality import assert_same_files, assert_same_run, contents, equal
from support.experiments import NETWORKS, fit, folder, new_folders, wait_for_step
from support.processes import TWO_PROCESSES, in_process, run, start, start_two
from support.records import SUMMARY


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("model", NETWORKS)
@pytest.mark.run
def test_repeated_runs_are_bitwise_equal(model, num_workers, reference, tmp_path):
    child = run(*fit(model, **{"data.init_args.num_workers": num_workers}), cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()
    assert_same_run(tmp_path, reference(model), model)


KILLS = [
    ("before an update of the weights", 3),
    ("while a checkpoint is written", 400),
    ("in a validation", 2),
    ("after an update of the weights", 8),
    ("before a checkpoint is on the disk", 2),
    ("between two passes over the data", 2),
    ("after a validation", 1),
    ("after a checkpoint is in its place", 3),
    ("after a checkpoint is in its place", 1),
    ("after a checkpoint is in its place", 1),
    ("in the test", 2),
]
"""The moment and the number of the call at which each successive start of one run is killed."""


@pytest.mark.parametrize(
    "model", ["gpt", *(pytest.param(name, marks=pytest.mark.soak) for name in NETWORKS if name != "gpt")]
)
@pytest.mark.run
def test_a_repeatedly_killed_run_is_bitwise_equal(model, reference, tmp_path):
    for fault in KILLS:
        child = run(*fit(model, "--ckpt_path=last"), cwd=tmp_path, fault=fault)
        assert child.wait() == -9, (fault, child.err.read_text())
    child = run(*fit(model, "--ckpt_path=last"), cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()
    # Lightning logs a step after saving it: a kill in between, within a millisecond, loses its row of metrics.csv
    assert_same_run(tmp_path, reference(model), model, rows_lost=2)


@pytest.mark.parametrize("call", [1, 2, 3, 13, 30])
@pytest.mark.run
def test_a_kill_loses_at_most_the_steps_since_the_last_checkpoint(call, tmp_path):
    child = run(*fit("gpt"), cwd=tmp_path, fault=("before an update of the weights", 5 + call))
    assert child.wait() == -9
    assert (4 + call) - read(folder(tmp_path, "gpt") / "checkpoints/last.ckpt")["global_step"] < 5


VARIANTS = {
    "accumulated batches": {"trainer.accumulate_grad_batches": 3, "trainer.max_steps": 20},
    "no validation": {"trainer.limit_val_batches": 0},
    "validation at every save": {"trainer.val_check_interval": 5},
    "validation at every step": {"trainer.val_check_interval": 1, "trainer.max_steps": 20},
    "workers": {"data.init_args.num_workers": 2},
    "bf16": {"trainer.precision": "bf16-mixed"},
    "float64": {"trainer.precision": "64-true"},
    "early stopping": {
        "trainer.callbacks": "[{class_path: lightning.pytorch.callbacks.EarlyStopping, "
        "init_args: {monitor: val/loss, patience: 1, min_delta: 0.5}}]"
    },
    "compiled": {
        "trainer.callbacks": "[{class_path: lightning_tfm.callbacks.Compile, init_args: {backend: aot_eager}}]"
    },
    "averaged weights": {"trainer.callbacks": "[{class_path: lightning_tfm.callbacks.WeightAveraging}]"},
    "averaged weights in float64": {
        "trainer.callbacks": "[{class_path: lightning_tfm.callbacks.WeightAveraging}]",
        "trainer.precision": "64-true",
    },
    "averaged weights in bfloat16": {
        "trainer.callbacks": "[{class_path: lightning_tfm.callbacks.WeightAveraging}]",
        "trainer.precision": "bf16-true",
    },
    "two threads": {"trainer.enable_progress_bar": "false"},
    "Muon": {"model.init_args.optimizer": "lightning_tfm.optimizers.Muon"},
    "inverse square root": {"model.init_args.lr_schedule.decay": "inverse_sqrt"},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.run
def test_other_settings_resume_bitwise(variant, tmp_path):
    settings, threads = VARIANTS[variant], "2" if variant == "two threads" else "1"
    whole, killed = new_folders(tmp_path, "whole", "killed")
    child = run(*fit("gpt", **settings), cwd=whole, OMP_NUM_THREADS=threads)
    assert child.wait() == 0, child.err.read_text()
    arguments = fit("gpt", "--ckpt_path=last", **settings)
    for fault in (("in a training step", 7), ("in a training step", 9), ("in the test", 1)):
        child = run(*arguments, cwd=killed, fault=fault, OMP_NUM_THREADS=threads)
        assert child.wait() == -9, child.err.read_text()
    child = run(*arguments, cwd=killed, OMP_NUM_THREADS=threads)
    assert child.wait() == 0, child.err.read_text()
    assert_same_run(killed, whole, "gpt", best=variant != "no validation")


def test_validation_within_an_accumulated_step_is_refused(tmp_path):
    settings = {"trainer.accumulate_grad_batches": 5}
    child = run(*fit("gpt", **settings), cwd=tmp_path)
    assert child.wait() == 2
    message = r"val_check_interval must be a multiple of trainer.accumulate_grad_batches \(5\).* but is 12; try 10"
    assert re.search(message, child.err.read_text())


def test_a_failed_rewrite_keeps_the_logged_rows(monkeypatch, tmp_path):
    """A new column changes the header, and so the whole file."""
    writer, path = MetricsWriter(str(tmp_path)), tmp_path / "metrics.csv"
    for step in range(5):
        writer.log_metrics({"train/loss": 0.5}, step)
    writer.save()
    writer.log_metrics({"train/loss": 0.4}, 5)
    writer.save()
    before = path.read_bytes()
    writer.log_metrics({"val/loss": 0.3}, 5)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(OSError, match=r"No space left on device: '.*/metrics\.csv'"):
            writer.save()
    assert path.read_bytes() == before
    writer.save()
    assert [(row["step"], row["train/loss"], row["val/loss"]) for row in Run(tmp_path).read_rows()[0]] == [
        *((str(step), "0.5", "") for step in range(5)),
        ("5", "0.4", ""),
        ("5", "", "0.3"),
    ]
    assert sorted(other.name for other in tmp_path.iterdir()) == ["metrics.csv"]


DAMAGES = {
    "NUL": b"0.5,3\0,,",
    "only NUL": bytes(512),
    "a stray quote": b'0.5,"3,,',
    "not UTF-8": b"0.5,\xff3,,",
    "a missing column": b"0.5,3,",
    "an additional column": b"0.5,3,,,",
    "no step": b"0.5,,,",
    "text": b"0.5,3,loss,",
    "two rows": b"0.5,3,0.5,3,,",
    "too long": b"0.5,3,," + b" " * 200_000,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_rows_are_skipped_and_kept_in_a_copy(damage, tmp_path, capsys):
    path = tmp_path / "metrics.csv"
    lines = [
        b"epoch,step,train/loss,val/loss",
        b"0,0,0.7,",
        DAMAGES[damage],
        b"0,1,0.6,",
        b"0,1,,0.8",
        b"0,2,0.5,",
        b"0,",
    ]
    path.write_bytes(b"\r\n".join(lines))
    assert [(row["step"], row["train/loss"]) for row in Run(tmp_path).read_rows()[0]] == [
        ("0", "0.7"),
        ("1", "0.6"),
        ("1", ""),
        ("2", "0.5"),
    ]
    MetricsWriter(str(tmp_path)).keep(2)
    assert [row["step"] for row in Run(tmp_path).read_rows()[0]] == ["0", "1", "1"]
    assert (tmp_path / "metrics.csv.damaged").read_bytes() == b"\r\n".join(lines)
    assert "skipping 1 damaged row of " in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{}", "[{}]", "[1]", "null", "{", "1", "[" * 5000])
def test_a_damaged_provenance_is_kept_in_a_copy(content, tmp_path, capsys):
    path = tmp_path / "provenance.json"
    path.write_text(content)
    assert Run(tmp_path).wandb_id is None
    assert provenance._earlier_starts(Run(tmp_path)) == []
    assert "provenance.json' must be a file that fit has written, but is damaged: " in (
        printed := capsys.readouterr().err
    )
    assert "it is kept as provenance.json.damaged" in printed
    assert path.with_name("provenance.json.damaged").read_text() == content


@pytest.mark.parametrize("content", ["[]", "{}", '{"steps": "1"}', "null", "{"])
def test_a_damaged_summary_does_not_stop_other_runs(content, tmp_path, capsys):
    network = {"class_path": "none", "init_args": {}}
    saved = {
        "format_version": FORMAT,
        "state_dict": {},
        "hyper_parameters": {"network": network},
        "optimizer_states": [],
        "global_step": 5,
    }
    for version, summary in enumerate((content, json.dumps(SUMMARY | {"steps": 5}))):
        checkpoint = tmp_path / f"version_{version}/checkpoints/last.ckpt"
        write(saved, checkpoint)
        (tmp_path / f"version_{version}/summary.json").write_text(summary)
    found = find_run("last", tmp_path, 10)
    assert (found.run.name, found.extends) == ("version_1", True)
    assert "/version_0/summary.json' must be a file that fit has written" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"version_0/summary.json' must be a file that fit has written, but is damaged"):
        find_run(str(tmp_path / "version_0"), tmp_path, 10)


@pytest.mark.run
def test_a_partially_written_log_is_continued(reference, tmp_path):
    assert run(*fit("gpt"), cwd=tmp_path, fault=("in a training step", 33)).wait() == -9
    with (folder(tmp_path, "gpt") / "metrics.csv").open("a") as file:
        file.write("0,3")
    assert run(*fit("gpt", "--ckpt_path=last"), cwd=tmp_path).wait() == 0
    assert_same_run(tmp_path, reference("gpt"), "gpt")


@pytest.mark.run
def test_resuming_from_a_path_starts_a_new_run(tmp_path):
    """The run continues in a new folder and leaves the first one unchanged."""
    assert run(*fit("gpt"), cwd=tmp_path, fault=("in a training step", 33)).wait() == -9
    killed = folder(tmp_path, "gpt")
    before = contents(killed)
    child = run(*fit("gpt", f"--ckpt_path={killed / 'checkpoints/last.ckpt'}"), cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()
    assert contents(killed) == before
    (other,) = set(killed.parent.iterdir()) - {killed}
    assert read(other / "checkpoints/last.ckpt")["global_step"] == 60
    assert (other / "checkpoints/best.ckpt").exists()


STOPPING = (
    "[{class_path: lightning.pytorch.callbacks.EarlyStopping, init_args: {monitor: %s, patience: 1, min_delta: 9}}]"
)
KEEPING = "[{class_path: lightning.pytorch.callbacks.ModelCheckpoint, init_args: {monitor: %s}}]"
AVERAGING = "[{class_path: lightning_tfm.callbacks.WeightAveraging, init_args: {decay: %s}}]"


def test_resuming_with_other_settings_is_refused(tmp_path, monkeypatch, capsys):
    """The error names the setting, and no file of the run is changed."""
    monkeypatch.chdir(tmp_path)
    arguments = {"trainer.callbacks": AVERAGING % 0.99}
    assert run(*fit("gpt", **arguments), cwd=tmp_path, fault=("in a training step", 33)).wait() == -9
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
        assert in_process(monkeypatch, *fit("gpt", "--ckpt_path=last", **settings)) == 2
        message = capsys.readouterr().err.splitlines()[-1]
        assert f"{name} must match the run 'runs/copy_gpt/version_0' ({old}) to resume it, but is {value};" in message
        assert contents(tmp_path) == before
    for option in ([], ["--dry-run"]):
        longer = fit("gpt", "--ckpt_path=last", *option, **arguments, **{"trainer.max_steps": 120})
        assert in_process(monkeypatch, *longer) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "trainer.max_steps must match the run 'runs/copy_gpt/version_0' (60) to resume it, since the" in line
        assert contents(tmp_path) == before


@pytest.mark.run
def test_a_run_cannot_be_resumed_to_fewer_steps_than_it_has(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = {"model.init_args.lr_schedule.decay": "inverse_sqrt"}
    assert run(*fit("gpt", **settings), cwd=tmp_path, fault=("in a training step", 33)).wait() == -9
    before = contents(tmp_path)
    checkpoint = folder(tmp_path, "gpt") / "checkpoints/last.ckpt"
    saved = read(checkpoint)["global_step"]
    for path, steps, rule in (("last", saved - 1, "at least"), (checkpoint, saved, "above")):
        changed = settings | {"trainer.max_steps": steps}
        assert in_process(monkeypatch, *fit("gpt", f"--ckpt_path={path}", **changed)) == 2
        assert f"trainer.max_steps must be {rule} the step of the checkpoint" in capsys.readouterr().err
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


@pytest.mark.run
def test_settings_of_the_hardware_may_change_and_are_recorded(reference, tmp_path):
    assert run(*fit("gpt"), cwd=tmp_path, fault=("in a training step", 33)).wait() == -9
    settings = {"data.init_args.num_workers": 1, "trainer.enable_progress_bar": "false"}
    child = run(*fit("gpt", "--ckpt_path=runs/copy_gpt/version_0", **settings), cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()
    assert_same_run(tmp_path, reference("gpt"), "gpt")
    starts = json.loads((folder(tmp_path, "gpt") / "provenance.json").read_text())
    assert [start["changed_settings"] for start in starts] == [{}, {"data.init_args.num_workers": [0, 1]}]


def metrics_of(run):
    """Return the logged metrics but those of the speed, and the metrics of the test."""
    rows = list(csv.DictReader((run / "metrics.csv").read_text().splitlines()))
    for row in rows:
        row.pop("tokens_per_second")
        row.pop("epoch")
    return [row for row in rows if any(row.values())], json.loads((run / "summary.json").read_text())["test"]


@pytest.mark.run
def test_a_finished_run_is_extended_in_a_new_folder(tmp_path):
    """The extended run equals one of that length, and the finished one stays as it is."""
    whole, extended = new_folders(tmp_path, "whole", "extended")
    settings = {"model.init_args.lr_schedule.decay": "inverse_sqrt", "trainer.max_steps": 36}
    assert run(*fit("gpt", **settings), cwd=whole).wait() == 0
    assert run(*fit("gpt", **settings | {"trainer.max_steps": 24}), cwd=extended).wait() == 0
    before = contents(extended / "runs")
    for named in ("last", "runs/copy_gpt/version_0"):
        child = run(*fit("gpt", f"--ckpt_path={named}", **settings | {"trainer.max_steps": 24}), cwd=extended)
        assert child.wait() == 2
        assert re.search(r"(has|have) (not )?finished", child.err.read_text())
        assert contents(extended / "runs") == before
    child = run(*fit("gpt", "--ckpt_path=last", **settings), cwd=extended)
    assert child.wait() == 0, child.err.read_text()
    first, second = (extended / f"runs/copy_gpt/version_{version}" for version in (0, 1))
    assert contents(first).items() <= before.items()
    ours, theirs = (read(run / "checkpoints/last.ckpt") for run in (second, whole / "runs/copy_gpt/version_0"))
    for name in ("global_step", "state_dict", "optimizer_states"):
        equal(ours[name], theirs[name])
    assert metrics_of(second) == metrics_of(whole / "runs/copy_gpt/version_0")
    starts = json.loads((second / "provenance.json").read_text())
    assert [(start["step"], start["changed_settings"]) for start in starts] == [
        (0, {}),
        (24, {"trainer.max_steps": [24, 36]}),
    ]
    assert yaml.safe_load((second / "config.yaml").read_text())["trainer"]["max_steps"] == 36


@pytest.mark.run
def test_last_is_the_newest_run_that_has_not_finished(tmp_path):
    """A finished run is newer than one that was stopped."""
    assert run(*fit("gpt"), cwd=tmp_path, fault=("in a training step", 33)).wait() == -9
    assert run(*fit("gpt"), cwd=tmp_path).wait() == 0
    stopped, finished = (tmp_path / f"runs/copy_gpt/version_{version}" for version in (0, 1))
    before = contents(finished)
    child = run(*fit("gpt", "--ckpt_path=last"), cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()
    assert contents(finished) == before
    assert_same_files(stopped, finished)


@pytest.mark.run
def test_last_resumes_an_unfinished_run_rather_than_extend_a_finished_one(tmp_path):
    assert run(*fit("gpt"), cwd=tmp_path, fault=("in a training step", 33)).wait() == -9
    assert run(*fit("gpt", **{"trainer.max_steps": 5}), cwd=tmp_path).wait() == 0
    child = run(*fit("gpt", "--ckpt_path=last"), cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()
    assert "resuming from runs/copy_gpt/version_0" in child.err.read_text()
    assert len(list((tmp_path / "runs/copy_gpt").iterdir())) == 2


@pytest.mark.run
def test_other_data_are_refused_on_resuming(tmp_path):
    assert run(*fit("gpt"), cwd=tmp_path, fault=("in a training step", 33)).wait() == -9
    before = contents(tmp_path / "runs")
    for split, size in (("val", 40), ("test", 40), ("train", 220)):
        checkpoint = folder(tmp_path, "gpt") / "checkpoints/last.ckpt"
        content = read(checkpoint)
        content["experiment"]["config"] = content["experiment"]["config"].replace(
            f"{split}_size: {30 if split != 'train' else 200}", f"{split}_size: {size}"
        )
        write(content, checkpoint)
        child = run(*fit("gpt", "--ckpt_path=last", **{f"data.init_args.{split}_size": size}), cwd=tmp_path)
        assert child.wait() == 2
        assert f"the {split} data must match the run 'runs/copy_gpt/version_0'" in child.err.read_text()
        checkpoint.write_bytes(before[checkpoint])
        assert contents(tmp_path / "runs") == before


def test_data_that_are_not_read_are_not_compared(tmp_path):
    saved = {"train": "1", "val": "2", "test": "3"}
    check_data(tmp_path, saved, {"train": "1", "val": "2"}, skips_test=True)
    check_data(tmp_path, {"train": "1", "val": "2"}, saved, skips_test=False)
    for fingerprint, skips_test in (({"train": "1", "val": "0"}, True), ({"train": "1", "val": "2"}, False)):
        with pytest.raises(UserError, match="data must match the run"):
            check_data(tmp_path, saved, fingerprint, skips_test)


@pytest.mark.run
def test_a_run_may_be_resumed_with_or_without_its_test(tmp_path):
    for first, second in (((), ("--skip-test",)), (("--skip-test",), ())):
        cwd = tmp_path / str(len(first))
        cwd.mkdir()
        assert run(*fit("gpt", *first), cwd=cwd, fault=("in a training step", 33)).wait() == -9
        child = run(*fit("gpt", "--ckpt_path=last", *second), cwd=cwd)
        assert child.wait() == 0, child.err.read_text()
        summary = json.loads((folder(cwd, "gpt") / "summary.json").read_text())
        assert ("test" in summary) == (not second)


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
    path, metrics = (checkpoint.parents[1] / name for name in ("provenance.json", "metrics.csv"))
    path.write_text('[{"format": 1000000}]')
    metrics.write_text("step,loss\n9,0.5\n")
    before = contents(tmp_path)
    resumed = Resumption(checkpoint, checkpoint.stat().st_mtime_ns, extends=False)
    with pytest.raises(UserError, match="use the version of lightning_tfm that wrote it"):
        open_run(CSVLogger(tmp_path / "runs", "new", "version_0"), resumed, 5)
    with pytest.raises(UserError, match="use the version of lightning_tfm that wrote it"):
        provenance._earlier_starts(Run(path.parent))
    assert {name: content for name, content in contents(tmp_path).items() if name.name != ".lock"} == before


@pytest.mark.run
def test_a_run_that_starts_from_a_checkpoint_records_it(tmp_path):
    assert run(*fit("gpt"), cwd=tmp_path, fault=("in a training step", 33)).wait() == -9
    (folder(tmp_path, "gpt") / "checkpoints/last.ckpt").replace(tmp_path / "begin.ckpt")
    child = run(*fit("gpt", "--ckpt_path=begin.ckpt", **{"trainer.val_check_interval": 15}), cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()
    new = tmp_path / "runs/copy_gpt/version_1"
    (entry,) = json.loads((new / "provenance.json").read_text())
    assert (entry["step"], entry["checkpoint"]) == (30, "begin.ckpt")
    assert entry["changed_settings"] == {"trainer.val_check_interval": [12, 15]}
    assert yaml.safe_load((new / "config.yaml").read_text())["ckpt_path"] == "begin.ckpt"


@pytest.mark.run
def test_the_saved_settings_name_the_experiment(tmp_path):
    assert run(*fit("gpt", **{"trainer.max_steps": 2}), cwd=tmp_path).wait() == 0
    child = run("fit", "--config", "runs/copy_gpt/version_0/config.yaml", cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()
    assert sorted(path.name for path in (tmp_path / "runs").glob("*/*")) == ["version_0", "version_1"]


@pytest.mark.run
def test_commands_that_start_together_have_folders_of_their_own(tmp_path):
    logger = f"{{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {{save_dir: {tmp_path}, name: mine}}}}"
    arguments = fit("gpt", f"--trainer.logger={logger}", **{"trainer.max_steps": 2})
    folders = new_folders(tmp_path, "first", "second")
    children = [start(*arguments, cwd=cwd) for cwd in folders]
    assert [child.wait() for child in children] == [0, 0], [child.err.read_text() for child in children]
    checkpoint = tmp_path / "mine/version_0/checkpoints/last.ckpt"
    children = [start("test", checkpoint, f"--trainer.logger={logger}", cwd=cwd) for cwd in folders]
    assert [child.wait() for child in children] == [0, 0], [child.err.read_text() for child in children]
    assert {path.parent.name for path in tmp_path.glob("mine/*/summary.json")} == {
        "version_0",
        "version_1",
        "test_0",
        "test_1",
    }


@pytest.mark.run
def test_a_test_does_not_enter_the_folder_of_a_run(reference, tmp_path):
    checkpoint = folder(reference("gpt"), "gpt") / "checkpoints/last.ckpt"
    logger = "{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: runs, name: mine, version: 0}}"
    assert run("test", checkpoint, f"--trainer.logger={logger}", cwd=tmp_path).wait() == 0
    before = contents(tmp_path / "runs")
    child = run("test", checkpoint, f"--trainer.logger={logger}", cwd=tmp_path)
    assert child.wait() == 2
    assert "trainer.logger must name a new folder" in child.err.read_text()
    assert contents(tmp_path / "runs") == before


@pytest.mark.run
def test_a_dry_run_of_a_resumed_run_trains_a_batch(tmp_path):
    assert run(*fit("gpt"), cwd=tmp_path, fault=("in a training step", 33)).wait() == -9
    before = contents(tmp_path / "runs")
    child = run(*fit("gpt", "--ckpt_path=last", "--dry-run"), cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()
    assert "dry run passed: trained and validated on one batch" in child.out.read_text()
    assert contents(tmp_path / "runs") == before
    checkpoint = folder(tmp_path, "gpt") / "checkpoints/last.ckpt"
    child = run("test", checkpoint, "--dry-run", cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()
    assert child.out.read_text() == "dry run passed: evaluated one batch; nothing was written\n"
    assert contents(tmp_path / "runs") == before


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"checkpoint.monitor": "val/bleu"}, "checkpoint.monitor must be a metric of the validation"),
        ({"checkpoint.mode": "max"}, "checkpoint.mode must be min for val/loss, of which lower values are better"),
        ({"trainer.accumulate_grad_batches": 5}, "val_check_interval must be a multiple"),
        ({"model.init_args.optimizer.init_args.lr": 1e30}, "loss and gradients must be finite"),
    ],
)
@pytest.mark.run
def test_a_mistake_found_while_training_leaves_no_empty_folder(setting, message, tmp_path):
    tensorboard = "--trainer.logger+=lightning_tfm.loggers.TensorBoardLogger"
    child = run(*fit("gpt", tensorboard, **setting | {"trainer.log_every_n_steps": 100}), cwd=tmp_path)
    assert child.wait() == 2
    assert message in child.err.read_text()
    assert not (tmp_path / "runs/copy_gpt").exists()
    assert not (tmp_path / "runs/tensorboard").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"trainer.accumulate_grad_batches": 5}, "val_check_interval must be a multiple"),
        ({"trainer.callbacks": STOPPING % "val/los"}, "did you mean 'val/loss'?"),
        ({"trainer.callbacks": STOPPING % "val/exact_match"}, "mode of EarlyStopping in trainer.callbacks must be max"),
        ({"trainer.callbacks": KEEPING % "val/exact_match"}, "mode of ModelCheckpoint in trainer.callbacks must be"),
        ({"trainer.max_steps": -1}, "trainer.max_steps must be at least 1"),
    ],
)
@pytest.mark.run
def test_a_dry_run_finds_mistakes_of_the_training(setting, message, tmp_path):
    child = run(*fit("gpt", "--dry-run", **setting), cwd=tmp_path)
    assert child.wait() == 2
    assert message in child.err.read_text().splitlines()[-1]


@pytest.mark.run
def test_early_stopping_by_an_unknown_metric_is_one_mistake(tmp_path):
    """Report it before the first step, except that the names of training metrics are not known before."""
    child = run(*fit("gpt", **{"trainer.callbacks": STOPPING % "val/los"}), cwd=tmp_path)
    assert child.wait() == 2
    message = "monitor of EarlyStopping in trainer.callbacks must be a metric of the validation, but is 'val/los'"
    assert f"{message}; did you mean 'val/loss'?" in child.err.read_text().splitlines()[-1]
    assert not (tmp_path / "runs/copy_gpt").exists()
    child = run(*fit("gpt", **{"trainer.callbacks": STOPPING % "train/los"}), cwd=tmp_path)
    assert child.wait() == 2
    assert "conditioned on metric `train/los` which is not available" in child.err.read_text().splitlines()[-1]
    assert "Traceback" not in child.err.read_text()


@pytest.mark.run
def test_modes_are_checked_without_a_sanity_check(tmp_path):
    settings = {"trainer.callbacks": STOPPING % "val/exact_match", "trainer.num_sanity_val_steps": 0}
    child = run(*fit("gpt", **settings), cwd=tmp_path)
    assert child.wait() == 2
    assert "mode of EarlyStopping in trainer.callbacks must be max" in child.err.read_text().splitlines()[-1]


@pytest.mark.run
def test_a_run_without_a_logger_writes_nothing(tmp_path):
    child = run(*fit("gpt", "--trainer.logger=false"), cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()
    assert "exact_match" in child.out.read_text()
    assert "no checkpoint is saved, and the last weights are tested" in child.err.read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"stdout", "stderr"}


@pytest.mark.run
def test_a_closed_terminal_saves_a_checkpoint(reference, tmp_path):
    child = run(*fit("gpt"), cwd=tmp_path, fault=("in a training step", 7, "SIGHUP"))
    assert child.wait() == 129
    message, command = child.err.read_text().splitlines()[-2:]
    assert message == "lightning-tfm: interrupted by SIGHUP, saved after step 7; resume with:"
    assert command.endswith("--ckpt_path runs/copy_gpt/version_0")
    assert run(*shlex.split(command)[1:], cwd=tmp_path).wait() == 0
    assert_same_run(tmp_path, reference("gpt"), "gpt")


@pytest.mark.run
def test_a_repeated_sighup_of_a_terminal_that_was_closed_is_one(tmp_path):
    """The kernel and the shell both send one, and the messages cannot be written."""
    ours, theirs = pty.openpty()
    command = [Path(sys.executable).with_name("lightning-tfm"), *map(str, fit("gpt", **{"trainer.max_steps": 5_000}))]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=os.environ | {"WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    while not list(tmp_path.glob("runs/copy_gpt/*/checkpoints/last.ckpt")):
        with suppress(BlockingIOError):
            os.read(ours, 65_536)
        assert process.poll() is None
        time.sleep(0.02)
    os.close(ours)
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 129
    child = run(*fit("gpt", "--ckpt_path=last", "--dry-run", **{"trainer.max_steps": 5_000}), cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()


@pytest.mark.parametrize("moment", ["at the start", "in training"])
@pytest.mark.run
def test_two_signals_at_once_print_no_traceback(moment, tmp_path):
    for wait in (0.0, 0.02, 0.05):
        (tmp_path / "stderr").unlink(missing_ok=True)
        child = start(*fit("gpt", **{"trainer.max_steps": 5_000}), cwd=tmp_path)
        while not (tmp_path / "stderr").exists():  # the command starts then
            time.sleep(0.02)
        while moment == "in training" and not list(tmp_path.glob("runs/copy_gpt/*/checkpoints/last.ckpt")):
            assert child.process.is_alive(), child.err.read_text()
            time.sleep(0.02)
        time.sleep(0.3)
        for _ in range(2):
            with suppress(ProcessLookupError):  # it may have ended
                os.kill(child.process.pid, signal.SIGINT)
            time.sleep(wait)
        assert child.wait() == 130
        assert "Traceback" not in child.err.read_text()
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)


# Two processes


def by_the_console_script(model, cwd, *options):
    """Start a run of two processes as users do: Lightning starts the second one."""
    command = [Path(sys.executable).with_name("lightning-tfm"), *map(str, fit(model, *TWO_PROCESSES, *options))]
    environment = {**os.environ, "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    with (cwd / "stderr").open("w") as err:
        return subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.DEVNULL, stderr=err)


def signal_after(steps, signum, process, cwd, model):
    """Signal a process as soon as its run has saved a checkpoint of at least this step."""
    wait_for_step(steps, process, cwd, model)
    os.kill(process.pid, signum)


@pytest.fixture
def whole(tmp_path):
    """Return a function that trains an undisturbed run of two processes, and returns its folder and another one."""

    def train(model):
        folders = new_folders(tmp_path, "whole", "disturbed")
        child = start_two(*fit(model), cwd=folders[0])
        assert child.wait() == 0, child.err.read_text()
        return folders

    return train


@pytest.mark.run
def test_two_processes_stop_together_and_resume_bitwise(whole):
    undisturbed, disturbed = whole("transformer")
    for steps, signum, status in ((10, signal.SIGTERM, 143), (30, signal.SIGINT, 130)):
        process = by_the_console_script("transformer", disturbed, "--ckpt_path=last")
        signal_after(steps, signum, process, disturbed, "transformer")
        assert process.wait(300) == status
        printed = (disturbed / "stderr").read_text()
        assert "Traceback" not in printed
        assert "saved after step" in printed
    child = start_two(*fit("transformer", "--ckpt_path=last"), cwd=disturbed)
    assert child.wait() == 0, child.err.read_text()
    assert_same_run(disturbed, undisturbed, "transformer")


@pytest.mark.run
@pytest.mark.parametrize(("steps", "saved"), [(20, 21), (35, 36), (59, 60), (60, 60)])
def test_two_processes_stop_at_the_same_step_after_a_signal_to_the_second(steps, saved, tmp_path):
    """The signal is exchanged after the step, and read after the next step, in a validation or at the end."""
    fault = {"fault": ("in a training step", steps, "SIGTERM"), "faulty_rank": 1}
    child = start_two(*fit("gpt"), cwd=tmp_path, **fault)
    assert child.wait() == 143, child.err.read_text()
    assert [other.exitcode for other in child.others] == [0]  # so that a launcher does not kill the first
    assert f"saved after step {saved}" in child.err.read_text()
    assert read(folder(tmp_path, "gpt") / "checkpoints/last.ckpt")["global_step"] == saved


@pytest.mark.run
@pytest.mark.parametrize("model", NETWORKS)
def test_two_repeatedly_killed_processes_resume_bitwise(model, whole):
    undisturbed, disturbed = whole(model)
    for number, signum in enumerate([signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGKILL], start=1):
        child = start_two(*fit(model, "--ckpt_path=last"), cwd=disturbed)
        signal_after(10 * number, signum, child.process, disturbed, model)
        status = child.wait()
        assert status == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[signum]
        if signum != signal.SIGKILL:
            printed = child.err.read_text()
            assert "Traceback" not in printed
            assert "saved after step" in printed
    child = start_two(*fit(model, "--ckpt_path=last"), cwd=disturbed)
    assert child.wait() == 0, child.err.read_text()
    assert_same_run(disturbed, undisturbed, model, rows_lost=2)


@pytest.mark.run
def test_a_run_of_two_processes_resumes_on_one(tmp_path):
    """The weights differ from those of one process by rounding only, since gradients are summed in another order."""
    whole, resumed = new_folders(tmp_path, "whole", "resumed")
    settings = {"trainer.precision": "64-true", "model.init_args.network.init_args.dropout": 0.0}
    child = run(*fit("transformer", **settings), cwd=whole)
    assert child.wait() == 0, child.err.read_text()
    child = start_two(*fit("transformer", **settings), cwd=resumed)
    signal_after(20, signal.SIGTERM, child.process, resumed, "transformer")
    assert child.wait() == 143, child.err.read_text()
    child = run(*fit("transformer", "--ckpt_path=last", **settings), cwd=resumed)
    assert child.wait() == 0, child.err.read_text()
    ours, theirs = (read(folder(cwd, "transformer") / "checkpoints/last.ckpt") for cwd in (resumed, whole))
    assert ours["global_step"] == theirs["global_step"] == 60
    for name, weight in theirs["state_dict"].items():
        torch.testing.assert_close(ours["state_dict"][name], weight, atol=1e-9, rtol=1e-8)


# At random times


@pytest.mark.run
@pytest.mark.parametrize("model", NETWORKS)
def test_a_run_killed_at_random_times_is_bitwise_equal(model, tmp_path):
    """Kill 30 times: some time after a checkpoint, in a step, a checkpoint or a validation, or during the start."""
    whole, killed = new_folders(tmp_path, "whole", "killed")
    settings = {"trainer.max_steps": 800}
    child = run(*fit(model, **settings), cwd=whole)
    assert child.wait() == 0, child.err.read_text()
    draw = random.Random(model)
    arguments = fit(model, "--ckpt_path=last", **settings)
    step = 0
    for _ in range(30):
        child = start(*arguments, cwd=killed)
        if draw.random() < 0.3:
            child.process.join(draw.uniform(0.0, 0.3))
            child.process.kill()
        else:
            step += draw.randint(1, 20)
            signal_after(step, signal.SIGKILL, child.process, killed, model)
        assert child.wait() == -9, child.err.read_text()
        step = max((read(path)["global_step"] for path in killed.glob("runs/*/*/checkpoints/last.ckpt")), default=0)
    child = run(*arguments, cwd=killed)
    assert child.wait() == 0, child.err.read_text()
    assert_same_run(killed, whole, model, rows_lost=30)


@pytest.mark.run
def test_two_processes_extend_a_finished_run(tmp_path):
    """Both resume from the same checkpoint, although the best one is copied to the new folder."""
    settings = {"model.init_args.lr_schedule.decay": "inverse_sqrt", "trainer.val_check_interval": 12}
    child = start_two(*fit("gpt", **settings, **{"trainer.max_steps": 18}), cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()
    child = start_two(*fit("gpt", "--ckpt_path=last", **settings, **{"trainer.max_steps": 24}), cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()
    extended = tmp_path / "runs/copy_gpt/version_1"
    assert [start["step"] for start in json.loads((extended / "provenance.json").read_text())] == [0, 18]
    assert read(extended / "checkpoints/last.ckpt")["global_step"] == 24


@pytest.mark.run
def test_a_run_that_stopped_early_has_finished(tmp_path):
    arguments = fit("gpt", "--ckpt_path=last", **{"trainer.callbacks": STOPPING % "val/loss"})
    assert run(*arguments, cwd=tmp_path).wait() == 0
    before = contents(tmp_path / "runs")
    child = run(*arguments, cwd=tmp_path)
    assert child.wait() == 2
    message = child.err.read_text()
    assert "needs an unfinished run" in message
    assert contents(tmp_path / "runs") == before
    (path,) = re.findall("train on in a new folder, name '(.*?)'", message)
    for version, settings, steps in ((1, {"trainer.callbacks": STOPPING % "val/loss"}, 48), (2, {}, 60)):
        child = run(*fit("gpt", f"--ckpt_path={path}", **settings), cwd=tmp_path)
        assert child.wait() == 0, child.err.read_text()
        assert summary_of(tmp_path, version)["steps"] == steps
    assert contents(tmp_path / "runs").items() >= before.items()


def summary_of(cwd, version):
    return json.loads((cwd / f"runs/copy_gpt/version_{version}/summary.json").read_text())


@pytest.mark.run
def test_a_run_is_continued_after_a_time_limit(tmp_path):
    """Each run has its own time limit, and the last one the weights of a run without any."""
    whole, limited = new_folders(tmp_path, "whole", "limited")
    settings = {"model.init_args.lr_schedule.decay": "inverse_sqrt", "trainer.max_steps": 10**6}
    steps = [0]
    for version in (0, 1):
        child = run(*fit("gpt", "--ckpt_path=last", **settings, **{"trainer.max_time": "00:00:00:01"}), cwd=limited)
        assert child.wait() == 0, child.err.read_text()
        summary = summary_of(limited, version)
        assert summary["stopped_early"] == "time limit"
        steps.append(summary["steps"])
    assert 0 < steps[1] < steps[2]
    settings["trainer.max_steps"] = steps[2] + 3
    arguments = fit("gpt", "--ckpt_path=last", **settings)
    assert run(*arguments, cwd=limited).wait() == 0
    assert run(*arguments, cwd=whole).wait() == 0
    runs = (limited / "runs/copy_gpt/version_2", whole / "runs/copy_gpt/version_0")
    ours, theirs = (read(run / "checkpoints/last.ckpt") for run in runs)
    for name in ("global_step", "state_dict", "optimizer_states"):
        equal(ours[name], theirs[name])
    child = run(*arguments, cwd=limited)
    assert child.wait() == 2
    assert "but all have finished; raise trainer.max_steps" in child.err.read_text()


@pytest.mark.run
def test_a_new_run_does_not_enter_the_folder_of_another(tmp_path):
    logger = "{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: runs, name: mine, version: 0}}"
    arguments = fit("gpt", f"--trainer.logger={logger}", **{"trainer.max_steps": 1})
    assert run(*arguments, cwd=tmp_path).wait() == 0
    before = contents(tmp_path / "runs")
    child = run(*arguments, cwd=tmp_path)
    assert child.wait() == 2
    assert "trainer.logger must name a new folder" in child.err.read_text()
    assert contents(tmp_path / "runs") == before
    child = run("test", "runs/mine/version_0", cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()
    assert contents(tmp_path / "runs/mine/version_0").items() <= before.items()


def test_an_interruption_while_a_checkpoint_is_written_ends_as_one(tmp_path, monkeypatch):
    """Torch then fails to close the file that is half written, and raises an error of its own."""
    write({"weight": torch.zeros(3)}, tmp_path / "last.ckpt")
    before = contents(tmp_path)

    def save(content, file):
        file.write(b"half of the file" * 100)
        try:
            raise Interrupted(signal.SIGINT)
        finally:
            raise RuntimeError("unexpected pos 1600 vs 1500")

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(Interrupted):
        write({"weight": torch.ones(3)}, tmp_path / "last.ckpt")
    assert contents(tmp_path) == before


@pytest.mark.run
def test_a_resumed_run_of_epochs_equals_one_of_steps(tmp_path):
    """A pass over 200 pairs has 13 batches of 15."""
    epochs, steps = new_folders(tmp_path, "epochs", "steps")
    arguments = [argument for argument in fit("gpt", "--trainer.max_epochs=4") if "max_steps" not in str(argument)]
    assert run(*arguments, cwd=epochs, fault=("in a training step", 20)).wait() == -9
    child = run(*arguments, "--ckpt_path=last", cwd=epochs)
    assert child.wait() == 0, child.err.read_text()
    assert run(*fit("gpt", **{"trainer.max_steps": 52}), cwd=steps).wait() == 0
    assert_same_run(epochs, steps, "gpt")
