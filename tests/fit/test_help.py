"""The help of the commands, and their completion in bash."""

import inspect
import re
import subprocess
from importlib import import_module

import pytest
import yaml
from jsonargparse import ArgumentParser

import datamodules
from lightning_tfm import networks, tasks
from lightning_tfm.__main__ import COMMANDS
from lightning_tfm.commands import SUMMARIES
from lightning_tfm.config.settings import flatten
from lightning_tfm.config.trust import trusted
from lightning_tfm.fit import LIGHTNING_COMMANDS
from lightning_tfm.fit.cli import SettingsCLI, run
from lightning_tfm.fit.help import BASE_CLASSES, purpose
from lightning_tfm.system.private import actions
from support.experiments import COPY
from support.processes import EXPERIMENTS


def test_help_lists_every_command(command):
    printed = command("--help").out
    assert all(f"\n  {command:<10}  {summary}\n" in printed for command, summary in COMMANDS.items())
    assert "generate date_attention_lstm " in printed
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize("name", ["fit", "validate", "test"])
def test_help_fits_a_screen_and_names_what_exists(name, command):
    printed = command(name, "--help").out
    assert len(printed.splitlines()) <= 24
    assert max(map(len, printed.splitlines())) <= 80
    words = re.split(r"\W+", printed)
    for package in (datamodules, tasks, networks) if name == "fit" else (datamodules,):
        for cls in (getattr(package, exported) for exported in package.__all__):
            is_base = inspect.isabstract(cls) or cls.__name__ in BASE_CLASSES
            assert is_base is (cls.__name__ not in words), cls
    assert ("--trainer.max_steps" in printed) is (name == "fit"), "an evaluation does not train"
    options = set(re.findall(r"--([a-z_.-]+)", printed)) - {"help-all"}
    settings = flatten(yaml.safe_load(command("fit", "--config", COPY, "--print_config").out))
    for option in options - {
        "config",
        "dry-run",
        "print_config",
        "data.help",
        "model.network.help",
        "seeds",
        "jobs",
        "fork",
    }:
        name = option.replace("model.", "model.init_args.")
        assert any(other == name or other.startswith(f"{name}.") for other in settings), option


def test_names_of_settings_have_hyphens_or_underscores(command):
    settings = ["--seed_everything=3", "--trainer.max_steps", "7", "--data.init_args.batch_size=9", "--dry_run"]
    printed, hyphenated = (
        command("fit", "--config", COPY, *arguments, "--print_config").out
        for arguments in (settings, [setting.replace("_", "-") for setting in settings])
    )
    assert printed == hyphenated
    settings = flatten(yaml.safe_load(printed))
    assert (settings["seed_everything"], settings["trainer.max_steps"], settings["data.init_args.batch_size"]) == (
        3,
        7,
        9,
    )


@pytest.mark.parametrize(
    ("arguments", "name", "setting"),
    [
        (["--data.help", "date"], "datamodules.Date", "--data.first_year"),
        (["--data.help=Tsv"], "datamodules.Tsv", "--data.target_separator"),
        (["copy_gpt", "--model.help", "classifier", "--trainer.max_steps=1"], "Classifier", "--model.labels"),
        (["--model.network.help", "gpt"], "GPT", "--network.num_heads"),
        (["copy_gpt", "--model.init_args.network.help=EncoderClassifier"], "EncoderClassifier", "--network.d_ff"),
    ],
)
def test_the_help_of_a_class_is_shown_by_its_name(arguments, name, setting, command):
    printed = command("fit", *arguments).out
    assert re.search(rf"^Help for .*\b{name}$", printed, re.MULTILINE)
    assert f"  {setting}" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data.help", "dates"], "--data.help must name a class of datamodules, but is 'dates'; did you mean 'Date'"),
        (["--model.help", "gpt"], "but is 'gpt'; try --model.network.help GPT"),
        (["--model.network.help"], "but is ''; available: GPT, AttentionLSTM, "),
        (["--data.help", "transformer"], "but is 'transformer'; try --model.network.help Transformer"),
    ],
)
def test_the_help_of_an_unknown_class_names_what_exists(arguments, message, mistake):
    assert message in mistake("fit", *arguments)


@pytest.mark.parametrize("name", LIGHTNING_COMMANDS)
def test_all_settings_are_listed_without_markup(name, command):
    printed = command(name, "--help-all").out
    assert f"\n\n{purpose(name)}\n\n" in printed
    assert "--trainer.gradient_clip_algorithm" in printed
    assert not re.search(r":(class|meth|func|attr):`|``", printed)
    for refused in ("overfit_batches", "limit_train_batches"):
        assert f"--trainer.{refused}" not in printed


@pytest.mark.parametrize("name", SUMMARIES)
def test_every_argument_of_a_command_has_help(name):
    parser = import_module(f"lightning_tfm.commands.{name}").make_parser()
    assert [action.dest for action in actions(parser) if not action.help] == []


OWN = {cls for cls in trusted().values() if cls.__module__.split(".")[0] in ("datamodules", "lightning_tfm")}


@pytest.mark.parametrize("cls", sorted(OWN, key=str), ids=lambda cls: cls.__name__)
def test_every_argument_of_a_class_has_help(cls):
    parser = ArgumentParser()
    parser.add_class_arguments(cls, "setting")
    assert [action.dest for action in actions(parser) if not action.help] == []


def test_every_setting_of_fit_has_help():
    parser = run(["fit", str(COPY)], SettingsCLI).command_parser
    assert [action.dest for action in actions(parser) if not action.help] == []


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["gen"], ["generate"]),
        (["fit", "date_att"], ["date_attention_lstm"]),
        (["fit", "date_gpt", "--trainer.max_s"], ["--trainer.max_steps"]),
        (["plan", "date_g"], ["date_gpt"]),
        (["plan", "date_gpt", "--dev"], ["--devices"]),
        (["generate", "best.ckpt", "--n-"], ["--n-best"]),
        (["fit", "date_gpt", "--trainer.overf"], []),  # hidden
        (["test", "pyproj"], ["pyproject.toml"]),
    ],
)
def test_commands_are_completed_in_bash(words, completed, monkeypatch, command):
    monkeypatch.chdir(EXPERIMENTS.parent)
    script = command("completion", "bash").out
    typed = f"COMP_WORDS=({' '.join(['lightning-tfm', *words])}); COMP_CWORD={len(words)}; _shtab_lightning_tfm"
    command = ["bash", "-c", f'{script}\n{typed}\nprintf "%s\\n" "${{COMPREPLY[@]}}"']
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == completed


def test_the_version_is_printed(command):
    assert re.fullmatch(r"lightning-tfm \d+\.\d+\.\d+\S*\n", command("--version").out)
    assert "List the runs below a folder" in command("help", "runs").out


def test_help_explains_the_temperature(command):
    assert "lower is more conservative" in " ".join(command("generate", "--help").out.split())
