"""Signals that save a checkpoint and end a run."""

import fcntl
import os
import pty
import shutil
import signal
import subprocess
import termios
import time
from contextlib import suppress

import pytest

from lightning_tfm.checkpoint import read
from lightning_tfm.runs.record import Run
from support.equality import assert_same_run
from support.experiments import fit, folder, wait_for_step
from support.processes import ENVIRONMENT, SCRIPT, TWO_PROCESSES, run, start, start_two

pytestmark = pytest.mark.run


SIGNALS = {"SIGTERM": 143, "SIGINT": 130, "SIGHUP": 129}
"""Exit status by signal."""
MOMENTS = [
    ("in a training step", 7),
    ("before an update of the weights", 12),
    ("in a validation", 4),
    ("while a checkpoint is written", 10),
    ("in a training step", 60),
]


@pytest.mark.parametrize(
    ("signum", "moment", "call"),
    [*((signum, *moment) for signum in ("SIGTERM", "SIGINT") for moment in MOMENTS), ("SIGHUP", *MOMENTS[0])],
)
def test_a_signal_saves_a_checkpoint_and_prints_the_resume_command(signum, moment, call, reference, tmp_path):
    child = run(*fit("gpt"), cwd=tmp_path, fault=(moment, call, signum))
    message, arguments = child.interrupted(SIGNALS[signum])
    step = read(folder(tmp_path, "gpt") / "checkpoints/last.ckpt")["global_step"]
    assert message == f"lightning-tfm: interrupted by {signum}, saved after step {step}; resume with:"
    assert step == call or moment != "in a training step", "no step is lost"
    assert arguments[-2:] == ["--ckpt_path", "runs/copy_gpt/version_0"]
    run(*arguments, cwd=tmp_path).finish()
    assert_same_run(tmp_path, reference("gpt"), "gpt")


@pytest.mark.parametrize("signum", ["SIGTERM", "SIGINT"])
def test_a_signal_in_the_test_ends_the_run_immediately(signum, tmp_path):
    child = run(*fit("gpt"), cwd=tmp_path, fault=("in the test", 1, signum))
    message, arguments = child.interrupted(SIGNALS[signum])
    assert message == f"lightning-tfm: interrupted by {signum}; resume with:"
    assert not (folder(tmp_path, "gpt") / "summary.json").exists()
    run(*arguments, cwd=tmp_path).finish()
    assert (folder(tmp_path, "gpt") / "summary.json").exists()


def test_resume_command_with_quoted_paths_resumes(killed, tmp_path):
    path = killed.parent.rename(tmp_path / "it's my run") / "version_0/checkpoints/last.ckpt"
    logger = "{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: runs, name: 'a\tb  c'}}"
    arguments = fit("gpt", "--ckpt_path", path.relative_to(tmp_path), "--trainer.logger", logger)
    child = run(*arguments, cwd=tmp_path, fault=("in a training step", 7, "SIGTERM"))
    run(*child.interrupted(143)[1], cwd=tmp_path).finish()
    assert [start["step"] for start in Run(next(tmp_path.glob("runs/*/version_0"))).starts] == [30, 37]


@pytest.mark.parametrize("devices", [(), TWO_PROCESSES])
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_all_processes_saves_a_checkpoint(signum, status, devices, tmp_path):
    """Ctrl-C in a terminal and SIGTERM from a scheduler also reach the second process and the data loader workers."""
    command = [
        SCRIPT,
        *map(str, fit("gpt", *devices, **{"data.init_args.num_workers": 2, "trainer.max_steps": 100_000})),
    ]
    with (tmp_path / "stderr").open("w") as err:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=ENVIRONMENT, stdout=err, stderr=err, start_new_session=True
        )
    wait_for_step(15, process, tmp_path, "gpt")  # after a validation, so that its workers exist, too
    os.killpg(process.pid, signum)
    try:
        assert process.wait(60) == status
    finally:
        process.kill()
    printed = (tmp_path / "stderr").read_text()
    assert printed.count(f"interrupted by {signum.name}, saved after step") == 1
    assert printed.count("interrupted") == 1
    assert "Traceback" not in printed


def test_a_repeated_sighup_of_a_terminal_that_was_closed_is_one(tmp_path):
    """The kernel and the shell both send one, and the messages cannot be written."""
    terminal, stream = pty.openpty()
    process = subprocess.Popen(
        [SCRIPT, *map(str, fit("gpt", **{"trainer.max_steps": 5_000}))],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdin=stream,
        stdout=stream,
        stderr=stream,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(stream)
    os.set_blocking(terminal, False)
    while not list(tmp_path.glob("runs/copy_gpt/*/checkpoints/last.ckpt")):
        with suppress(BlockingIOError):
            os.read(terminal, 65_536)
        assert process.poll() is None
        time.sleep(0.02)
    os.close(terminal)
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 129
    run(*fit("gpt", "--ckpt_path=last", "--dry-run", **{"trainer.max_steps": 5_000}), cwd=tmp_path).finish()


@pytest.mark.parametrize("moment", ["at the start", "in training"])
def test_two_signals_at_once_print_no_traceback(moment, tmp_path):
    for wait in (0.0, 0.02, 0.05):
        (tmp_path / "stderr").unlink(missing_ok=True)
        child = start(*fit("gpt", **{"trainer.max_steps": 5_000}), cwd=tmp_path)
        child.wait_until(child.err.exists)  # the command starts then
        if moment == "in training":
            child.wait_until(lambda: [*tmp_path.glob("runs/copy_gpt/*/checkpoints/last.ckpt")])
        time.sleep(0.3)
        for _ in range(2):
            with suppress(ProcessLookupError):  # it may have ended
                os.kill(child.process.pid, signal.SIGINT)
            time.sleep(wait)
        assert child.wait() == 130
        assert "Traceback" not in child.err.read_text()
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)


@pytest.mark.parametrize(("steps", "saved"), [(20, 21), (35, 36), (59, 60), (60, 60)])
def test_two_processes_stop_at_the_same_step_after_a_signal_to_the_second(steps, saved, tmp_path):
    """The signal is exchanged after the step, and read after the next step, in a validation or at the end."""
    fault = {"fault": ("in a training step", steps, "SIGTERM"), "faulty_rank": 1}
    child = start_two(*fit("gpt"), cwd=tmp_path, **fault)
    assert child.wait() == 143, child.err.read_text()
    assert [other.exitcode for other in child.others] == [0]  # so that a launcher does not kill the first
    assert f"saved after step {saved}" in child.err.read_text()
    assert read(folder(tmp_path, "gpt") / "checkpoints/last.ckpt")["global_step"] == saved
