"""Mistakes in a YAML file or on the command line, each reported in one line before data are generated."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_tfm.__main__ import COMMANDS
from lightning_tfm.checkpoint import read, write
from lightning_tfm.checkpoint.plugin import VerifiedCheckpointIO
from lightning_tfm.commands.parser import check_new_file, check_writable
from lightning_tfm.errors import UserError
from lightning_tfm.fit.cli import TfmCLI
from lightning_tfm.runs.record import Run
from support.experiments import COPY, DATE, fit
from support.processes import EXPERIMENTS, run


@pytest.fixture
def yaml_mistake(mistake):
    """Return a function that fits an experiment and a YAML file with a mistake, and returns the error."""

    def yaml_mistake(data, *options):
        Path("mistake.yaml").write_bytes(data if isinstance(data, bytes) else data.encode())
        return mistake("fit", "--config", COPY, "--config", "mistake.yaml", *options)

    return yaml_mistake


def test_a_mistake_prints_one_line_to_standard_error(tmp_path):
    script = Path(sys.executable).with_name("lightning-tfm")
    setting = "--model.init_args.network.init_args.max_length=20"
    run = subprocess.run([script, "fit", "--config", COPY, setting], cwd=tmp_path, capture_output=True, text=True)
    assert (run.returncode, run.stdout, len(run.stderr.splitlines())) == (2, "", 1)
    assert "has 141 tokens, but the model has max_length 20 positions" in run.stderr


def test_control_characters_of_a_mistake_are_escaped(mistake):
    Path("a\x1b[2J.yaml").write_text("seed_everything: 1\x1b")
    for arguments in (["runs", "a\x1b]0;b\x07"], ["list", "\x1b"], ["fit", "--config", "a\x1b[2J.yaml"]):
        error = mistake(*arguments)
        assert error.isascii()
        assert error.isprintable(), error


@pytest.mark.parametrize(
    ("replaced", "by", "message"),
    [
        ("d_model:", "d_modle:", "no setting 'd_modle' of lightning_tfm.Transformer; did you mean 'd_model'?"),
        ("batch_size:", "batchsize:", "no setting 'batchsize' of datamodules.Copy; did you mean 'batch_size'?"),
        ("warmup_steps:", "warmup_step:", "did you mean 'warmup_steps'?"),
        ("max_steps:", "max_stpes:", "no setting 'trainer.max_stpes'; did you mean 'trainer.max_steps'?"),
        ("\ndata:", "\ndatas:", "no setting 'datas'; did you mean 'data'?"),
        (": Copy", ": datamodules.Cpoy", "a class of datamodules, which has no 'Cpoy'; did you mean 'Copy'"),
        (": Transformer", ": lightning_tfm.networks.Trnsformer", "did you mean 'Transformer'?"),
        (": Copy", ": datamodulez.Copy", "--trust-package datamodulez"),
        (r"d_model: \d+", "d_model: wide", "model.network.d_model must be of type int, but is wide"),
        (r"max_steps: \d+", "accelerator: off", "but is False; in YAML, quote words such as no, yes, on and off"),
        (r"d_model: \d+", "d_model: 130", "d_model must be divisible by num_heads (8), but is 130; try 128 or 136"),
        (r"d_ff: \d+", "d_ff: 512, max_length: 20", "has 141 tokens, but the model has max_length 20 positions"),
        (r"dropout: [\d.]+", "dropout: 1.5", "dropout must be at least 0 and below 1, but is 1.5"),
        (r"warmup_steps: \d+", "decay: cosinus", "model.lr_schedule.decay must be one of 'linear', 'cosine', "),
        (r"batch_size: \d+", "batch_size: 0", "batch_size must be at least 1, but is 0"),
        (r"warmup_steps: \d+", "warmup_steps: -5", "warmup_steps must be at least 0, but is -5"),
        (r"max_steps: \d+", "max_epochs: 0", "trainer.max_epochs must be at least 1, but is 0"),
        (r"max_steps: \d+", "max_steps: -1", "trainer.max_steps must be at least 1"),
        (r"max_steps: \d+", "limit_train_batches: 9", "trainer.limit_train_batches must not be set"),
        (r"seed_everything: \d+", "seed_everything: one", "seed_everything"),
        (r"seed_everything: \d+", "seed_everything: -1", "seed_everything must be from 0 to 4294967295, but is -1"),
        ("class_path: Seq2SeqModule", "class_path: lightning_tfm.tasks.Optimization", "model"),
        (r"class_path: Seq2SeqModule\n", "", "model must be a class, such as {class_path: PACKAGE.CLASS, init_args: "),
        ("trainer:", "trainer: {", "while parsing"),
    ],
)
def test_a_mistake_in_a_yaml_is_reported_in_one_line(replaced, by, message, mistake, tmp_path):
    text, count = re.subn(replaced, by, COPY.read_text(), count=1)
    assert count == 1
    path = tmp_path / "mistake.yaml"
    path.write_text(text)
    assert message in mistake("fit", "--config", path)
    assert sorted(tmp_path.iterdir()) == [path]


SPEC = "{class_path: PACKAGE.CLASS, init_args: {NAME: VALUE}}"
PLACES = {
    "data": "data: %s",
    "model": "model: %s",
    "model.network": "model: {class_path: lightning_tfm.tasks.Seq2SeqModule, init_args: {network: %s}}",
    "trainer.callbacks": "trainer: {callbacks: [%s]}",
    "trainer.logger": "trainer: {logger: [%s]}",
    "trainer.plugins": "trainer: {plugins: [%s]}",
    "trainer.profiler": "trainer: {profiler: %s}",
    "trainer.strategy": "trainer: {strategy: %s}",
}


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *((place, "{class_path: [a, b]}") for place in PLACES),
        ("data", "{class_path: {a: b}}"),
        ("model.network", "{class_path: 3}"),
        ("trainer.callbacks", "{class_path: true}"),
        ("trainer.logger", "{class_path: null}"),
        ("data", "{class_path: datamodules.Copy, init_args: [a, b]}"),
        ("data", "{class_path: datamodules.Copy, init_args: text}"),
        ("model", "{class_path: lightning_tfm.tasks.Seq2SeqModule, init_args: [a, b]}"),
        ("model.network", "{class_path: lightning_tfm.networks.Transformer, init_args: 3}"),
        ("trainer.callbacks", "{class_path: lightning_tfm.callbacks.Compile, init_args: [a, b]}"),
        ("trainer.logger", "{class_path: lightning.pytorch.loggers.CSVLogger, init_args: null}"),
    ],
)
def test_a_class_has_a_name_and_a_mapping_of_arguments(place, value, yaml_mistake):
    rule, _, refused = yaml_mistake(PLACES[place] % value).partition(", but is ")
    assert rule.startswith(f"lightning-tfm: error: {place} must be ")
    assert SPEC in rule
    assert str(yaml.safe_load(value)) in refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: 3", f"data must be a class, such as {SPEC}, but is 3"),
        ("data: [1]", f"data must be a class, such as {SPEC}, but is [1]"),
        ("data: {class_path: Dtae}", f"must be a class, such as {SPEC}, but is Dtae; did you mean 'Date'?"),
        ("data:", "data must be set, but is missing; add it to a YAML file"),
        ("data:\nseed_everything: 1", "data must be set, but is missing"),
        ("model:\nseed_everything: 1", "model must be set, but is missing"),
        ("model: {class_path: lightning_tfm.tasks.TaskModule}", "lightning_tfm.tasks.TaskModule is abstract"),
        ("trainer: 3", "trainer must be a mapping of settings, NAME: VALUE, but is 3 in 'mistake.yaml'"),
        ("trainer:\nseed_everything: 1", "trainer must be a mapping of settings, NAME: VALUE, but is None"),
        ("trainer: [max_steps]", "trainer must be a mapping of settings, NAME: VALUE, but is ['max_steps']"),
        ("trainer: text", "trainer must be a mapping of settings, NAME: VALUE, but is text"),
        ("checkpoint: 3", "checkpoint must be a mapping of settings, NAME: VALUE, but is 3 in 'mistake.yaml'"),
        ("seed_everything: [1]", "seed_everything must be of type int, but is [1]"),
        ("num_threads: 0", "num_threads must be at least 1, but is 0; try 1"),
        ("seed_everything: true", "seed_everything must be of type int, but is True"),
        ("trainer: {val_check_interval: 0}", "trainer.val_check_interval must be at least 1, but is 0; try 1"),
        ("trainer: {accumulate_grad_batches: -1}", "trainer.accumulate_grad_batches must be at least 1, but is -1"),
        ("trainer: {check_val_every_n_epoch: 0}", "trainer.check_val_every_n_epoch must be at least 1, but is 0"),
        ("trainer: {min_steps: 2}", "trainer.min_steps must not be set, since"),
        ("trainer: {val_check_interval: 0.5}", "trainer.val_check_interval must be a number of training batches"),
        ("trainer: {val_check_interval: '00:00:00:01'}", "must be a number of training batches, but is 00:00:00:01"),
        (
            "model: {class_path: Seq2SeqModule, init_args: {lr_schedule: [1]}}",
            "model.lr_schedule must be {NAME: VALUE}, ",
        ),
        ("trainer: {precision: x}", "trainer.precision must be of type int or one of 'transformer-engine'"),
        ("trainer: {logger: CSVLogger}", "save_dir must be set, but is missing; add it to the init_args of lightning"),
        ("", "--config must name a YAML file of settings, NAME: VALUE, but 'mistake.yaml' is empty"),
        ("# trainer:\n", "but 'mistake.yaml' is empty"),
        ("- trainer\n- data\n", "but 'mistake.yaml' holds ['trainer', 'data']"),
        ("trainer\n", "but 'mistake.yaml' holds 'trainer'"),
        ('data: "\\U00ffffff"\n', "but 'mistake.yaml' has an escape above \\U0010ffff; delete it"),
        ('data: "\\Uffffffff"\n', "but 'mistake.yaml' has an escape above \\U0010ffff; delete it"),
        (b"data: 3\nname: caf\xe9\n", "a YAML file in UTF-8, but line 2 of 'mistake.yaml' is not; save it in UTF-8"),
        (b"\xff\xfed\0a\0t\0a\0", "a YAML file in UTF-8, but line 1 of 'mistake.yaml' is not"),
    ],
)
def test_a_malformed_section_or_file_is_refused(text, message, yaml_mistake):
    assert message in yaml_mistake(text, "--trainer.max_steps", "3")


TOO_LARGE = "it must have at most 10,000 values, with aliases replaced, and at most 100 levels of nesting"
BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 9)
)


INVALID = {
    "trainer:\n  max_steps: 3\n max_epochs: 4\n": (3, "expected <block end>"),
    "trainer:\n\tmax_steps: 3\n": (2, "indent with spaces"),
    "trainer: {max_steps: 3\ndata: 3\n": (2, "while parsing a flow mapping from line 1, expected ',' or '}'"),
    "trainer:\n  max_steps: 3\n  devices: 1\n  max_steps: 4\n": (4, "duplicate key 'max_steps' (first in line 2)"),
    "trainer: {max_steps: 3, max_steps: 3}\n": (1, "duplicate key 'max_steps' (first in line 1)"),
    "trainer: {}\nseed_everything: 1\ntrainer: {}\n": (3, "duplicate key 'trainer' (first in line 1)"),
    "data: 3\ntrainer: *settings\n": (2, "found undefined alias 'settings'"),
    "data: 3\ntrainer: a\x07b\n": (2, r"the character '\x07'"),
    "data: 3\ntrainer: !!python/name:os.system\n": (2, "could not determine a constructor"),
    "data: 3\n---\ntrainer: 3\n": (2, "but found another document"),
    "data: 3\ntrainer: !!int three\n": (2, "invalid literal for int"),
    f"data: 3\ntrainer: {{max_steps: {'9' * 400}}}\n": (2, "an integer must be at most 9223372036854775807"),
    f"data: 3\ntrainer: {{max_steps: {'9' * 5000}}}\n": (2, "Exceeds the limit"),
    "data: 3\ntrainer: &it [*it]\n": (2, TOO_LARGE),
    f"data: 3\ntrainer: {'[' * 3000}{']' * 3000}\n": (2, TOO_LARGE),
    f"data: 3\ntrainer: {'[' * 200_000}\n": (2, TOO_LARGE),
    "data: 3\ntrainer:\n" + "- " * 3000 + "a\n": (3, TOO_LARGE),
    f"data: 3\n{BOMB}": (6, TOO_LARGE),
    f"[{'x, ' * 20_000}]": (1, TOO_LARGE),
    f"%YAML 1.3\n---\na: {'[' * 3000}{']' * 3000}\n": (3, TOO_LARGE),  # an error of libyaml, but not of PyYAML
    f"a: &a {'x' * 20_000}\nb: [{'*a, ' * 5_000}]\n": (2, TOO_LARGE),
}


@pytest.mark.parametrize("text", INVALID, ids=lambda text: repr(text[:40]))
def test_invalid_yaml_is_reported_with_its_file_and_line(text, mistake):
    Path("a folder").mkdir()
    Path("a folder/mistake.yaml").write_text(text)
    line, problem = INVALID[text]
    message = mistake("fit", "--config", COPY, "--config", "a folder/mistake.yaml", "--config", COPY)
    start = f"error: --config must name a valid YAML file, but line {line} of 'a folder/mistake.yaml' is not: "
    assert start in message
    assert problem in message.partition(start)[2]


@pytest.mark.parametrize("value", [BOMB, "[" * 200_000, "9" * 400], ids=["aliases", "nesting", "integer"])
@pytest.mark.parametrize("setting", ["trainer.max_steps", "trainer.callbacks", "data.batch_size", "model.optimizer.lr"])
def test_the_limits_of_yaml_apply_to_single_settings(setting, value, mistake):
    """The parser reads the value of an option, and a string in a YAML file, as YAML."""
    assert mistake("fit", "--config", COPY, f"--{setting}={value}")


def test_a_yaml_may_be_a_pipe_or_start_with_a_byte_order_mark(mistake, tmp_path):
    """A pipe can be read only once."""
    mark = tmp_path / "mark.yaml"
    mark.write_bytes(b"\xef\xbb\xbf" + COPY.read_bytes())
    output, pipe = os.pipe()
    os.write(pipe, COPY.read_bytes())
    os.close(pipe)
    message = mistake("fit", "--config", mark, "--config", f"/dev/fd/{output}", "--trainer.max_steps=0")
    assert "trainer.max_steps must be at least 1" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--config", "none.yaml"], "--config must name a readable YAML file, but 'none.yaml' is not"),
        (["--config", EXPERIMENTS], "experiments' must be a YAML file or the name of an experiment, but is a folder"),
        (["--data", "a/b.yaml"], f"data must be a class, such as {SPEC}, but is a/b.yaml"),
        (["--data.class_path=[a, b]"], "data must be a class"),
        (["--data.init_args=[a]"], "data must be a class"),
        (["--model.init_args.network.class_path=[a, b]"], "model.network must be a class"),
        (["--model.init_args.network=GTP"], "but is GTP; did you mean 'GPT'?"),
        (["--trainer.callbacks+={class_path: [a]}"], "trainer.callbacks must be a class"),
        ([COPY], "an argument must be --SETTING VALUE, such as --config YAML, but is "),
        (["--config", ""], "--config must name a readable YAML file, but '.' is not: Is a directory"),
        (["--data=null"], "data must be set, but is missing; add it to a YAML"),
        (["--trainer=3"], "trainer must be a mapping of settings, NAME: VALUE, but is 3"),
        (["--model.init_args.network.init_args.d_model", "130"], "d_model must be divisible by"),
        (["--trainer.max_step", "3"], "no setting 'trainer.max_step'; did you mean 'trainer.max_steps'?"),
        (["--skip_tests"], "no setting 'skip_tests'; did you mean 'skip_test'?"),
        (["--ckpt_path", "none.ckpt"], "there is no checkpoint 'none.ckpt'"),
        (["--trainer.overfit_batches", "1"], "trainer.overfit_batches must be 0, but is 1"),
        (["--config=elastic", "--trainer.strategy.num_micro_batches=3"], "num_micro_batches must be a power of two"),
        (["--config", sys.executable], "must name a YAML file in UTF-8"),
    ],
)
def test_a_mistake_in_an_option_of_fit_is_reported_in_one_line(options, message, mistake):
    assert message in mistake("fit", "--config", COPY, *options)


@pytest.mark.parametrize(
    ("epochs", "steps"), [("max_epochs", "max_steps"), ("check_val_every_n_epoch", "val_check_interval")]
)
def test_passes_and_their_conversion_are_mutually_exclusive(epochs, steps, mistake):
    message = f"trainer.{epochs} (2) and trainer.{steps} (9) are mutually exclusive"
    assert message in mistake("fit", COPY, f"--trainer.{epochs}=2", f"--trainer.{steps}=9")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["test", "--config", COPY], "--ckpt_path must name the checkpoint to test"),
        (["fit", "--trainer.max_steps=3"], "pass that with --config"),
        (["fit"], "lightning-tfm fit needs the name of an experiment; `lightning-tfm list` shows them"),
        (["validate"], "lightning-tfm validate needs the name of a run; `lightning-tfm runs` shows them"),
        (["test"], "lightning-tfm test needs the name of a run; `lightning-tfm runs` shows them"),
        (["foo"], f"must come first, but is 'foo'; available: {', '.join(COMMANDS)}"),
        (["--config", COPY, "fit"], "must come first, but is '--config'; available: fit, "),
        (["generate"], "RUN"),
        (["generate", "none.ckpt", "3 May"], "there is no checkpoint 'none.ckpt'"),
        (["generate", COPY, "3 May"], "must be a checkpoint of lightning_tfm"),
        (["generate", EXPERIMENTS, "3 May"], "is a folder without runs"),
        (["test", "date_gpt"], "no run 'date_gpt'; train this experiment first with: lightning-tfm fit date_gpt"),
        (["test", "--config", COPY, "--ckpt_path", "nothing"], "there is no run 'nothing'; train one with"),
        (["fit", COPY, "--name", "a/b"], "name must be the name of a folder, of letters, digits and . _ + - only"),
        (["fit", COPY, "--name", ".."], "but is '..'; try my_run"),
    ],
)
def test_a_mistake_on_the_command_line_is_reported_in_one_line(arguments, message, mistake):
    assert message in mistake(*arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--config", COPY], "class_path must match the checkpoint"),
        (["--config", DATE, "--model.init_args.network.init_args.d_model=32"], "d_model must match the checkpoint"),
        (["--config", DATE, "--data.init_args.locales=[en,de]"], "the vocabulary of the data must match the"),
    ],
)
@pytest.mark.parametrize("name", ["fit", "test"])
def test_a_checkpoint_of_another_model_or_vocabulary_is_refused(name, settings, message, checkpoint, mistake):
    assert message in mistake(name, *settings, "--ckpt_path", checkpoint)


def test_an_inconsistent_checkpoint_is_refused(checkpoint, mistake):
    content = read(checkpoint)
    del content["state_dict"]["network.head.bias"]
    write(content, "partial.ckpt")
    assert "must fit its own hyper-parameters" in mistake("generate", "partial.ckpt", "3 May")
    torch.save(content, "unsummed.ckpt")
    assert "its checksum is wrong or missing" in mistake("generate", "unsummed.ckpt", "3 May")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["model.network.d_model=1000000"], r"must fit into memory, but \d+ bytes for one tensor do not; lower"),
        (["trainer.callbacks+=LearningRateFinder"], "must not contain LearningRateFinder, .*; try lightning-tfm sweep"),
        (["trainer.callbacks+=BatchSizeFinder"], "must not contain BatchSizeFinder, .*; try lightning-tfm plan"),
        (["trainer.max_time=999999999999:00:00:00"], "trainer.max_time must be below 100,000,000 days"),
        (["trainer.max_time={days: 999999999999}"], "Python int too large"),
        (["trainer.limit_test_batches=0"], "trainer.limit_test_batches must be above 0"),
        (["trainer.limit_test_batches=0.001", "dry-run"], r"limit_test_batches must leave at least one of \d+ batch"),
        (["trainer.limit_val_batches=0.001", "dry-run"], r"limit_val_batches must leave at least one of \d+ batch"),
    ],
)
def test_a_mistake_found_by_torch_or_lightning_is_one_line(options, message, tmp_path, command):
    options = (*options, "trust-package=lightning.pytorch.callbacks", "data.train_size=100")
    error = command("fit", "copy_gpt", *(f"--{option}" for option in options), status=2).err
    assert re.search(message, error.splitlines()[-1])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("reason", "kind"), [(errno.ENOSPC, UserError), (errno.EACCES, PermissionError)])
def test_only_a_full_disk_is_answered_by_the_advice_to_free_space(reason, kind, monkeypatch, tmp_path):
    def fail(self, **settings):
        self.run = Run(tmp_path)
        raise OSError(reason, os.strerror(reason), str(tmp_path / "metrics.csv"))

    monkeypatch.setattr(LightningCLI, "__init__", fail)
    with pytest.raises(kind, match="free disk space" if kind is UserError else "Permission denied"):
        TfmCLI("fit", [], VerifiedCheckpointIO())


def test_an_unwritable_folder_is_reported(tmp_path):
    with pytest.raises(UserError, match=r"'/sys/a.ckpt' cannot be written: .*; nothing was overwritten"):
        write({}, "/sys/a.ckpt")  # not even root can write there
    logger = "--trainer.logger={class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: /sys/runs}}"
    child = run(*fit("gpt", logger), cwd=tmp_path)
    line = child.refuse("'/sys/runs.*' must be readable and writable, but is not: .*; change its permissions")
    assert child.err.read_text().splitlines() == [line]


def test_an_output_in_an_unwritable_folder_is_refused_before_it_is_made(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write everywhere
    message = re.escape(
        f"--output must lie in a folder that can be written, but {str(tmp_path)!r} cannot; name another"
    )
    with pytest.raises(UserError, match=message):
        check_new_file("--output", tmp_path / "report.html", overwrite=False)
    with pytest.raises(UserError, match=message):
        check_writable("--output", tmp_path / "none/inspect")
