"""A run that was killed, to be resumed."""

import shutil

import pytest

from support.experiments import fit, folder, made_once
from support.processes import run


@pytest.fixture
def killed(tmp_path, tmp_path_factory):
    """Copy a run that was killed in step 33 to the folder of the test, and return the folder of the run."""

    def train(cwd):
        run(*fit("gpt"), cwd=cwd, fault=("in a training step", 33)).die()

    shutil.copytree(made_once("killed", train, tmp_path_factory) / "runs", tmp_path / "runs")
    return folder(tmp_path, "gpt")
