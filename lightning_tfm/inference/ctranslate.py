"""Conversion of networks to CTranslate2 (https://opennmt.net/CTranslate2), an engine that decodes Transformers fast."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_tfm.errors import UserError
from lightning_tfm.layers import LearnedPositions, Positions, RotaryPositions, SinusoidalPositions, TransformerLayer
from lightning_tfm.networks import GPT, Transformer
from lightning_tfm.networks.gpt import LOWEST
from lightning_tfm.tokenization import BOS, EOS, PAD

if TYPE_CHECKING:
    from ctranslate2.specs import ModelSpec

# The engine requires an unknown token, but no text contains PAD.
SPECIAL = {"unk_token": str(PAD), "bos_token": str(BOS), "eos_token": str(EOS)}


def tokens(ids: Tensor) -> list[str]:
    """Return the tokens of CTranslate2 for ids (T), without padding: the ids in decimal digits, for any tokenizer."""
    return [str(number) for number in ids.tolist() if number != PAD]


def convert(network: nn.Module, folder: Path) -> None:
    """Write a network as a model of CTranslate2: a Transformer for `Translator`, a GPT for `Generator`.

    PAD and BOS have probability 0, as in decoding.

    Args:
        network: the network.
        folder: the folder to write.

    Raises:
        UserError: if CTranslate2 cannot compute the network.
    """
    if isinstance(network, Transformer):
        spec = _transformer(network)
    elif isinstance(network, GPT):
        spec = _gpt(network)
    else:
        raise UserError(
            "--format ctranslate2 needs a Transformer or GPT, but the network is "
            f"{type(network).__name__}; try --format safetensors"
        )
    spec.validate()
    spec.optimize()  # writes tied weights once
    folder.mkdir()
    spec.save(str(folder))


@torch.no_grad()
def difference(network: Transformer | GPT, folder: Path, source: Tensor, target: Tensor) -> float:
    """Return the maximum absolute difference of the log probabilities of targets, on a CPU in float32.

    Args:
        network: the network.
        folder: the folder that `convert` has written.
        source: the sources (B, S).
        target: the targets (B, T).
    """
    import ctranslate2

    logits = network(source, F.pad(target[:, :-1], (1, 0), value=BOS))
    logits[..., [PAD, BOS]] = -math.inf
    expected = logits.log_softmax(-1).gather(2, target.unsqueeze(-1)).squeeze(-1)[target != PAD]
    sources, targets = ([tokens(row) for row in side] for side in (source, target))
    if isinstance(network, Transformer):
        translator = ctranslate2.Translator(str(folder), device="cpu", compute_type="float32")
        scores = [scored.log_probs[:-1] for scored in translator.score_batch(sources, targets)]  # without EOS
    else:
        generator = ctranslate2.Generator(str(folder), device="cpu", compute_type="float32")
        texts = [[*before, str(BOS), *after] for before, after in zip(sources, targets, strict=True)]
        found = generator.score_batch(texts)
        scores = [scored.log_probs[len(before) :] for before, scored in zip(sources, found, strict=True)]
    if list(map(len, scores)) != list(map(len, targets)):
        return math.inf
    return (torch.tensor(list(chain(*scores))) - expected).abs().max().item()


def _vocabulary(network: Transformer | GPT) -> list[str]:
    """Return the token of each id."""
    return [str(number) for number in range(network.hyper_parameters["vocab_size"])]


def _transformer(network: Transformer) -> ModelSpec:
    from ctranslate2.specs import TransformerSpec

    settings = network.hyper_parameters
    _check(network, "positions", ("sinusoidal", "learned"))
    _check(network, "cross_attention", ("dot_product",))
    _check(network, "pointer_generator", (False,))
    spec = TransformerSpec.from_config(
        settings["num_layers"], settings["num_heads"], pre_norm=settings["norm"] == "pre"
    )
    encoder, decoder = spec.encoder, spec.decoder
    encoder.embeddings[0].weight = _array(network.source_embedding.weight)
    decoder.embeddings.weight = _array(network.target_embedding.weight)
    for side, scheme, norm in (
        (encoder, network.source_positions, network.encoder_norm),
        (decoder, network.target_positions, network.decoder_norm),
    ):
        side.position_encodings.encodings = _encodings(scheme)
        if isinstance(norm, nn.LayerNorm):
            _norm(side.layer_norm, norm)
    for theirs, ours in zip((*encoder.layer, *decoder.layer), (*network.encoder, *network.decoder), strict=True):
        _layer(theirs, cast(TransformerLayer, ours))
    _head(decoder.projection, network.head.weight)
    spec.register_source_vocabulary(_vocabulary(network))
    spec.register_target_vocabulary(_vocabulary(network))
    for name, token in (SPECIAL | {"decoder_start_token": str(BOS)}).items():
        setattr(spec.config, name, token)
    return cast("ModelSpec", spec)


def _gpt(network: GPT) -> ModelSpec:
    from ctranslate2.specs import TransformerDecoderModelSpec
    from ctranslate2.specs.common_spec import Activation

    settings = network.hyper_parameters
    _check(network, "positions", ("sinusoidal", "learned", "rotary", "randomized"))
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
        decoder.position_encodings.encodings = _encodings(network.positions)
    _norm(decoder.layer_norm, network.norm)
    for theirs, ours in zip(decoder.layer, cast(Iterable[TransformerLayer], network.layers), strict=True):
        _layer(theirs, ours)
    _head(decoder.projection, network.head.weight, network.special_bias)
    spec.register_vocabulary(_vocabulary(network))
    for name, token in SPECIAL.items():
        setattr(spec.config, name, token)
    return cast("ModelSpec", spec)


def _check(network: Transformer | GPT, name: str, supported: tuple[Any, ...]) -> None:
    """Check a hyper-parameter of a network.

    Raises:
        UserError: if CTranslate2 does not support its value.
    """
    value = network.hyper_parameters[name]
    if value not in supported:
        raise UserError(
            f"{name} must be {', '.join(map(str, supported)).lower()} for --format ctranslate2, but is "
            f"{str(value).lower()}; try --format safetensors"
        )


def _array(tensor: Tensor) -> Any:
    return tensor.detach().float().numpy()


def _encodings(scheme: Positions) -> Any:
    """Return the encodings (positions, D) that a scheme adds to the embeddings."""
    assert isinstance(scheme, SinusoidalPositions | LearnedPositions)
    return _array(cast(Tensor, scheme.table()))


def _linear(spec: Any, linear: nn.Linear) -> None:
    spec.weight = _array(linear.weight)
    if linear.bias is not None:
        spec.bias = _array(linear.bias)


def _norm(spec: Any, norm: nn.LayerNorm) -> None:
    spec.gamma = _array(norm.weight)
    spec.beta = _array(torch.zeros_like(norm.weight) if norm.bias is None else norm.bias)


def _layer(spec: Any, layer: TransformerLayer) -> None:
    sub_layers: list[tuple[Any, Any, nn.Module, tuple[str, ...]]] = [
        (spec.self_attention, layer.add_self, layer.self_attention, ("qkv_proj", "out_proj"))
    ]
    if hasattr(spec, "attention"):
        sub_layers.append((spec.attention, layer.add_cross, layer.cross_attention, ("q_proj", "kv_proj", "out_proj")))
    for attention, add, ours, names in sub_layers:
        _norm(attention.layer_norm, add.norm)
        for theirs, name in zip(attention.linear, names, strict=True):
            _linear(theirs, getattr(ours, name))
    _norm(spec.ffn.layer_norm, layer.add_feed_forward.norm)
    _linear(spec.ffn.linear_0, cast(nn.Linear, layer.feed_forward[0]))
    _linear(spec.ffn.linear_1, cast(nn.Linear, layer.feed_forward[2]))


def _head(spec: Any, weight: Tensor, bias: Tensor | None = None) -> None:
    bias = torch.zeros(len(weight)) if bias is None else bias.float()
    spec.weight, spec.bias = _array(weight), _array(bias.index_fill(0, torch.tensor([PAD, BOS]), LOWEST))
