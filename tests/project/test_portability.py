"""The framework without the APIs that exist only on Linux, which support/hidden_apis.py hides."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path, PurePath

import pytest

from datamodules.sentiment import read_labeled
from datamodules.text import Text
from lightning_tfm.data import TableReader
from support.experiments import fit
from support.hidden_apis import PACKAGES

ROOT = Path(__file__).parents[2]


def run_elsewhere(cwd, *commands):
    """Run commands without what macOS and Windows lack, and return their output."""
    script = ROOT / "tests/support/hidden_apis.py"
    commands = json.dumps([[str(argument) for argument in command] for command in commands])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-X", "warn_default_encoding", script, commands]
    child = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr
    return child.stdout


@pytest.mark.run
def test_modules_import_on_other_systems(tmp_path):
    names = set(run_elsewhere(tmp_path).split())
    known = {"lightning_tfm.fit.cli", "lightning_tfm.commands.reproduce", "datamodules.date", "benchmarks.measure"}
    assert known <= names


@pytest.mark.run
def test_commands_run_on_other_systems(tmp_path):
    run = tmp_path / "runs/copy_gpt/version_0"
    settings = {"model.init_args.lr_schedule.decay": "inverse_sqrt"}
    printed = run_elsewhere(
        tmp_path,
        fit("gpt", **settings, **{"trainer.max_steps": 13}),
        fit("gpt", "--ckpt_path=last", **settings, **{"trainer.max_steps": 20}),
        ("generate", run / "checkpoints/best.ckpt", "1 2 3"),
        ("report", run),
    )
    assert f"The run is saved in {run}.\n" in printed, "the path is absolute, as on another drive"
    assert (tmp_path / "report.html").exists()


def texts_without_encoding(source):
    """Yield each call that reads or writes text in the default encoding of the system."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        *_, owner, name = ["", *ast.unparse(node.func).split(".")]
        keywords = {keyword.arg for keyword in node.keywords}
        binary = re.search(r"'[rwax]\+?b'", " ".join(map(ast.unparse, node.args)))
        opens = name == "open" and owner not in ("archive", "os", "tarfile", "Image") and not binary
        reads = name in ("read_text", "write_text") and owner  # those without an owner are ours, in UTF-8
        runs = "text" in keywords and name not in ("encode", "_replace")  # of a subprocess, not of a chart or a tuple
        if (opens or reads or runs) and "encoding" not in keywords:
            yield ast.unparse(node)


UNSPECIFIED = "p.read_text()", "p.write_text(x)", "p.open()", "p.open('a')", "open(p)", "run(c, text=True)"


def test_text_files_have_an_encoding():
    assert [*texts_without_encoding("; ".join(UNSPECIFIED))] == [*UNSPECIFIED]
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        assert [*texts_without_encoding(path.read_text(encoding="utf-8"))] == [], path


def test_data_are_pickled_for_workers(make_data):
    """The data loader spawns its workers on macOS and Windows."""
    data = make_data(num_workers=1)
    data.setup("fit")
    for loader in (data.train_dataloader(), data.val_dataloader()):
        sent = pickle.loads(pickle.dumps((loader.dataset, loader.collate_fn, loader.worker_init_fn)))
        assert len(sent[0]) == len(loader.dataset)


def test_order_of_files(monkeypatch, tmp_path):
    for name in ("b", "C", "a"):
        for label in ("pos", "Neg"):
            (tmp_path / label).mkdir(exist_ok=True)
            (tmp_path / label / name).write_text(f"{label} {name}", encoding="utf-8")

    def read():
        return Text(str(tmp_path)).files, read_labeled([str(tmp_path)], TableReader({}), "train")

    expected = read()
    monkeypatch.setattr(PurePath, "__lt__", lambda ours, theirs: str(ours).lower() < str(theirs).lower())
    assert read() == expected, "Windows orders paths without regard to case"
