"""Differences between runs, configurations and checkpoints, and the step at which runs part: `lightning-tfm diff`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from lightning_tfm.checkpoint import read, write
from lightning_tfm.commands import step_trace
from lightning_tfm.comparison.tensors import fingerprint, tensor_difference
from support.experiments import fit, made_once
from support.processes import CONTEXT, EXPERIMENTS, start, start_two
from support.records import SUMMARY, write_run

PLANTED = """
import torch
from lightning import Callback


class Fault(Callback):
    '''Plant a fault at a step, counted from 0.'''

    def __init__(self, kind: str = "none", layer: str = "", step: int = 0) -> None:
        self.kind, self.layer, self.step = kind, layer, step

    def is_due(self, trainer, kind):
        return trainer.global_step == self.step and self.kind == kind

    def flip(self, values):
        values.detach().view(-1)[:1].view(torch.int32).bitwise_xor_(1)  # the last bit of the first element

    def weight(self, module):
        return module.network.get_submodule(self.layer).weight

    def on_train_start(self, trainer, module):
        if self.kind == "code":
            layer = module.network.get_submodule(self.layer)
            layer.forward = lambda x: torch.nn.functional.linear(1.001 * x, layer.weight, layer.bias)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if self.is_due(trainer, "weight"):
            self.flip(self.weight(module))
        if self.is_due(trainer, "embedding"):
            self.flip(self.weight(module)[1])  # of BOS, which each batch has
        if self.is_due(trainer, "swap"):
            for each in batch:
                each[:2] = each[:2].flip(0)
        if self.is_due(trainer, "target"):
            batch.target_out[0, 0] = 2  # EOS
        if self.is_due(trainer, "loss"):
            module.label_smoothing = 1e-3
        if self.is_due(trainer, "threads"):
            torch.set_num_threads(3)
        if self.is_due(trainer, "kernel"):
            torch.backends.mkldnn.enabled = False
            torch.backends.cuda.enable_flash_sdp(False)  # on a CPU, too
        if self.is_due(trainer, "dropout"):
            module.seed += 1
        if self.is_due(trainer, "order"):
            for each in batch:
                each.copy_(each.flip(0))

    def on_after_backward(self, trainer, module):
        if self.is_due(trainer, "gradient"):
            self.flip(self.weight(module).grad)

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if trainer.global_step >= self.step and self.kind == "learning rate":
            for group in optimizer.param_groups:
                group["lr"] /= 2
        if self.is_due(trainer, "clipping"):
            trainer.gradient_clip_val = 1e-3

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.step + 1 and self.kind in ("exp_avg", "exp_avg_sq", "update"):
            weight = self.weight(module)
            self.flip(weight if self.kind == "update" else trainer.optimizers[0].state[weight][self.kind])
