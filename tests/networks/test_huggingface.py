"""Models of Hugging Face: their weights in GPT, and GPT as one of them."""

from __future__ import annotations

import csv
import json
import math
import re
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from lightning_tfm.checkpoint import read
from lightning_tfm.errors import UserError
from lightning_tfm.inference.decoding import continue_text
from lightning_tfm.inference.loading import load
from lightning_tfm.layers import LoRALinear
from lightning_tfm.layers.losses import token_nll
from lightning_tfm.networks import GPT, LinearTransformer
from lightning_tfm.networks.huggingface import from_huggingface, start_from, to_huggingface
from lightning_tfm.tokenization import NUM_SPECIAL
from support.corpora import TEXT
from support.experiments import write_gpt2, write_task
from support.networks import LLAMA, QWEN3, SMOLLM2, randomize
from support.processes import run

IDS = 50
GPT2_SIZE = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 24}
SIZE = {
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 24,
}
MODELS = {
    "GPT-2": ("GPT2", {}),
    "GPT-2 untied": ("GPT2", {"tie_word_embeddings": False, "n_inner": 40, "layer_norm_epsilon": 0.1}),
    **{f"GPT-2 {name}": ("GPT2", {"activation_function": name}) for name in ("gelu", "relu", "relu2")},
    "Llama": ("Llama", {}),
    "Llama tied": ("Llama", {"tie_word_embeddings": True, "rms_norm_eps": 0.1, "hidden_size": 24}),
    "Llama grouped": ("Llama", {"num_key_value_heads": 2, "head_dim": 6, "rope_theta": 5e5}),
    "Qwen 3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 6}),
    "Qwen 3 tied": ("Qwen3", {"num_key_value_heads": 1, "tie_word_embeddings": True, "rope_theta": 1e6}),
}


def new_model(name, changes):
    """Return a small random model of transformers."""
    config = getattr(transformers, f"{name}Config")(
        **{"vocab_size": IDS, "bos_token_id": None, "eos_token_id": None}
        | (GPT2_SIZE if name == "GPT2" else SIZE)
        | changes
    )
    model = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(config)
    return randomize(model).eval()


@pytest.fixture(params=MODELS)
def model(request):
    return new_model(*MODELS[request.param])


def norm_in_float64(self, x):
    return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


def compute_in_float64(model, network, monkeypatch):
    """Make transformers compute the loss and RMSNorm in float64, as it does all else, and share its rotary angles.

    Their frequencies are rounded to float32 in transformers.
    """
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    for norm in (LlamaRMSNorm, Qwen3RMSNorm):
        monkeypatch.setattr(norm, "forward", norm_in_float64)
    if model.config.model_type != "gpt2":
        angles = model.model.rotary_emb(torch.zeros((), dtype=torch.float64), torch.arange(24)[None])
        for table, angle in zip((network.positions.cos, network.positions.sin), angles, strict=True):
            torch.testing.assert_close(table, angle[0, :, : table.size(1)], rtol=0, atol=1e-5)
            table.copy_(angle[0, :, : table.size(1)])


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=str)
@torch.no_grad()
def test_logits_loss_and_cached_generation_equal_transformers(dtype, bound, model, monkeypatch):
    close = partial(torch.testing.assert_close, rtol=0, atol=bound)
    network, ids = from_huggingface(model.to(dtype), NUM_SPECIAL).eval(), torch.randint(IDS, (3, 24))
    if dtype == torch.float64:
        actual = network(ids[:, :0], ids + NUM_SPECIAL)[..., NUM_SPECIAL:]
        close(actual, model(ids).logits, atol=1e-6)
        compute_in_float64(model, network, monkeypatch)
    expected, tokens = model(ids, labels=ids), ids + NUM_SPECIAL
    logits = network(tokens[:, :0], tokens)
    close(logits[..., NUM_SPECIAL:], expected.logits)
    close(token_nll(logits[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel(), expected.loss)

    prompt = ids[:, :4]
    ids = model.generate(prompt, max_new_tokens=20, do_sample=False, attention_mask=torch.ones_like(prompt))
    tokens = ids + NUM_SPECIAL
    assert continue_text(network.encode, network.decode_step, tokens[:, :4], 20, 24).equal(tokens[:, 4:])
    state, cache = network.encode(tokens[:, :3]), model(ids[:, :3]).past_key_values
    for step in range(3, 23):
        logits, state = network.decode_step(tokens[:, step], state)
        output = model(ids[:, step : step + 1], past_key_values=cache)
        close(logits[:, NUM_SPECIAL:], output.logits[:, 0])
        assert logits.argmax(1).equal(tokens[:, step + 1])


@torch.no_grad()
def test_weights_return_without_a_difference(model):
    network, tied = from_huggingface(model), model.config.tie_word_embeddings
    assert sum(weight.numel() for weight in network.parameters()) == model.num_parameters()
    config, weights = to_huggingface(network)
    state = model.state_dict()
    assert weights.keys() == state.keys() - ({"lm_head.weight"} if tied else set())
    assert all(weight.equal(state[name]) for name, weight in weights.items())
    again = type(model)(type(model.config)(**config)).eval()
    again.load_state_dict(weights, strict=not tied)
    ids = torch.randint(IDS, (3, 24))
    assert again(ids).logits.equal(model(ids).logits), "config.json has the settings of the model"
    assert to_huggingface(from_huggingface(again))[0] == config


@pytest.mark.parametrize("architecture", [LLAMA, SMOLLM2, QWEN3], ids=["Llama", "SmolLM2", "Qwen3"])
@torch.no_grad()
def test_overlays_are_models_of_transformers(architecture):
    network = randomize(GPT(11, 16, 4, 2, max_length=12, **architecture)).eval()
    config, weights = to_huggingface(network)
    model_type = config.pop("model_type")
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **config))
    model.load_state_dict(weights, strict=not architecture["tie_embeddings"])
    tokens = torch.randint(0, 11, (3, 12))
    torch.testing.assert_close(network(tokens[:, :0], tokens), model.eval()(tokens).logits, atol=1e-5, rtol=0)
    assert sum(weight.numel() for weight in network.parameters()) == model.num_parameters()


