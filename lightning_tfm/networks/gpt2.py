"""Weights of GPT-2 (Radford et al. 2019), as Hugging Face stores them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from lightning_tfm.errors import UserError, rank_zero_print
from lightning_tfm.layers import TransformerLayer
from lightning_tfm.networks.gpt import GPT
from lightning_tfm.networks.network import CausalNetwork
from lightning_tfm.tokenization import NUM_SPECIAL

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel


def from_huggingface(model: GPT2LMHeadModel, num_special: int = 0) -> GPT:
    """Return a GPT with the weights of a Hugging Face GPT-2 and the same distribution over its ids.

    `num_special` is 0, or NUM_SPECIAL to insert PAD, BOS and EOS before the ids of the model, with probability 0, since
    the model was not trained on them.

    Raises:
        UserError: if the model has an option that `GPT` does not implement.
    """
    assert num_special in (0, NUM_SPECIAL)
    config: Any = model.config
    supported = {
        "activation_function": ("gelu_new",),
        "n_inner": (4 * config.n_embd, None),  # None means 4 x the width
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "tie_word_embeddings": (True,),
        "add_cross_attention": (False,),
    }
    for name, values in supported.items():
        if (value := getattr(config, name)) not in values:
            raise UserError(f"{name} must be {values[0]} to load the weights of GPT-2, but is {value}")
    gpt = GPT(
        num_special + config.vocab_size,
        config.n_embd,
        config.n_head,
        config.n_layer,
        max_length=config.n_positions,
        activation="gelu_tanh",
        text_only=num_special > 0,
    ).to(torch.promote_types(model.dtype, torch.float32))  # weights are never rounded
    transformer: Any = model.transformer

    def copy(target: Any, source: Any, is_transposed: bool = False) -> None:
        target.weight.copy_(source.weight.T if is_transposed else source.weight)
        if getattr(target, "bias", None) is not None:
            target.bias.copy_(source.bias)

    with torch.no_grad():
        gpt.embedding.weight[num_special:] = transformer.wte.weight
        copy(gpt.positions, transformer.wpe)
        copy(gpt.norm, transformer.ln_f)
        for layer, block in zip(cast(Iterable[TransformerLayer], gpt.layers), transformer.h, strict=True):
            copy(layer.add_self.norm, block.ln_1)
            copy(layer.add_feed_forward.norm, block.ln_2)
            for linear, conv1d in (  # whose weights are (in, out)
                (layer.self_attention.qkv_proj, block.attn.c_attn),
                (layer.self_attention.out_proj, block.attn.c_proj),
                (layer.feed_forward[0], block.mlp.c_fc),
                (layer.feed_forward[2], block.mlp.c_proj),
            ):
                copy(linear, conv1d, is_transposed=True)
    return gpt


def load_gpt2(folder: str) -> GPT:
    """Return the GPT-2 of a Hugging Face folder as a GPT with PAD, BOS and EOS; raise UserError if there is none."""
    config = Path(folder, "config.json")
    if not config.is_file():
        raise UserError(f"pretrained must be a folder with a Hugging Face GPT-2, but there is no {folder}/config.json")
    try:
        from safetensors import SafetensorError
        from transformers import GPT2LMHeadModel
    except ImportError:
        raise UserError("pretrained needs the package transformers; pip install transformers") from None
    try:
        model_type = json.loads(config.read_text(encoding="utf-8")).get("model_type")
        if model_type != "gpt2":
            raise ValueError(f"it holds a model of type {model_type}")
        loaded = GPT2LMHeadModel.from_pretrained(folder, local_files_only=True, output_loading_info=True)
        model, info = cast("tuple[GPT2LMHeadModel, dict[str, Any]]", loaded)
        if info["missing_keys"]:  # transformers would initialize them randomly
            raise ValueError(f"it lacks {sorted(info['missing_keys'])[0]}")
    except (OSError, ValueError, RuntimeError, AttributeError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"pretrained must be a folder with a Hugging Face GPT-2, but {folder!r} is not: {reason}"
        ) from None
    return from_huggingface(model, NUM_SPECIAL)


def start_from_gpt2(network: CausalNetwork, folder: str) -> None:
    """Copy the weights of a Hugging Face GPT-2 into a network; raise UserError unless it is a GPT of its settings."""
    if not isinstance(network, GPT):
        raise UserError(f"pretrained must not be set for {type(network).__name__}, which has no pretrained weights")
    gpt2 = load_gpt2(folder)
    needed = gpt2.hyper_parameters | {"dropout": network.hyper_parameters["dropout"]}  # dropout has no weights
    for name, value in network.hyper_parameters.items():
        if value != needed[name] and name == "vocab_size":
            raise UserError(
                f"data.init_args.tokenizer_file must be the tokenizer.json of {folder!r}, which has {needed[name]} "
                f"ids, but the data have {value}"
            )
        if value != needed[name]:
            raise UserError(f"{name} must match {folder!r}, but is {value}; set it to {needed[name]}")
    dtype = network.embedding.weight.dtype
    if torch.promote_types(gpt2.embedding.weight.dtype, dtype) != dtype:
        rank_zero_print(f"the weights of {folder!r}, of {gpt2.embedding.weight.dtype}, are rounded to {dtype}")
    network.load_state_dict(gpt2.state_dict())
