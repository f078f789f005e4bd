"""Runs with other settings of the trainer."""

import re
from pathlib import Path

import pytest

from lightning_tfm.checkpoint import read
from lightning_tfm.runs.record import Run
from support.experiments import COPY, NETWORKS, STOPPING, fit, folder, write_task
from support.processes import EXPERIMENTS, run, start, start_two

pytestmark = pytest.mark.run


@pytest.mark.parametrize(
    ("model", "begin", "options"),
    [
        ("transformer", start, ["--trainer.precision=bf16-mixed"]),
        ("gpt", start_two, []),
        ("attention_lstm", start, ["--trainer.precision=bf16-mixed"]),
    ],
)
def test_experiments_train_and_generate_in_half_precision_or_with_two_processes(model, begin, options, tmp_path):
    sizes = ["--data.init_args.train_size=600", "--data.init_args.val_size=51", "--data.init_args.test_size=51"]
    sizes += ["--data.init_args.longer_size=51", "--data.init_args.batch_size=15", "--trainer.max_steps=20"]
    begin("fit", "--config", EXPERIMENTS / f"copy_{model}.yaml", *sizes, *options, cwd=tmp_path).finish()
    (run_folder,) = (tmp_path / f"runs/copy_{model}").iterdir()
    summary = Run(run_folder).summary
    assert {"exact_match", "longer/exact_match", "x10/exact_match"} <= set(summary.test)
    assert summary.samples_per_second * summary.train_seconds == pytest.approx(20 * 15, rel=0.1)
    assert read(run_folder / "checkpoints/last.ckpt")["global_step"] == 20

    longest = "1 " * 140
    lines = ["3 1 2", "", longest + longest, longest]
    child = run("generate", run_folder / "checkpoints/best.ckpt", "--beam-size", "2", *lines, cwd=tmp_path)
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


def test_a_run_without_validation_is_tested_at_its_end(monkeypatch, tmp_path, command):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    sizes = ["--data.init_args.train_size=600", "--data.init_args.val_size=20", "--data.init_args.test_size=30"]
    settings = [*sizes, "--data.init_args.longer_size=30", "--trainer.limit_val_batches=0", "--trainer.max_steps=5"]
    command("fit", "--config", COPY, *settings)
    trained = Run(tmp_path / "runs/copy_transformer/version_0")
    assert "exact_match" in trained.summary.test
    assert read(trained.checkpoint_folder / Run.LAST)["global_step"] == 5


@pytest.mark.parametrize(
    ("settings", "steps", "validations"),
    [
        ({"max_epochs": 3, "check_val_every_n_epoch": 1}, 15, [5, 10, 15]),
        ({"max_epochs": 3, "check_val_every_n_epoch": 2}, 15, [10]),
        ({"max_epochs": 1, "check_val_every_n_epoch": 2}, 5, [5]),
        ({"max_steps": 9, "check_val_every_n_epoch": 1}, 9, [5]),
        ({"max_epochs": 2, "val_check_interval": 4}, 10, [4, 8]),
        ({"max_epochs": 3, "check_val_every_n_epoch": 1, "accumulate_grad_batches": 2}, 8, [3, 6]),
    ],
)
def test_a_run_validates_after_passes_over_the_data(settings, steps, validations, tmp_path, command):
    """A pass over 100 pairs has 5 batches of 20."""
    arguments = ["fit", "--config", str(write_task("spelling_gpt", tmp_path)), "--trainer.log_every_n_steps=1"]
    command(*arguments, *(f"--trainer.{name}={value}" for name, value in settings.items()))
    rows = Run(Path("runs/spelling_gpt/version_0")).metrics()
    assert [row["step"] + 1 for row in rows if "val/loss" in row] == validations
    assert max(row["step"] for row in rows if "train/loss" in row) + 1 == steps


