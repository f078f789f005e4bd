"""Comparison of `lightning_tfm.insight` with TransformerLens (Nanda & Bloom 2022) on a GPT-2 with random weights.

TransformerLens is not a dependency of the benchmarks, since it requires many packages. In an environment with them:

    pip install 'transformer-lens>=3,<4'
    python -m benchmarks.transformer_lens

prints the largest difference of each measurement, in float32. The exit status is 1 if one is above LIMIT.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_tfm.insight import Part, Sample, head_scores, interventions
from lightning_tfm.insight.attribution import direct_logit_attribution, patching
from lightning_tfm.insight.scores import PATTERNS
from lightning_tfm.layers import attention_maps
from lightning_tfm.networks.huggingface import from_huggingface

LIMIT = 1e-4
"""Largest difference."""

LAYERS, HEADS, WIDTH, LENGTH, VOCAB_SIZE = 3, 4, 64, 12, 50


def models() -> tuple[GPT2LMHeadModel, Any]:
    """Return a GPT-2 with random weights, also of biases and norms, in both libraries."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig  # type: ignore[import-not-found]
    from transformer_lens.pretrained.weight_conversions import (  # type: ignore[import-not-found]
        convert_gpt2_weights,
    )

    settings = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "n_positions": 32, "vocab_size": VOCAB_SIZE}
    gpt2 = GPT2LMHeadModel(GPT2Config(**settings)).eval()
    with torch.no_grad():
        for parameter in gpt2.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    config = HookedTransformerConfig(
        n_layers=LAYERS,
        n_heads=HEADS,
        d_model=WIDTH,
        d_head=WIDTH // HEADS,
        d_mlp=4 * WIDTH,
        n_ctx=32,
        d_vocab=VOCAB_SIZE,
        act_fn="gelu_new",
        normalization_type="LN",
        default_prepend_bos=False,
    )
    hooked = HookedTransformer(config)
    # Direct attributions of TransformerLens assume that the weights of norms are folded into those that follow.
    unchanged = dict.fromkeys(
        ("center_writing_weights", "center_unembed", "fold_value_biases", "refactor_factored_attn_matrices"), False
    )
    hooked.load_and_process_state_dict(convert_gpt2_weights(gpt2, config), fold_ln=True, **unchanged)
    return gpt2, hooked.eval()


@torch.no_grad()
def differences() -> Iterator[tuple[str, float]]:
    """Yield each measurement with the largest difference."""
    from transformer_lens import head_detector

    torch.manual_seed(0)
    gpt2, hooked = models()
    network = from_huggingface(gpt2).eval()
    half = torch.randint(1, VOCAB_SIZE, (1, LENGTH // 2))
    text = torch.cat((half, half), dim=1)  # repeated, for induction
    targets = text.roll(-1, 1)
    sample = Sample((text[:, :0], text), targets, torch.ones_like(targets, dtype=torch.bool))
    logits, cache = hooked.run_with_cache(text)
    yield "logits", _largest(network(*sample.inputs) - logits)

    with attention_maps(network) as maps:
        network(*sample.inputs)
    yield "attention weights", max(_largest(maps[_layer(n)] - cache["pattern", n]) for n in range(LAYERS))

    scores = head_scores(network, sample)
    for name in ("previous_token", "duplicate_token", "induction"):
        pattern = getattr(head_detector, f"get_{name}_head_detection_pattern")(text)
        share = PATTERNS[name](text)[0].any(1).float().mean().item()  # TransformerLens averages over all queries
        errors = []
        for n in range(LAYERS):
            for head in range(HEADS):
                score = head_detector.compute_head_attention_similarity_score(
                    cache["pattern", n][0, head],
                    pattern,
                    exclude_bos=False,
                    exclude_current_token=False,
                    error_measure="mul",
                )
                errors.append(abs(score - share * scores[Part(_layer(n), head)][name]))
        yield f"score {name}", max(errors)

    residual, labels = cache.get_full_resid_decomposition(expand_neurons=False, apply_ln=True, return_labels=True)
    expected = dict(zip(labels, (residual * hooked.W_U.T[targets]).sum(-1), strict=True))
    actual = direct_logit_attribution(network, sample)
    errors = [_largest(actual[Part(f"layers.{n}.feed_forward")] - expected[f"{n}_mlp_out"]) for n in range(LAYERS)]
    errors += [
        _largest(actual[Part(_layer(n), head)] - expected[f"L{n}H{head}"])
        for n in range(LAYERS)
        for head in range(HEADS)
    ]
    yield "direct logit attribution", max(errors)

    other = text.clone()
    other[0, 3] = text[0, 3] % (VOCAB_SIZE - 1) + 1
    is_last = torch.arange(LENGTH).expand_as(text) == LENGTH - 1
    effects = patching(network, sample.inputs, Sample((text[:, :0], other), targets, is_last))
    _, states = hooked.run_with_cache(other)

    def log_p(logits: Tensor) -> Tensor:
        return logits.log_softmax(-1)[0, -1, targets[0, -1]]

    start, goal = log_p(hooked(text)), log_p(hooked(other))
    errors = []
    for n in range(LAYERS):
        name = f"blocks.{n}.hook_resid_post"
        for position in range(LENGTH):

            def patch(x: Tensor, hook: object, name: str = name, position: int = position) -> Tensor:
                return x.index_copy(1, torch.tensor([position]), states[name][:, position : position + 1])

            patched = log_p(hooked.run_with_hooks(text, fwd_hooks=[(name, patch)]))
            errors.append(abs(((patched - start) / (goal - start) - effects[f"layers.{n}"][position]).item()))
    yield "activation patching", max(errors)

    def ablate(z: Tensor, hook: object) -> Tensor:
        return z.index_fill(2, torch.tensor([2]), 0)

    with interventions(network) as touch:
        touch.scale(_layer(1), by=0.0, head=2)
        ablated = network(*sample.inputs)
    yield "ablation", _largest(ablated - hooked.run_with_hooks(text, fwd_hooks=[("blocks.1.attn.hook_z", ablate)]))


def _layer(number: int) -> str:
    return f"layers.{number}.self_attention"


def _largest(difference: Tensor) -> float:
    return difference.abs().max().item()


if __name__ == "__main__":
    largest = dict(differences())
    for measurement, value in largest.items():
        print(f"{measurement:26} {value:.1e}")
    sys.exit(max(largest.values()) > LIMIT)
