"""Checks of a run, each once, before the command writes anything and before Lightning starts other runs."""

from collections import Counter

import lightning
import pytest

from datamodules import Copy
from lightning_tfm.errors import UserError
from lightning_tfm.networks import GPT
from lightning_tfm.tasks import Seq2SeqModule, TaskModule, base, checks

SIZES = {"train_size": 40, "val_size": 10, "test_size": 10, "longer_size": 10, "batch_size": 10}


@pytest.fixture
def calls(monkeypatch):
    """Count the calls of each check."""
    counts = Counter()

    def count(place, name):
        check = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *a, **k: counts.update([name]) or check(*a, **k))

    for name in ("check_strategy", "_check_callbacks", "_check_epochs", "check_limits", "check_interval"):
        count(checks, name)
    count(TaskModule, "check_data")
    count(TaskModule, "check_checkpoint")
    count(base, "check_ranks")
    return counts


ONCE = ("check_strategy", "_check_callbacks", "_check_epochs", "check_limits", "check_interval", "check_data")


def test_the_command_checks_a_fit_once(calls, monkeypatch, command):
    monkeypatch.setattr("lightning_tfm.fit.cli.TfmCLI.after_fit", lambda cli: None)  # which tests, another run
    sizes = [f"--data.{name}={size}" for name, size in SIZES.items()]
    options = ["--trainer.val_check_interval=1", "--model.network.d_model=8", "--model.lr_schedule.decay=inverse_sqrt"]
    command("fit", "copy_gpt", *sizes, *options, "--trainer.max_steps=2")
    assert {name: calls[name] for name in (*ONCE, "check_ranks")} == dict.fromkeys((*ONCE, "check_ranks"), 1)
    calls.clear()
    last = "--ckpt_path=runs/copy_gpt/version_0/checkpoints/last.ckpt"
    command("fit", "copy_gpt", *sizes, *options, "--trainer.max_steps=3", last)
    assert {name: calls[name] for name in (*ONCE, "check_checkpoint")} == dict.fromkeys((*ONCE, "check_checkpoint"), 1)


def fit_in_python(folder, ckpt_path=None):
    """Train in Python, and return the module."""
    data = Copy(**SIZES)
    module = Seq2SeqModule.from_data(data, GPT.from_data(data, d_model=8, num_heads=2, num_layers=1))
    intervals = {"val_check_interval": 1, "check_val_every_n_epoch": None}
    trainer = lightning.Trainer(default_root_dir=folder, accelerator="cpu", max_steps=2, **intervals)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return module


def test_python_checks_a_fit_once(calls, tmp_path):
    fit_in_python(tmp_path)
    assert {name: calls[name] for name in (*ONCE, "check_ranks")} == dict.fromkeys((*ONCE, "check_ranks"), 1)


def test_a_resumed_fit_leaves_no_step_to_a_later_one(monkeypatch, tmp_path):
    compared = {}
    monkeypatch.setattr(base, "check_ranks", compared.update)
    path = tmp_path / "last.ckpt"
    fit_in_python(tmp_path).trainer.save_checkpoint(path)
    assert fit_in_python(tmp_path, path).resumed_step is None
    assert [name for name in compared if "tokenizer" in name] == ["tokenizer"], "the others are settings"


def test_a_run_that_a_check_refuses_writes_nothing(monkeypatch, tmp_path, command):
    def refuse(strategy):
        raise UserError("refused")

    monkeypatch.setattr(checks, "check_strategy", refuse)
    command("fit", "copy_gpt", status=2)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="refused"):
        fit_in_python(tmp_path)