@pytest.mark.parametrize(("moment", "loss"), [("in the loss", "nan"), ("in a training step", r"[12]\.\d+")])
@pytest.mark.parametrize("model", NETWORKS)
def test_nan_stops_training_and_earlier_checkpoints_are_kept(model, moment, loss, tmp_path):
    """NaN occurs in the loss and thus in the gradients, or in the gradients alone."""
    arguments = fit(model, **{"trainer.log_every_n_steps": 10, "checkpoint.every_n_train_steps": 7})
    message = rf"at step 31 the loss is {loss} and .* \d+ weights are not finite \(first network\."
    line = run(*arguments, cwd=tmp_path, fault=(moment, 31, "nan")).refuse(message)
    checkpoints = folder(tmp_path, model) / "checkpoints"
    assert str(checkpoints.relative_to(tmp_path)) in line
    for name, step in (("last", 28), ("best", 24)):
        content = read(checkpoints / f"{name}.ckpt")
        assert content["global_step"] == step
        assert all(weight.isfinite().all() for weight in content["state_dict"].values())


KEEPING = "[{class_path: lightning.pytorch.callbacks.ModelCheckpoint, init_args: {monitor: %s}}]"


@pytest.mark.parametrize(
    ("options", "setting", "message"),
    [
        ([], {"checkpoint.monitor": "val/bleu"}, "checkpoint.monitor must be a metric of the validation"),
        ([], {"checkpoint.mode": "max"}, "checkpoint.mode must be min for val/loss, of which lower values are better"),
        ([], {"trainer.accumulate_grad_batches": 5}, r"val_check_interval must be a multiple of .* \(5\).* 12; try 10"),
        ([], {"trainer.callbacks": STOPPING % "val/los"}, "of EarlyStopping .* 'val/los'; did you mean 'val/loss'"),
        ([], {"model.init_args.optimizer.init_args.lr": 1e30}, r"gradients must be finite, but at step \d .*\.lr\)"),
        (["--dry-run"], {"trainer.accumulate_grad_batches": 5}, "val_check_interval must be a multiple"),
        (["--dry-run"], {"trainer.callbacks": STOPPING % "val/los"}, "did you mean 'val/loss'?"),
        (["--dry-run"], {"trainer.callbacks": STOPPING % "val/exact_match"}, "mode of EarlyStopping .* must be max"),
        (["--dry-run"], {"trainer.callbacks": KEEPING % "val/exact_match"}, "mode of ModelCheckpoint .* must be max"),
        (["--dry-run"], {"trainer.max_steps": -1}, "trainer.max_steps must be at least 1"),
    ],
)
def test_a_mistake_found_while_training_leaves_no_empty_folder(options, setting, message, tmp_path):
    tensorboard = "--trainer.logger+=lightning_tfm.loggers.TensorBoardLogger"
    settings = setting | {"trainer.log_every_n_steps": 100}
    run(*fit("gpt", tensorboard, *options, **settings), cwd=tmp_path).refuse(message)
    assert not (tmp_path / "runs/copy_gpt").exists()
    assert not (tmp_path / "runs/tensorboard").exists()


@pytest.mark.parametrize(
    ("option", "metric", "message"),
    [
        ("--trainer.num_sanity_val_steps=0", "val/exact_match", "mode of EarlyStopping .* must be max"),
        ("--skip-test", "train/los", "metric `train/los` which is not available"),
    ],
)
def test_a_metric_that_is_unknown_before_the_first_step_is_checked_later(option, metric, message, tmp_path):
    run(*fit("gpt", option, **{"trainer.callbacks": STOPPING % metric}), cwd=tmp_path).refuse(message)


def test_a_run_without_a_logger_writes_nothing(tmp_path):
    child = run(*fit("gpt", "--trainer.logger=false"), cwd=tmp_path).finish()
    assert "exact_match" in child.out.read_text()
    assert "no checkpoint is saved, and the last weights are tested" in child.err.read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"stdout", "stderr"}
