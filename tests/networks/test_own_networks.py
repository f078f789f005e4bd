"""Commands load networks from a user's package if, and only if, `--trust-package` names it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import lightning_tfm
from lightning_tfm.checkpoint import read, write
from lightning_tfm.errors import UserError
from support.processes import EXPERIMENTS, in_process, run

OWN = """
from pathlib import Path

import torch
from lightning_tfm.networks import Seq2SeqNetwork
from torch import nn

Path(__file__).with_name("canary").touch()


class Mine(Seq2SeqNetwork):
    def __init__(self, vocab_size: int, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width, padding_idx=0)
        self.head = nn.Linear(2 * width, vocab_size)

    def encode(self, source):
        return (self.embedding(source).sum(1),)

    def decode_step(self, token, state):
        return self.head(torch.cat((self.embedding(token), state[0]), -1)), state

    def forward(self, source, target_in):
        (state,) = self.encode(source)
        target = self.embedding(target_in)
        return self.head(torch.cat((target, state.unsqueeze(1).expand_as(target)), -1))
"""

SIZES = [f"--data.{name}=30" for name in ("train_size", "val_size", "test_size", "longer_size", "batch_size")]
SIZES += ["--trainer.max_steps=3", "--trainer.val_check_interval=3", "--trainer.accelerator=cpu"]


@pytest.fixture(scope="module")
def own_run(tmp_path_factory):
    """Train a network of a module in the current folder, and return the folder of the run."""
    cwd = tmp_path_factory.mktemp("own")
    (cwd / "my_nets.py").write_text(OWN)
    arguments = ["--model.network=my_nets.Mine", "--trust-package=my_nets", *SIZES]
    child = run("fit", "--config", EXPERIMENTS / "copy_gpt.yaml", *arguments, cwd=cwd)
    assert child.wait() == 0, child.err.read_text()
    return cwd / "runs/copy_gpt/version_0"


def test_commands_printed_by_fit_trust_the_package_too(own_run):
    printed = (own_run.parents[2] / "stdout").read_text()
    assert re.findall(r"lightning-tfm (generate|report) .* --trust-package my_nets\n", printed) == [
        "generate",
        "report",
    ]


@pytest.fixture
def checkpoint(own_run, monkeypatch):
    """Return the checkpoint of the network, whose module is in the current folder and not imported."""
    monkeypatch.chdir(own_run.parents[2])
    monkeypatch.setattr(sys, "path", [*sys.path])
    common = sys.modules["jsonargparse._common"]
    monkeypatch.setattr(common, "parsing_settings", dict(common.parsing_settings))  # trusted in this test only
    Path("canary").unlink(missing_ok=True)
    yield own_run / "checkpoints/best.ckpt"
    sys.modules.pop("my_nets", None)


COMMANDS = [
    "generate {checkpoint} 1 --output {output}",
    "export {checkpoint} --output {output}",
    "export {checkpoint} --format torch_export --output {output}",
    "test --config {run}/config.yaml --ckpt_path {checkpoint}",
    "inspect {checkpoint} --examples 4 --output {output}",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_load_a_network_of_a_trusted_package(command, own_run, checkpoint, monkeypatch, tmp_path, capsys):
    arguments = command.format(checkpoint=checkpoint, run=own_run, output=tmp_path / "output").split()
    assert in_process(monkeypatch, *arguments) == 2
    assert "--trust-package" in capsys.readouterr().err
    assert "my_nets" not in sys.modules
    assert not Path("canary").exists()
    assert not (tmp_path / "output").exists()
    assert in_process(monkeypatch, *arguments, "--trust-package", "other,my_nets") == 0, capsys.readouterr().err
    assert Path("canary").exists()
    assert (tmp_path / "output").exists() or arguments[0] == "test"


def test_a_report_shows_the_attention_of_trusted_networks_only(own_run, checkpoint, monkeypatch, tmp_path, capsys):
    arguments = ["report", own_run, "--output", tmp_path / "page.html"]
    assert in_process(monkeypatch, *arguments) == 0
    message = "cannot show the attention of .* 'my_nets.Mine', which is not imported; .*: --trust-package my_nets\n"
    assert re.search(message, capsys.readouterr().err, re.DOTALL)
    assert not Path("canary").exists()
    assert in_process(monkeypatch, *arguments, "--overwrite", "--trust-package=my_nets") == 0
    assert capsys.readouterr().err == ""
    assert Path("canary").exists()


def test_load_imports_a_network_of_a_trusted_package(checkpoint):
    for trust_packages in ((), ["my_net"], ["other"], ["my_nets.inner"]):
        with pytest.raises(UserError, match=r"names 'my_nets.Mine', which is not imported.*--trust-package my_nets"):
            lightning_tfm.load(checkpoint, trust_packages)
    assert not Path("canary").exists()
    network = lightning_tfm.load(checkpoint, trust_packages=["my_nets"]).network
    assert type(network).__name__ == "Mine"
    assert network.hyper_parameters["width"] == 8


def test_a_trusted_package_must_define_the_network(checkpoint, tmp_path):
    content = read(checkpoint)
    for name, message in (
        ("my_nets.Yours", "'my_nets.Yours', which cannot be imported: module 'my_nets' has no attribute 'Yours'"),
        ("my_nets.inner.Mine", "'my_nets.inner.Mine', which cannot be imported"),
        ("my_nets.nn.Linear", "'my_nets.nn.Linear', which cannot be imported"),
        ("my_nets.Path", "derives from Network, but names 'my_nets.Path'"),
        ("my_nets.Seq2SeqNetwork", "derives from Network, but names 'my_nets.Seq2SeqNetwork'"),
        (["my_nets"], "is not imported"),
    ):
        network = content["hyper_parameters"]["network"] | {"class_path": name}
        hyper_parameters = content["hyper_parameters"] | {"network": network}
        write(content | {"hyper_parameters": hyper_parameters}, tmp_path / "odd.ckpt")
        with pytest.raises(UserError, match=re.escape(message)):
            lightning_tfm.load(tmp_path / "odd.ckpt", trust_packages=["my_nets"])


@pytest.mark.run
def test_reproduce_passes_trusted_packages_to_its_runs(checkpoint, monkeypatch, tmp_path, capsys):
    claims = "mine: {test/exact_match: {11: 0, 12: 1}, training: {seconds: 2, machine: any}}\n"
    (tmp_path / "claims.yaml").write_text(claims)
    config = (checkpoint.parents[1] / "config.yaml").read_text().replace("trust_package: my_nets", "trust_package: ''")
    config = config.partition("\n")[2]  # drop the line with the version of Lightning
    (tmp_path / "mine.yaml").write_text(config)
    arguments = ["reproduce", tmp_path / "mine.yaml", "--seeds", "1"]
    assert in_process(monkeypatch, *arguments, "--output", tmp_path / "refused") == 2
    assert "--trust-package my_nets" in capsys.readouterr().err
    assert not Path("canary").exists()
    assert in_process(monkeypatch, *arguments, "--output", tmp_path / "allowed", "--trust-package=my_nets") == 0
    assert Path("canary").exists()


@pytest.mark.parametrize("name", ["my-package", "jsonargparse", "*", "os.", "a b"])
def test_trust_package_accepts_names_of_packages_only(name, monkeypatch, capsys):
    for command in (("fit", "--config", EXPERIMENTS / "copy_gpt.yaml"), ("generate", "none.ckpt", "x")):
        assert in_process(monkeypatch, *command, "--trust-package", name) == 2
        message = capsys.readouterr().err
        assert re.search(f"--trust-package: .* names of packages, .* but has {re.escape(repr(name))}", message)
        assert "Traceback" not in message
