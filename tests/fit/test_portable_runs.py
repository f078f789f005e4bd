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


def short_run(folder, *options, **environment):
    command = [SCRIPT, "fit", "copy_gpt", "--trainer.max_steps=2", *SIZES, *options]
    subprocess.run(command, cwd=folder, env=ENVIRONMENT | environment, check=True, capture_output=True)
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
