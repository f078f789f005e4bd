"""Runs with other settings of the trainer."""

from pathlib import Path

import pytest

from lightning_tfm.checkpoint import read
from lightning_tfm.runs.record import Run
from support.experiments import NETWORKS, STOPPING, fit, folder, write_task
from support.processes import run

pytestmark = pytest.mark.run


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
