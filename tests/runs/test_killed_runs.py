"""Reproducibility bit for bit: of repeated runs, with any number of workers, killed and resumed."""

import os
import random
import signal
import subprocess

import pytest

from lightning_tfm.checkpoint import read
from support.equality import assert_same_run
from support.experiments import AVERAGED, MUON, NETWORKS, STOPPING, fit, folder, new_folders, wait_for_step
from support.marks import soak_except
from support.processes import ENVIRONMENT, SCRIPT, TWO_PROCESSES, run, start, start_two

pytestmark = pytest.mark.run


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.soak), 3])
@pytest.mark.parametrize("model", NETWORKS)
def test_repeated_runs_are_bitwise_equal(model, num_workers, reference, tmp_path):
    run(*fit(model, **{"data.init_args.num_workers": num_workers}), cwd=tmp_path).finish()
    assert_same_run(tmp_path, reference(model), model)


KILLS = [
    ("before an update of the weights", 3),
    ("while a checkpoint is written", 80),
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


MODELS = ["gpt", *(pytest.param(name, marks=pytest.mark.soak) for name in NETWORKS if name != "gpt")]


@pytest.mark.parametrize("model", MODELS)
def test_a_repeatedly_killed_run_is_bitwise_equal(model, reference, tmp_path):
    for fault in KILLS:
        run(*fit(model, "--ckpt_path=last"), cwd=tmp_path, fault=fault).die()
    run(*fit(model, "--ckpt_path=last"), cwd=tmp_path).finish()
    # Lightning logs a step after saving it: a kill in between, within a millisecond, loses its row of metrics.csv
    assert_same_run(tmp_path, reference(model), model, rows_lost=2)


@pytest.mark.parametrize("call", [1, 30])
def test_a_kill_loses_at_most_the_steps_since_the_last_checkpoint(call, tmp_path):
    run(*fit("gpt"), cwd=tmp_path, fault=("before an update of the weights", 5 + call)).die()
    assert (4 + call) - read(folder(tmp_path, "gpt") / "checkpoints/last.ckpt")["global_step"] < 5


VARIANTS = {
    "accumulated batches": {"trainer.accumulate_grad_batches": 3, "trainer.max_steps": 20},
    "no validation": {"trainer.limit_val_batches": 0},
    "validation at every save": {"trainer.val_check_interval": 5},
    "validation at every step": {"trainer.val_check_interval": 1, "trainer.max_steps": 20},
    "workers": {"data.init_args.num_workers": 2},
    "bf16": {"trainer.precision": "bf16-mixed"},
    "float64": {"trainer.precision": "64-true"},
    "early stopping": {"trainer.callbacks": STOPPING % "val/loss"},
    "compiled": {
        "trainer.callbacks": "[{class_path: lightning_tfm.callbacks.Compile, init_args: {backend: aot_eager}}]"
    },
    "averaged weights": AVERAGED,
    "averaged weights in float64": AVERAGED | {"trainer.precision": "64-true"},
    "averaged weights in bfloat16": AVERAGED | {"trainer.precision": "bf16-true"},
    "two threads": {"trainer.enable_progress_bar": "false", "num_threads": 2},
    "Muon": MUON,
    "inverse square root": {"model.init_args.lr_schedule.decay": "inverse_sqrt"},
}


@pytest.mark.parametrize(
    "variant",
    soak_except(
        ("accumulated batches", "no validation", "bf16", "early stopping", "averaged weights", "Muon"), VARIANTS
    ),
)
def test_other_settings_resume_bitwise(variant, tmp_path):
    settings = VARIANTS[variant]
    whole, killed = new_folders(tmp_path, "whole", "killed")
    run(*fit("gpt", **settings), cwd=whole).finish()
    arguments = fit("gpt", "--ckpt_path=last", **settings)
    for call in (7, 9):
        run(*arguments, cwd=killed, fault=("in a training step", call)).die()
    run(*arguments, cwd=killed).finish()
    assert_same_run(killed, whole, "gpt", best=variant != "no validation")


def signal_after(steps, signum, process, cwd, model):
    """Signal a process as soon as its run has saved a checkpoint of at least this step."""
    wait_for_step(steps, process, cwd, model)
    os.kill(process.pid, signum)


def test_two_processes_stop_together_and_resume_bitwise(reference, tmp_path):
    """Lightning starts the second process, as for users."""
    command = [SCRIPT, *map(str, fit("transformer", *TWO_PROCESSES, "--ckpt_path=last"))]
    for steps, signum, status in ((10, signal.SIGTERM, 143), (30, signal.SIGINT, 130)):
        with (tmp_path / "stderr").open("w") as err:
            process = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=err)
        signal_after(steps, signum, process, tmp_path, "transformer")
        assert process.wait(300) == status
        printed = (tmp_path / "stderr").read_text()
        assert "Traceback" not in printed
        assert "saved after step" in printed
    start_two(*fit("transformer", "--ckpt_path=last"), cwd=tmp_path).finish()
    assert_same_run(tmp_path, reference("transformer", start_two), "transformer")


@pytest.mark.soak
@pytest.mark.parametrize("model", NETWORKS)
def test_two_repeatedly_killed_processes_resume_bitwise(model, reference, tmp_path):
    statuses = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}
    for number, signum in enumerate([signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGKILL], start=1):
        child = start_two(*fit(model, "--ckpt_path=last"), cwd=tmp_path)
        signal_after(10 * number, signum, child.process, tmp_path, model)
        assert child.wait() == statuses[signum]
        if signum != signal.SIGKILL:
            printed = child.err.read_text()
            assert "Traceback" not in printed
            assert "saved after step" in printed
    start_two(*fit(model, "--ckpt_path=last"), cwd=tmp_path).finish()
    assert_same_run(tmp_path, reference(model, start_two), model, rows_lost=2)


@pytest.mark.soak
@pytest.mark.parametrize("model", NETWORKS)
def test_a_run_killed_at_random_times_is_bitwise_equal(model, reference, tmp_path):
    """Kill 30 times: some time after a checkpoint, in a step, a checkpoint or a validation, or during the start."""
    settings = {"trainer.max_steps": 800}
    arguments = fit(model, "--ckpt_path=last", **settings)
    draw, step = random.Random(model), 0
    for _ in range(30):
        child = start(*arguments, cwd=tmp_path)
        if draw.random() < 0.3:
            child.process.join(draw.uniform(0.0, 0.3))
            child.process.kill()
        else:
            step += draw.randint(1, 20)
            signal_after(step, signal.SIGKILL, child.process, tmp_path, model)
        assert child.wait() == -9, child.err.read_text()
        step = max((read(path)["global_step"] for path in tmp_path.glob("runs/*/*/checkpoints/last.ckpt")), default=0)
    run(*arguments, cwd=tmp_path).finish()
    assert_same_run(tmp_path, reference(model, **settings), model, rows_lost=30)
