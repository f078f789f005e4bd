"""Conversion of networks to CTranslate2 (https://opennmt.net/CTranslate2), an engine that decodes Transformers fast."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_tfm.errors import UserError
from lightning_tfm.layers import RotaryPositions, TransformerLayer
from lightning_tfm.networks import GPT, Transformer
from lightning_tfm.networks.gpt import LOWEST
from lightning_tfm.tokenization import BOS, EOS, PAD

# The engine requires an unknown token, but no text contains PAD.
SPECIAL = {"unk_token": str(PAD), "bos_token": str(BOS), "eos_token": str(EOS)}


def tokens(ids: Tensor) -> list[str]:
    """Return the tokens of CTranslate2 for ids (T), without padding: the ids in decimal digits, for any tokenizer."""
    return [str(number) for number in ids.tolist() if number != PAD]


def convert(network: nn.Module, folder: Path) -> None:
    """Write a network as a model of CTranslate2 in a new folder: a Transformer for `Translator`, a GPT for `Generator`.

    PAD and BOS have probability 0, as in decoding.

    Raises:
        UserError: if CTranslate2 cannot compute the network.
    """
    if not isinstance(network, Transformer | GPT):
        raise UserError(
            f"--format ctranslate2 needs a Transformer or GPT, but the network is {type(network).__name__}; try "
            "--format safetensors"
        )
    spec = _transformer(network) if isinstance(network, Transformer) else _gpt(network)
    spec.validate()
    spec.optimize()  # writes tied weights once
    folder.mkdir()
    spec.save(str(folder))


@torch.no_grad()
def difference(network: Transformer | GPT, folder: Path, source: Tensor, target: Tensor) -> float:
    """Return the maximum absolute difference of the log probabilities of targets (B, T), given sources (B, S).

    Both the network and its conversion in a folder are computed in float32 on a CPU.
    """
    import ctranslate2

    logits = network(source, F.pad(target[:, :-1], (1, 0), value=BOS))
    logits[..., [PAD, BOS]] = -math.inf
    expected = logits.log_softmax(-1).gather(2, target.unsqueeze(-1)).squeeze(-1)[target != PAD]
    sources, targets = ([tokens(row) for row in side] for side in (source, target))
    settings = {"device": "cpu", "compute_type": "float32"}
    if isinstance(network, Transformer):
        scored = ctranslate2.Translator(str(folder), **settings).score_batch(sources, targets)
        scores = [row.log_probs[:-1] for row in scored]  # without EOS
    else:
        texts = [[*before, str(BOS), *after] for before, after in zip(sources, targets, strict=True)]
        scored = ctranslate2.Generator(str(folder), **settings).score_batch(texts)
        scores = [row.log_probs[len(before) :] for before, row in zip(sources, scored, strict=True)]
    if list(map(len, scores)) != list(map(len, targets)):
        return math.inf
    return (torch.tensor(list(chain(*scores))) - expected).abs().max().item()


def _transformer(network: Transformer) -> Any:
    from ctranslate2.specs import TransformerSpec

    settings = network.hyper_parameters
    _check(
        network,
        positions=("sinusoidal", "learned"),
        cross_attention=("dot_product",),
        pointer_generator=(False,),
        activation=("relu",),
        norm_type=("layer",),
    )
    spec = TransformerSpec.from_config(
        settings["num_layers"], settings["num_heads"], pre_norm=settings["norm"] == "pre"
    )
    spec.encoder.embeddings[0].weight = _array(network.source_embedding.weight)
    spec.decoder.embeddings.weight = _array(network.target_embedding.weight)
    for side, scheme, norm, layers in (
        (spec.encoder, network.source_positions, network.encoder_norm, network.encoder),
        (spec.decoder, network.target_positions, network.decoder_norm, network.decoder),
    ):
        side.position_encodings.encodings = _array(scheme.table())
        if isinstance(norm, nn.LayerNorm):
            _copy(side.layer_norm, norm)
        _copy_layers(side.layer, layers)
    _copy_head(spec.decoder.projection, network.head.weight)
    vocabulary = [str(number) for number in range(settings["vocab_size"])]
    spec.register_source_vocabulary(vocabulary)
    spec.register_target_vocabulary(vocabulary)
    for name, token in (SPECIAL | {"decoder_start_token": str(BOS)}).items():
        setattr(spec.config, name, token)
    return spec


def _gpt(network: GPT) -> Any:
    from ctranslate2.specs import TransformerDecoderModelSpec
    from ctranslate2.specs.common_spec import Activation

    settings = network.hyper_parameters
    _check(
        network,
        positions=("sinusoidal", "learned", "rotary", "randomized"),
        activation=("gelu", "gelu_tanh"),
        rotary_base=(10000,),
        d_head=(None, settings["d_model"] // settings["num_heads"]),
        num_kv_heads=(None, settings["num_heads"]),
        qk_norm=(False,),
        norm_type=("layer",),
        norm_eps=(1e-5,),
        window=(None,),
        logit_cap=(None,),
    )
    rotates = isinstance(network.positions, RotaryPositions)
    spec = TransformerDecoderModelSpec.from_config(
        settings["num_layers"],
        settings["num_heads"],
        activation={"gelu": Activation.GELU, "gelu_tanh": Activation.GELUTanh}[settings["activation"]],
        rotary_dim=0 if rotates else None,  # 0 for all dimensions of a head
    )
    decoder = spec.decoder
    decoder.scale_embeddings = False
    decoder.embeddings.weight = _array(network.embedding.weight)
    if not rotates:
        decoder.position_encodings.encodings = _array(network.positions.table())
    _copy(decoder.layer_norm, network.norm)
    _copy_layers(decoder.layer, network.layers)
    _copy_head(decoder.projection, network.head.weight, network.special_bias)
    spec.register_vocabulary([str(number) for number in range(settings["vocab_size"])])
    for name, token in SPECIAL.items():
        setattr(spec.config, name, token)
    return spec


def _check(network: Transformer | GPT, **supported: tuple[Any, ...]) -> None:
    """Raise UserError if a hyper-parameter has none of the values that CTranslate2 supports."""
    for name, values in supported.items():
        if (value := network.hyper_parameters[name]) not in values:
            *allowed, actual = ("null" if each is None else str(each).lower() for each in (*values, value))
            raise UserError(
                f"{name} must be {', '.join(allowed)} for --format ctranslate2, but is {actual}; "
                "try --format safetensors"
            )


def _array(tensor: Tensor | None) -> Any:
    assert tensor is not None
    return tensor.detach().float().numpy()


def _copy(spec: Any, module: nn.Module) -> None:
    """Copy the weights of a linear layer or a layer norm."""
    assert isinstance(module, nn.Linear | nn.LayerNorm)
    if isinstance(module, nn.LayerNorm):
        spec.gamma = _array(module.weight)
        spec.beta = _array(torch.zeros_like(module.weight) if module.bias is None else module.bias)
    else:
        spec.weight = _array(module.weight)
        if module.bias is not None:
            spec.bias = _array(module.bias)


def _copy_layers(specs: Any, layers: nn.ModuleList) -> None:
    for spec, layer in zip(specs, cast(Iterable[TransformerLayer], layers), strict=True):
        attentions: list[tuple[Any, nn.Module, tuple[str, ...]]] = [
            (spec.self_attention, layer.self_attention, ("qkv_proj", "out_proj"))
        ]
        _copy(spec.self_attention.layer_norm, layer.add_self.norm)
        if hasattr(spec, "attention"):
            attentions.append((spec.attention, layer.cross_attention, ("q_proj", "kv_proj", "out_proj")))
            _copy(spec.attention.layer_norm, layer.add_cross.norm)
        for attention, module, names in attentions:
            for linear, name in zip(attention.linear, names, strict=True):
                _copy(linear, getattr(module, name))
        _copy(spec.ffn.layer_norm, layer.add_feed_forward.norm)
        _copy(spec.ffn.linear_0, layer.feed_forward[0])
        _copy(spec.ffn.linear_1, layer.feed_forward[2])


def _copy_head(spec: Any, weight: Tensor, bias: Tensor | None = None) -> None:
    bias = torch.zeros(len(weight)) if bias is None else bias.float()
    spec.weight, spec.bias = _array(weight), _array(bias.index_fill(0, torch.tensor([PAD, BOS]), LOWEST))
