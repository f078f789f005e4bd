"""Runs with damaged checkpoints or a full disk."""

import shutil

import pytest

from lightning_tfm.checkpoint import read
from lightning_tfm.runs.record import Run
from support.equality import assert_same_run
from support.experiments import fit, folder
from support.processes import run

pytestmark = pytest.mark.run


def test_averages_beside_the_checkpoints_are_ignored_and_kept(reference, tmp_path):
    """An average is newer, cannot be resumed from, and may have a name like theirs."""
    arguments = fit("gpt", **{"checkpoint.keep_last": 2})
    run(*arguments, cwd=tmp_path, fault=("in a training step", 33)).die()
    checkpoints = folder(tmp_path, "gpt") / "checkpoints"
    names = ["mean", "step_mean", "step_", "step_1.5", "step_-1", "step_012", "step_٣", "best_step_12", "step_99999"]
    steps = [checkpoints / f"step_{step}.ckpt" for step in (12, 24)]
    means = [checkpoints / f"{name}.ckpt" for name in names]
    run("average", *steps, "--output", means[0], cwd=tmp_path).finish()
    for mean in means[1:]:
        shutil.copy(means[0], mean)
    before = {mean: mean.read_bytes() for mean in means}
    child = run(*arguments, "--ckpt_path=last", cwd=tmp_path).finish()
    assert "damaged" not in child.err.read_text()
    assert {mean: mean.read_bytes() for mean in means} == before
    assert not any(step.exists() for step in steps), "old steps are deleted, in spite of the averages"
    assert_same_run(tmp_path, reference("gpt"), "gpt")


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped"])
def test_last_falls_back_to_the_newest_intact_checkpoint(damage, reference, tmp_path):
    run(*fit("attention_lstm"), cwd=tmp_path, fault=("in a training step", 29)).die()
    killed = folder(tmp_path, "attention_lstm")
    last = killed / "checkpoints/last.ckpt"
    data = bytearray(last.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 4
    last.write_bytes({"cut": data[:-1000], "empty": b""}.get(damage, data))
    child = run(*fit("attention_lstm", "--ckpt_path=last"), cwd=tmp_path).finish()
    (line,) = (line for line in child.err.read_text().splitlines() if "damaged" in line)
    assert "last.ckpt: it is damaged" in line
    assert [start["step"] for start in Run(killed).starts] == [0, 24], "from best.ckpt"
    assert_same_run(tmp_path, reference("attention_lstm"), "attention_lstm")


def test_a_full_disk_is_reported_and_the_previous_checkpoint_is_kept(reference, tmp_path):
    child = run(*fit("transformer"), cwd=tmp_path, fault=("in a training step", 18, "the disk is full"))
    child.refuse(
        "the checkpoint 'runs/.*/last.ckpt' cannot be written: File too large; the one before it is kept; free"
    )
    checkpoints = folder(tmp_path, "transformer") / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["best.ckpt", "last.ckpt"]
    assert read(checkpoints / "last.ckpt")["global_step"] == 15
    run(*fit("transformer", "--ckpt_path=last"), cwd=tmp_path).finish()
    assert_same_run(tmp_path, reference("transformer"), "transformer")


def test_a_full_disk_in_the_test_is_reported_and_the_run_resumes(tmp_path):
    arguments = fit("gpt", **{"trainer.max_steps": 12, "data.init_args.test_size": 300})
    child = run(*arguments, cwd=tmp_path, fault=("in the test", 1, "the disk is full"))
    child.refuse(
        "version_0/predictions.jsonl' cannot be written: File too large; .*--ckpt_path runs/copy_gpt/version_0$"
    )
    run(*arguments, "--ckpt_path=runs/copy_gpt/version_0", cwd=tmp_path).finish()
    assert len(Run(folder(tmp_path, "gpt")).predictions) > 300