"""

LAYERS = {
    "transformer": "decoder.0.cross_attention.out_proj",
    "gpt": "layers.0.self_attention.out_proj",
    "attention_lstm": "readout",
}
"""A linear layer of each network."""

EMBEDDINGS = {"transformer": "target_embedding", "gpt": "embedding", "attention_lstm": "target_embedding"}
"""The embedding of the outputs."""

FIRST = {
    "transformer": "source_embedding.weight",
    "gpt": "embedding.weight",
    "attention_lstm": "source_embedding.weight",
}
"""The first parameter."""

KERNELS = {
    "transformer": "input of encoder.0.self_attention.out_proj",
    "gpt": "input of layers.0.self_attention.out_proj",
    "attention_lstm": "output of encoder_forward, 0",
}
"""The first value that other kernels compute: the attention, and the LSTM of oneDNN."""

FAULTS = {
    "weight": ("weight", LAYERS, 5, "output of {place}"),
    "dropout": ("dropout", LAYERS, 5, "output of dropout"),
    "order": ("order", LAYERS, 5, "batch, source"),
    "learning rate": ("learning rate", LAYERS, 5, "learning rate"),
    "gradient": ("gradient", LAYERS, 5, "gradient of {place}.weight"),
    "clipping": ("clipping", FIRST, 5, "clipped gradient of {place}"),
    "moment": ("exp_avg", LAYERS, 5, "optimizer state exp_avg of {place}.weight"),
    "update": ("update", LAYERS, 5, "parameter {place}.weight"),
}
"""Faults: their kind, place and step, and the first difference that they cause."""

OTHERS = {"transformer": "encoder.0.feed_forward.2", "gpt": "layers.0.feed_forward.2", "attention_lstm": "head"}
"""Another linear layer, whose weight is not that of the embedding."""

THREADS = {
    "transformer": "gradient of encoder.0.add_self.norm.weight",
    "gpt": "gradient of layers.0.add_self.norm.weight",
}
"""The first value that three threads sum in another order; those of the LSTM have the same bits."""

FURTHER_FAULTS = {
    "weight of another layer in the first step": ("weight", OTHERS, 0, "output of {place}"),
    "weight in the last step": ("weight", LAYERS, 7, "output of {place}"),
    "embedding": ("embedding", EMBEDDINGS, 3, "output of {place}"),
    "dropout in the first step": ("dropout", LAYERS, 0, "output of dropout"),
    "order of two examples": ("swap", LAYERS, 2, "batch, source"),
    "target": ("target", LAYERS, 6, "batch, target_out"),
    "code": ("code", LAYERS, 0, "output of {place}"),
    "loss": ("loss", LAYERS, 4, "loss"),
    "kernel": ("kernel", KERNELS, 3, "{place}"),
    "threads": ("threads", THREADS, 3, "{place}"),
    "learning rate in the second step": ("learning rate", LAYERS, 1, "learning rate"),
    "gradient of another layer": ("gradient", OTHERS, 7, "gradient of {place}.weight"),
    "second moment": ("exp_avg_sq", OTHERS, 2, "optimizer state exp_avg_sq of {place}.weight"),
}
"""Faults that take longer to test than they tell, or depend on the processor."""

STEPS = 8


@pytest.fixture
def trained(tmp_path_factory, command, tmp_path, monkeypatch):
    """Return a function that trains a run once, and copies it to the folder of a test."""
    monkeypatch.setattr(step_trace, "PROCESSES", CONTEXT)  # which has imported the package

    def trained(model, name="first", fault=None, keeps=()):
        def train(cwd):
            (cwd / "planted_fault.py").write_text(PLANTED)
            callbacks = {"trainer.callbacks": "[{class_path: planted_fault.Fault}]", "trainer.max_steps": STEPS}
            intervals = {"trainer.val_check_interval": 4, "checkpoint.keep_last": 2}
            start(*fit(model, "--trust-package=planted_fault", **callbacks, **intervals), cwd=cwd).finish()

        made = made_once(f"traced_{model}", train, tmp_path_factory)
        shutil.copy(made / "planted_fault.py", tmp_path)
        run = shutil.copytree(made / f"runs/copy_{model}/version_0", tmp_path / "runs" / model / name)
        if fault is not None:
            config = yaml.safe_load((run / "config.yaml").read_text())
            config["trainer"]["callbacks"][0]["init_args"] = fault
            (run / "config.yaml").write_text(yaml.safe_dump(config))
            for path in ("summary.json", "metrics.csv"):  # of a training without the fault
                (run / path).unlink()
        for path in (run / "checkpoints").iterdir():
            if path.name not in keeps:
                path.unlink()
        return run

    return trained


def traced(command, *runs, status=1):
    """Return the trace of two runs."""
    printed = command("diff", *runs, "--trace", "--json", "--trust-package=planted_fault", status=status).out
    return json.loads(printed)["trace"]


def check_fault(model, kind, places, step, expected, trained, command):
    """Check that `--trace` names a fault of one of two runs."""
    fault = {"kind": kind, "layer": places[model], "step": step}
    found = traced(command, trained(model), trained(model, "second", fault))
    assert (found["first_step"], found["equal_steps"], found["not_repeated"]) == (0, step, [])
    assert (found["difference"]["step"], found["difference"]["name"]) == (step, expected.format(place=places[model]))


@pytest.mark.parametrize(("name", "model"), [(name, model) for name in FAULTS for model in FAULTS[name][1]])
def test_trace_names_a_planted_fault(name, model, trained, command):
    check_fault(model, *FAULTS[name], trained, command)


@pytest.mark.run
@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "model"), [(name, model) for name in FURTHER_FAULTS for model in FURTHER_FAULTS[name][1]]
)
def test_trace_names_a_further_fault(name, model, trained, command):
    check_fault(model, *FURTHER_FAULTS[name], trained, command)


def test_equal_runs_are_trained_again_to_their_end(trained, command):
    runs = trained("gpt"), trained("gpt", "second")
    found = traced(command, *runs, status=0)
    assert found == {
        "first_step": 0,
        "steps": STEPS,
        "equal_steps": STEPS,
        "not_repeated": [],
        "difference": None,
        "skipped": 0,
    }


def test_trace_starts_from_the_last_equal_checkpoints(trained, command):
    runs = trained("gpt", keeps=["step_4.ckpt", "last.ckpt"]), trained("gpt", "second", keeps=["last.ckpt"])
    printed = command("diff", *runs, "--trace").out
    assert printed.splitlines()[-1] == f"not trained again: the last checkpoints, after {STEPS} steps, are equal"
    content = read(runs[1] / "checkpoints/last.ckpt")
    earlier = content | {"global_step": 1}  # an unequal state
    write(earlier, runs[1] / "checkpoints/last.ckpt")
    assert traced(command, *runs, status=0)["first_step"] == 0


def test_trace_resumes_at_a_checkpoint(trained, command):
    fault = {"kind": "weight", "layer": LAYERS["gpt"], "step": 6}
    found = traced(
        command, *(trained("gpt", keeps=["step_4.ckpt"]), trained("gpt", "second", fault, keeps=["step_4.ckpt"]))
    )
    assert (found["first_step"], found["equal_steps"], found["difference"]["step"]) == (4, 2, 6)
    assert found["difference"]["name"] == f"output of {LAYERS['gpt']}"
    assert found["difference"]["before"] == f"input of {LAYERS['gpt']}"


def test_trace_of_accumulated_batches_and_micro_batches(trained, command):
    runs = [trained("gpt", name) for name in ("first", "second")]
    for run, kind in zip(runs, ("none", "dropout"), strict=True):
        config = yaml.safe_load((run / "config.yaml").read_text())
        strategy = {"class_path": "lightning_tfm.distributed.strategies.Elastic", "init_args": {"num_micro_batches": 2}}
        config["trainer"] |= {"strategy": strategy, "accumulate_grad_batches": 2, "devices": 2}
        config["trainer"]["callbacks"][0]["init_args"] = {"kind": kind, "layer": "", "step": 1}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        (run / "metrics.csv").unlink()
    found = traced(command, *runs)
    assert (found["equal_steps"], found["difference"]["step"]) == (1, 1)
    assert found["difference"]["name"] == "output of dropout"


RAISE = """def on_train_start(self, trainer, module):
        if trainer.global_rank:
            raise RuntimeError("planted in process 1")
