"""The data that a run logs to W&B, read by the tool of W&B from the file of an offline run."""

from __future__ import annotations

import csv
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import defaultdict
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import requests
import wandb
import yaml
from jsonargparse import Namespace
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from datamodules import Copy
from lightning_tfm import loggers
from lightning_tfm.callbacks.predictions import SAMPLES
from lightning_tfm.errors import UserError
from lightning_tfm.fit.arguments import with_options
from lightning_tfm.fit.trainer_settings import CSV, WANDB, loggers_of_run
from support.experiments import SETTINGS, fit, folder
from support.processes import EXPERIMENTS, run, start_two


def offline_files(cwd):
    """Return the files of offline runs, oldest first."""
    return sorted((cwd / "runs/wandb").glob("offline-run-*/run-*.wandb"))


@functools.cache
def inspect(path):
    """Return all records of a finished run."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in child.stdout.splitlines()]


def records(path, type_):
    """Return the records of a type in order."""
    return [record[type_] for record in inspect(path) if record["type"] == type_]


def history(path):
    return [record["item"] for record in records(path, "history")]


def summary(path):
    """Return the last value of each name in the summary of a run."""
    updates = (item for record in records(path, "summary") for item in record.get("update", {}).items())
    return dict(updates)


def tables(path):
    """Return the tables of predictions that a run has logged."""
    contents = [content for record in records(path, "artifact") for content in record["manifest"]["contents"]]
    paths = [content["local_path"] for content in contents if content["path"] == "val/predictions.table.json"]
    return [json.loads(Path(path).read_text()) for path in paths]


@pytest.fixture(scope="module")
def cwd(tmp_path_factory):
    """Train with the best checkpoint logged as an artifact, and with examples, and return the folder."""
    cwd = tmp_path_factory.mktemp("wandb")
    options = ["--trainer.logger.log_best=true", "--trainer.logger.log_examples=true"]
    run(*fit("transformer", *options), cwd=cwd, WANDB_MODE="offline").finish()
    return cwd


@pytest.fixture(scope="module")
def path(cwd):
    (path,) = offline_files(cwd)
    return path


@pytest.fixture
def started(monkeypatch, new_wandb):
    """Return the settings with which runs are started, which are not."""
    started = []
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(wandb, "init", lambda **settings: started.append(settings))
    return started


def test_launch_package_is_not_imported(tmp_path):
    script = """if True:
        import sys
        from lightning_tfm.loggers import WandbLogger
        WandbLogger(save_dir=".", offline=True).experiment
        import wandb
        assert wandb.run
        assert not any("launch" in name for name in sys.modules if name.startswith("wandb"))
        wandb.finish()
        from wandb.sdk.launch.inputs.internal import StagedLaunchInputs
        applied = []
        StagedLaunchInputs.apply = lambda inputs, run: applied.append(run)
        WandbLogger(save_dir=".", offline=True).experiment
        assert applied == [wandb.run]
    """
    child = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert "launch" not in child.stderr


def test_wandb_metrics_equal_metrics_csv(cwd, path):
    logged = {
        (name, item["_step"]): value
        for item in history(path)
        for name, value in item.items()
        if name.split("/")[0] in ("train", "trainer", "val", "test")
    }
    final = summary(path)
    with (folder(cwd, "transformer") / "metrics.csv").open(newline="") as file:
        written = {
            (name, int(row["step"])): float(value)
            for row in csv.DictReader(file)
            for name, value in row.items()
            if value and name != "step"
        }
    assert {"train/loss", "trainer/learning_rate", "val/exact_match", "test/loss"} <= {name for name, _ in written}
    for (name, step), value in written.items():
        actual = final[name] if name.startswith("test/") else logged[name, step]
        assert actual == pytest.approx(value, rel=1e-5), name


def test_training_loss_is_the_first_curve_and_none_is_a_straight_line(path):
    """`wandb leet` sorts charts by name."""
    curves = defaultdict(list)
    for item in history(path):
        for name, value in item.items():
            if isinstance(value, int | float) and not re.search("^_|attention|predictions", name):
                curves[name].append(value)
    del curves["val/exact_match"]  # 0 after a few steps
    assert min(curves) == "train/loss"
    assert [name for name, values in curves.items() if np.allclose(np.diff(values, 2), 0, atol=1e-9)] == []


PLANTED = "xylographer"


@pytest.mark.parametrize("log_examples", [False, True])
def test_texts_of_the_data_are_logged_if_the_user_asks_for_it(log_examples, tmp_path):
    """Search all files of W&B for a word of each example; TensorBoard is local."""
    pairs = [f"{PLANTED} {number}\t{PLANTED} {number + 1}\n" for number in range(90)]
    for split, lines in {"train": pairs[:60], "val": pairs[60:75], "test": pairs[75:]}.items():
        (tmp_path / f"{split}.tsv").write_text("".join(lines))
    options = [f"--data.{split}={split}.tsv" for split in ("train", "val", "test")]
    options += ["--trainer.logger.log_examples=true"] if log_examples else []
    options += ["--trainer.logger+=lightning_tfm.loggers.TensorBoardLogger"]
    options += ["--trainer.max_steps=4", "--trainer.val_check_interval=2", "--data.batch_size=15"]
    run("fit", "--config", EXPERIMENTS / "tsv_transformer.yaml", *options, cwd=tmp_path, WANDB_MODE="offline").finish()
    printed = (tmp_path / "stdout").read_text()
    assert PLANTED in printed, "predictions are printed"
    assert ("--trainer.logger.log_examples true" in printed) == (not log_examples)
    assert offline_files(tmp_path)
    files = [path for path in (tmp_path / "runs/wandb").rglob("*") if path.is_file()]
    containing = {path.suffix for path in files if PLANTED.encode() in path.read_bytes()}
    assert containing == ({".log", ".json", ".wandb"} if log_examples else set())
    pictures = {path.parent.name for path in files if path.suffix == ".png"}
    assert pictures == ({"test"} if log_examples else set())
    (events, *_) = (tmp_path / "runs/tensorboard").glob("*/events*")
    assert PLANTED.encode() in b"".join(path.read_bytes() for path in events.parent.iterdir())


def test_wandb_config_and_data_fingerprint(cwd, path):
    updates = [record["update"] for record in records(path, "config")]
    resolved = yaml.safe_load((folder(cwd, "transformer") / "config.yaml").read_text())
    (whole,) = (update for update in updates if "model" in update)
    network = whole["model"]["init_args"]["network"]
    assert network == resolved["model"]["init_args"]["network"]
    assert network["init_args"]["d_model"] == 16
    assert whole["data"] == resolved["data"]
    assert whole["trainer"]["max_steps"] == 60
    (start,) = json.loads((folder(cwd, "transformer") / "provenance.json").read_text())
    assert {"data_fingerprint": start["data_fingerprint"]} in updates
    (begun,) = records(path, "run")
    assert begun["run_id"] == start["wandb"]
    assert begun["run_group"] == "copy_transformer"
    assert begun["display_name"] == "copy_transformer/version_0"
    assert begun["config"]["update"]["git_commit"] == (start["git"]["commit"] or "unknown")
    assert begun["tags"] == ["Seq2SeqModule", "Transformer", "Copy"]


def test_fork_has_the_group_and_the_id_of_its_parent(cwd, path, tmp_path):
    shutil.copytree(cwd / "runs", tmp_path / "runs")
    run(
        "fit", "--fork", "copy_transformer/version_0@3", "--model.optimizer.lr=1e-4", cwd=tmp_path, WANDB_MODE="offline"
    ).finish()
    (parent,), (fork,) = (records(each, "run") for each in offline_files(tmp_path))
    assert fork["run_id"] != parent["run_id"]
    assert fork["run_group"] == parent["run_group"]
    lineage = fork["config"]["update"]["fork"]
    assert (lineage["run"], lineage["step"]) == ("runs/copy_transformer/version_0", 3)
    assert lineage["wandb"] == parent["run_id"]
    assert "fork" not in parent["config"]["update"]
    assert min(item["_step"] for item in history(offline_files(tmp_path)[1])) >= 3


def test_tables_of_predictions(path):
    steps = [item["_step"] for item in history(path) if "val/predictions._type" in item]
    assert steps == [11, 23, 35, 47, 59]
    logged = tables(path)
    assert len(logged) == 5
    prefix = "data.init_args."
    arguments = {name.removeprefix(prefix): value for name, value in SETTINGS.items() if name.startswith(prefix)}
    pairs = Copy(seed=1, **arguments | {"multiples": []}).pairs("val")[:SAMPLES]
    for table in logged:
        assert table["columns"] == ["source", "target", "prediction", "correct"]
        assert [row[:2] for row in table["data"]] == [[pair.source, pair.target] for pair in pairs]
        assert all(right == (target == prediction) for _, target, prediction, right in table["data"])
    assert len({json.dumps(table["data"]) for table in logged}) > 1, "predictions change during training"


def test_wandb_images_and_best_checkpoint(cwd, path):
    (item,) = (item for item in history(path) if "test/attention._type" in item)
    assert item["test/attention._type"] == "images/separated"
    run = folder(cwd, "transformer")
    assert item["test/attention.count"] == len(list((run / "attention").glob("*.png")))
    (record,) = (record for record in records(path, "artifact") if record["type"] == "model")
    assert "best" in record["aliases"]
    (content,) = record["manifest"]["contents"]
    assert content["path"] == "best.ckpt"
    assert int(content["size"]) == (run / "checkpoints/best.ckpt").stat().st_size


def test_offline_run_prints_sync_command(cwd, path):
    state, command = (cwd / "stdout").read_text().splitlines()[-2:]
    assert state == "W&B, offline: the run is logged; to upload it:"
    command, sync, pattern = command.split()
    assert (Path(command).name, sync) == ("wandb", "sync")
    assert list(cwd.glob(pattern)) == [path.parent]


@pytest.mark.parametrize("connects_early", [False, True])
def test_online_if_logged_in(connects_early, monkeypatch, started):
    logins = []
    monkeypatch.setattr(loggers, "_is_reachable", lambda address: True)
    monkeypatch.setattr(wandb, "login", lambda **settings: logins.append(settings) or True)
    logger = loggers.WandbLogger(project="tests")
    if connects_early:
        logger.connect()
    _ = logger.experiment
    assert logins[0]["prompt"] is False
    assert started[0]["mode"] == "online"
    settings = started[0]["settings"]
    assert settings.init_timeout >= 10, "a server that responds may be slow"
    assert not settings.silent
    assert settings.disable_git, "it would run programs that the repository names"


def test_offline_if_service_fails(monkeypatch, tmp_path, capsys, started):
    def fail():
        raise RuntimeError("no service")

    monkeypatch.setattr(wandb, "setup", fail)
    logger = loggers.WandbLogger(project="tests", save_dir=tmp_path)
    logger.connect()
    _ = logger.experiment
    assert started[0]["mode"] == "offline"
    assert "failed to start: no service" in capsys.readouterr().err


def test_offline_if_name_of_server_is_not_resolved_in_time(monkeypatch, tmp_path, capsys, started):
    resolved = threading.Event()
    monkeypatch.setattr(loggers, "REACH_TIMEOUT", 0.01)
    monkeypatch.setattr(loggers, "_is_reachable", lambda address: resolved.wait())
    logger = loggers.WandbLogger(project="tests", save_dir=tmp_path)
    _ = logger.experiment
    resolved.set()
    assert started[0]["mode"] == "offline"
    assert logger.unreachable.startswith("http")
    assert capsys.readouterr().err == "", "the end of the run tells it"


@pytest.mark.parametrize(
    ("status", "content", "is_reachable"),
    [(200, b"{}", True), (200, b"<html>", False), (401, b"<html>", True), (503, b"{}", False)],
)
def test_reachable_server_responds_with_json_or_refuses_without_account(status, content, is_reachable, monkeypatch):
    response = requests.Response()
    response.status_code, response._content = status, content
    monkeypatch.setattr(requests, "post", lambda *_, **__: response)
    assert loggers._is_reachable("https://wandb.invalid") == is_reachable


def test_failed_offline_run_can_be_uploaded():
    logger = loggers.WandbLogger(offline=True)
    logger._experiment = SimpleNamespace(settings=SimpleNamespace(sync_dir="runs/wandb/offline-run-1-x"), id="x")
    logger.failed = True
    assert logger.offline_pattern == "runs/wandb/offline-run-*-x"
    assert logger.run_id is None


def test_base_url_of_current_folder_is_refused(monkeypatch, tmp_path, capsys, started):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(requests, "post", lambda *_, **__: pytest.fail("the server is contacted"))
    Path("wandb").mkdir()
    Path("wandb/settings").write_text("[default]\nproject = mine\nbase_url = http://wandb.invalid\n")
    _ = loggers.WandbLogger(save_dir=tmp_path).experiment
    assert started[0]["mode"] == "offline"
    assert "'wandb/settings' must not set base_url, since your API key could be sent" in capsys.readouterr().err


def test_crashed_service_does_not_end_run(monkeypatch, tmp_path, capsys):
    """The teardown of W&B exits with the status of its service."""

    def crash(*args, **settings):
        raise ConnectionError("the service has crashed")

    logger = loggers.WandbLogger(save_dir=tmp_path)
    logger._experiment = SimpleNamespace(starting_step=0, log=crash)
    monkeypatch.setattr(wandb, "teardown", lambda: sys.exit(2))
    logger.log_metrics({"loss": 1.0}, step=1)
    assert logger.failed
    assert "W&B has failed and is disabled for the rest of the run: the service" in capsys.readouterr().err


def test_resumed_run_logs_missing_rows(monkeypatch, tmp_path):
    csv_logger = CSVLogger(tmp_path, "name", "version")
    metrics = Path(csv_logger.log_dir, "metrics.csv")
    metrics.parent.mkdir(parents=True)
    rows = [(0, 4.0), (1, 3.0), (1, 5.0), (2, 2.0), (2, 1.5)]
    for starting_step, expected in ((2, []), (0, []), (1, rows[1:]), (2, rows[3:])):
        logged = []
        logger = loggers.WandbLogger(save_dir=tmp_path)
        log = lambda item, step: logged.append((step, item.get("train/loss", item.get("val/loss"))))  # noqa: B023, E731
        logger._experiment = SimpleNamespace(starting_step=starting_step, log=log)
        loggers.resume_loggers([csv_logger, logger], 3)
        assert not logger.failed
        assert logged == expected
        metrics.write_text("step,train/loss,val/loss\n0,4.0,\n1,3.0,\n1,,5.0\n2,2.0,\n2,,1.5\n")


@pytest.mark.parametrize(
    ("mode", "settings"), [("offline", {}), ("disabled", {}), ("online", {"offline": True})], ids=str
)
def test_offline_run_has_no_network_access(mode, settings, monkeypatch, tmp_path, started):
    monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.setattr(loggers, "_is_reachable", lambda address: pytest.fail("the server is contacted"))
    _ = loggers.WandbLogger(save_dir=tmp_path, **settings).experiment
    assert started[0]["mode"] == (mode if mode == "disabled" else "offline")


def test_only_rank_0_connects(monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    monkeypatch.setattr(wandb, "setup", lambda: pytest.fail("the service is started"))
    logger = loggers.WandbLogger()
    logger.connect()
    assert logger._mode is None


def test_fit_connects_before_data_setup(monkeypatch, command):
    def stop(data, stage):
        raise UserError("stopped")

    calls = []
    monkeypatch.setattr(loggers.WandbLogger, "connect", lambda logger: calls.append(logger))
    monkeypatch.setattr(Copy, "setup", stop)
    command(*fit("transformer"), status=2)
    assert len(calls) == 1


def test_log_model_is_refused():
    with pytest.raises(UserError, match="log_model must be false, but is true; log_best keeps"):
        loggers.WandbLogger(log_model=True)


def test_checkpoint_does_not_set_log_examples(tmp_path):
    """A checkpoint of a stranger would otherwise let a test upload the user's data."""
    logger = {"class_path": WANDB, "init_args": {"project": "mine", "log_examples": True}}
    content = {
        "experiment": {"name": "any", "config": yaml.safe_dump({"trainer": {"logger": [logger], "callbacks": []}})}
    }
    path = tmp_path / "any.ckpt"
    path.touch()
    arguments = with_options(["test", str(path)], tmp_path, lambda path: content)
    (kept,) = yaml.safe_load(Path(arguments[2]).read_text())["trainer"]["logger"]
    assert kept["init_args"] == {"save_dir": "runs", "project": "mine"}


