"""`lightning-tfm reproduce` on experiments that take a second, and the claims of the real ones."""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml

import datamodules
from lightning_tfm.commands.reproduce import HEADER, SEEDS, _number, _rows, compared
from lightning_tfm.commands.seeds import SeededRuns, parse_seeds
from lightning_tfm.config.experiments import Claim, list_experiments, read_experiment
from lightning_tfm.data import GeneratedDataModule
from lightning_tfm.runs.record import Run, Summary
from lightning_tfm.system.terminal import LiteralConsole, print_table
from support.experiments import NETWORKS, SETTINGS, made_once
from support.processes import EXPERIMENTS, run, start

README = Path(__file__).parents[2] / "README.md"
YAMLS = [experiment.path for experiment in list_experiments(EXPERIMENTS) if experiment.claims]


def write_project(folder):
    """Write two short experiments; the claim of one and one of two claims of the other hold."""
    (folder / "experiments").mkdir()
    claimed = {}
    for model, claims in (
        ("gpt", {"test/exact_match": {11: 0.0, 12: 0.01}}),
        ("attention_lstm", {"test/exact_match": {11: 0.9, 12: 0.91}, "test/loss": {11: 2.0, 12: 2.1}}),
    ):
        config = yaml.safe_load((EXPERIMENTS / f"copy_{model}.yaml").read_text())
        network = {f"model.init_args.network.init_args.{name}": size for name, size in NETWORKS[model].items()}
        for name, value in (SETTINGS | network).items():
            *groups, key = name.split(".")
            functools.reduce(lambda group, name: group.setdefault(name, {}), groups, config)[key] = value
        (folder / f"experiments/copy_{model}.yaml").write_text(yaml.safe_dump(config))
        claimed[f"copy_{model}"] = claims | {"training": {"seconds": 2, "machine": "any"}}
    (folder / "experiments/claims.yaml").write_text(yaml.safe_dump(claimed))


@pytest.fixture
def project(tmp_path):
    write_project(tmp_path)
    return tmp_path


@pytest.fixture
def reproduced(tmp_path_factory):
    """Return the folder of a reproduction with two seeds, made once per session."""

    def reproduce(folder):
        write_project(folder)
        child = run("reproduce", "--seeds", "4..5", cwd=folder, forks=True)
        assert child.wait() == 1, child.err.read_text()

    return made_once("reproduced", reproduce, tmp_path_factory)


def cells(markdown):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in markdown.splitlines() if line.startswith("|")]


@pytest.mark.run
def test_claims_and_results(reproduced):
    results = json.loads((reproduced / "runs/reproduce/reproduce.json").read_text())["results"]
    holds = {(result["experiment"], result["metric"]): result["holds"] for result in results}
    assert holds == {
        ("copy_attention_lstm", "test/exact_match"): False,
        ("copy_attention_lstm", "test/loss"): True,
        ("copy_gpt", "test/exact_match"): True,
    }
    for result in results:
        paths = reproduced.glob(f"runs/reproduce/{result['experiment']}/*/summary.json")
        summaries = [json.loads(path.read_text()) for path in paths]
        metric = result["metric"].removeprefix("test/")
        assert result["values"] == {str(summary["seed"]): summary["test"][metric] for summary in summaries}
        assert sorted(result["values"]) == ["4", "5"]
    markdown = (reproduced / "runs/reproduce/RESULTS.md").read_text()
    verdicts = {(row[0], row[1]): row[4] for row in cells(markdown)[2:]}
    assert verdicts == {key: "PASS" if value else "FAIL" for key, value in holds.items()}
    printed = (reproduced / "stdout").read_text().splitlines()
    expected = ["1/2 copy_attention_lstm", "seed 4", "seed 5", "2/2 copy_gpt", "seed 4", "seed 5"]
    assert [line.split(":")[0] for line in printed[:6]] == expected
    assert sum("PASS" in line for line in printed) == 2
    assert max(map(len, printed[6:])) <= 80
    assert printed[-1] == "2 of 3 claims hold; written: runs/reproduce/RESULTS.md"


