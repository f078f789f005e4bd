"""Averaged weights: of the steps of a run, and of checkpoints."""

import re
from copy import deepcopy

import pytest
import torch
from torch import nn

from lightning_tfm.checkpoint import averaging, read
from lightning_tfm.checkpoint.averaging import average_checkpoints
from support.equality import equal
from support.experiments import trained_run
from support.processes import run


@pytest.mark.run
def test_checkpoints_are_averaged(tmp_path_factory, tmp_path, command):
    """A run can keep the checkpoints of its last validations to average them."""
    folder = trained_run("spelling_gpt", tmp_path_factory)
    run("fit", "--config", folder.parents[2] / "spelling_gpt.yaml", "--checkpoint.keep_last=3", cwd=tmp_path).finish()
    checkpoints = tmp_path / "runs/spelling_gpt/version_0/checkpoints"
    paths = [checkpoints / f"step_{step}.ckpt" for step in (20, 30, 40)]
    assert sorted(checkpoints.glob("*.ckpt")) == sorted([*paths, checkpoints / "best.ckpt", checkpoints / "last.ckpt"])
    assert [read(path)["global_step"] for path in paths] == [20, 30, 40]
    equal(read(paths[2])["state_dict"], read(checkpoints / "last.ckpt")["state_dict"])
    mean = tmp_path / "mean.ckpt"
    command("average", *paths, "--output", mean)
    weights = [read(path)["state_dict"] for path in (*paths, mean)]
    for name, weight in weights[3].items():
        torch.testing.assert_close(weight, sum(other[name] for other in weights[:3]) / 3)
    command("generate", mean, "abc")
    run("test", "--config", folder.parents[2] / "spelling_gpt.yaml", "--ckpt_path", mean, cwd=tmp_path).finish()
    other = trained_run("text_gpt", tmp_path_factory) / "checkpoints/best.ckpt"
    message = command("average", paths[0], other, "--output", tmp_path / "none.ckpt", status=2).err
    assert "all checkpoints must have the same class_path" in message
    assert len(set(re.findall(r"'[^']+'", message))) == 2, "both files are named"
    assert "--output must be a new file" in command("average", paths[0], "--output", mean, status=2).err
    path = folder.parents[2] / "spelling_gpt.yaml"
    message = command("fit", "--config", path, "--ckpt_path", mean, status=2).err
    assert "mean.ckpt' must hold the optimizer's state to resume its run" in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_averaged_checkpoints_have_the_mean_weights(network, dtype, monkeypatch):
    """Tied weights share their memory under two names."""
    contents = {}
    for name in "abc":
        for parameter in network.to(dtype).parameters():
            nn.init.normal_(parameter)
        contents[name] = {"state_dict": deepcopy(network.state_dict()), "hyper_parameters": {}}
    expected = {
        name: torch.stack([content["state_dict"][name] for content in contents.values()]).double().mean(0).to(weight)
        for name, weight in contents["a"]["state_dict"].items()
    }
    monkeypatch.setattr(averaging, "read", contents.__getitem__)
    torch.testing.assert_close(average_checkpoints("abc")["state_dict"], expected)