def fitting(model, **changes):
    """Return a GPT whose settings are those of a model, with PAD, BOS and EOS."""
    return GPT(**from_huggingface(model, NUM_SPECIAL).hyper_parameters | changes).eval()


@pytest.mark.parametrize("shard", ["1GB", "10KB"], ids=["one file", "several files"])
def test_folders_are_read_without_transformers(shard, model, tmp_path, monkeypatch):
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert len([*tmp_path.glob("*.safetensors")]) == 1 or shard == "10KB"
    network, ids = fitting(model, dropout=0.1), torch.randint(IDS, (3, 24))
    expected = from_huggingface(model, NUM_SPECIAL)(ids[:, :0] + NUM_SPECIAL, ids + NUM_SPECIAL)
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    start_from(network, str(tmp_path))
    assert network(ids[:, :0] + NUM_SPECIAL, ids + NUM_SPECIAL).equal(expected)


def test_bfloat16_is_read_as_float32(model, tmp_path, capsys):
    model.bfloat16().save_pretrained(tmp_path)
    network = fitting(model)
    start_from(network, str(tmp_path))
    assert network.embedding.weight.dtype == torch.float32
    assert network.embedding.weight[NUM_SPECIAL:].equal(model.get_input_embeddings().weight.float())
    assert "rounded" not in capsys.readouterr().err


