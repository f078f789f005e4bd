"""Training for a number of epochs."""

import pytest

from datamodules import Copy
from lightning_tfm.data import BatchDivision
from lightning_tfm.fit.cli import SettingsCLI
from lightning_tfm.fit.cli import run as cli_run
from support.experiments import write_task


@pytest.mark.parametrize(
    ("task", "arguments", "steps"),
    [
        ("spelling_gpt", [], 15),  # 3 passes over 100 pairs in batches of 20
        ("spelling_gpt", ["--data.batch_size=30", "--trainer.accumulate_grad_batches=2"], 5),  # 9 batches
        ("translation_transformer", [], None),  # batches of a number of tokens
        ("text_gpt", [], None),
    ],
)
def test_max_epochs_is_the_number_of_steps_of_all_passes(task, arguments, steps, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    cli = cli_run(
        ["fit", "--config", str(write_task(task, tmp_path)), "--dry-run", "--trainer.max_epochs=3", *arguments],
        SettingsCLI,
    )
    settings = cli.settings()["trainer"]
    assert settings["max_epochs"] is None
    cli.datamodule.setup("fit")
    stream = cli.datamodule.training_batches(BatchDivision())
    samples = [
        stream.samples_seen(settings["max_steps"] * settings["accumulate_grad_batches"] - more) for more in (0, 1)
    ]
    one_pass = sum(len(rows) for rows in stream.batches(0))
    assert samples[0] >= 3 * one_pass
    assert settings["accumulate_grad_batches"] > 1 or samples[1] < 3 * one_pass
    assert steps in (None, settings["max_steps"])
    assert f"corresponds to trainer.max_steps {settings['max_steps']}" in capsys.readouterr().err


def test_training_data_that_epochs_count_are_built_once(monkeypatch, command):
    built, encode = [], Copy.examples
    monkeypatch.setattr(Copy, "examples", lambda data, split: built.append(split) or encode(data, split))
    sizes = [f"--data.{name}=30" for name in ("train_size", "val_size", "test_size", "longer_size", "batch_size")]
    command("fit", "copy_gpt", "--dry-run", "--trainer.max_epochs=2", *sizes)
    assert built.count("train") == 1
    assert len(built) == len(set(built))