@pytest.mark.run
def test_interrupted_reproduction_is_resumed(project):
    arguments = ("reproduce", "copy_gpt", "experiments/copy_attention_lstm.yaml", "--seeds", "4", "--output", "out")
    child = start(*arguments, cwd=project, forks=True)
    child.wait_until(lambda: [*project.glob("out/copy_attention_lstm/*/checkpoints/last.ckpt")])
    child.process.terminate()
    assert child.wait() == 143
    assert child.err.read_text().splitlines()[-2:] == [
        "lightning-tfm: interrupted by SIGTERM; resume with:",
        f"  lightning-tfm {' '.join(arguments)}",
    ]
    (first,) = (project / "out").glob("copy_gpt/*/summary.json")
    written = first.stat().st_mtime_ns

    child = run(*arguments, cwd=project, forks=True)
    assert child.wait() == 1, child.err.read_text()
    assert first.stat().st_mtime_ns == written, "finished runs are not repeated"
    (starts,) = (project / "out").glob("copy_attention_lstm/*/provenance.json")
    first_step, *later = (begun["step"] for begun in json.loads(starts.read_text()))
    assert first_step == 0
    assert all(step >= 5 for step in later)
    assert len(list((project / "out").glob("*/*/summary.json"))) == 2


@pytest.mark.run
def test_runs_of_different_settings_or_source(reproduced, tmp_path):
    project = shutil.copytree(reproduced, tmp_path / "project")
    path = project / "experiments/copy_gpt.yaml"
    path.write_text(path.read_text().replace("max_steps: 60", "max_steps: 61") + "\n# a comment\n")
    arguments = ("reproduce", "copy_gpt", "--seeds=4")
    child = run(*arguments, cwd=project).finish()
    assert "finished before" not in child.out.read_text()
    assert len(list(project.glob("runs/reproduce/copy_gpt/*/summary.json"))) == 3
    results = project / "runs/reproduce/reproduce.json"
    for name, value in (("versions", {"torch": "1.0"}), ("uncommitted changes", "other"), ("commit", "other")):
        content = json.loads(results.read_text())
        content["source"][name] = value
        results.write_text(json.dumps(content))
        run(*arguments, cwd=project).refuse(f"whose runs have the same {name}, but 'runs/reproduce' differs")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "'none' must be a YAML file or the name of an experiment, but is neither"),
        (["--seeds", "3..1"], "--seeds must be 1 to 1000 different numbers below 4294967296"),
        (["copy_gpt", "experiments/copy_gpt.yaml"], "NAME must name each experiment once"),
        (["copy_gpt", "broken.yaml"], "NAME must name a valid YAML file, but line 4 of 'broken.yaml' is not: "),
        (["copy_gpt", "latin.yaml"], "NAME must name a YAML file in UTF-8, but line 2 of 'latin.yaml' is not"),
        (["copy_gpt", "--output", "broken.yaml"], "--output must be a folder, but 'broken.yaml' is a file"),
        (["copy_gpt", "--seeds", "1", "--output", "old"], "'old/reproduce.json' must be an intact file"),
        (["tsv_transformer"], "NAME must be an experiment with claims, but tsv_transformer has none"),
        (["odd/odd.yaml"], "'odd/claims.yaml' must state the results of odd for two seeds or more"),
    ],
)
def test_errors_are_one_line(arguments, message, project, mistake):
    (project / "broken.yaml").write_text("# claims:\ntrainer: {\ndata: 3\n")
    (project / "latin.yaml").write_bytes(b"# claims:\n# caf\xe9\n")
    (project / "old").mkdir()
    (project / "old/reproduce.json").write_text("{")
    (project / "odd").mkdir()
    (project / "odd/odd.yaml").write_text("seed_everything: 1\n")
    (project / "odd/claims.yaml").write_text("odd: {test/loss: {11: 1.0}, training: {seconds: 1, machine: any}}\n")
    assert message in mistake("reproduce", *arguments)
    assert not (project / "runs").exists()


def claim(*values):
    return Claim("test/exact_match", dict(enumerate(values, start=11)))