@pytest.mark.run
def test_resumed_run_keeps_wandb_id(tmp_path):
    for fault in (("in a training step", 20, "SIGTERM"), ("in a training step", 20, "SIGTERM"), None):
        run(*fit("gpt", "--ckpt_path=last"), cwd=tmp_path, fault=fault, WANDB_MODE="offline")
    paths = offline_files(tmp_path)
    assert len(paths) == 3
    ids = {record["run_id"] for path in paths for record in records(path, "run")}
    assert len(ids) == 1
    starts = json.loads((folder(tmp_path, "gpt") / "provenance.json").read_text())
    assert {start["wandb"] for start in starts} == ids
    steps = {item["_step"] for path in paths for item in history(path) if "train/loss" in item}
    assert steps == set(range(60))
    command = (tmp_path / "stdout").read_text().splitlines()[-1].split()
    assert sorted(tmp_path.glob(command[2])) == sorted(path.parent for path in paths)


@pytest.mark.run
def test_two_processes_log_one_run(path, tmp_path):
    child = start_two(
        *fit("transformer", "--trainer.logger.log_examples=true"), cwd=tmp_path, WANDB_MODE="offline"
    ).finish()
    (shared,) = offline_files(tmp_path)
    losses = ([item["val/loss"] for item in history(file) if "val/loss" in item] for file in (shared, path))
    assert next(losses) == pytest.approx(next(losses), rel=0.1)
    sources = ([[row[:2] for row in table["data"]] for table in tables(file)] for file in (shared, path))
    assert next(sources) == next(sources)
    assert child.out.read_text().count("The run is saved in") == 1
    assert "The run is saved in" not in (tmp_path / "stdout_1").read_text()


