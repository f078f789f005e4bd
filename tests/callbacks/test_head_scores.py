"""Scores of heads that are logged during training."""

import csv

import lightning
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from datamodules import Copy
from lightning_tfm.callbacks import HeadScores
from lightning_tfm.errors import UserError
from lightning_tfm.insight import Sample, head_scores
from lightning_tfm.networks import GPT, AttentionLSTM
from lightning_tfm.tasks import Seq2SeqModule


@pytest.mark.parametrize("cls", [GPT, AttentionLSTM])
def test_scores_are_logged_at_each_validation(cls, tmp_path):
    data = Copy(train_size=40, val_size=10, test_size=10, longer_size=10, batch_size=10)
    module = Seq2SeqModule.from_data(data, cls.from_data(data, d_model=8))
    settings = {"max_steps": 2, "val_check_interval": 1, "check_val_every_n_epoch": None, "logger": False}
    trainer = lightning.Trainer(
        default_root_dir=tmp_path, accelerator="cpu", callbacks=[HeadScores(num_examples=4)], **settings
    )
    trainer.fit(module, data)
    dataset = data.datasets["val"]
    sample = Sample.from_dataset(dataset, torch.arange(4), module.network)
    expected = {
        f"val/heads/{layer}/head_{head}/{name}": value
        for (layer, head), scores in head_scores(module.network.eval(), sample).items()
        for name, value in scores.items()
    }
    assert any(name.endswith("alignment") for name in expected)
    logged = {name: value.item() for name, value in trainer.logged_metrics.items() if name.startswith("val/heads/")}
    assert logged == pytest.approx(expected, abs=1e-6)


def fit(tmp_path, callbacks, **settings):
    lightning.seed_everything(1)
    data = Copy(train_size=40, val_size=10, test_size=10, longer_size=10, batch_size=10)
    module = Seq2SeqModule.from_data(data, GPT.from_data(data, d_model=8, dropout=0.1))
    common = {"max_steps": 4, "val_check_interval": 2, "check_val_every_n_epoch": None, "accelerator": "cpu"}
    common |= {"default_root_dir": tmp_path, "logger": False, "callbacks": callbacks}
    trainer = lightning.Trainer(**common | settings)
    trainer.fit(module, data)
    return module.network.state_dict()


def test_a_training_is_the_same_with_scores(tmp_path):
    expected = fit(tmp_path / "without", [])
    actual = fit(tmp_path / "with", [HeadScores(num_examples=4)])
    assert all(weight.equal(actual[name]) for name, weight in expected.items())


def test_loggers_receive_the_scores(tmp_path):
    table, board = CSVLogger(tmp_path, name="csv", version=0), TensorBoardLogger(tmp_path, name="board", version=0)
    fit(tmp_path, [HeadScores(num_examples=4)], logger=[table, board])
    name = "val/heads/layers.1.self_attention/head_2/induction"
    with open(f"{table.log_dir}/metrics.csv", newline="") as file:
        rows = [(int(row["step"]), float(row[name])) for row in csv.DictReader(file) if row[name]]
    events = EventAccumulator(board.log_dir).Reload().Scalars(name)
    assert [event.step for event in events] == [step for step, _ in rows] == [1, 3]
    assert [event.value for event in events] == pytest.approx([value for _, value in rows])


def test_number_of_examples():
    with pytest.raises(UserError, match="num_examples must be at least 1, but is 0; try 64"):
        HeadScores(num_examples=0)
