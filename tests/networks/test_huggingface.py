"""Weights of GPT-2 of Hugging Face."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path

import pytest
import torch

from lightning_tfm.inference.loading import load
from lightning_tfm.layers.losses import token_nll
from lightning_tfm.networks import GPT
from lightning_tfm.networks.huggingface import from_huggingface, start_from
from lightning_tfm.tokenization import NUM_SPECIAL
from support.corpora import TEXT
from support.experiments import write_gpt2, write_task
from support.processes import run


@pytest.fixture(params=[-55.0])
def gpt2_folder(tmp_path, request):
    """Save a small GPT-2 of Hugging Face with a tokenizer; the parameter shifts its logits."""
    return write_gpt2(tmp_path / "gpt2", request.param)


@pytest.mark.parametrize("gpt2_folder", [0.0, -55.0, -300.0, 55.0], indirect=True)
def test_gpt2_equals_hugging_face_over_the_whole_vocabulary(gpt2_folder, tmp_path):
    """PAD, BOS and EOS have zero probability for any shift of the logits."""
    from transformers import GPT2LMHeadModel

    reference = GPT2LMHeadModel.from_pretrained(gpt2_folder).eval()
    network = from_huggingface(reference, NUM_SPECIAL).eval()
    ids = torch.randint(287, (4, 16))
    tokens = ids + NUM_SPECIAL
    with torch.no_grad():
        expected = reference(ids, labels=ids)
        actual = network(tokens[:, :0], tokens)
        stepwise, _ = network.decode_step(tokens[:, -1], network.encode(tokens[:, :-1]))
    probabilities = torch.nn.functional.pad(expected.logits.softmax(-1), (NUM_SPECIAL, 0))
    torch.testing.assert_close(actual.softmax(-1), probabilities, rtol=0, atol=1e-5)
    torch.testing.assert_close(stepwise.softmax(-1), probabilities[:, -1], rtol=0, atol=1e-5)
    loss = token_nll(actual[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
    assert loss.item() == pytest.approx(expected.loss.item(), abs=1e-5)
    assert all(weight.isfinite().all() for weight in network.state_dict().values())


def gpt2_settings(folder):
    network = {"activation": "gelu_tanh", "text_only": "true", "positions": "learned"}
    settings = {f"model.network.{name}": value for name, value in network.items()}
    settings |= {"model.pretrained": folder, "data.tokenizer_file": folder / "tokenizer.json"}
    return [f"--{name}={value}" for name, value in settings.items()]


def test_fine_tuning_lowers_the_loss_of_gpt2(gpt2_folder, tmp_path):
    path = write_task("text_gpt", tmp_path)
    validated = ["--trainer.val_check_interval=1", "--trainer.max_steps=30"]
    rate = ["--model.optimizer.lr=3e-3", "--model.lr_schedule.warmup_steps=0"]
    run("fit", "--config", path, *gpt2_settings(gpt2_folder), *validated, *rate, cwd=tmp_path).finish()
    with (tmp_path / "runs/text_gpt/version_0/metrics.csv").open() as file:
        losses = [float(row["val/loss"]) for row in csv.DictReader(file) if row.get("val/loss")]
    assert losses[0] == pytest.approx(math.log(287), abs=0.3), "a random model is uniform over the ids of GPT-2"
    assert losses[-1] < losses[0] - 0.3


def test_training_starts_from_the_weights_of_gpt2(gpt2_folder, tmp_path):
    from transformers import GPT2LMHeadModel

    path = write_task("text_gpt", tmp_path)
    settings = [*gpt2_settings(gpt2_folder), "--trainer.max_steps=1", "--model.optimizer.lr=1e-12"]
    run("fit", "--config", path, *settings, cwd=tmp_path, fault=("after a validation", 2)).die()
    module = load(tmp_path / "runs/text_gpt/version_0/checkpoints/best.ckpt")
    network, tokenizer = module.network, module.tokenizer
    reference = GPT2LMHeadModel.from_pretrained(gpt2_folder).eval()
    ids = torch.tensor([tokenizer.encode(TEXT[:30])[:12]])
    with torch.no_grad():
        actual = network(ids[:, :0], ids).softmax(-1)
        expected = torch.nn.functional.pad(reference(ids - 3).logits.softmax(-1), (3, 0))
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    (Path(gpt2_folder) / "model.safetensors").unlink()  # a resumed run does not need it
    run("fit", "--config", path, *settings, "--ckpt_path=last", cwd=tmp_path).finish()


def test_rounded_weights_of_gpt2_are_reported(gpt2_folder, capsys):
    from transformers import GPT2LMHeadModel

    network = GPT(NUM_SPECIAL + 287, 16, 2, 1, max_length=16, activation="gelu_tanh", text_only=True)
    start_from(network, str(gpt2_folder))
    assert "rounded" not in capsys.readouterr().err
    GPT2LMHeadModel.from_pretrained(gpt2_folder).double().save_pretrained(gpt2_folder)
    start_from(network, str(gpt2_folder))
    assert "of torch.float64, are rounded to torch.float32" in capsys.readouterr().err


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def remove_weights(folder):
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = {name: weight for name, weight in load_file(path).items() if "c_attn" not in name}
    save_file(weights, path, {"format": "pt"})


def change_model_type(folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "bert"}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "gpt2' is not: "),
        (remove_weights, "gpt2' is not: it lacks transformer.h.0.attn.c_attn.bias"),
        (change_model_type, "gpt2' is not: it holds a model of type bert"),
    ],
)
def test_a_damaged_folder_of_gpt2_is_refused(damage, message, gpt2_folder, tmp_path, command):
    """Missing weights would be random, and training would start from noise."""
    damage(gpt2_folder)
    _, err = command("fit", "--config", write_task("text_gpt", tmp_path), *gpt2_settings(gpt2_folder), status=2)
    assert message in err.splitlines()[-1]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("model.network.num_layers=2", r"num_layers must match '.*gpt2', but is 2; set it to 1"),
        ("model.network.text_only=false", r"text_only must match '.*gpt2', but is False; set it to True"),
        ("model.network.activation=gelu", r"activation must match '.*gpt2', but is gelu; set it to gelu_tanh"),
        ("data.tokenizer_file=null", r"tokenizer_file must be the tokenizer.json of '.*gpt2', which has 290 ids, but"),
        ("model.pretrained=none", "pretrained must be a folder with .* GPT-2, but there is no none/config.json"),
    ],
)
def test_mismatched_pretrained_weights_are_refused(option, message, gpt2_folder, tmp_path, command):
    arguments = [write_task("text_gpt", tmp_path), *gpt2_settings(gpt2_folder), f"--{option}"]
    assert re.search(message, command("fit", "--config", *arguments, status=2).err)
    assert not (tmp_path / "runs").exists(), "the run ends before training"
