"""GPT-2, Llama and Qwen 3 as Hugging Face's transformers stores them: weights and settings from and for `GPT`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_tfm.errors import UserError, rank_zero_print
from lightning_tfm.layers import check_num_heads
from lightning_tfm.networks.gpt import GPT, default_d_ff
from lightning_tfm.networks.network import CausalNetwork, complete
from lightning_tfm.tokenization import BOS, EOS, NUM_SPECIAL, PAD

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Weights = Mapping[str, Tensor]
"""Weights by name."""

WEIGHTS = "model.safetensors"
"""Name of the file of weights; larger models have an index of several files instead."""


@dataclass(frozen=True)
class Family:
    """Models of one architecture.

    Attributes:
        architecture: class in transformers.
        prefix: first part of the names of all weights except those of the output layer; a file may omit it.
        modules: names of modules by those of `GPT`, where # is the number of a layer. The rows of a module of `GPT`
            are those of its parts, one after the other.
        keys: keys of config.json by setting of `GPT`.
        activations: values of the key of the activation by name of `activation_function`.
        defaults: values of keys that config.json may lack; None depends on other keys.
        settings: values of other settings of `GPT`.
        fixed: the only values of other keys that `GPT` implements.
        rotated: parts whose rows are permuted, see `_permute`.
        transposes: whether matrices of layers have the shape (in, out).
    """

    architecture: str
    prefix: str
    modules: Mapping[str, tuple[str, ...]]
    keys: Mapping[str, str]
    activations: Mapping[str, str]
    defaults: Mapping[str, Any]
    settings: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    rotated: tuple[str, ...] = ()
    transposes: bool = False

    def names(self, num_layers: int) -> Iterator[tuple[str, list[str]]]:
        """Yield the names of possible weights of `GPT`, each with the names of its parts."""
        for module, parts in self.modules.items():
            for number in range(num_layers if "#" in module else 1):
                for kind in ("weight", "bias"):
                    names = [f"{name.replace('#', str(number))}.{kind}" for name in (module, *parts)]
                    yield names[0], names[1:]


GPT2 = Family(
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    modules={
        "embedding": ("transformer.wte",),
        "positions": ("transformer.wpe",),
        "layers.#.add_self.norm": ("transformer.h.#.ln_1",),
        "layers.#.self_attention.qkv_proj": ("transformer.h.#.attn.c_attn",),
        "layers.#.self_attention.out_proj": ("transformer.h.#.attn.c_proj",),
        "layers.#.add_feed_forward.norm": ("transformer.h.#.ln_2",),
        "layers.#.feed_forward.0": ("transformer.h.#.mlp.c_fc",),
        "layers.#.feed_forward.2": ("transformer.h.#.mlp.c_proj",),
        "norm": ("transformer.ln_f",),
        "head": ("lm_head",),
    },
    keys={
        "d_model": "n_embd",
        "num_heads": "n_head",
        "num_layers": "n_layer",
        "max_length": "n_positions",
        "activation": "activation_function",
        "d_ff": "n_inner",
        "norm_eps": "layer_norm_epsilon",
        "tie_embeddings": "tie_word_embeddings",
    },
    activations={"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu", "relu_squared": "relu2"},
    defaults={
        "activation_function": "gelu_new",
        "n_inner": None,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    settings={
        "bias": True,
        "positions": "learned",
        "rotary_base": 10000.0,
        "d_head": None,
        "num_kv_heads": None,
        "qk_norm": False,
        "norm_type": "layer",
        "window": None,
        "logit_cap": None,
        "lora_rank": None,
    },
    fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    transposes=True,
)

LLAMA = Family(
    architecture="LlamaForCausalLM",
    prefix="model.",
    modules={
        "embedding": ("model.embed_tokens",),
        "layers.#.add_self.norm": ("model.layers.#.input_layernorm",),
        "layers.#.self_attention.qkv_proj": tuple(f"model.layers.#.self_attn.{part}_proj" for part in "qkv"),
        "layers.#.self_attention.out_proj": ("model.layers.#.self_attn.o_proj",),
        "layers.#.add_feed_forward.norm": ("model.layers.#.post_attention_layernorm",),
        "layers.#.feed_forward.0": ("model.layers.#.mlp.gate_proj", "model.layers.#.mlp.up_proj"),
        "layers.#.feed_forward.2": ("model.layers.#.mlp.down_proj",),
        "norm": ("model.norm",),
        "head": ("lm_head",),
    },
    keys={
        "d_model": "hidden_size",
        "num_heads": "num_attention_heads",
        "num_layers": "num_hidden_layers",
        "max_length": "max_position_embeddings",
        "activation": "hidden_act",
        "rotary_base": "rope_theta",
        "d_ff": "intermediate_size",
        "d_head": "head_dim",
        "num_kv_heads": "num_key_value_heads",
        "norm_eps": "rms_norm_eps",
        "tie_embeddings": "tie_word_embeddings",
    },
    activations={"swiglu": "silu"},
    defaults={
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "head_dim": None,
        "num_key_value_heads": None,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    settings={
        "bias": False,
        "positions": "rotary",
        "qk_norm": False,
        "norm_type": "rms",
        "window": None,
        "logit_cap": None,
        "lora_rank": None,
    },
    fixed={"attention_bias": False, "mlp_bias": False},
    rotated=("q_proj", "k_proj", "q_norm", "k_norm"),
)

QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    prefix=LLAMA.prefix,
    modules={
        **LLAMA.modules,
        **{f"layers.#.self_attention.{part}_norm": (f"model.layers.#.self_attn.{part}_norm",) for part in "qk"},
    },
    keys=LLAMA.keys,
    activations=LLAMA.activations,
    defaults={**LLAMA.defaults, "head_dim": 128, "num_key_value_heads": 32},
    settings={**LLAMA.settings, "qk_norm": True},
    fixed={"attention_bias": False, "use_sliding_window": False},
    rotated=LLAMA.rotated,
)

FAMILIES = {"gpt2": GPT2, "llama": LLAMA, "qwen3": QWEN3}
"""Families by the value of `model_type` in config.json."""


def from_huggingface(model: PreTrainedModel, num_special: int = 0) -> GPT:
    """Return a GPT with the weights of a model of transformers and the same distribution over its ids.

    `num_special` is 0, or NUM_SPECIAL to insert PAD, BOS and EOS before the ids of the model, with probability 0, since
    the model was not trained on them.

    Raises:
        UserError: if the model is of another architecture, or has an option that `GPT` does not implement.
    """
    assert num_special in (0, NUM_SPECIAL)
    config = model.config.to_dict()
    gpt = GPT(**_settings(config, num_special)).to(torch.promote_types(model.dtype, torch.float32))  # never rounded
    _copy(model.state_dict(), gpt, _family(config), num_special)
    return gpt


def start_from(network: CausalNetwork, folder: str) -> None:
    """Copy the weights of a folder of Hugging Face into a network.

    The folder has a config.json, and a model.safetensors or several files with an index, from which nothing is
    executed. Ids of the folder are those of the network without PAD, BOS and EOS.

    Raises:
        UserError: unless the folder contains a model of FAMILIES, and the network is a GPT of its settings.
    """
    if not isinstance(network, GPT):
        raise UserError(f"pretrained must not be set for {type(network).__name__}, which has no pretrained weights")
    if not Path(folder, "config.json").is_file():
        raise UserError(f"pretrained must be a folder of Hugging Face, but there is no {folder}/config.json")
    from safetensors import SafetensorError

    try:
        config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        needed = _resolved(_settings(config, NUM_SPECIAL))
        _check_equal(network, needed, folder)
        weights = _read(Path(folder))
        _copy(weights, network, _family(config), NUM_SPECIAL)
    except (OSError, ValueError, TypeError, AttributeError, KeyError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"pretrained must be a folder of Hugging Face, but {folder!r} is not: {reason}") from None
    dtypes, dtype = {weight.dtype for weight in weights.values()}, network.embedding.weight.dtype
    for rounded in (each for each in dtypes if torch.promote_types(each, dtype) != dtype):
        rank_zero_print(f"the weights of {folder!r}, of {rounded}, are rounded to {dtype}")


def to_huggingface(network: GPT, num_special: int = 0) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the content of config.json and the weights of a model of transformers with the logits of a GPT.

    The first `num_special` ids, 0 or NUM_SPECIAL, are not ids of the model.

    Raises:
        UserError: if no model of FAMILIES has the settings of the GPT.
    """
    settings = _resolved(network.hyper_parameters)
    model_type = "gpt2"
    if settings["positions"] == "rotary":
        model_type = "qwen3" if settings["qk_norm"] else "llama"
    if model_type == "llama":
        check_num_heads(settings["d_model"], settings["num_heads"])  # as LlamaConfig does, whatever d_head is
    family = FAMILIES[model_type]
    required = _resolved({**settings, **family.settings, **({} if num_special else {"text_only": False})})
    supported = {name: [value] for name, value in required.items()}
    supported |= {"positions": ["learned", "rotary"], "activation": [*family.activations]}
    for name, values in supported.items():
        if settings[name] not in values:
            raise UserError(
                f"{name} must be {', '.join(map(_shown, values))} for --format huggingface, as in {model_type}, but is "
                f"{_shown(settings[name])}; try --format safetensors"
            )
    special = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": model_type}
    config |= {"vocab_size": settings["vocab_size"] - num_special}
    config |= {key: settings[name] for name, key in family.keys.items()}
    config |= {family.keys["activation"]: family.activations[settings["activation"]]}
    config |= {"dtype": str(network.embedding.weight.dtype).removeprefix("torch.")}
    config |= {key: None if num_special else number for key, number in special.items()}
    state, weights = network.state_dict(), {}
    for name, parts in family.names(settings["num_layers"]):
        if name not in state or _is_tied(name, settings):
            continue
        weight = state[name][_first_row(name, num_special) :]
        heads = [settings["num_heads"], *[settings["num_kv_heads"]] * 2] if len(parts) == 3 else [1] * len(parts)
        rows = [len(weight) // sum(heads) * number for number in heads]
        for part, value in zip(parts, weight.split(rows), strict=True):
            if _is_rotated(part, family):
                value = _permute(value, settings["d_head"] // 2, 2)
            weights[part] = (value.T if _is_transposed(name, value, family) else value).contiguous()
    return config, weights


def _settings(config: Mapping[str, Any], num_special: int) -> dict[str, Any]:
    """Return the settings of the GPT for the content of a config.json; raise UserError if there is none."""
    family = _family(config)
    # In transformers 5, an entry holds all settings of rotary positions.
    rope = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    fixed = {"rope_scaling": None, "quantization_config": None, **family.fixed}
    values = {**family.defaults, **rope, **config, "rope_scaling": None if kind == "default" else kind}
    for key, value in fixed.items():
        if (actual := values.get(key, value)) != value:
            raise UserError(
                f"{key} must be {_shown(value)} in config.json, but is {_shown(actual)}; choose another model"
            )
    if missing := [key for key in ("vocab_size", *family.keys.values()) if key not in values]:
        raise ValueError(f"config.json lacks {missing[0]}")
    settings = {name: values[key] for name, key in family.keys.items()}
    activations = {value: name for name, value in family.activations.items()}
    if settings["activation"] not in activations:
        raise UserError(
            f"{family.keys['activation']} must be {', '.join(activations)} in config.json, but is "
            f"{settings['activation']}; choose another model"
        )
    settings["activation"] = activations[settings["activation"]]
    settings |= {"vocab_size": num_special + values["vocab_size"], "text_only": num_special > 0}
    return settings | dict(family.settings)


def _family(config: Mapping[str, Any]) -> Family:
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise UserError(f"model_type must be {', '.join(FAMILIES)} in config.json, but is {model_type}")
    return FAMILIES[model_type]


def _resolved(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of GPT with the values that it gives to widths and numbers that are None."""
    width, heads = settings["d_model"], settings["num_heads"]
    defaults = {"d_head": width // heads, "num_kv_heads": heads, "d_ff": default_d_ff(width, settings["activation"])}
    return complete(dict(settings), defaults)


def _shown(value: Any) -> str:
    """Return a value as in a YAML file."""
    return "null" if value is None else str(value).lower()


def _check_equal(network: GPT, needed: Mapping[str, Any], folder: str) -> None:
    """Raise UserError if a setting of a network differs from those that the weights of a folder need."""
    free = {"dropout", "lora_rank", *(["max_length"] if needed["positions"] == "rotary" else [])}  # not of the folder
    for name, value in _resolved(network.hyper_parameters).items():
        if name in free or value == needed[name]:
            continue
        if name == "vocab_size":
            raise UserError(
                f"data.init_args.tokenizer_file must be the tokenizer.json of {folder!r}, which has {needed[name]} "
                f"ids, but the data have {value}"
            )
        raise UserError(f"{name} must match {folder!r}, but is {_shown(value)}; set it to {_shown(needed[name])}")


def _read(folder: Path) -> dict[str, Tensor]:
    """Read the weights of a folder."""
    from safetensors.torch import load_file

    index = folder / f"{WEIGHTS}.index.json"
    names = {WEIGHTS}
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    weights: dict[str, Tensor] = {}
    for name in sorted(names):
        if Path(name).name != name:
            raise ValueError(f"its index names {name!r}, which is in another folder")
        weights |= load_file(folder / name)
    return weights


@torch.no_grad()
def _copy(weights: Weights, network: GPT, family: Family, num_special: int) -> None:
    """Copy weights of a family into a GPT, from its row `num_special` of ids; raise ValueError if one is missing."""
    weights = {
        name if name.startswith((family.prefix, "lm_head.")) else family.prefix + name: weight
        for name, weight in weights.items()
    }
    settings, state = _resolved(network.hyper_parameters), network.state_dict()
    for name, parts in family.names(settings["num_layers"]):
        if name not in state or _is_tied(name, settings):
            continue
        values = []
        for part in parts:
            if part not in weights:
                raise ValueError(f"it lacks {part}")
            value = weights[part].T if _is_transposed(name, weights[part], family) else weights[part]
            values.append(_permute(value, 2, settings["d_head"] // 2) if _is_rotated(part, family) else value)
        target, value = state[name][_first_row(name, num_special) :], torch.cat(values)
        if target.shape != value.shape:
            raise ValueError(f"{parts[0]} has the shape {[*weights[parts[0]].shape]}, unlike config.json")
        target.copy_(value)


def _is_tied(name: str, settings: Mapping[str, Any]) -> bool:
    return name == "head.weight" and settings["tie_embeddings"]


def _first_row(name: str, num_special: int) -> int:
    return num_special if name in ("embedding.weight", "head.weight") else 0


def _is_transposed(name: str, weight: Tensor, family: Family) -> bool:
    return family.transposes and name.startswith("layers.") and weight.dim() == 2


def _is_rotated(part: str, family: Family) -> bool:
    return part.split(".")[-2] in family.rotated


def _permute(weight: Tensor, *sizes: int) -> Tensor:
    """Permute the rows of each head of a projection, or the elements of its norm.

    Rotary positions rotate element i with i + d/2 of a head of width d in transformers, and 2i with 2i + 1 here. The
    sizes are (2, d/2) to order rows as here, and (d/2, 2) to order them as in transformers.
    """
    return weight.unflatten(0, (-1, *sizes)).transpose(1, 2).flatten(0, 2)
