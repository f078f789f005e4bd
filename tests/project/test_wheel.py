"""The package, installed as a wheel and as an editable clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from lightning_tfm.config.experiments import list_experiments
from lightning_tfm.system.terminal import format_value

pytestmark = pytest.mark.run

ROOT = Path(__file__).parents[2]


def run_command(*command: object, cwd: Path, **environment: str) -> str:
    """Run a command in a folder, and return its output."""
    child = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=os.environ | {"WANDB_MODE": "disabled", "COLUMNS": "120"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


def copy_source(folder: Path) -> Path:
    """Copy what the package is built from into a folder, and return the folder."""
    for name in ("lightning_tfm", "datamodules", "experiments"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (".gitignore", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def pip(command: str, *arguments: object, cwd: Path) -> None:
    """Run a command of pip without network access."""
    options = ["--quiet", "--disable-pip-version-check", "--no-deps"]
    run_command(sys.executable, "-m", "pip", command, *options, *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Install the wheel into a folder, with the dependencies of this environment."""
    source, site = copy_source(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("site")
    pip("wheel", "--no-build-isolation", "--wheel-dir", source, source, cwd=source)
    (wheel,) = source.glob("*.whl")
    pip("install", "--target", site, wheel, cwd=source)
    return site


def test_files_of_wheel(site):
    files = [path for package in ("lightning_tfm", "datamodules") for path in (ROOT / package).rglob("*")]
    files = [
        path.relative_to(ROOT) for path in files if path.suffix in (".bib", ".css", ".html", ".js", ".py", ".typed")
    ]
    assert all((site / path).is_file() for path in files)


@pytest.fixture
def installed(site, tmp_path):
    """Return a function that runs Python with the installed wheel in an empty folder, and returns its output."""
    return lambda *arguments: run_command(sys.executable, "-P", *arguments, cwd=tmp_path, PYTHONPATH=str(site))


def test_console_script_lists_experiments(site, installed, tmp_path):
    """The console script of pyproject.toml runs the same program as `python -m lightning_tfm`."""
    printed = run_command(site / "bin/lightning-tfm", "list", cwd=tmp_path, PYTHONPATH=str(site))
    assert printed == installed("-m", "lightning_tfm", "list")
    for experiment in list_experiments(ROOT / "experiments"):
        (line,) = [line for line in printed.splitlines() if line.split()[0] == experiment.name]
        if experiment.claims:
            claim = experiment.claims[0]
            assert f"{claim.metric} {format_value(claim.value)}" in line
            assert f"{experiment.seconds:,.0f} s" in line


def test_fit_of_named_experiment(site, installed, tmp_path):
    settings = ["--trainer.max_steps=2", "--trainer.val_check_interval=2"]
    settings += ["--data.train_size=200", "--data.val_size=20", "--data.test_size=20"]
    installed("-m", "lightning_tfm", "fit", "--config", "date_attention_lstm", *settings)
    assert (tmp_path / "runs/date_attention_lstm/version_0/checkpoints/best.ckpt").is_file()
    where = installed("-c", "print(__import__('lightning_tfm').__file__)")
    assert Path(where.strip()).is_relative_to(site)


def test_editable_clone_is_imported_from_the_folder_above(tmp_path):
    """A clone's folder has the name of the package, but is only a namespace package."""
    source, environment = copy_source(tmp_path / "lightning_tfm"), tmp_path / "environment"
    run_command(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    pip(
        *("install", "--ignore-installed", "--no-build-isolation", "--prefix", environment, "--editable", source),
        cwd=tmp_path,
    )
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    program = "import lightning_tfm; print(lightning_tfm.AttentionLSTM, lightning_tfm.__file__)"
    printed = run_command(environment / "bin/python", "-c", program, cwd=tmp_path, PYTHONPATH="")
    *_, file = printed.split()
    assert Path(file) == source / "lightning_tfm/__init__.py"