@pytest.fixture
def runs(tmp_path):
    """Return a function that makes runs with values of the exact match, by seed; None is a run that has failed."""

    def make(*values):
        made = {}
        for seed, value in enumerate(values, start=1):
            made[seed] = None if value is None else Run(tmp_path / str(seed))
            if value is not None:
                made[seed].__dict__["summary"] = Summary(test={"exact_match": value}, steps=1, parameters=1, seed=seed)
        return made

    return make


def test_confidence_interval(runs):
    """Compared with tables of t for 2 and 9 degrees of freedom."""
    result = compared("x", claim(1.9, 2.1), runs(1.0, 2.0, 3.0))
    assert (result.mean, result.holds) == (2.0, True)
    assert result.interval[1] - result.mean == pytest.approx(4.302653 / math.sqrt(3), rel=1e-3)
    result = compared("x", claim(0.0, 0.1), runs(*range(10)))
    assert result.mean - result.interval[0] == pytest.approx(2.262157 * 3.027650 / math.sqrt(10), rel=1e-3)
    assert not result.holds
    result = compared("x", claim(1.0, 1.0), runs(1.0))
    assert (result.interval, result.holds) == (None, True)
    for missing in (None, math.nan, math.inf):
        result = compared("x", claim(1.0, 1.1), runs(1.0, missing))
        assert (result.values, result.mean, result.interval, result.holds) == ({1: 1.0, 2: None}, None, None, False)


def test_prediction_interval(runs):
    """Compared with tables of t for 4 degrees of freedom."""
    result = compared("x", claim(1.0, 2.0, 3.0, 4.0, 5.0), runs(1.0, 2.0, 3.0))
    assert result.claimed == 3.0
    assert result.tolerance == pytest.approx(4.604095 * math.sqrt(2.5) * math.sqrt(1 / 5 + 1 / 3), rel=1e-6)
    result = compared("x", claim(0.5, 0.5), runs(0.4994))
    assert (result.tolerance, result.holds) == (pytest.approx(0.0005), False)


