"""Mistakes of newcomers on the command line, whose messages name the setting, its value and a fix."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from lightning_tfm.__main__ import COMMANDS
from lightning_tfm.config.arguments import GROUPS, OPTIONS, SETTINGS
from lightning_tfm.errors import SYNONYMS
from lightning_tfm.fit.cli import TfmCLI

FILES = {
    "colon.yaml": b"trainer: {max_steps:3}\n",
    "comma.yaml": b"model: {init_args: {optimizer: {init_args: {lr: 1,5e-3}}}}\n",
    "empty.txt": b"",
    "empty.tsv": b"",
    "gap.tsv": b"a\tb\nc\n",
    "good.tsv": b"a\tb\nc\td\n",
    "latin.tsv": "Grüße\tgreetings\n".encode("latin-1"),
    "list.yaml": b"- 1\n",
    "not_a.ckpt": b"weights",
    "one_column.tsv": b"one\ntwo\nthree\n",
    "overlay.yaml": b"trainer: {max_steps: 3}\n",
    "short.txt": b"one\ntwo\n",
    "sweep.yaml": b"method: grid\n",
    "tab.yaml": b"trainer:\n\tmax_steps: 3\n",
    "utf16.txt": "May 3, 1979\n".encode("utf-16"),
}

EARLY = {
    "": {
        "fti": ("'fti'", "'fit'"),
        "train": ("'train'", "'fit'"),
        "eval": ("'eval'", "'test'"),
        "predict": ("'predict'", "'generate'"),
        "foo": ("'foo'", "available: fit, validate"),
        "--config copy_gpt fit": ("must come first", "'--config'", "available: fit"),
        "help fti": ("'fti'", "'fit'"),
        "fit": ("needs the name of an experiment", "lightning-tfm list"),
        "test": ("needs the name of a run", "lightning-tfm runs"),
        "plan": ("needs the name of an experiment", "lightning-tfm list"),
        "reproduce copy_gtp": ("'copy_gtp'", "'copy_gpt'"),
        "plan copy_gtp": ("'copy_gtp'", "'copy_gpt'"),
        "fit date_atention_lstm": ("'date_atention_lstm'", "'date_attention_lstm'"),
        "fit copy-gpt": ("'copy-gpt'", "'copy_gpt'"),
        "fit foo": ("'foo'", "lightning-tfm list"),
        "fit swep.yaml": ("'swep.yaml'", "No such file", "'sweep.yaml'"),
        "fit overlay.yaml": ("data and model must be set", "'overlay.yaml'", "fit EXPERIMENT --config overlay.yaml"),
        "fit --config=overlay.yaml --data Copy": ("model must be set", "'overlay.yaml'"),
        "plan overlay.yaml": ("data and model must be set", "plan EXPERIMENT --config overlay.yaml"),
        "fit elastic": ("data and model must be set", "fit EXPERIMENT --config elastic"),
        "explore copy_gpt --host 0.0.0.0": ("'--host' of explore", "'port'", "settings of test"),
        "inspect copy_gpt --split train": ("'--split' of inspect", "available: against, examples", "settings of test"),
        "inspect copy_gpt --example=3": ("'--example' of inspect", "'examples'"),
        "explore copy_gpt --batch_size 3": ("'batch_size'", "--data.batch_size"),
        "fit not_a.ckpt": ("a checkpoint", "--ckpt_path not_a.ckpt"),
    },
    "fit copy_gpt": {
        "--config foo.yaml": ("--config", "'foo.yaml'", "No such file"),
        "--lr 0.1": ("'lr'", "--model.optimizer.lr"),
        "-lr 0.1": ("'lr'", "--model.optimizer.lr"),
        "--learning-rate=0.1": ("'learning-rate'", "--model.optimizer.lr"),
        "--optimizer.lr 0.1": ("'optimizer.lr'", "--model.optimizer.lr"),
        "--seed 3": ("'seed'", "--seed_everything"),
        "--experiment mine": ("'experiment'", "--name"),
        "--features_col 3": ("'features_col'", "--data.features"),
        "--target_sep :": ("'target_sep'", "--data.target_separator"),
        "--encoder_layers 3": ("'encoder_layers'", "--model.network.num_layers"),
        "--dev dev.tsv": ("'dev'", "--data.val"),
        "--epochs 3": ("'epochs'", "--trainer.max_epochs"),
        "-e 3": ("'e'", "--trainer.max_epochs"),
        "--batch_size 3": ("'batch_size'", "--data.batch_size"),
        "--batch-size 3": ("'batch-size'", "--data.batch_size"),
        "--max-steps 3": ("'max-steps'", "--trainer.max_steps"),
        "--gpus 2": ("'gpus'", "--trainer.devices"),
        "--device cuda": ("'device'", "--trainer.accelerator"),
        "--workers 2": ("'workers'", "--data.num_workers"),
        "--hidden_size 64": ("'hidden_size'", "--model.network.d_model"),
        "--layers 3": ("'layers'", "--model.network.num_layers"),
        "--heads 3": ("'heads'", "--model.network.num_heads"),
        "--dropout 0.1": ("'dropout'", "--model.network.dropout"),
        "--optimizer adam": ("'optimizer'", "--model.optimizer"),
        "--keep 3": ("'keep'", "--checkpoint.keep_last"),
        "--save-total-limit 3": ("'save-total-limit'", "--checkpoint.keep_last"),
        "--resume last": ("'resume'", "--ckpt_path"),
        "--fp16": ("'fp16'", "--trainer.precision"),
        "--wandb false": ("'wandb'", "--trainer.logger"),
        "--grad-clip 1": ("'grad-clip'", "--trainer.gradient_clip_val"),
    },
}
"""Required parts of the message by the end of a command and its beginning; torch is not imported."""

LATE = {
    "fit copy_gpt": {
        "--max-step 3": ("'max_step'", "'trainer.max_steps'"),
        "--trainer.epochs 3": ("'trainer.epochs'", "'trainer.max_epochs'"),
        "--model.lr 0.1": ("'lr' of lightning_tfm.Seq2SeqModule", "'model.optimizer.lr'"),
        "--model.network.hidden_size 64": ("'hidden_size' of lightning_tfm.GPT", "'d_model'"),
        "--data.lr 0.1": ("'lr' of datamodules.Copy", "'model.optimizer.lr'"),
        "--foo 3": ("'foo'", "available: checkpoint, ckpt_path"),
        "trainer.max_steps=3": ("--SETTING VALUE", "--trainer.max_steps"),
        "copy_transformer": ("--config YAML", "'copy_transformer'"),
        "list.yaml": ("'list.yaml'", "try --config list.yaml"),
        "--trainer.max_steps": ("--trainer.max_steps must have a value", "add it"),
        "--data.batch_size": ("--data.batch_size must have a value", "add it"),
        "--model.network.d_model --dry-run": ("--model.network.d_model must have a value", "add it"),
        "--config colon.yaml": ("a space after its colon", "'trainer.max_steps:3'", "try trainer.max_steps: 3"),
        "--config comma.yaml": ("must have a name", "0.005", "decimals with a point"),
        "--config": ("--config must have a value", "add it"),
        "--config list.yaml": ("'list.yaml'", "NAME: VALUE"),
        "--config tab.yaml": ("line 2 of 'tab.yaml'", "indent with spaces"),
        "--seeds five": ("--seeds", "'five'", "try 1..5"),
        "--seeds 1..3 --jobs 0": ("--jobs must be at least 1", "0", "try 1"),
        "--seeds 1..3 --jobs two": ("--jobs must be of type int", "'two'"),
        "--jobs 3": ("required: --seeds",),
        "--trainer.max_steps -5": ("trainer.max_steps must be at least 1", "-5", "try 3000"),
        "--trainer.max_steps ten": ("trainer.max_steps must be of type int", "ten"),
        "--trainer.max_steps 1e3": ("trainer.max_steps must be of type int", "try 1000"),
        "--trainer.max_steps 10,000": ("trainer.max_steps must be of type int", "10,000; try 10000"),
        "--trainer.devices two": ("trainer.devices must be a number", "try 1"),
        "--trainer.accelerator cuda": ("trainer.accelerator must be available", "CUDA", "try auto"),
        "--trainer.accelerator tpu": ("trainer.accelerator must be available", "tpu", "try auto"),
        "--trainer.accelerator gpus": ("trainer.accelerator must be auto, cpu", "gpus", "try auto"),
        "--trainer.precision fp16": ("trainer.precision", "'16-mixed'", "fp16"),
        "--trainer.precision bf16-mix": ("trainer.precision", "bf16-mix", "did you mean 'bf16-mixed'"),
        "--trainer.benchmark maybe": ("trainer.benchmark must be true or false", "maybe"),
        "--trainer.strategy dpp": ("trainer.strategy must be auto, ddp", "dpp", "try auto"),
        "--trainer.gradient_clip_val -1": ("trainer.gradient_clip_val must be at least 0", "-1"),
        "--trainer.log_every_n_steps -1": ("trainer.log_every_n_steps must be at least 0", "-1"),
        "--trainer.limit_val_batches -1": ("trainer.limit_val_batches must be", "-1", "leave it out"),
        "--trainer.logger wandb": ("trainer.logger", "wandb", "'WandbLogger'"),
        "--trainer.callbacks.patience 4": ("trainer.callbacks must name", "try --trainer.callbacks+=EarlyStopping"),
        "--trainer.callbacks+=EarlyStopping --trainer.callbacks.patience four": ("callbacks.patience", "int", "four"),
        "--trainer.callbacks+=EarlyStopping --trainer.callbacks.patienc 4": ("EarlyStopping", "'patience'"),
        "--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor val/loss --trainer.callbacks.patience -1": (
            *("patience of EarlyStopping in trainer.callbacks must be at least 0", "-1", "try 3"),
        ),
        "--trainer.callbacks EarlyStoping": ("trainer.callbacks", "'EarlyStopping'"),
        "--trainer.max_time 1h": ("trainer.max_time must be DD:HH:MM:SS", "1h", "try 00:01:00:00"),
        "--data date": ("data must be", "date", "'Date'"),
        "--data good.tsv": ("data must be a class", "'good.tsv'", "--data.train good.tsv"),
        "--data.batch_size null": ("batch_size must be at least 1", "None"),
        "--model GPT": ("model must be", "GPT", "--model.network GPT"),
        "--model.network gpt": ("model.network must be", "gpt", "'GPT'"),
        "--model.network foo": ("model.network must be", "foo", "available: AttentionLSTM, "),
        "--model.network EncoderClassifier": ("but is EncoderClassifier", "available: GPT, AttentionLSTM, Linear"),
        "--model.optimizer adam": ("model.optimizer must be", "adam", "'Adam'"),
        "--model.optimizer.lr small": ("model.optimizer.lr must be of type float", "small"),
        "--model.optimizer.lr 0,001": ("model.optimizer.lr must be of type float", "0,001; try 0.001"),
        "--model.optimizer.lr nan": ("model.optimizer.lr must be a finite number", "nan"),
        "--model.optimizer.lr 0": ("lr must be above 0", "0.0", "try 0.001"),
        "--model.network.positions rope": ("model.network.positions must be one of", "'rotary'", "rope"),
        "--model.network.num_heads 3": ("d_model must be divisible by num_heads (3)", "try"),
        "--model.network.dropout 1.5": ("dropout must be", "1.5", "try 0.1"),
        "--ckpt_path not_a.ckpt": ("'not_a.ckpt'", "not a checkpoint", "fit --ckpt_path last"),
        "--ckpt_path CHECKPOINT": ("class_path must match the checkpoint", "config.yaml"),
    },
    "fit copy_attention_lstm": {
        "--model.network.num_layers 3": ("'num_layers' of lightning_tfm.AttentionLSTM", "available: attention, cell"),
    },
    "fit tsv_transformer --data.val good.tsv": {
        "--data.train none.tsv": ("'none.tsv'", "LIGHTNING_TFM_DATA"),
        "--data.train one_column.tsv": ("'one_column.tsv' must have a tab", "line 1", "'one'", "by tabs, or"),
        "--data.train gap.tsv": ("'gap.tsv'", "line 2"),
        "--data.train empty.tsv": ("'empty.tsv' must hold text", "empty"),
        "--data.train latin.tsv": ("'latin.tsv' must be in encoding utf-8", "such as latin-1"),
        "--data.train=": ("train must name a file, but is empty", "--data.train FILE"),
        "--data.train good.tsv --data.val=": ("val must name a file, but is empty", "--data.val FILE"),
        "--data.train good.tsv --data.test=": ("test must name a file, but is empty", "--data.test FILE"),
        "--data.train .": ("train must be a file", "'.'"),
        "--data.path good.tsv": ("'path' of datamodules.Tsv", "available: "),
        "--data.dev good.tsv": ("'dev' of datamodules.Tsv", "'val'"),
    },
    "": {
        "sweep sweep.yaml": ("SPEC", "missing 'metric', 'parameters', and 'command'"),
        "test copy_gpt": ("no run 'copy_gpt'", "lightning-tfm fit copy_gpt"),
        "generate May CHECKPOINT": ("RUN must come before TEXT", "'May'", "first"),
        "list copy_gpt": ("unrecognized arguments: copy_gpt",),
        "plan copy_gpt --gpus 2": ("'gpus'", "'trainer.devices'"),
        "report none": ("there is no run 'none'", "lightning-tfm fit EXPERIMENT"),
        "average CHECKPOINT": ("required: --output",),
        "ensemble CHECKPOINT": ("required: --output",),
        "export CHECKPOINT --format onx": ("'onx'", "choose from", "onnx"),
        "explore CHECKPOINT --port web": ("--port must be of type int", "'web'"),
        "inspect CHECKPOINT --against May": ("--against", "add --input TEXT"),
        "completion fishy": ("'fishy'", "choose from"),
    },
    "generate CHECKPOINT May": {
        "--n-best 0": ("n_best must be from 1", "0", "try 1"),
        "--beam 4": ("'--beam'", "'beam-size'"),
        "--num_beams 4": ("'--num_beams'", "'beam-size'"),
        "--max-new-tokens 4": ("'--max-new-tokens'", "'max-tokens'"),
        "--device cuda": ("'--device'", "available: help, input"),
        "--beam_size four": ("--beam-size must be of type int", "'four'"),
        "--beam_size": ("--beam-size: expected one argument",),
        "--temperature -1": ("temperature must be 0 or from 0.01", "-1.0", "try 0.8"),
        "--temperature 1 --beam-size 4": ("beam_size and temperature are mutually exclusive",),
        "--input short.txt": ("TEXT or --input", "leave one out"),
        "--output none/out.txt": ("--output must be a file", "'none/out.txt'"),
    },
    "generate CHECKPOINT": {
        "--input none.txt": ("--input must be a file", "'none.txt'"),
        "--input utf16.txt": ("'utf16.txt'", "save it in UTF-8"),
    },
}
"""Required parts of the message by the end of a command and its beginning."""


def cases(mistakes):
    return [
        pytest.param(f"{start} {end}".split(), parts, id=f"{start} {end}".strip())
        for start, ends in mistakes.items()
        for end, parts in ends.items()
    ]


@pytest.fixture
def newcomer(mistake, tmp_path, monkeypatch):
    """Return a function that runs a command with a mistake beside FILES, and checks that the error has some parts."""

    def started(self, prefix):
        raise AssertionError("the run started")

    def newcomer(arguments, parts):
        for name, content in FILES.items():
            Path(tmp_path, name).write_bytes(content)
        monkeypatch.setattr(TfmCLI, "_enter", started)
        message = mistake(*arguments)
        assert [part for part in parts if part not in message] == [], message

    return newcomer


@pytest.mark.parametrize(("arguments", "parts"), cases(EARLY))
def test_a_mistake_in_a_name_has_a_fix(arguments, parts, newcomer):
    newcomer(arguments, parts)


@pytest.mark.parametrize(("arguments", "parts"), cases(LATE))
def test_a_mistake_has_a_fix(arguments, parts, newcomer, request):
    if "CHECKPOINT" in arguments:
        checkpoint = request.getfixturevalue("checkpoint")
        arguments = [str(checkpoint) if argument == "CHECKPOINT" else argument for argument in arguments]
    newcomer(arguments, parts)


@pytest.mark.parametrize("command", OPTIONS)
def test_the_options_of_a_command_are_those_of_its_parser(command):
    parser = import_module(f"lightning_tfm.commands.{command}").make_parser()
    assert sorted(option[2:] for option in parser.options() if option.startswith("--")) == [*OPTIONS[command]]


SCRIPT = """
import sys
from lightning_tfm.__main__ import main
for arguments in sys.stdin:
    sys.argv = ["lightning-tfm", *arguments.split()]
    try:
        main()
    except SystemExit as end:
        assert end.code == 2
    assert not {"torch", "lightning", "numpy", "rich"} & sys.modules.keys(), arguments
"""


def test_a_mistake_in_a_name_is_found_before_torch_is_imported(tmp_path):
    commands = "\n".join(f"{start} {end}" for start, ends in EARLY.items() for end in ends)
    command = [sys.executable, "-c", SCRIPT]
    child = subprocess.run(command, input=commands, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr
    assert len(child.stderr.splitlines()) == sum(map(len, EARLY.values()))


def test_a_synonym_is_neither_a_setting_nor_ambiguous():
    """Otherwise, the check of names would refuse a setting that exists."""
    own = {"config", "c", "dry_run", "h", "help", "help_all", "jobs", "print_config", "seeds", "skip_test"}
    aliases = [alias for name in SETTINGS for alias in SYNONYMS[name].split()]
    assert len(aliases) == len(set(aliases))
    assert not own.union(GROUPS) & set(aliases)
    assert not set(COMMANDS) & {alias for name in COMMANDS for alias in SYNONYMS.get(name, "").split()}
