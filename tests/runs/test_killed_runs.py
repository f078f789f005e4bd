"""Reproducibility bit for bit: of repeated runs, with any number of workers, killed and resumed."""

from __future__ import annotations

import os
import random
import signal
import subprocess

import pytest
import torch

from lightning_tfm.checkpoint import read
from support.equality import assert_same_run
from support.experiments import AVERAGED, MUON, NETWORKS, STOPPING, fit, folder, new_folders, wait_for_step
from support.processes import ENVIRONMENT, SCRIPT, TWO_PROCESSES, run, start, start_two

pytestmark = pytest.mark.run


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("model", NETWORKS)
def test_repeated_runs_are_bitwise_equal(model, num_workers, reference, tmp_path):
    run(*fit(model, **{"data.init_args.num_workers": num_workers}), cwd=tmp_path).finish()
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
def test_a_repeatedly_killed_run_is_bitwise_equal(model, reference, tmp_path):
    for fault in KILLS:
        run(*fit(model, "--ckpt_path=last"), cwd=tmp_path, fault=fault).die()
    run(*fit(model, "--ckpt_path=last"), cwd=tmp_path).finish()
    # Lightning logs a step after saving it: a kill in between, within a millisecond, loses its row of metrics.csv
    assert_same_run(tmp_path, reference(model), model, rows_lost=2)


@pytest.mark.parametrize("call", [1, 2, 3, 13, 30])
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
    "two threads": {"trainer.enable_progress_bar": "false"},
    "Muon": MUON,
    "inverse square root": {"model.init_args.lr_schedule.decay": "inverse_sqrt"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_settings_resume_bitwise(variant, tmp_path):
    settings, threads = VARIANTS[variant], "2" if variant == "two threads" else "1"
    whole, killed = new_folders(tmp_path, "whole", "killed")
    run(*fit("gpt", **settings), cwd=whole, OMP_NUM_THREADS=threads).finish()
    arguments = fit("gpt", "--ckpt_path=last", **settings)
    for fault in (("in a training step", 7), ("in a training step", 9), ("in the test", 1)):
        run(*arguments, cwd=killed, fault=fault, OMP_NUM_THREADS=threads).die()
    run(*arguments, cwd=killed, OMP_NUM_THREADS=threads).finish()
    assert_same_run(killed, whole, "gpt", best=variant != "no validation")


def by_the_console_script(model, cwd, *options):
    """Start a run of two processes as users do: Lightning starts the second one."""
    command = [SCRIPT, *map(str, fit(model, *TWO_PROCESSES, *options))]
    with (cwd / "stderr").open("w") as err:
        return subprocess.Popen(command, cwd=cwd, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=err)


def signal_after(steps, signum, process, cwd, model):
    """Signal a process as soon as its run has saved a checkpoint of at least this step."""
    wait_for_step(steps, process, cwd, model)
    os.kill(process.pid, signum)


def test_two_processes_stop_together_and_resume_bitwise(tmp_path):
    undisturbed, disturbed = new_folders(tmp_path, "undisturbed", "disturbed")
    start_two(*fit("transformer"), cwd=undisturbed).finish()
    for steps, signum, status in ((10, signal.SIGTERM, 143), (30, signal.SIGINT, 130)):
        process = by_the_console_script("transformer", disturbed, "--ckpt_path=last")
        signal_after(steps, signum, process, disturbed, "transformer")
        assert process.wait(300) == status
        printed = (disturbed / "stderr").read_text()
        assert "Traceback" not in printed
        assert "saved after step" in printed
    start_two(*fit("transformer", "--ckpt_path=last"), cwd=disturbed).finish()
    assert_same_run(disturbed, undisturbed, "transformer")


@pytest.mark.parametrize("model", NETWORKS)
def test_two_repeatedly_killed_processes_resume_bitwise(model, tmp_path):
    undisturbed, disturbed = new_folders(tmp_path, "undisturbed", "disturbed")
    start_two(*fit(model), cwd=undisturbed).finish()
    for number, signum in enumerate([signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGKILL], start=1):
        child = start_two(*fit(model, "--ckpt_path=last"), cwd=disturbed)
        signal_after(10 * number, signum, child.process, disturbed, model)
        status = child.wait()
        assert status == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[signum]
        if signum != signal.SIGKILL:
            printed = child.err.read_text()
            assert "Traceback" not in printed
            assert "saved after step" in printed
    start_two(*fit(model, "--ckpt_path=last"), cwd=disturbed).finish()
    assert_same_run(disturbed, undisturbed, model, rows_lost=2)


def test_a_run_of_two_processes_resumes_on_one(tmp_path):
    """The weights differ from those of one process by rounding only, since gradients are summed in another order."""
    whole, resumed = new_folders(tmp_path, "whole", "resumed")
    settings = {"trainer.precision": "64-true", "model.init_args.network.init_args.dropout": 0.0}
    run(*fit("transformer", **settings), cwd=whole).finish()
    child = start_two(*fit("transformer", **settings), cwd=resumed)
    signal_after(20, signal.SIGTERM, child.process, resumed, "transformer")
    assert child.wait() == 143, child.err.read_text()
    run(*fit("transformer", "--ckpt_path=last", **settings), cwd=resumed).finish()
    actual, expected = (read(folder(cwd, "transformer") / "checkpoints/last.ckpt") for cwd in (resumed, whole))
    assert actual["global_step"] == expected["global_step"] == 60
    for name, weight in expected["state_dict"].items():
        torch.testing.assert_close(actual["state_dict"][name], weight, atol=1e-9, rtol=1e-8)


@pytest.mark.parametrize("model", NETWORKS)
def test_a_run_killed_at_random_times_is_bitwise_equal(model, tmp_path):
    """Kill 30 times: some time after a checkpoint, in a step, a checkpoint or a validation, or during the start."""
    whole, killed = new_folders(tmp_path, "whole", "killed")
    settings = {"trainer.max_steps": 800}
    child = run(*fit(model, **settings), cwd=whole).finish()
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
    run(*arguments, cwd=killed).finish()
    assert_same_run(killed, whole, model, rows_lost=30)
