"""Small networks of all kinds."""

import inspect
from functools import partial

import torch
import yaml

from lightning_tfm import networks
from lightning_tfm.networks import GPT, AttentionLSTM, Ensemble, LinearTransformer, Seq2SeqNetwork, Transformer
from support.processes import EXPERIMENTS

VOCAB_SIZE = 11


def architecture(overlay):
    """Return the settings of GPT in an overlay."""
    config = yaml.safe_load((EXPERIMENTS / f"{overlay}.yaml").read_text())
    return config["model"]["init_args"]["network"]["init_args"]


LLAMA, SMOLLM2 = architecture("llama"), architecture("smollm2")
QWEN3 = architecture("qwen3") | {"d_head": 6}  # unlike d_model / num_heads
SIZES = {"d_model": 16, "num_heads": 4, "num_layers": 2, "d_ff": 32, "dropout": 0.1, "max_length": 20}


def tiny(cls, **settings):
    """Return a constructor of a small network."""
    sizes = {name: size for name, size in SIZES.items() if name in inspect.signature(cls).parameters}
    return partial(cls, VOCAB_SIZE, **sizes | settings)


CLASSES = [getattr(networks, name) for name in networks.__all__]
NETWORKS = {
    cls.__name__: tiny(cls) for cls in CLASSES if issubclass(cls, Seq2SeqNetwork) and not inspect.isabstract(cls)
}
NETWORKS |= {
    f"{cls.__name__} {scheme}": tiny(cls, positions=scheme)
    for cls, schemes in (
        (Transformer, ("rotary", "alibi", "none", "randomized", "coupled")),
        (GPT, ("rotary", "sinusoidal", "alibi", "none", "randomized", "coupled")),
        (LinearTransformer, ("none",)),
    )
    for scheme in schemes
}
NETWORKS |= {
    f"AttentionLSTM {cell} {attention}": tiny(AttentionLSTM, cell=cell, attention=attention)
    for cell, attentions in (
        ("lstm", ("location_aware", "monotonic", "hard_monotonic")),
        ("gru", ("additive", "monotonic", "hard_monotonic")),
    )
    for attention in attentions
}
NETWORKS |= {
    f"AttentionLSTM {attention} features_encoder": tiny(
        AttentionLSTM, attention=attention, d_embedding=12, features_encoder="linear", feature_ids=[8, 10]
    )
    for attention in ("additive", "monotonic", "hard_monotonic")
}
NETWORKS |= {
    f"AttentionLSTM {attention} outputs": tiny(
        AttentionLSTM, attention=attention, outputs="targets", target_ids=[*range(3, VOCAB_SIZE)]
    )
    for attention in ("additive", "hard_monotonic")
}
NETWORKS |= {
    "Transformer post learned tied": tiny(Transformer, norm="post", positions="learned", tie_embeddings=True),
    "Transformer pointer_generator": tiny(Transformer, pointer_generator=True),
    "Transformer monotonic": tiny(Transformer, cross_attention="monotonic"),
    "Transformer post rms swiglu": tiny(Transformer, norm="post", norm_type="rms", activation="swiglu"),
    "AttentionLSTM pointer_generator": tiny(AttentionLSTM, pointer_generator=True),
    "GPT no_bias": tiny(GPT, bias=False),
    "GPT llama": tiny(GPT, **LLAMA),
    "GPT qwen3": tiny(GPT, **QWEN3),
    "GPT window logit_cap relu_squared": tiny(GPT, window=4, logit_cap=8.0, activation="relu_squared"),
}


def randomize(network, std=0.3):
    """Draw all parameters, biases included, and return the network."""
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return network


def minimize(loss, network):
    """Take 150 steps of Adam, and return the last value of the function `loss`."""
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
    return value


def step_by_step(network, source, target_in):
    """Return the logits (B, T, V) of `decode_step` for each token."""
    state, steps = network.encode(source), []
    for token in target_in.unbind(1):
        logits, state = network.decode_step(token, state)
        steps.append(logits)
    return torch.stack(steps, dim=1)


def joined(*networks):
    """Return the ensemble of some networks, which it copies."""
    members = [
        {
            "class_path": f"{type(network).__module__}.{type(network).__qualname__}",
            "init_args": network.hyper_parameters,
        }
        for network in networks
    ]
    ensemble = Ensemble(networks[0].hyper_parameters["vocab_size"], members)
    for member, network in zip(ensemble.members, networks, strict=True):
        member.load_state_dict(network.state_dict())
    return ensemble.eval()
