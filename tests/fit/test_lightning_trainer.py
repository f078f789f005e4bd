"""The package as a library, with the Trainer of Lightning instead of the command line."""

from functools import partial

import lightning
import pytest
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger

import lightning_tfm
from datamodules import Copy, Date, Sentiment, Text
from lightning_tfm import (
    GPT,
    AttentionLSTM,
    Classifier,
    EncoderClassifier,
    LanguageModel,
    LinearTransformer,
    LRSchedule,
    MaskedEncoder,
    MaskedLanguageModel,
    Seq2SeqModule,
    Transformer,
    UserError,
)
from lightning_tfm.callbacks import AttentionLogger, Predictions
from lightning_tfm.callbacks.predictions import SAMPLES
from lightning_tfm.checkpoint import verify_checksum
from lightning_tfm.optimizers import AdamW
from support.corpora import reviews, text_file, write_table

SIZES = {"train_size": 200, "val_size": 20, "test_size": 20, "batch_size": 20}


SMALL = {"d_model": 16, "num_heads": 2, "num_layers": 1}


def quiet_trainer(**settings):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(accelerator="cpu", **quiet | settings)


def text(folder):
    return Text(text_file(folder), max_length=16, batch_size=8)


def labeled_texts(folder):
    return Sentiment([write_table(folder / "reviews.tsv", reviews(200))], max_length=16, batch_size=20)


TASKS = {
    "transformer": (Seq2SeqModule, lambda data: Transformer.from_data(data, d_ff=32, **SMALL), lambda _: Date(**SIZES)),
    "gpt": (Seq2SeqModule, lambda data: GPT.from_data(data, **SMALL), lambda _: Date(**SIZES)),
    "attention_lstm": (Seq2SeqModule, lambda data: AttentionLSTM.from_data(data, d_model=16), lambda _: Date(**SIZES)),
    "text": (LanguageModel, lambda data: LinearTransformer.from_data(data, **SMALL), text),
    "masked": (MaskedLanguageModel, lambda data: MaskedEncoder.from_data(data, **SMALL), text),
    "classifier": (Classifier, lambda data: EncoderClassifier.from_data(data, d_ff=32, **SMALL), labeled_texts),
}
LINES = {"text": "ein", "masked": "ei[MASK]", "classifier": "the film"}


@pytest.mark.parametrize("name", TASKS)
def test_checkpoints_of_lightnings_trainer_are_loaded_and_used_by_the_command(name, tmp_path, command):
    cls, make_network, make_data = TASKS[name]
    lightning.seed_everything(1)
    data = make_data(tmp_path)
    module = cls.from_data(data, make_network(data), lr_schedule=LRSchedule(warmup_steps=2))
    trainer = quiet_trainer(max_steps=4)
    trainer.fit(module, data)
    (metrics,) = trainer.test(module, data, verbose=False)
    assert metrics["val/final/loss" if data.test_sets == ("val",) else "test/loss"] > 0
    line = LINES.get(name, "Thursday, May 3, 1979")
    (prediction,) = module.predict([line])
    path = trainer.checkpoint_callback.best_model_path
    assert verify_checksum(path)
    assert lightning_tfm.load(path).predict([line]) == [prediction]
    assert command("generate", path, line).out.startswith(prediction.text)


def train(folder, steps=4, path=None, lr=0.001, clip=1.0):
    """Train a network, also from a checkpoint; return its module and the path of its checkpoint."""
    lightning.seed_everything(1)
    data = Copy(**SIZES)
    network = Transformer.from_data(data, d_ff=32, dropout=0.1, **SMALL)
    settings = {"optimizer": partial(AdamW, lr=lr), "lr_schedule": LRSchedule(2, decay="inverse_sqrt")}
    module = Seq2SeqModule.from_data(data, network, **settings)
    trainer = quiet_trainer(max_steps=steps, gradient_clip_val=clip, default_root_dir=folder)
    trainer.fit(module, data, ckpt_path=path, weights_only=True)
    return module, trainer.checkpoint_callback.best_model_path


def test_a_run_resumes_bitwise_or_with_other_settings_not_at_all(tmp_path):
    """The Trainer of Lightning makes the checks of the command."""
    whole, _ = train(tmp_path / "whole", 8)
    _, path = train(tmp_path / "first")
    resumed, _ = train(tmp_path / "resumed", 8, path)
    for name, weight in whole.state_dict().items():
        assert weight.equal(resumed.state_dict()[name]), name
    with pytest.raises(UserError, match=r"lr must match .* \(0.001\)"):
        train(tmp_path, 8, path, lr=0.002)
    with pytest.raises(UserError, match=r"gradient_clip_val must match .* \(1.0\)"):
        train(tmp_path, 8, path, clip=0.5)


