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
from support.processes import CONTEXT, EXPERIMENTS, start
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

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if self.is_due(trainer, "weight"):
            self.flip(self.weight(module))
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
        if trainer.global_step == self.step + 1 and self.kind in ("moment", "update"):
            weight = self.weight(module)
            self.flip(weight if self.kind == "update" else trainer.optimizers[0].state[weight]["exp_avg"])
"""

LAYERS = {"transformer": "decoder.0.cross_attention.out_proj", "gpt": "layers.0.self_attention.out_proj", "attention_lstm": "readout"}
"""A linear layer of each network."""

FAULTS = {
    "weight": "output of {layer}",
    "dropout": "output of dropout",
    "order": "batch, source",
    "learning rate": "learning rate",
    "gradient": "gradient of {layer}.weight",
    "clipping": "clipped gradient of ",
    "moment": "optimizer state exp_avg of {layer}.weight",
    "update": "parameter {layer}.weight",
}
"""The first difference that each fault causes."""

STEPS = 8


@pytest.fixture
def trained(tmp_path_factory, command, tmp_path, monkeypatch):
    """Return a function that trains a run once, and copies it to the folder of a test."""
    monkeypatch.setattr(step_trace, "PROCESSES", CONTEXT)  # which has imported the package

    def trained(model, name="first", fault=None, keeps=()):
        def train(cwd):
            (cwd / "planted.py").write_text(PLANTED)
            callbacks = {"trainer.callbacks": "[{class_path: planted.Fault}]", "trainer.max_steps": STEPS}
            intervals = {"trainer.val_check_interval": 4, "checkpoint.every_n_train_steps": 4}
            start(*fit(model, "--trust-package=planted", **callbacks, **intervals), cwd=cwd).finish()

        made = made_once(f"traced_{model}", train, tmp_path_factory)
        shutil.copy(made / "planted.py", tmp_path)
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
    printed = command("diff", *runs, "--trace", "--json", "--trust-package=planted", status=status).out
    return json.loads(printed)["trace"]


@pytest.mark.parametrize("model", LAYERS)
@pytest.mark.parametrize("kind", FAULTS)
def test_trace_names_a_planted_fault(kind, model, trained, command):
    fault = {"kind": kind, "layer": LAYERS[model], "step": 5}
    found = traced(command, trained(model), trained(model, "second", fault))
    assert (found["first_step"], found["equal_steps"], found["not_repeated"]) == (0, 5, [])
    assert found["difference"]["step"] == 5
    name, expected = found["difference"]["name"], FAULTS[kind].format(layer=LAYERS[model])
    assert name == expected or (kind == "clipping" and name.startswith(expected))
