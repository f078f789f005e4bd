"""Scores of attention heads, computed from their weights.

Shapes: batch B, heads H, queries T, keys S.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_tfm.data import Batch
from lightning_tfm.insight.interventions import Part
from lightning_tfm.insight.sample import Sample, tokens_of
from lightning_tfm.layers import attention_layers, attention_maps
from lightning_tfm.networks import Network, Seq2SeqNetwork
from lightning_tfm.tasks.alignment import AlignmentScores
from lightning_tfm.tokenization import EOS, PAD

HeadScores = dict[Part, dict[str, float]]
"""Scores by name, for each head; a score that the sample does not define is missing."""

READS = "reads_"
"""Prefix of the scores of the parts of a target."""


def previous_token(tokens: Tensor) -> Tensor:
    """Return the keys (B, T, T) that precede each query."""
    T = tokens.size(1)
    return torch.eye(T, dtype=torch.bool, device=tokens.device).roll(-1, 1).tril(-1).expand(len(tokens), T, T)


def first_token(tokens: Tensor) -> Tensor:
    """Return the first key of each later query (B, T, T)."""
    keys = torch.zeros(*tokens.shape, tokens.size(1), dtype=torch.bool, device=tokens.device)
    keys[:, 1:, 0] = True
    return keys


def duplicate_token(tokens: Tensor) -> Tensor:
    """Return the earlier keys (B, T, T) with the token of the query."""
    return (tokens.unsqueeze(2) == tokens.unsqueeze(1)).tril(-1)


def induction(tokens: Tensor) -> Tensor:
    """Return the earlier keys (B, T, T) that follow an earlier occurrence of the token of the query."""
    return torch.nn.functional.pad(duplicate_token(tokens)[:, :, :-1], (1, 0)).tril(-1)


PATTERNS: dict[str, Callable[[Tensor], Tensor]] = {
    "previous_token": previous_token,
    "duplicate_token": duplicate_token,
    "induction": induction,
    "first_token": first_token,
}
"""Keys (B, T, T) to which a head of self-attention attends for each query, given the tokens (B, T), by score.

The score is the sum of the weights of these keys, averaged over the queries that have such keys. Olsson et al. (2022)
average over repeated random sequences instead, where all queries of the second half have such keys.
"""


@torch.no_grad()
def head_scores(network: Network, sample: Sample) -> HeadScores:
    """Return the scores of each attention head of a network, in evaluation mode.

    Heads of self-attention have the scores of `PATTERNS`. Heads that read the source, also in one sequence with the
    target, have:

    - `entropy`: the entropy of the weights over the source, in nats, see `AlignmentScores`,
    - `monotonicity`: the share of steps whose largest weight is at the source token of the step before, or later,

    and with a gold alignment:

    - `alignment` and `aer`: its accuracy and error rate, see `AlignmentScores`,
    - `alignment_later` and `aer_later`: these of the weights one step later (Chen et al. 2020), and
    - `reads_PART`: for each part of a target, the sum of the weights of the source symbols that are linked to the part,
      averaged over the steps that write the part.
    """
    layers = attention_layers(network)
    means, now, later = _Means(), AlignmentScores(), AlignmentScores()
    for rows in sample.batches():
        batch = sample.rows(rows)
        with attention_maps(network) as maps:
            network(*batch.inputs)
        for name, weights in maps.items():
            if not layers[name].over_memory:
                tokens = tokens_of(network, name, batch.inputs)
                is_token = (tokens != PAD).unsqueeze(2) & (tokens != PAD).unsqueeze(1)
                for score, pattern in PATTERNS.items():
                    means.add_weights(name, score, weights, pattern(tokens) & is_token)
        if maps and isinstance(network, Seq2SeqNetwork) and batch.inputs[0].size(1) > 0:
            maps = network.source_attention(maps, batch.inputs[0])
            _add_source_scores(means, maps, batch)
            _add_alignment(now, maps, batch)
            _add_alignment(later, {name: weights.roll(-1, 2) for name, weights in maps.items()}, batch)
    scores = means.compute()
    for suffix, metric in {"": now, "_later": later}.items():
        values = metric.by_name() if metric.heads else {}
        names = {"accuracy": f"alignment{suffix}", "aer": f"aer{suffix}"} if sample.gold is not None else {}
        for score, name in {**names, **({} if suffix else {"entropy": "entropy"})}.items():
            for head, value in zip(metric.heads, values.get(score, ()), strict=True):
                scores[Part(*head)][name] = value.item()
    return dict(scores)


class _Means:
    """Means of the scores (H) of layers, by layer and name, over all batches."""

    def __init__(self) -> None:
        self.sums: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}

    def add(self, layer: str, name: str, values: Tensor, number: Tensor) -> None:
        """Add sums of values (H), and their number."""
        total, count = self.sums.get((layer, name), (0, 0))
        self.sums[layer, name] = total + values, count + number

    def add_weights(self, layer: str, name: str, weights: Tensor, keys: Tensor) -> None:
        """Add the weights (B, H, T, S) of keys (B, T, S), summed for each query that has any."""
        self.add(layer, name, (weights * keys.unsqueeze(1)).sum((0, 2, 3)), keys.any(2).sum())

    def compute(self) -> HeadScores:
        """Return the means that are defined."""
        scores: HeadScores = defaultdict(dict)
        for (layer, name), (values, number) in self.sums.items():
            for head, value in enumerate((values / number).tolist() if number else ()):
                scores[Part(layer, head)][name] = value
        return scores


def _add_source_scores(means: _Means, maps: dict[str, Tensor], sample: Sample) -> None:
    """Add the scores of monotonicity and of parts, given the weights (B, H, T, S) over the source."""
    is_target = _is_symbol(sample.targets)
    both = is_target[:, 1:] & is_target[:, :-1]
    for name, weights in maps.items():
        attended = weights.argmax(-1)  # (B, H, T)
        follows = (attended[..., 1:] >= attended[..., :-1]) & both.unsqueeze(1)
        means.add(name, "monotonicity", follows.sum((0, 2)), both.sum())
        if sample.gold is None:
            continue
        for part, mask in sample.parts.items():
            linked = (sample.gold & mask.unsqueeze(2)).any(1, keepdim=True)  # (B, 1, S)
            means.add_weights(name, f"{READS}{part}", weights, linked & mask.unsqueeze(2))


def _add_alignment(metric: AlignmentScores, maps: dict[str, Tensor], sample: Sample) -> None:
    """Update the metric with weights (B, H, T, S) over the source; without gold links, of which only the entropy."""
    source, target_in = sample.inputs
    gold = sample.gold
    if gold is None:
        gold = torch.zeros(*sample.targets.shape, source.size(1), dtype=torch.bool, device=source.device)
    metric.to(source.device).update(maps, gold, Batch(source, target_in, sample.targets, torch.arange(len(source))))


def _is_symbol(targets: Tensor) -> Tensor:
    return (targets != PAD) & (targets != EOS)