class MediaLog(CSVLogger):
    """Logger of tables and images, in a few lines."""

    log_examples = True

    def __init__(self, folder):
        super().__init__(folder)
        self.tables, self.images = {}, {}

    def log_table(self, key, columns, data, step=None):
        self.tables[key] = columns, data

    def log_image(self, key, images, step=None, **kwargs):
        self.images[key] = images


def test_another_logger_receives_tables_and_images(tmp_path):
    data = Copy(**SIZES)
    module = Seq2SeqModule.from_data(data, Transformer.from_data(data, d_ff=32, **SMALL))
    logger = MediaLog(tmp_path)
    callbacks = [Predictions(), AttentionLogger()]
    settings = {"max_steps": 2, "val_check_interval": 2, "num_sanity_val_steps": 0}
    trainer = quiet_trainer(logger=logger, callbacks=callbacks, **settings)
    trainer.fit(module, data)
    trainer.test(module, data, verbose=False)
    columns, rows = logger.tables["val/predictions"]
    assert columns == ["source", "target", "prediction", "correct"]
    assert len(rows) == min(SIZES["val_size"], SAMPLES)
    assert logger.images["test/attention"]


def test_modules_and_networks_refuse_data_of_another_task(tmp_path):
    data = Copy(**SIZES)
    with pytest.raises(UserError, match=r"Copy, but Classifier .*; try .*Seq2SeqModule"):
        Classifier.from_data(data, None)
    with pytest.raises(UserError, match=r"a text, .* try .*LanguageModel, .*MaskedLanguageModel"):
        Seq2SeqModule.from_data(text(tmp_path), None)
    with pytest.raises(UserError, match=r"EncoderClassifier .* Copy"):
        EncoderClassifier.from_data(data)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_steps": -1, "max_epochs": -1}, "trainer.max_steps must be at least 1, .* but is -1"),
        ({"min_steps": 2}, "trainer.min_steps must not count epochs"),
        ({"min_epochs": 2}, "trainer.min_epochs must not count epochs"),
        ({"check_val_every_n_epoch": 2}, "trainer.check_val_every_n_epoch must not count epochs"),
        ({"reload_dataloaders_every_n_epochs": 1}, "trainer.reload_dataloaders_every_n_epochs must"),
        ({"callbacks": [StochasticWeightAveraging(0.1, swa_epoch_start=1)]}, "StochasticW.*; try .*WeightAveraging"),
        (
            {"check_val_every_n_epoch": None, "callbacks": [EarlyStopping("val/loss", check_on_train_epoch_end=True)]},
            "check_on_train_epoch_end of EarlyStopping must not count epochs",
        ),
        ({"callbacks": [EarlyStopping("val/loss")]}, "check_val_every_n_epoch must .* trainer.val_check_interval"),
        ({"logger": True, "callbacks": [LearningRateMonitor("epoch")]}, "logging_interval of LearningRateMonitor must"),
        ({"callbacks": [ModelCheckpoint(every_n_epochs=2)]}, "every_n_epochs of ModelCheckpoint must"),
        ({"callbacks": [ModelCheckpoint(save_on_train_epoch_end=True)]}, "save_on_train_epoch_end of ModelCheckpoint"),
        ({"callbacks": [Timer("00:01:00:00", interval="epoch")]}, "interval of Timer must not count"),
        ({"callbacks": [GradientAccumulationScheduler({0: 2})]}, "Grad.*Scheduler, .*; try trainer.accumulate_grad"),
    ],
)
def test_settings_that_the_command_refuses_are_refused_in_python(settings, message, tmp_path):
    data = Copy(**SIZES)
    module = Seq2SeqModule.from_data(data, AttentionLSTM.from_data(data, d_model=8))
    trainer = quiet_trainer(default_root_dir=tmp_path, **{"max_steps": 9} | settings)
    with pytest.raises(UserError, match=message):
        trainer.fit(module, data)


def test_epochs_are_counted_where_lightning_has_several(tmp_path):
    data = Copy(**SIZES)
    module = Seq2SeqModule.from_data(data, AttentionLSTM.from_data(data, d_model=8))
    callbacks = [EarlyStopping("val/loss"), ModelCheckpoint(every_n_epochs=2, save_top_k=-1)]
    trainer = quiet_trainer(default_root_dir=tmp_path, max_epochs=4, min_epochs=2, callbacks=callbacks)
    trainer.fit(module, data)
    assert trainer.current_epoch == 4
    assert len(list(tmp_path.glob("**/*.ckpt"))) == 2