@pytest.mark.parametrize(
    ("class_path", "expected"),
    [(CSV, [(CSV, "/home/me/disk/runs")]), (WANDB, [(CSV, "runs"), (WANDB, "/home/me/disk/runs")])],
)
def test_csv_is_always_written_and_save_dir_is_expanded(class_path, expected, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("PLACE", "disk")
    logger = Namespace(class_path=class_path, init_args=Namespace(save_dir="~/$PLACE/runs", name=None))
    loggers = loggers_of_run(logger, "copy_gpt")
    assert [(logger.class_path, logger.init_args.save_dir) for logger in loggers] == expected


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flag = "--trainer.logger+=lightning_tfm.loggers.TensorBoardLogger"
    run(*fit("gpt", flag, **{"trainer.max_steps": 24}), cwd=tmp_path).finish()
    events = EventAccumulator(str(tmp_path / "runs/tensorboard/copy_gpt_version_0"))
    events.Reload()
    scalars = sorted(events.Tags()["scalars"])
    assert scalars[:2] == ["loss/train", "loss/val"], "TensorBoard sorts them"
    assert {name.partition("/")[0] for name in scalars} == {"loss", "test", "trainer", "val"}
    assert len(events.Scalars("loss/train")) == 24
    assert len(events.Scalars("val/exact_match")) == 2
    (text,) = events.Tensors("run/text_summary")[0].tensor_proto.string_val
    assert text.startswith(b"Seq2SeqModule, GPT, Copy; commit ")
    header, _, *rows = events.Tensors("val/predictions/text_summary")[0].tensor_proto.string_val[0].splitlines()
    assert header == b"| source | target | prediction | correct |"
    assert len(rows) == SAMPLES
    pictures = sorted((folder(tmp_path, "gpt") / "attention").glob("*.png"))
    assert sorted(events.Tags()["images"]) == [f"test/attention/{path.stem}" for path in pictures]
    logged = yaml.unsafe_load((tmp_path / "runs/tensorboard/copy_gpt_version_0/hparams.yaml").read_text())
    assert logged["tags"] == "Seq2SeqModule, GPT, Copy"
    assert logged["git_commit"]
    assert (folder(tmp_path, "gpt") / "metrics.csv").exists()


def test_tensorboard_shows_settings_with_the_main_metric(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    logger = loggers.TensorBoardLogger(tmp_path, version="run")
    model = {"d_model": 8, "dropout": 0.5, "bias": True, "activation": "gelu", "sizes": [1, 2], "none": None}
    logger.log_hyperparams({"model": model, "trainer": {"logger": "any", "max_steps": 5}})
    logger.log_hyperparams({"data_fingerprint": {"train": "abc"}})
    logger.log_metrics({"train/loss": 1.0}, 0)
    for step in (1, 2):
        logger.log_metrics({"val/loss": 2.0, "val/exact_match": 0.25 * step, "val/ser": 0.1}, step)
    logger.log_metrics({"test/exact_match": 0.75, "test/exact_match/short": 1.0}, 3)
    logger.save()
    logger.experiment.close()
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    content = {name: HParamsPluginData.FromString(data) for name, data in events.PluginTagToContent("hparams").items()}
    experiment = content["_hparams_/experiment"].experiment
    assert [info.name.tag for info in experiment.metric_infos] == ["val/exact_match", "test/exact_match"]
    assert {info.name.tag for info in experiment.metric_infos} <= set(events.Tags()["scalars"])
    assert "test/exact_match/short" not in events.Tags()["scalars"]
    shown = content["_hparams_/session_start_info"].session_start_info.hparams
    assert shown["model.d_model"].number_value == 8
    assert shown["model.activation"].string_value == "gelu"
    assert shown["model.bias"].string_value == "True"
    assert shown["trainer.max_steps"].number_value == 5
    assert "trainer.logger" not in shown


def test_tensorboard_purges_repeated_steps(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    csv_logger = CSVLogger(tmp_path, "name", "version")
    for start, stop in ((0, 5), (3, 6)):
        logger = loggers.TensorBoardLogger(tmp_path, version="run")
        loggers.resume_loggers([csv_logger, logger], start)
        for step in range(start, stop):
            logger.log_metrics({"train/loss": float(start)}, step)
        logger.save()
        logger.experiment.close()
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    scalars = [(event.step, event.value) for event in events.Scalars("loss/train")]
    assert scalars == [(0, 0.0), (1, 0.0), (2, 0.0), (3, 3.0), (4, 3.0), (5, 3.0)]


# Sweeps and dashboards

RECORDER = """
import json
from lightning import Callback

class Recorder(Callback):
    def on_fit_start(self, trainer, pl_module):
        values = {
            "lr": pl_module.make_optimizer.keywords["lr"],
            "d_model": pl_module.network.hyper_parameters["d_model"],
        }
        with open(f"rank_{trainer.global_rank}.json", "w") as file:
            json.dump(values, file)
"""

SWEEPS = sorted((EXPERIMENTS / "sweeps").glob("*.yaml"))


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
@pytest.mark.run
def test_wandb_sweep_values_reach_every_process(path, tmp_path):
    """The command line accepts the command that the W&B agent builds from a sweep, on two processes."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    sweep = yaml.safe_load(path.read_text())
    values = {
        name: setting.get("value", setting.get("max", setting.get("values", [None])[0]))
        for name, setting in sweep["parameters"].items()
    }
    arguments = create_sweep_command_args({"args": {name: {"value": value} for name, value in values.items()}})
    command = []
    for word in create_sweep_command(sweep["command"]):
        command += arguments["args"] if word == "${args}" else [word]
    assert command[:3] == ["lightning-tfm", "fit", "--config"]
    command[3] = EXPERIMENTS.parent / command[3]
    command += ["--trainer.max_steps=2"]
    command += [f"--data.init_args.{name}_size=60" for name in ("train", "val", "test")]
    command += ["--data.init_args.batch_size=10", "--model.init_args.lr_schedule.warmup_steps=1"]
    (tmp_path / "recorder.py").write_text(RECORDER)
    command += ["--trust-package=recorder", "--trainer.callbacks+=recorder.Recorder"]
    start_two(*command[1:], cwd=tmp_path).finish()
    for rank in (0, 1):
        received = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        assert received == {"lr": values["model.optimizer.lr"], "d_model": values["model.network.d_model"]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by pydantic in wandb-workspaces
def test_dashboards_show_logged_metrics(path, monkeypatch):
    """Build the reports, and check that a run logs all their names."""
    monkeypatch.syspath_prepend(EXPERIMENTS)
    import dashboard
    from wandb_workspaces.reports.v2 import interface

    monkeypatch.setattr(interface, "_get_api", lambda: None)
    monkeypatch.setattr(interface, "execute_graphql", lambda *_: {"project": {"internalId": "1"}})
    logged = {name for item in history(path) for name in item} | summary(path).keys()
    view = dashboard.workspace("team", "lightning_tfm")
    report = dashboard.report("team", "lightning_tfm")
    _, text = (page._to_model().model_dump_json(by_alias=True) for page in (view, report))
    panels = [panel for section in view.sections for panel in section.panels]
    named = {name for panel in panels for name in _names(panel)}
    assert {"val/exact_match", "test/exact_match", "val/predictions"} <= named
    for name in named - {"Step"}:
        assert any(other == name or other.startswith(f"{name}.") for other in logged), name
    for pattern in filter(None, (getattr(panel, "metric_regex", None) for panel in panels)):
        assert any(re.fullmatch(pattern, name) for name in logged), pattern
    groups = product(("copy", "date", "toy_translation"), ("transformer", "gpt", "attention_lstm"))
    assert all("_".join(group) in text for group in groups)


def _names(panel):
    for attribute in ("x", "y", "metrics", "media_keys", "table_name"):
        value = getattr(panel, attribute, None)
        for name in value if isinstance(value, list | tuple) else [value]:
            if isinstance(name, str):
                yield name


def test_dashboards_need_account(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environment |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    command = [sys.executable, EXPERIMENTS / "dashboard.py", "--entity", "team"]
    child = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert child.returncode == 2
    assert child.stderr.splitlines()[-1].startswith("dashboard.py: error: W&B cannot save it: No API key")