"""
"""The beginning of a method of `Fault` that raises an error in one process."""


def on_several_processes(run, strategy="ddp", processes=(2,)):
    """Make a copied run one that was started with these numbers of processes."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["trainer"] |= {"devices": processes[-1], "strategy": strategy}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    start, *_ = json.loads((run / "provenance.json").read_text())
    (run / "provenance.json").write_text(json.dumps([start | {"processes": number} for number in processes]))
    for path in ("summary.json", "metrics.csv"):
        (run / path).unlink(missing_ok=True)
    return run


@pytest.mark.parametrize("model", LAYERS)
def test_trace_of_two_processes(model, trained, command):
    fault = {"kind": "weight", "layer": LAYERS[model], "step": 1}
    found = traced(command, on_several_processes(trained(model)), on_several_processes(trained(model, "second", fault)))
    assert (found["equal_steps"], found["difference"]["step"], found["difference"]["process"]) == (1, 1, 0)
    assert found["difference"]["name"] == f"output of {LAYERS[model]}"


def test_equal_runs_of_two_processes_are_trained_again_to_their_end(trained, command):
    runs = [on_several_processes(trained("gpt", name)) for name in ("first", "second")]
    assert traced(command, *runs, status=0)["equal_steps"] == STEPS


@pytest.mark.parametrize("model", LAYERS)
def test_trace_compares_the_rows_of_one_and_two_processes(model, trained, command):
    fault = {"kind": "target", "step": 0}
    found = traced(command, trained(model), on_several_processes(trained(model, "second", fault)))["difference"]
    assert (found["step"], found["name"], found["process"]) == (0, "batch, target_out", 0)
    assert (found["index"], found["values"][1]) == ([0, 0], 2)


