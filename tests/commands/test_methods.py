"""The paragraph for a publication: `lightning-tfm methods`."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from lightning_tfm.commands.methods import CHOICES, REFERENCES
from lightning_tfm.config.experiments import list_experiments
from lightning_tfm.runs.record import Run
from support import records
from support.processes import EXPERIMENTS

ROOT = EXPERIMENTS.parent

OVERLAYS = ("elastic", "model_parallel")
NAMES = [experiment.name for experiment in list_experiments(EXPERIMENTS) if experiment.name not in OVERLAYS]

START = {
    "data_sizes": {"train": 54_321, "val": 1_234, "test": 4_567},
    "versions": records.START["versions"] | {"python": "3.11.7", "lightning": "2.6.6", "faker": "40.1", "babel": "2.1"},
}

WORDS = {
    "model.network.dropout": r"dropout \\cite\{srivastava2014\}",
    "model.network.word_dropout": "word dropout",
    "model.network.num_bigram_buckets": "naive Bayes",
    "model.network.pointer_generator": "pointer-generator",
    "model.label_smoothing": "label smoothing",
    "model.pretrained": "started from the pretrained weights in",
    "model.lr_schedule.warmup_steps": "increased linearly|warm-up",
    "model.optimizer.weight_decay": "weight decay",
    "model.optimizer.muon_lr": r"rate of [\d.]+ for hidden matrices",
    "trainer.gradient_clip_val": "clipped",
    "trainer.precision": "The precision",
    "trainer.callbacks": "callback|averaged exponentially",
}
"""Patterns of the words of settings, which appear if, and only if, the setting is on."""


def setting(config, name):
    """Return a setting by its name on the command line; None if there is none."""
    value = config
    for part in name.split("."):
        value = value.get("init_args", value).get(part) if isinstance(value, dict) else None
    return value


def set_off(config, name):
    *parents, last = name.split(".")
    value = setting(config, ".".join(parents))
    value.get("init_args", value)[last] = None


def without_citations(text):
    return re.sub(r"\\cite\{\w+\}", "", text)


@pytest.fixture
def described(tmp_path, command):
    """Return a function that describes a run with some settings, and returns the paragraph and the references."""

    def described(config, summary=None, start=None, name="name"):
        records.write_run(tmp_path / name, config, summary or {"seed": 7}, START | (start or {}))
        printed = command("methods", tmp_path / name).out
        comment, paragraph, _, bibliography = printed.split("\n", 3)
        assert comment == f"% {tmp_path.name}"
        return paragraph, bibliography

    return described


@pytest.fixture
def configs(command):
    """Return a function that returns all settings of an experiment."""
    return lambda name: yaml.safe_load(command("fit", name, "--print_config").out)


@pytest.mark.parametrize("name", NAMES)
def test_paragraphs_of_experiments(name, configs, described, tmp_path):
    """Numbers stand in the files of the run, citations match the references, and no setting is named that is off."""
    config = configs(name)
    paragraph, bibliography = described(config)
    files = json.dumps(config) + "".join(
        (tmp_path / "name" / file).read_text() for file in (Run.SUMMARY, Run.PROVENANCE)
    )
    numbers = re.findall(r"\d+(?:\.\d+)?", re.sub(r"(?<=\d),(?=\d)", "", without_citations(paragraph)))
    assert len(numbers) > 10
    assert set(numbers) <= set(re.findall(r"\d+(?:\.\d+)?", files))
    cited = set(re.findall(r"\\cite\{(\w+)\}", paragraph))
    assert cited == set(re.findall(r"^@\w+\{(\w+),$", bibliography, re.MULTILINE))
    for option, words in WORDS.items():
        assert bool(re.search(words, paragraph)) is bool(setting(config, option)), option
    accumulated = setting(config, "trainer.accumulate_grad_batches")
    assert ("each step used" in paragraph) is (accumulated > 1)
    assert ("beam search" in paragraph) is ((setting(config, "model.beam_size") or 1) > 1)
    assert ("greedy" in paragraph) is (setting(config, "model.beam_size") == 1)
    assert "None" not in paragraph
    assert "  " not in paragraph


@pytest.mark.parametrize("option", [*WORDS])
def test_a_setting_is_named_only_if_it_is_on(option, configs, described):
    on = {
        "dropout": 0.125,
        "word_dropout": 0.125,
        "pointer_generator": True,
        "pretrained": "folder",
        "callbacks": [{"class_path": "x.Y"}],
    }
    config = configs({"muon_lr": "shakespeare_gpt_gpu"}.get(option.rpartition(".")[2], "polarity_classifier"))
    *parents, last = option.split(".")
    parent = setting(config, ".".join(parents))
    parent.get("init_args", parent)[last] = on.get(last, 0.5 if last != "precision" else "bf16-mixed")
    paragraph, _ = described(config, name="on")
    assert re.search(WORDS[option], paragraph)
    set_off(config, option)
    if last == "warmup_steps":
        parent.get("init_args", parent)[last] = 0
    paragraph, _ = described(config, name="off")
    assert not re.search(WORDS[option], paragraph)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in CHOICES.items() for value in values])
def test_choices_of_a_network(name, value, configs, described):
    config = configs({"attention": "date_attention_lstm", "cell": "date_attention_lstm"}.get(name, "copy_transformer"))
    arguments = setting(config, "model.network")["init_args"]
    arguments[name] = value
    paragraph, _ = described(config)
    for other, text in CHOICES[name].items():
        if not text.startswith(CHOICES[name][value]) or other == value:
            assert (text in paragraph) is (text in CHOICES[name][value])


def test_references_are_complete_and_used():
    text = REFERENCES.read_text()
    entries = dict(re.findall(r"^@\w+\{(\w+),\n(.*?)^\}$", text, re.MULTILINE | re.DOTALL))
    assert len(entries) == text.count("@")
    assert list(entries) == sorted(entries)
    code = (ROOT / "lightning_tfm/commands/methods.py").read_text()
    for key, fields in entries.items():
        assert re.search(rf"cite\{{+{key}\}}", code), f"{key} is not cited"
        assert all(f"  {field} = {{" in fields for field in ("author", "title"))
        assert fields.count("{") == fields.count("}")
        year = re.search(r"\d{4}", key)
        assert year is None or f"  year = {{{year[0]}}}," in fields
        assert year is None or key.removesuffix(year[0]) in re.sub(r"\{\\.(\w)\}", r"\1", fields).lower()
    own = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    fields = entries["lightning_tfm"].replace("\\", "")
    assert f"{{{own['title']}}}" in fields
    assert f"{{{{{own['authors'][0]['name']}}}}}" in fields
    assert set(re.findall(r"cite\{+(\w+)\}", code)) == set(entries)


def test_runs_of_equal_settings_share_a_paragraph(configs, tmp_path, command):
    for seed, steps, decay in ((2, 600, 0.01), (1, 500, 0.01), (3, 600, 0.125)):
        config = configs("date_attention_lstm")
        config["seed_everything"] = seed
        config["model"]["init_args"]["optimizer"]["init_args"]["weight_decay"] = decay
        summary = {"seed": seed, "steps": steps, "train_seconds": float(seed)}
        records.write_run(tmp_path / f"runs/version_{seed}", config, summary, START)
    printed = command("methods", tmp_path / "runs").out
    assert printed.count("We trained an") + printed.count("We trained a ") == 2
    assert "We trained for 500 to 600 steps with each of the seeds 1 and 2." in printed
    assert "We trained for 600 steps with the seed 3." in printed
    assert "Training took 1.0 to 2.0 seconds per run" in printed
    assert printed.count("@misc{lightning_tfm,") == 1
    error = command("methods", f"A={tmp_path}/runs", status=2).err
    assert "the runs of a group must have equal settings except for the seed, but those of A differ" in error


def test_what_a_run_was_is_described(configs, described):
    config = configs("date_gpt")
    config["trainer"]["strategy"] = yaml.safe_load((EXPERIMENTS / "elastic.yaml").read_text())["trainer"]["strategy"]
    averaging = {"class_path": "lightning_tfm.callbacks.WeightAveraging", "init_args": {"decay": 0.875}}
    config["trainer"]["callbacks"] = [averaging]
    config["trainer"]["max_steps"] = config["model"]["init_args"]["lr_schedule"]["warmup_steps"] = 100
    hardware = records.START["hardware"] | {"gpus": ["GPU & Co"] * 2, "threads": 3}
    start = {"hardware": hardware, "processes": 2, "framework": {"commit": "0123456789abcdef", "dirty": True}}
    summary = {"seed": 1, "stopped_early": "callback", "signatures": {"bleu": "nrefs:1|tok:13a"}}
    paragraph, _ = described(config, summary, start)
    assert "averaged exponentially with a decay rate of at most 0.875." in paragraph
    assert r"The strategy was \texttt{Elastic} with \texttt{num\_micro\_batches} 2." in paragraph
    assert r"in 2 processes with 3 threads on GPU \& Co." in paragraph
    assert "(commit 0123456789 with uncommitted changes)." in paragraph
    assert (
        "Training of at most 100 steps, for which the learning rate was scheduled, was stopped early by a" in paragraph
    )
    assert "increased until the end, in a warm-up of 100 steps." in paragraph
    assert r"(\texttt{nrefs:1\textbar{}tok:13a})" in paragraph
    config["model"]["init_args"]["lr_schedule"]["warmup_steps"] = 200
    assert "in a warm-up of 200 steps, and did not reach its peak." in described(config, summary, start, "long")[0]
    assert "54,321 (train), 1,234 (val) and 4,567 (test) pairs" in paragraph
    assert "decayed" not in paragraph
    config["trainer"]["accelerator"] = "cpu"
    assert "GPU" not in described(config, summary, start)[0].replace("GPT", "")


def test_own_classes_are_named_by_their_path(configs, described):
    config = configs("shakespeare_gpt2")
    assert "into characters" not in described(config)[0], "tokenizer_file replaces the tokenizer"
    config["model"]["init_args"]["network"]["class_path"] = "mine.GPT"
    config["data"] = {"class_path": "mine.Date", "init_args": {"tokenizer": {"a": 1}, "batch_size": 3}}
    paragraph, _ = described(config, name="own")
    assert r"We trained the network \texttt{mine.GPT} with \texttt{" in paragraph
    assert r"The data were those of \texttt{mine.Date}." in paragraph
    assert not re.search("decoder-only|GELU|tied|Faker|Babel|Texts were", paragraph)


def test_invalid_runs(configs, tmp_path, command):
    assert "GROUP must name runs, but 'nowhere' names none" in command("methods", "nowhere", status=2).err
    records.write_run(tmp_path / "young", configs("date_gpt"))
    assert "has not finished, and is left out" in command("methods", "young", status=2).err
    run = records.write_run(tmp_path / "short", {"model": {"class_path": "Seq2SeqModule"}, "data": []}, {"seed": 1})
    assert "'short/config.yaml' must hold all settings, as fit writes it" in command("methods", "short", status=2).err
    summary = json.loads((run.folder / Run.SUMMARY).read_text())
    del summary["train_seconds"]
    (run.folder / Run.SUMMARY).write_text(json.dumps(summary))
    captured = command("methods", "short", status=2).err
    assert "short has no record of a training, and is left out" in captured
    assert "GROUP must name a run that was trained" in captured
