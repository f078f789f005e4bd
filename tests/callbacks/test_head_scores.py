"""Scores of heads that are logged during training."""

import lightning
import pytest
import torch

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
        f"heads/{layer}/head_{head}/{name}": value
        for (layer, head), scores in head_scores(module.network.eval(), sample).items()
        for name, value in scores.items()
    }
    assert any(name.endswith("alignment") for name in expected)
    logged = {name: value.item() for name, value in trainer.logged_metrics.items() if name.startswith("heads/")}
    assert logged == pytest.approx(expected, abs=1e-6)


def test_number_of_examples():
    with pytest.raises(UserError, match="num_examples must be at least 1, but is 0; try 64"):
        HeadScores(num_examples=0)