def test_another_batch_size_of_several_processes_is_the_first_difference(trained, command):
    runs = trained("gpt"), on_several_processes(trained("gpt", "second"))
    config = yaml.safe_load((runs[1] / "config.yaml").read_text())
    config["data"]["init_args"]["batch_size"] *= 2
    (runs[1] / "config.yaml").write_text(yaml.safe_dump(config))
    found = traced(command, *runs)["difference"]
    assert (found["step"], found["name"], found["before"]) == (0, "batch, source", None)


def test_error_of_one_of_several_processes_is_reported(trained, command, tmp_path):
    runs = [on_several_processes(trained("gpt", name)) for name in ("first", "second")]
    planted = (tmp_path / "planted_fault.py").read_text()
    raised = planted.replace("def on_train_start(self, trainer, module):", RAISE)
    assert raised != planted
    (tmp_path / "planted_fault.py").write_text(raised)
    error = command("diff", *runs, "--trace", "--trust-package=planted_fault", status=2).err
    assert "planted in process 1" in error.splitlines()[-1]


@pytest.mark.run
@pytest.mark.soak
@pytest.mark.parametrize("experiment", ["date_gpt", "date_transformer", "toy_translation_transformer"])
def test_trace_of_one_and_two_processes_names_the_first_all_reduce(experiment, command, monkeypatch, tmp_path):
    """The outputs of rows do not depend on the number of rows here, as they may with other kernels."""
    monkeypatch.setattr(step_trace, "PROCESSES", CONTEXT)
    settings = {"max_steps": 2, "val_check_interval": 2, "limit_val_batches": 1}
    arguments = ["fit", "--config", EXPERIMENTS / f"{experiment}.yaml", "--skip_test"]
    arguments += [f"--trainer.{name}={value}" for name, value in settings.items()]
    for name, begin in {"one": start, "two": start_two}.items():
        begin(*arguments, "--name", name, cwd=tmp_path).finish()
    found = traced(command, "one", "two")
    assert (found["equal_steps"], found["difference"]["step"], found["difference"]["reduced"]) == (0, 0, 2)
    assert found["difference"]["name"].startswith("gradient of ")
    assert found["difference"]["before"] == "output of network"
    printed = command("diff", "one", "two", "--trace", status=1).out
    assert ", all-reduced over 2 processes\n" in printed


def test_values_of_a_planted_difference(trained, command):
    fault = {"kind": "update", "layer": "head", "step": 2}
    found = traced(command, trained("gpt"), trained("gpt", "second", fault))["difference"]
    first, second = map(np.float32, found["values"])
    assert int(first.view(np.int32)) ^ int(second.view(np.int32)) == 1  # the last bit
    assert (found["index"], found["differing"]) == ([0, 0], 1)
    assert found["absolute"] == abs(float(first) - float(second))


