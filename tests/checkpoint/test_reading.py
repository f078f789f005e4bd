"""A command reads and hashes a checkpoint once."""

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from lightning_tfm.checkpoint import content
from support.experiments import fit


@pytest.fixture
def last(reference, monkeypatch, tmp_path):
    """Return the last checkpoint of an unfinished run in the current folder."""
    run = shutil.copytree(reference("gpt") / "runs/copy_gpt/version_0", tmp_path / "runs/copy_gpt/version_0")
    (run / "summary.json").unlink()
    monkeypatch.chdir(tmp_path)
    return run / "checkpoints/last.ckpt"


@pytest.fixture
def counts(monkeypatch):
    """Count how often each file is hashed and loaded, by kind and file name."""
    counts = Counter()

    def counted(kind, function):
        def call(path, *arguments, **settings):
            counts[kind, Path(path).name] += 1
            return function(path, *arguments, **settings)

        return call

    monkeypatch.setattr(content, "verify_checksum", counted("hashed", content.verify_checksum))
    monkeypatch.setattr(torch, "load", counted("loaded", torch.load))
    return counts


def test_fit_reads_the_checkpoint_that_it_resumes_once(last, counts, command):
    command(*fit("gpt", "--ckpt_path=last"))
    assert {kind: counts[kind, last.name] for kind in ("hashed", "loaded")} == {"hashed": 1, "loaded": 1}


@pytest.mark.parametrize("name", ["validate", "test"])
def test_an_evaluation_reads_its_checkpoint_once(name, last, counts, command):
    command(name, last)
    assert {kind: counts[kind, last.name] for kind in ("hashed", "loaded")} == {"hashed": 1, "loaded": 1}
