"""GPT: its formula, pairs and texts without a source."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lightning_tfm.inference.decoding import continue_text
from lightning_tfm.networks import GPT
from lightning_tfm.tokenization import PAD
from support.networks import LLAMA, QWEN3, SMOLLM2, randomize


def test_gpt_reads_a_pair_as_one_sequence(batch):
    """The unpadded text `source EOS BOS target` has the same logits as the pair."""
    source, target_in = batch
    gpt = GPT(11, 16, 4, 2, max_length=20).eval()
    nn.init.normal_(gpt.positions.weight)
    pairs = gpt(source, target_in)
    for row in range(len(source)):
        S, T = int((source[row] != PAD).sum()), int((target_in[row] != PAD).sum())
        text = torch.cat((source[row, :S], target_in[row, :T]))[None]
        as_text = gpt(text[:, :0], text)
        torch.testing.assert_close(pairs[row, :T], as_text[0, S:], atol=1e-5, rtol=1e-4)


SETTINGS = {
    "GPT-2": {},
    "no biases": {"bias": False},
    "ReLU": {"activation": "relu"},
    "squared ReLU": {"activation": "relu_squared"},
    "SwiGLU": {"activation": "swiglu"},
    "width of the hidden layer": {"d_ff": 24},
    "width of a head": {"d_head": 6},
    "grouped queries": {"num_kv_heads": 2},
    "one head of keys": {"num_kv_heads": 1},
    "RMSNorm": {"norm_type": "rms", "norm_eps": 0.1},
    "layer norm": {"norm_eps": 0.1},
    "QK-norm": {"qk_norm": True, "norm_eps": 0.1},
    "rotary": {"positions": "rotary", "rotary_base": 100},
    "window": {"window": 3},
    "untied": {"tie_embeddings": False},
    "capped": {"logit_cap": 2.0},
    "Llama": LLAMA,
    "SmolLM 2": SMOLLM2,
    "Qwen 3": QWEN3 | {"window": 5, "logit_cap": 3},
}


def formula(network, tokens):
    """Return the logits (T, V) of a text (T), written out from the papers: one head and one position at a time."""
    settings, weights = network.hyper_parameters, network.state_dict()
    D, H, T = settings["d_model"], settings["num_heads"], len(tokens)
    d, kv = settings["d_head"] or D // H, settings["num_kv_heads"] or H

    def norm(x, name, kind=settings["norm_type"]):
        if kind == "rms":
            y = x / (x.square().mean() + settings["norm_eps"]).sqrt()
        else:
            y = (x - x.mean()) / ((x - x.mean()).square().mean() + settings["norm_eps"]).sqrt()
        return y * weights[f"{name}.weight"] + weights.get(f"{name}.bias", 0)

    def linear(x, name):
        return weights[f"{name}.weight"] @ x + weights.get(f"{name}.bias", 0)

    def rotated(x, position):
        if settings["positions"] != "rotary":
            return x
        pairs = []
        for i in range(d // 2):
            angle = position / settings["rotary_base"] ** (2 * i / d)
            a, b = x[2 * i], x[2 * i + 1]
            pairs += [a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)]
        return torch.stack(pairs)

    def activated(x):
        match settings["activation"]:
            case "relu":
                return x.clamp(min=0)
            case "relu_squared":
                return x.clamp(min=0) ** 2
            case "swiglu":
                gate, linear = x[: len(x) // 2], x[len(x) // 2 :]
                return gate / (1 + (-gate).exp()) * linear
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2

    stream = [weights["embedding.weight"][token] for token in tokens]
    if settings["positions"] == "learned":
        stream = [x + weights["positions.weight"][position] for position, x in enumerate(stream)]
    for number in range(settings["num_layers"]):
        attention = f"layers.{number}.self_attention"
        queries, keys, values = [], [], []
        for position, x in enumerate(stream):
            heads = linear(norm(x, f"layers.{number}.add_self.norm"), f"{attention}.qkv_proj").split(d)
            q, k = heads[:H], heads[H : H + kv]
            if settings["qk_norm"]:
                q, k = ([norm(x, f"{attention}.{n}_norm", "rms") for x in part] for n, part in (("q", q), ("k", k)))
            queries.append([rotated(x, position) for x in q])
            keys.append([rotated(x, position) for x in k])
            values.append(heads[H + kv :])
        for t in range(T):
            visible = range(max(0, t + 1 - (settings["window"] or T)), t + 1)
            contexts = []
            for h in range(H):
                group = h // (H // kv)
                scores = torch.stack([queries[t][h] @ keys[s][group] / math.sqrt(d) for s in visible])
                contexts.append(sum(p * values[s][group] for p, s in zip(scores.softmax(0), visible, strict=True)))
            stream[t] = stream[t] + linear(torch.cat(contexts), f"{attention}.out_proj")
            hidden = linear(
                norm(stream[t], f"layers.{number}.add_feed_forward.norm"), f"layers.{number}.feed_forward.0"
            )
            stream[t] = stream[t] + linear(activated(hidden), f"layers.{number}.feed_forward.2")
    logits = torch.stack([linear(norm(x, "norm"), "head") for x in stream])
    cap = settings["logit_cap"]
    return logits if cap is None else cap * torch.tanh(logits / cap)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@torch.no_grad()
def test_gpt_equals_its_formula(settings):
    network = randomize(GPT(11, 16, 4, 2, max_length=9, **settings)).double().eval()
    tokens = torch.randint(0, 11, (2, 9))
    actual = network(tokens[:, :0], tokens)
    expected = torch.stack([formula(network, row) for row in tokens])
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)  # of rotations in float32
    assert (network.head.weight is network.embedding.weight) is network.hyper_parameters["tie_embeddings"]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_initial_weights_have_the_scale_of_gpt2(settings):
    """Also those of the residual sum of 2 x num_layers sub-layers; biases are 0, and norms do not scale."""
    network = GPT(300, **{"d_model": 128, "num_heads": 4, "num_layers": 3, "max_length": 100} | settings)
    for name, weight in network.named_parameters():
        if weight.dim() == 1:
            assert weight.eq(0 if name.endswith("bias") else 1).all()
        else:
            is_last = name.endswith(("out_proj.weight", "feed_forward.2.weight"))
            assert weight.std().item() == pytest.approx(0.02 / math.sqrt(6 if is_last else 1), rel=0.05), name


def test_swiglu_has_as_many_weights_as_gelu_by_default():
    sizes = {}
    for activation in ("gelu", "swiglu"):
        network = GPT(11, 96, 4, 1, max_length=9, bias=False, activation=activation)
        sizes[activation] = sum(weight.numel() for weight in network.layers[0].feed_forward.parameters())
    assert sizes == {"gelu": 8 * 96**2, "swiglu": 8 * 96**2}


@pytest.mark.parametrize("network", ["GPT", "GPT no_bias", "GPT rotary", "GPT qwen3"], indirect=True)
def test_continuing_a_text_reads_the_context_that_fits(network):
    """Greedy decoding equals recomputation; at the last position, the second half of the context is read again."""
    network = type(network)(**network.hyper_parameters | {"max_length": 8}).eval()
    tokens = torch.tensor([[3, 4, 5]])
    more = continue_text(network.encode, network.decode_step, tokens, 20, 8)
    text = tokens
    while text.size(1) < 23:
        # the first nine tokens are read in full, then the last four and the next five, and so on
        begin = 5 * ((text.size(1) - 9) // 5 + 1) if text.size(1) > 8 else 0
        seen = text[:, begin:]
        with torch.no_grad():
            logits = network(seen[:, :0], seen)[:, -1].clone()
        logits[:, :3] = -math.inf
        text = torch.cat((text, logits.argmax(-1, keepdim=True)), dim=1)
    assert more.equal(text[:, 3:])