def test_run_that_does_not_repeat_its_record(trained, command):
    runs = trained("gpt"), trained("gpt", "second")
    lines = (runs[1] / "metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("train/loss")
    row = lines[4].split(",")
    row[column], recorded = "2.5", float(row[column])
    (runs[1] / "metrics.csv").write_text("\n".join([*lines[:4], ",".join(row), *lines[5:]]) + "\n")
    found = traced(command, *runs)
    step = int(row[lines[0].split(",").index("step")])
    assert found["not_repeated"] == [
        {"name": f"train/loss at step {step} of {Path('runs/gpt/second')}", "values": [2.5, recorded]}
    ]
    assert found["difference"] is None
    printed = command("diff", *runs, "--trace", "--trust-package=planted_fault", status=1).out
    assert f"the run does not repeat: train/loss at step {step} of runs/gpt/second was 2.5, and is now" in printed


OWN = """
import torch
from lightning_tfm.networks import Seq2SeqNetwork
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden):
        hidden = torch.relu(self.inner(hidden))
        return self.last(hidden)


class Before(Seq2SeqNetwork):
    block = Block

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding, self.middle, self.head = nn.Embedding(vocab_size, 8), self.block(), nn.Linear(8, vocab_size)

    def encode(self, source):
        return (self.embedding(source).sum(1),)

    def decode_step(self, token, state):
        return self.head(self.middle(self.embedding(token) + state[0])), state

    def forward(self, source, target_in):
        (state,) = self.encode(source)
        return self.head(self.middle(self.embedding(target_in) + state.unsqueeze(1)))


class Changed(Block):
    def forward(self, hidden):
        hidden = torch.tanh(self.inner(hidden))
        return self.last(hidden)


class After(Before):
    block = Changed
"""


def test_trace_names_changed_code(trained, command, tmp_path):
    """The input of the layer after the changed line differs, but not the output of the layer before it."""
    runs = trained("gpt"), trained("gpt", "second", fault={})
    (tmp_path / "own.py").write_text(OWN)
    for name, run in zip(("Before", "After"), runs, strict=True):
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["model"]["init_args"]["network"] = {"class_path": f"own.{name}"}
        config["trainer"]["callbacks"] = None
        shutil.rmtree(run)
        run.mkdir()
        (run / "config.yaml").write_text(yaml.safe_dump(config))
    printed = command("diff", *runs, "--trace", "--trust-package=own,planted_fault", "--json", status=1).out
    content = json.loads(printed)
    assert {"name": "model.network", "values": ["Before", "After"]} in content["differences"]["settings"]
    found = content["trace"]["difference"]
    assert (found["step"], found["name"], found["before"]) == (0, "input of middle.last", "output of middle.inner")


def test_changed_code_is_not_the_recorded_one(trained, command, tmp_path):
    runs = trained("gpt"), trained("gpt", "second")
    planted = (tmp_path / "planted_fault.py").read_text()
    (tmp_path / "planted_fault.py").write_text(planted.replace('kind: str = "none"', 'kind: str = "dropout"'))
    for run in runs:
        (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("kind: none", "kind: dropout"))
    found = traced(command, *runs)
    assert found["equal_steps"] == 0
    assert [each["name"][:20] for each in found["not_repeated"]] == ["train/loss at step 0"] * 2


def test_trace_refuses_what_it_cannot_repeat(trained, command, mistake):
    runs = trained("gpt"), trained("gpt", "second")
    assert "--trace needs two runs" in mistake("diff", runs[0], EXPERIMENTS / "copy_gpt.yaml", "--trace")
    config = runs[1] / "config.yaml"
    config.write_text(config.read_text().replace("planted_fault.Fault", "planted_fault.Missing"))
    error = command("diff", *runs, "--trace", "--trust-package=planted_fault", status=2).err
    assert "RUN must be a run that can be trained again, but 'runs/gpt/second' is not: " in error
    on_several_processes(runs[0], processes=(2, 1))
    assert "was started with 1 and 2" in mistake("diff", *runs, "--trace")
    for run, processes in zip(runs, (2, 3), strict=True):
        on_several_processes(run, processes=(processes,))
    assert "have 2 and 3" in mistake("diff", *runs, "--trace")
    on_several_processes(runs[1], "lightning_tfm.distributed.strategies.ModelParallel")
    assert "has ModelParallel" in mistake("diff", *runs, "--trace")


# Records


def differences(command, *names, status=1):
    return json.loads(command("diff", *names, "--json", status=status).out)["differences"]


CONFIG = {
    "name": "a",
    "trainer": {"max_steps": 10, "logger": [{"save_dir": "runs"}]},
    "model": {"init_args": {"network": {"class_path": "lightning_tfm.networks.GPT", "init_args": {"d_model": 64}}}},
}


def test_settings_are_named_as_on_the_command_line(command, tmp_path):
    other = json.loads(json.dumps(CONFIG))
    other["name"], other["trainer"]["logger"] = "b", False
    other["model"]["init_args"]["network"]["init_args"]["d_model"] = 128
    write_run(tmp_path / "a", CONFIG)
    write_run(tmp_path / "b", other)
    assert differences(command, "a", "b")["settings"] == [{"name": "model.network.d_model", "values": [64, 128]}]
    other["model"]["init_args"]["network"]["class_path"] = "lightning_tfm.networks.Transformer"
    write_run(tmp_path / "c", other)
    assert differences(command, "a", "c")["settings"] == [{"name": "model.network", "values": ["GPT", "Transformer"]}]
    printed = command("diff", "a", "c", status=1).out
    assert [line.split() for line in printed.splitlines() if "model" in line] == [
        ["model.network", "GPT", "Transformer"]
    ]
    assert "equal: environment, results" in printed
    other["model"]["init_args"]["network"]["class_path"] = "own.GPT"  # of the same name in another module
    write_run(tmp_path / "d", other)
    values = ["lightning_tfm.networks.GPT", "own.GPT"]
    assert differences(command, "a", "d")["settings"] == [{"name": "model.network", "values": values}]


def test_equal_runs(command, tmp_path):
    for name in "ab":
        write_run(tmp_path / name, CONFIG, SUMMARY, predictions=[{}])
        (tmp_path / name / "metrics.csv").write_text(f"step,train/loss,trainer/tokens_per_second\n0,0.5,{ord(name)}\n")
    assert differences(command, "a", "b", status=0) == {"settings": [], "environment": [], "results": []}
    assert command("diff", "a", "b").out == "equal: settings, environment, results\n"


def test_environment(command, tmp_path):
    write_run(tmp_path / "a", CONFIG)
    run = write_run(tmp_path / "b", CONFIG, start={"versions": {"lightning_tfm": "0.1.0", "torch": "2.9.0"}})
    run.write_diff(0, "diff --git a/net.py b/net.py\n--- a/net.py\n+++ b/net.py\n")
    found = {each["name"]: each["values"] for each in differences(command, "a", "b")["environment"]}
    assert found.keys() == {"version of torch", "uncommitted changes"}
    assert found["version of torch"] == ["2.13.0", "2.9.0"]
    assert [value.split(" ", 1)[1] for value in found["uncommitted changes"]] == ["notes", "net.py, notes"]
    start = json.loads((tmp_path / "a/provenance.json").read_text())[0]
    start["versions"]["torch"] = "2.14.0"
    run.write_starts([*json.loads((tmp_path / "a/provenance.json").read_text()), start])
    resumed = {each["name"]: each["values"] for each in differences(command, "a", "b")["environment"]}
    assert resumed["version of torch"] == ["2.13.0", "2.13.0, then 2.14.0"]


def test_first_results(command, tmp_path):
    rows = "0,0.5,\n1,0.4,\n1,,0.3\n2,0.2,\n"
    for name, changed, lines in (
        ("a", rows, [{}, {}, {}]),
        ("b", rows.replace("0.3", "0.25").replace("0.2,", "0.1,"), [{}, {"nll": 2.0}, {"prediction": "c", "nll": 3.0}]),
        ("c", rows.removesuffix("2,0.2,\n"), [{}, {"nll": 2.0}]),
    ):
        write_run(tmp_path / name, CONFIG, SUMMARY, predictions=lines)
        (tmp_path / name / "metrics.csv").write_text(f"step,train/loss,val/loss\n{changed}")
    assert differences(command, "a", "b")["results"] == [
        {"name": "val/loss at step 1", "values": ["0.3", "0.25"]},
        {"name": "prediction of test example 2 for 'a'", "values": ["b", "c"]},
    ]
    assert differences(command, "a", "c")["results"] == [
        {"name": "train/loss at step 2", "values": ["0.2", None]},
        {"name": "nll of test example 1 for 'a'", "values": [1.0, 2.0]},
    ]


# Configurations and checkpoints


def test_configurations(command, mistake, trained):
    found = differences(command, "copy_gpt.yaml", "copy_transformer.yaml")
    assert {"name": "model.network", "values": ["GPT", "Transformer"]} in found["settings"]
    assert found.keys() == {"settings"}
    assert differences(command, EXPERIMENTS / "copy_gpt.yaml", "copy_gpt.yaml", status=0) == {"settings": []}
    run = trained("gpt")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"]["init_args"]["optimizer"]["init_args"]["lr"] = 0.5
    (run.parents[2] / "own.yaml").write_text(yaml.safe_dump(config))
    printed = command("diff", run, "own.yaml", "--trust-package=planted_fault", "--json", status=1).out
    assert json.loads(printed)["differences"] == {"settings": [{"name": "model.optimizer.lr", "values": [0.003, 0.5]}]}
    assert "did you mean 'copy_gpt'" in mistake("diff", "copy_gtp.yaml", "copy_gpt.yaml")
    assert "there is no run 'copy_gpt'" in mistake("diff", "copy_gpt", "copy_gpt.yaml")  # without a suffix, a run


def test_checkpoints(command, trained):
    path = trained("gpt", keeps=["last.ckpt"]) / "checkpoints/last.ckpt"
    assert not any(differences(command, path, path, status=0).values())
    content = read(path)
    weight, moment = (
        content["state_dict"]["network.layers.0.feed_forward.0.weight"],
        content["optimizer_states"][0]["state"][0]["exp_avg"],
    )
    before = weight.numpy().copy()
    weight[1, 2:4] += 0.25
    moment.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
    write(content, path.with_name("other.ckpt"))
    found = differences(command, path, path.with_name("other.ckpt"))
    (row,) = found["parameters"]
    name = "layers.0.feed_forward.0.weight"
    change = np.abs(weight.numpy().astype(float) - before)
    assert (row["name"], row["elements"], row["differing"], row["index"]) == (name, before.size, 2, [1, 2])
    assert row["absolute"] == change.max()
    assert row["relative"] == pytest.approx((change / np.maximum(abs(weight.numpy()), abs(before))).max())
    assert [(each["name"], each["differing"]) for each in found["optimizer state"]] == [("0.state.0.exp_avg", 1)]
    content["state_dict"]["network.norm.bias"] = torch.zeros(3)
    write(content, path.with_name("other.ckpt"))
    printed = command("diff", path, path.with_name("other.ckpt"), status=1).out
    assert "float32 (16,) or float32 (3,)" in printed
    assert "equal: settings, step" in printed
    del content["optimizer_states"]
    write(content | {"global_step": 5}, path.with_name("weights.ckpt"))
    assert differences(command, path, path.with_name("weights.ckpt"))["step"] == [
        {"name": "global_step", "values": [STEPS, 5]}
    ]
    assert found.keys() - differences(command, path, path.with_name("weights.ckpt")).keys() == {"optimizer state"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_fingerprint_depends_on_each_bit_and_on_the_order(dtype):
    values = torch.randint(0, 2, (6, 5)).to(dtype)
    assert fingerprint(values) == fingerprint(values.t().contiguous().t())
    others = [values.view(5, 6), values.flip(0).flip(1), values.to(torch.int16)]
    bits = values.clone().view(torch.uint8)
    for place in range(bits.numel()):
        changed = bits.clone()
        changed.view(-1)[place] ^= 1
        others.append(changed.view(dtype))
    assert len({fingerprint(other) for other in [values, *others]}) == 1 + len(others)


def test_difference_of_tensors_with_special_values():
    assert tensor_difference(torch.tensor(float("nan")), torch.tensor(float("nan"))) is None
    found = tensor_difference(torch.tensor([1.0, 0.0, 3.0]), torch.tensor([1.0, -0.0, 3.0]))
    assert (found["differing"], found["index"], found["absolute"], found["relative"]) == (1, [1], 0, 0)
    found = tensor_difference(torch.tensor([1 + 2j, 3 + 4j]), torch.tensor([1 + 2j, 3 + 8j]))
    assert (found["differing"], found["index"], found["values"], found["relative"]) == (1, [1, 1], (4, 8), 0.5)