def test_files_of_earlier_versions_are_read(tmp_path):
    """Read GPT-2 weights without a prefix and with mask buffers, and a Llama with `rope_theta`."""
    model = new_model("GPT2", {})
    weights = {name.removeprefix("transformer."): weight for name, weight in model.state_dict().items()}
    del weights["lm_head.weight"]
    weights |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 24, 24) for layer in range(2)}
    save_file(weights, tmp_path / "model.safetensors")
    settings = {name: value for name, value in model.config.to_dict().items() if name.startswith(("n_", "vocab"))}
    (tmp_path / "config.json").write_text(json.dumps(settings | {"model_type": "gpt2"}))
    network = fitting(model)
    start_from(network, str(tmp_path))
    assert network.norm.weight.equal(model.transformer.ln_f.weight)

    model = new_model("Llama", {"rope_theta": 777.0})
    model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["rope_parameters"], settings["head_dim"], settings["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps(settings | {"rope_theta": 777.0, "rope_scaling": None}))
    start_from(fitting(model, max_length=9), str(tmp_path))
    with pytest.raises(UserError, match=r"rotary_base must match '.*', but is 778; set it to 777.0"):
        start_from(fitting(model, rotary_base=778), str(tmp_path))


ROTARY = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("GPT2", {"activation_function": "silu"}, "activation_function must be gelu_new, gelu, relu, relu2 in"),
        ("GPT2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx must be false in"),
        ("GPT2", {"scale_attn_weights": False}, "scale_attn_weights must be true in config.json, but is false"),
        ("GPT2", {"add_cross_attention": True}, "add_cross_attention must be false"),
        ("Llama", {"attention_bias": True}, "attention_bias must be false"),
        ("Llama", {"mlp_bias": True}, "mlp_bias must be false"),
        ("Llama", {"hidden_act": "gelu"}, "hidden_act must be silu in config.json, but is gelu"),
        ("Llama", {"rope_parameters": ROTARY}, "rope_scaling must be null in config.json, but is linear"),
        ("Qwen3", {"use_sliding_window": True}, "use_sliding_window must be false"),
        ("Mistral", {}, "model_type must be gpt2, llama, qwen3 in config.json, but is mistral"),
    ],
)  # fmt: skip
def test_unsupported_models_are_refused(name, changes, message):
    with pytest.raises(UserError, match=re.escape(message)):
        from_huggingface(new_model(name, changes))


def test_other_networks_have_no_pretrained_weights():
    with pytest.raises(UserError, match="pretrained must not be set for LinearTransformer"):
        start_from(LinearTransformer(11, 16, 4, 1, max_length=9), "folder")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"positions": "alibi"}, "positions must be learned, rotary for --format huggingface, as in gpt2"),
        ({"bias": False}, "bias must be true for --format huggingface, as in gpt2, but is false"),
        ({"activation": "swiglu"}, "activation must be gelu_tanh, gelu, relu, relu_squared for"),
        ({"norm_type": "rms"}, "norm_type must be layer for"),
        ({"d_head": 6}, "d_head must be 4 for"),
        ({"num_kv_heads": 2}, "num_kv_heads must be 4 for"),
        ({"qk_norm": True}, "qk_norm must be false for"),
        ({"text_only": True}, "text_only must be false for"),
        (LLAMA | {"num_heads": 6, "d_head": 6}, "d_model must be divisible by num_heads (6), but is 16"),
        *[
            (overlay | change, f"{next(iter(change))} must be {needed} for --format huggingface, as in {name}")
            for (overlay, name), (change, needed) in product(
                ((LLAMA, "llama"), (QWEN3, "qwen3")),
                (
                    ({"window": 4}, "null"),
                    ({"logit_cap": 30.0}, "null"),
                    ({"bias": True}, "false"),
                    ({"norm_type": "layer"}, "rms"),
                    ({"activation": "gelu"}, "swiglu"),
                ),
            )
        ],
    ],
)  # fmt: skip
def test_other_settings_are_not_exported(settings, message):
    with pytest.raises(UserError, match=re.escape(message)):
        to_huggingface(GPT(11, 16, **{"num_heads": 4, "max_length": 9} | settings))


@pytest.fixture(params=[-55.0])
def gpt2_folder(tmp_path, request):
    """Save a small GPT-2 of Hugging Face with a tokenizer; the parameter shifts its logits."""
    return write_gpt2(tmp_path / "gpt2", request.param)


@pytest.mark.parametrize("gpt2_folder", [0.0, -55.0, -300.0, 55.0], indirect=True)
def test_gpt2_equals_hugging_face_over_the_whole_vocabulary(gpt2_folder, tmp_path):
    """PAD, BOS and EOS have zero probability for any shift of the logits."""
    reference = transformers.GPT2LMHeadModel.from_pretrained(gpt2_folder).eval()
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
    path = write_task("text_gpt", tmp_path)
    settings = [*gpt2_settings(gpt2_folder), "--trainer.max_steps=1", "--model.optimizer.lr=1e-12"]
    run("fit", "--config", path, *settings, cwd=tmp_path, fault=("after a validation", 2)).die()
    module = load(tmp_path / "runs/text_gpt/version_0/checkpoints/best.ckpt")
    network, tokenizer = module.network, module.tokenizer
    reference = transformers.GPT2LMHeadModel.from_pretrained(gpt2_folder).eval()
    ids = torch.tensor([tokenizer.encode(TEXT[:30])[:12]])
    with torch.no_grad():
        actual = network(ids[:, :0], ids).softmax(-1)
        expected = torch.nn.functional.pad(reference(ids - 3).logits.softmax(-1), (3, 0))
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    (Path(gpt2_folder) / "model.safetensors").unlink()  # a resumed run does not need it
    run("fit", "--config", path, *settings, "--ckpt_path=last", cwd=tmp_path).finish()


