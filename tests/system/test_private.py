"""Private names of other packages, which an update may rename."""

from __future__ import annotations

from datetime import timedelta

import jsonargparse
import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy

from lightning_tfm.fit.cli import TfmCLI
from lightning_tfm.system import private


def test_the_arguments_of_a_parser_are_listed():
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--size", type=int)
    assert "size" in [action.dest for action in private.actions(parser)]


def test_the_value_of_a_setting_is_not_read_from_a_file(monkeypatch, tmp_path):
    monkeypatch.setattr(jsonargparse._optionals, "_config_read_mode", "fr")
    (tmp_path / "a.yaml").write_text("size: 3\n")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(type("Group", (), {"__init__": make}), "group", sub_configs=True)
    assert parser.parse_args([f"--group={tmp_path / 'a.yaml'}"]).group.size == 3
    private.read_no_files()
    with pytest.raises(jsonargparse.ArgumentError):
        parser.parse_args([f"--group={tmp_path / 'a.yaml'}"])


def make(self, size: int = 1):
    """Accept a size."""


def test_the_loader_of_the_parser_is_replaced(monkeypatch):
    monkeypatch.setattr(jsonargparse._loaders_dumpers, "yaml_default_loader", None)
    streams = []

    class Loader(private.yaml_loader()):
        def __init__(self, stream):
            streams.append(stream)
            super().__init__(stream)

    private.replace_yaml_loader(Loader)
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--sizes", type=list[int])
    assert parser.parse_args(["--sizes=[1, 2]"]).sizes == [1, 2]
    assert "[1, 2]" in streams


@pytest.mark.parametrize("method", ["popen", "fork"])
def test_the_start_method_of_a_strategy_is_known(method):
    assert private.start_method(DDPStrategy(start_method=method)) == method


def test_only_the_default_timeout_of_a_strategy_is_replaced():
    limits = []
    for strategy in (DDPStrategy(), DDPStrategy(timeout=timedelta(seconds=7))):
        private.replace_default_timeout(strategy, timedelta(seconds=3))
        limits.append(strategy._timeout)
    assert limits == [timedelta(seconds=3), timedelta(seconds=7)]


@pytest.mark.parametrize("by_epoch", [False, True])
def test_what_counts_epochs_is_known(by_epoch):
    assert private.stops_after_epochs(EarlyStopping("val/loss", check_on_train_epoch_end=by_epoch)) is by_epoch
    assert private.saves_after_epochs(ModelCheckpoint(save_on_train_epoch_end=by_epoch)) is by_epoch
    assert private.epochs_between_saves(ModelCheckpoint(every_n_epochs=3 if by_epoch else 1)) == (3 if by_epoch else 1)
    assert private.timer_interval(Timer(interval="epoch" if by_epoch else "step")) == ("epoch" if by_epoch else "step")


def test_the_version_and_the_writer_of_a_logger_are_set(tmp_path):
    logger = CSVLogger(tmp_path, "mine")
    assert private.logger_version(logger) is None
    private.set_version(logger, "test_3")
    private.set_writer(logger, writer := object())
    assert logger.log_dir == str(tmp_path / "mine/test_3")
    assert logger.experiment is writer


def test_the_command_overrides_methods_that_lightning_calls():
    overridden = {name for name in vars(TfmCLI) if name.startswith("_") and not name.startswith("__")}
    own = {"_clean_up", "_find_checkpoint", "_schedule_needs_max_steps", "_new_data", "_convert_epochs", "_from_data"}
    own |= {"_configure_callbacks", "_check_run", "_enter"}
    assert overridden - own == overridden & vars(LightningCLI).keys()