def test_coverage_of_prediction_interval(runs):
    """Check the coverage of 99% on draws from a normal distribution."""
    draws = torch.randn(4000, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist()
    held = [compared("x", claim(*draw[:5]), runs(*draw[5:])).holds for draw in draws]
    assert sum(held) / len(held) == pytest.approx(0.99, abs=0.005)


def test_table_fits_terminal(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal
    monkeypatch.setenv("COLUMNS", "80")
    experiments = [read_experiment(path) for path in YAMLS]
    results = [compared(each.name, claim, {21: None}) for each in experiments for claim in each.claims]
    print_table(HEADER[:5], [row[:5] for row in _rows(results)], LiteralConsole())
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("FAIL" in line for line in lines) == len(results)


@pytest.mark.run
def test_current_folder_has_files_but_no_modules(tmp_path):
    """Paths are relative to it as in `fit`, whatever the output folder is, but its modules may come from a stranger."""
    for name in ("yaml", "wandb", "random", "lightning_tfm", "datamodules"):
        (tmp_path / f"{name}.py").write_text("open('canary', 'w')")
    words = [f"{word}\t{word[::-1]}" for word in ("ab", "abc", "bca", "cab", "ba", "cc", "abab", "caca")]
    (tmp_path / "words.tsv").write_text("\n".join(words))
    text = (EXPERIMENTS / "tsv_transformer.yaml").read_text()
    for old, new in (("train.tsv", "words.tsv"), ("val.tsv", "words.tsv"), ("5000", "2"), ("size: 64", "size: 4")):
        text = text.replace(old, new)
    (tmp_path / "mine.yaml").write_text(text)
    claims = "mine: {val/exact_match: {11: 0.0, 12: 0.0}, training: {seconds: 2, machine: any}}\n"
    (tmp_path / "claims.yaml").write_text(claims)
    run("reproduce", "mine.yaml", "--seeds=1", "--output=some/where", cwd=tmp_path).finish()
    assert list(tmp_path.glob("some/where/mine/version_0/summary.json"))
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "canary").exists()


CSV = "lightning.pytorch.loggers.CSVLogger"
WANDB = "lightning_tfm.loggers.WandbLogger"


@pytest.mark.parametrize(
    ("trainer", "classes"),
    [
        ("{}", [CSV, WANDB]),
        ("{logger: true}", [CSV]),
        (f"{{logger: [{CSV}, {WANDB}]}}", [CSV, WANDB]),
        (f"{{logger: {{class_path: {WANDB}, init_args: {{project: mine}}}}}}", [CSV, WANDB]),
        (f"{{logger: [{WANDB}, {{class_path: {CSV}, init_args: {{save_dir: elsewhere, name: mine}}}}]}}", [CSV, WANDB]),
    ],
)
def test_loggers_write_into_output_folder(trainer, classes, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lightning_tfm.fit.cli.handle_signals", lambda handler: None)
    path = EXPERIMENTS / "copy_gpt.yaml"
    config = yaml.safe_load(path.read_text())
    config["trainer"] = {"max_steps": 3} | yaml.safe_load(trainer)
    Path("mine.yaml").write_text(yaml.safe_dump(config))
    runs = SeededRuns(["--config", "mine.yaml"], Path("out"))
    loggers = json.loads(runs._arguments[-1])
    assert runs.folder == Path("out/mine")
    assert [logger["class_path"] for logger in loggers] == classes
    assert {logger["init_args"]["save_dir"] for logger in loggers} == {"out"}
    assert ("mine" in str(loggers[-1]["init_args"].get("project"))) == ("project" in trainer)


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_claims_use_generated_or_pinned_data(path):
    """Such claims can be reproduced on any machine with a network."""
    config = yaml.safe_load(path.read_text())["data"]
    data = getattr(datamodules, config["class_path"].removeprefix("datamodules."))
    if not issubclass(data, GeneratedDataModule):
        pinned = sys.modules[data.__module__].FILES
        named = [config["init_args"].get(split) or [] for split in ("train", "val", "test")]
        named = {name for names in named for name in names}
        if config["init_args"].get("path") == "tiny_shakespeare":
            named.add("tinyshakespeare/input.txt")
        assert named
        assert named <= pinned.keys()


@pytest.mark.parametrize("experiment", list_experiments(EXPERIMENTS), ids=lambda experiment: experiment.name)
def test_test_and_validation_data_differ(experiment):
    """Settings are chosen on the validation data."""
    data = yaml.safe_load(experiment.path.read_text())["data"]
    settings = data["init_args"]
    if data["class_path"] == "ParallelText":
        assert settings["test"] == [f"multi30k/test_2016_flickr.{language}.gz" for language in ("de", "en")]
        assert set(settings["test"]).isdisjoint(settings["val"] + settings["train"])
    elif data["class_path"] == "Text":
        assert settings["test_fraction"] > 0
    elif data["class_path"] == "Sentiment":
        assert settings.get("test") or settings.get("test_fraction", 0.1) > 0


CLAIM_SEEDS = {"copy_gpt": range(71, 76), "copy_transformer": range(41, 46), "polarity_classifier": range(51, 56)}
"""Seeds of claims other than 11 to 15, with which earlier settings were measured or chosen."""


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_claims_use_new_seeds(path):
    seeds = CLAIM_SEEDS.get(path.stem, range(11, 16))
    assert all(list(claim.by_seed) == list(seeds) for claim in read_experiment(path).claims)
    assert {1, 2, 3, *parse_seeds(SEEDS)}.isdisjoint(seeds)


def test_readme_shows_claims():
    expected = {}
    for experiment in map(read_experiment, YAMLS):
        for claim in experiment.claims:
            values = claim.by_seed.values()
            around = f"{_number(min(values))} to {_number(max(values))}"
            row = [_number(claim.value), around, f"{experiment.seconds:,.0f} s"]
            expected[experiment.name, claim.metric.removeprefix("test/")] = row
    rows = [row for row in cells(README.read_text()) if len(row) == 5 and row[2][:1].isdigit()]
    shown = {(row[0].strip("`"), row[1]): row[2:] for row in rows}
    assert len(shown) == 5
    shown.pop(("multi30k_transformer", "bleu"))  # has two seeds, too few for a claim
    assert shown.items() <= expected.items()