@torch.no_grad()
def test_a_fine_tuned_llama_returns_to_transformers(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = new_model("Llama", {"vocab_size": 287, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 5e5})
    folder = write_gpt2(tmp_path / "llama")  # for its tokenizer
    model.save_pretrained(folder)
    sizes = {"num_heads": 4, "num_layers": 2, "d_ff": 40}
    settings = {f"model.network.{name}": value for name, value in (LLAMA | sizes | {"text_only": True}).items()}
    settings |= {"model.pretrained": folder, "data.tokenizer_file": folder / "tokenizer.json", "trainer.max_steps": 10}
    arguments = [f"--{name}={str(value).lower()}" for name, value in settings.items()]
    run("fit", "--config", write_task("text_gpt", tmp_path), *arguments, cwd=tmp_path).finish()
    exported = tmp_path / "exported"
    command("export", "text_gpt/version_0", "--format", "huggingface", "--output", exported)

    trained = load("text_gpt/version_0")
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    ids = torch.tensor([tokenizer(TEXT[:30]).input_ids[:12]])
    assert (ids + NUM_SPECIAL).tolist() == [trained.tokenizer.encode(TEXT[:30])[:12]]
    model = transformers.AutoModelForCausalLM.from_pretrained(exported).eval()
    logits = trained.network(ids[:, :0], ids + NUM_SPECIAL)[..., NUM_SPECIAL:]
    torch.testing.assert_close(model(ids).logits, logits, rtol=0, atol=1e-5)

    network = GPT(**trained.network.hyper_parameters)
    start_from(network, str(exported))
    for name, weight in network.state_dict().items():
        rows = NUM_SPECIAL if name in ("embedding.weight", "head.weight") else 0
        assert weight[rows:].equal(trained.network.state_dict()[name][rows:])


@torch.no_grad()
def test_lora_is_trained_resumed_and_merged(gpt2_folder, tmp_path, command, monkeypatch):
    """Only the updates are trained, bit for bit the same in a resumed run; other commands read merged weights."""
    monkeypatch.chdir(tmp_path)
    rate = ["--model.optimizer.lr=3e-2", "--model.lr_schedule.warmup_steps=0"]
    settings = [*gpt2_settings(gpt2_folder), *rate, "--model.network.lora_rank=2", "--trainer.max_steps=20"]
    arguments = ["fit", "--config", write_task("text_gpt", tmp_path), *settings]
    run(*arguments, "--name=whole", cwd=tmp_path).finish()
    run(*arguments, "--name=resumed", cwd=tmp_path, fault=("after a validation", 2)).die()
    run(*arguments, "--name=resumed", "--ckpt_path=last", cwd=tmp_path).finish()
    whole, resumed = (read(tmp_path / f"runs/{name}/version_0/checkpoints/last.ckpt") for name in ("whole", "resumed"))
    weights = {name.removeprefix("network."): weight for name, weight in whole["state_dict"].items()}
    assert all(weight.equal(resumed["state_dict"][f"network.{name}"]) for name, weight in weights.items())

    network = GPT(**whole["hyper_parameters"]["network"]["init_args"]).eval()
    network.load_state_dict(weights)
    updates = {name for name in weights if ".lora_" in name}
    assert all(weights[name].count_nonzero() for name in updates)
    start = from_huggingface(transformers.GPT2LMHeadModel.from_pretrained(gpt2_folder), NUM_SPECIAL).state_dict()
    for name in weights.keys() - updates:
        rows = NUM_SPECIAL if name in ("embedding.weight", "head.weight") else 0
        assert weights[name][rows:].equal(start[name][rows:]), "all other weights are those of GPT-2"
    assert len(whole["optimizer_states"][0]["state"]) == len(updates)

    ids = torch.randint(287, (2, 16))
    expected = network(ids[:, :0], ids + NUM_SPECIAL)
    best = load("whole/version_0")
    assert not any(isinstance(layer, LoRALinear) for layer in best.network.modules())
    assert command("generate", "runs/whole/version_0/checkpoints/last.ckpt", "ROMEO:").out
    for format in ("huggingface", "safetensors", "single"):
        command("export", "runs/whole/version_0/checkpoints/last.ckpt", "--format", format, "--output", format)
    model = transformers.AutoModelForCausalLM.from_pretrained("huggingface").eval()
    torch.testing.assert_close(model(ids).logits, expected[..., NUM_SPECIAL:], rtol=0, atol=1e-4)
    again = GPT(**json.loads(Path("safetensors/config.json").read_text())["network"]["init_args"]).eval()
    again.load_state_dict(load_file("safetensors/model.safetensors"), strict=False)
    torch.testing.assert_close(again(ids[:, :0], ids + NUM_SPECIAL), expected, rtol=0, atol=1e-4)
    logits = load("single/model.ckpt").network(ids[:, :0], ids + NUM_SPECIAL)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_rounded_weights_of_gpt2_are_reported(gpt2_folder, capsys):
    network = GPT(NUM_SPECIAL + 287, 16, 2, 1, max_length=16, activation="gelu_tanh", text_only=True)
    start_from(network, str(gpt2_folder))
    assert "rounded" not in capsys.readouterr().err
    transformers.GPT2LMHeadModel.from_pretrained(gpt2_folder).double().save_pretrained(gpt2_folder)
    start_from(network, str(gpt2_folder))
    assert "of torch.float64, are rounded to torch.float32" in capsys.readouterr().err


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def remove_weights(folder):
    path = folder / "model.safetensors"
    weights = {name: weight for name, weight in load_file(path).items() if "c_attn" not in name}
    save_file(weights, path, {"format": "pt"})


def change_model_type(folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "bert"}))


