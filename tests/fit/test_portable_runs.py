"""The setting `portable`, which fixes the kernels before Python starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_tfm.errors import UserError
from lightning_tfm.runs.record import Run
from lightning_tfm.system.portability import VARIABLES, VariablesError, check_portable
from support.processes import ENVIRONMENT, SCRIPT

ROOT = Path(__file__).parents[2]
SIZES = [f"--data.{name}_size=20" for name in ("val", "test", "longer")]


def run_script(folder, *arguments, **environment):
    """Run `lightning-tfm` in a folder, and return what it prints."""
    options = {"env": ENVIRONMENT | environment, "capture_output": True, "text": True}
    child = subprocess.run([SCRIPT, *arguments], cwd=folder, check=False, **options)
    assert child.returncode == 0, child.stdout + child.stderr
    return child.stdout


def short_run(folder, *options, **environment):
    run_script(folder, "fit", "copy_gpt", "--trainer.max_steps=2", *SIZES, *options, **environment)
    (path,) = folder.glob("runs/copy_gpt/*")
    return Run(path)


@pytest.mark.run
def test_a_portable_run_is_started_again_with_the_variables(tmp_path):
    folders = [tmp_path / name for name in ("portable", "exported")]
    for folder in folders:
        folder.mkdir()
    run, exported = short_run(folders[0], "--config=portable"), short_run(folders[1], **VARIABLES)
    assert run.config["portable"] is True
    assert exported.config["portable"] is False
    (start,), (other,) = run.starts, exported.starts
    assert start["hardware"]["instruction_set"] == other["hardware"]["instruction_set"] == "AVX2"
    assert (run.folder / Run.METRICS).read_bytes() == (exported.folder / Run.METRICS).read_bytes()


@pytest.mark.run
def test_portable_runs_are_traced_and_verified(tmp_path):
    for name in ("first", "second"):
        run_script(tmp_path, "fit", "copy_gpt", "--config=portable", "--trainer.max_steps=2", *SIZES, "--name", name)
    for checkpoint in tmp_path.glob("runs/second/version_0/checkpoints/*"):
        checkpoint.unlink()  # so that both are trained again from the start
    traced = run_script(tmp_path, "diff", "first", "second", "--trace")
    assert "the next 2 steps are equal" in traced
    run_script(tmp_path, "pack", "first", "--output", "pack.zip")
    assert "failed" not in run_script(tmp_path, "verify", "pack.zip", "--retrain")


def test_in_python_the_variables_must_be_set_before(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(VariablesError, match=r"portable must be false unless .* MKL_CBWR=COMPATIBLE .*set these"):
        check_portable()
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "DEFAULT")
    with pytest.raises(UserError, match="portable must be false on processors without AVX2, but is true"):
        check_portable()


@pytest.mark.run
@pytest.mark.soak
@pytest.mark.skipif("cpuid_fault" not in Path("/proc/cpuinfo").read_text(), reason="the processor cannot be emulated")
def test_emulated_processors_have_the_same_bits():
    command = [sys.executable, "-m", "benchmarks.portable_bits", "--sets", "portable", "--names", "copy_gpt"]
    subprocess.run(command, cwd=ROOT, check=True)
