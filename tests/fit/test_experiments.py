"""Every experiment of the folder `experiments`."""

import pytest
import yaml

from lightning_tfm.config.experiments import list_experiments
from lightning_tfm.tasks import TaskModule
from support.corpora import TEXT, reviews, sentences, write_inflections, write_lines, write_pronunciations
from support.experiments import COPY
from support.networks import architecture
from support.processes import EXPERIMENTS

TAB = "\t"
YAMLS = [experiment.path for experiment in list_experiments(EXPERIMENTS)]


GENERATED = {
    f"{task}_{model}"
    for task in ("copy", "toy_translation", "date")
    for model in ("transformer", "gpt", "attention_lstm")
}


def test_each_task_is_paired_with_each_model():
    assert {path.stem for path in YAMLS} >= GENERATED


def settings_with_small_files(data, folder):
    """Return settings that replace downloads by small files."""
    if data == "Text":
        (folder / "text.txt").write_text(10 * TEXT)
        settings = {"path": folder / "text.txt", "batch_size": 2, "tokenizer_file": "null", "vocab_size": 300}
    elif data == "Sentiment":
        settings = {"train": [write_lines(folder / "table.tsv", map(TAB.join, reviews(400)))]}
    else:
        features = ["N;PL"] if data == "Tsv" else []
        table = write_lines(folder / "table.tsv", (TAB.join([*pair, *features]) for pair in sentences(300)))
        table = [table] if data == "ParallelText" else table
        settings = {"train": table, "val": table, "test": table, "vocab_size": 400}
        if data == "ParallelText":
            settings["batch_tokens"] = 600
    return [f"--data.init_args.{name}={value}" for name, value in settings.items()]


MIRRORS = {"Inflection": write_inflections, "Pronunciation": write_pronunciations}
"""Functions that write a mirror of the files of a data module."""


LARGE = {"multi30k_transformer_gpu", "shakespeare_gpt2"}
"""Experiments with networks of more than forty million parameters."""


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.run] if path.stem in LARGE else []) for path in YAMLS],
    ids=lambda path: path.stem,
)
def test_experiment_runs(path, monkeypatch, tmp_path, command):
    """Train and validate on one batch each, of fewer pairs and otherwise as configured.

    Note:
        Large networks are trained in float32: on CPUs without instructions for bfloat16, a step would take minutes.
    """
    tested = []
    monkeypatch.setattr(TaskModule, "on_validation_end", lambda module: tested.append(module))
    if path.stem.startswith(("copy", "toy_translation", "date")):
        sizes = ["--data.init_args.train_size=600", "--data.init_args.val_size=20", "--data.init_args.test_size=30"]
    else:
        config = yaml.safe_load(path.read_text())
        data = config["data"]["class_path"]
        if data in MIRRORS:
            MIRRORS[data](tmp_path, monkeypatch)
            sizes = ["--data.init_args.batch_size=10"]
        else:
            sizes = settings_with_small_files(data, tmp_path)
        if "pretrained" in config["model"]["init_args"]:  # half a gigabyte of weights
            sizes += ["--model.init_args.pretrained=null", "--data.init_args.max_length=64"]
    if path.stem in LARGE:
        sizes.append("--trainer.precision=32-true")
    command("fit", "--config", path, "--trainer.fast_dev_run=true", *sizes)
    (module,) = tested
    assert module.network.hyper_parameters["vocab_size"] == module.tokenizer.vocab_size
    assert module.trainer.global_step == 1
    config = yaml.safe_load(path.read_text())
    assert type(config["seed_everything"]) is int
    assert 12 <= len(path.read_text().splitlines()) <= 20


@pytest.mark.parametrize("experiment", ["copy_gpt", COPY])
def test_an_experiment_is_fit_by_its_name_alone(experiment, tmp_path, command):
    sizes = [f"--data.{name}=30" for name in ("train_size", "val_size", "test_size", "longer_size", "batch_size")]
    assert command("fit", experiment, "--dry-run", *sizes).out.splitlines()[-1].startswith("dry run passed")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("overlay", ["llama", "qwen3", "smollm2"])
def test_an_architecture_can_be_laid_over_an_experiment(overlay, tmp_path, command):
    """Only the settings of the overlay change."""
    before, after = (
        yaml.safe_load(command("fit", "shakespeare_gpt", *options, "--print_config").out)
        for options in ([], ["--config", overlay])
    )
    before["model"]["init_args"]["network"]["init_args"] |= architecture(overlay)
    assert after == before
    sizes = settings_with_small_files("Text", tmp_path)
    command("fit", "shakespeare_gpt", "--config", overlay, "--trainer.fast_dev_run=true", *sizes)


def test_setting_of_a_nested_class_can_be_null(command):
    values = {"d_embedding": 8, "features_encoder": "linear"}
    settings = [f"--model.network.{name}={value}" for name, value in values.items()]
    nulls = [f"--model.network.{name}=null" for name in values]
    printed = command("fit", "copy_attention_lstm", *settings, *nulls, "--print_config").out
    network = yaml.safe_load(printed)["model"]["init_args"]["network"]["init_args"]
    assert {name: network[name] for name in values} == dict.fromkeys(values)