def change_shape(folder):
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"transformer.wte.weight": weights["transformer.wte.weight"][1:].clone()}, path)


def remove_width(folder):
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    del settings["n_embd"]
    path.write_text(json.dumps(settings))


def leave_the_folder(folder):
    index = {"weight_map": {"transformer.wte.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "gpt2' is not: "),
        (remove_weights, "gpt2' is not: it lacks transformer.h.0.attn.c_attn.weight"),
        (change_shape, "gpt2' is not: transformer.wte.weight has the shape [286, 16], unlike config.json"),
        (change_model_type, "model_type must be gpt2, llama, qwen3 in config.json, but is bert"),
        (remove_width, "gpt2' is not: config.json lacks n_embd"),
        (leave_the_folder, "gpt2' is not: its index names '../model.safetensors', which is in another folder"),
    ],
)
def test_a_damaged_folder_of_gpt2_is_refused(damage, message, gpt2_folder, tmp_path, command):
    """Missing weights would be random, and training would start from noise."""
    damage(gpt2_folder)
    _, err = command("fit", "--config", write_task("text_gpt", tmp_path), *gpt2_settings(gpt2_folder), status=2)
    assert message in err.splitlines()[-1]
    assert not (tmp_path / "runs").exists()


def test_lora_without_pretrained_weights_is_refused(tmp_path, command):
    arguments = ["fit", "--config", write_task("text_gpt", tmp_path), "--model.network.lora_rank=8"]
    assert "lora_rank must be null without model.init_args.pretrained" in command(*arguments, status=2).err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("model.network.num_layers=2", r"num_layers must match '.*gpt2', but is 2; set it to 1"),
        ("model.network.text_only=false", r"text_only must match '.*gpt2', but is false; set it to true"),
        ("model.network.activation=gelu", r"activation must match '.*gpt2', but is gelu; set it to gelu_tanh"),
        ("data.tokenizer_file=null", r"tokenizer_file must be the tokenizer.json of '.*gpt2', which has 290 ids, but"),
        ("model.network.lora_rank=0", "lora_rank must be at least 1, but is 0"),
        ("model.pretrained=none", "pretrained must be a folder of Hugging Face, but there is no none/config.json"),
    ],
)
def test_mismatched_pretrained_weights_are_refused(option, message, gpt2_folder, tmp_path, command):
    arguments = [write_task("text_gpt", tmp_path), *gpt2_settings(gpt2_folder), f"--{option}"]
    assert re.search(message, command("fit", "--config", *arguments, status=2).err)
    assert not (tmp_path / "runs").exists(), "the run ends before training"
