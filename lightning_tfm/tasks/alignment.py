"""Evaluation of attention weights against a gold alignment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lightning_tfm.data import Batch, Pair
from lightning_tfm.tasks.metrics import exact_sum
from lightning_tfm.tokenization import EOS, PAD

HIGHER_IS_BETTER = {"accuracy": True, "aer": False}
"""Whether higher values of a score are better; of the entropy, it is not known."""


def gold_links(pairs: Sequence[Pair], batch: Batch) -> Tensor:
    """Return a mask (B, T, S) that is True where the alignment of a pair links a target symbol to a source symbol.

    Args:
        pairs: the pairs of the batch, in the order of its rows.
        batch: the batch.
    """
    gold = torch.zeros(*batch.target_out.shape, batch.source.size(1), dtype=torch.bool)
    links = [(row, j, i) for row, pair in enumerate(pairs) for i, j in pair.alignment or ()]
    if links:
        gold[tuple(torch.tensor(links).T)] = True
    return gold.to(batch.source.device)


class AlignmentScore(Metric):
    """Agreement of each attention head of a layer with a gold alignment.

    A head links each target symbol to the source symbol with the largest weight. If the largest weight is at EOS, the
    target symbol has no link.

    - `accuracy`: the fraction of target symbols with gold links that are linked to one of their gold symbols.
    - `aer`: the alignment error rate 1 - (|A n S| + |A n P|) / (|A| + |S|) (Och & Ney 2003), for links A, gold
      links P and sure gold links S. A gold link is sure if it is the only one of its target symbol. Otherwise, any of
      the gold links is correct, such as to any letter of May for 05. Target symbols without gold links, such as the
      hyphens of a date, should have no link.
    - `entropy`: the entropy of the weights over the source, in nats, averaged over target symbols; 0 if each target
      symbol attends to a single position.

    Args:
        num_heads: number of heads H.
    """

    full_state_update = False
    correct: Tensor
    sure_correct: Tensor
    found: Tensor
    sure: Tensor
    linked: Tensor
    symbols: Tensor
    entropies: list[Tensor] | Tensor

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        for name in ("correct", "sure_correct", "found"):
            self.add_state(name, torch.zeros(num_heads, dtype=torch.long), dist_reduce_fx="sum")
        for name in ("sure", "linked", "symbols"):
            self.add_state(name, torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("entropies", [], dist_reduce_fx="cat")

    def update(self, weights: Tensor, gold: Tensor, batch: Batch) -> None:
        """Update the state with a batch.

        Args:
            weights: the attention weights (B, H, T, S), with sum 1 over S.
            gold: the gold links (B, T, S), see `gold_links`.
            batch: the batch.
        """
        heads = weights.size(1)
        is_source = (batch.source != PAD) & (batch.source != EOS)  # (B, S)
        is_target = (batch.target_out != PAD) & (batch.target_out != EOS)  # (B, T)
        attended = weights.argmax(-1)  # (B, H, T)
        correct = gold.unsqueeze(1).expand(-1, heads, -1, -1).gather(-1, attended.unsqueeze(-1)).squeeze(-1)
        found = is_source.unsqueeze(1).expand(-1, heads, -1).gather(-1, attended) & is_target.unsqueeze(1)
        is_sure = gold.sum(-1) == 1  # (B, T)
        entropy = torch.special.entr(weights.float()).sum(-1) * is_target.unsqueeze(1)  # (B, H, T)
        self.correct += correct.sum((0, 2))
        self.sure_correct += (correct & is_sure.unsqueeze(1)).sum((0, 2))
        self.found += found.sum((0, 2))
        assert isinstance(self.entropies, list)
        self.entropies.append(entropy.sum((0, 2)).unsqueeze(0))  # (1, H)
        self.sure += is_sure.sum()
        self.linked += gold.any(-1).sum()
        self.symbols += is_target.sum()

    def compute(self) -> dict[str, Tensor]:
        """Return the scores by name, each with one value per head (H)."""
        return {
            "accuracy": self.correct / self.linked.clamp(min=1),
            "aer": 1 - (self.sure_correct + self.correct) / (self.found + self.sure).clamp(min=1),
            "entropy": exact_sum(dim_zero_cat(self.entropies)) / self.symbols,
        }


class AlignmentScores(Metric):
    """Agreement of the attention heads of all layers with a gold alignment, see `AlignmentScore`.

    Attributes:
        best_head: the layer and the head with the highest accuracy at the last computation; None before.
    """

    full_state_update = False
    higher_is_better = HIGHER_IS_BETTER  # type: ignore[assignment]  # by score

    def __init__(self) -> None:
        super().__init__()
        self.best_head: tuple[str, int] | None = None
        self.layers: dict[str, AlignmentScore] = {}

    def update(self, maps: Mapping[str, Tensor], gold: Tensor, batch: Batch) -> None:
        """Update the state with a batch.

        Args:
            maps: the attention weights (B, H, T, S) by layer.
            gold: the gold links (B, T, S), see `gold_links`.
            batch: the batch.
        """
        for layer, weights in maps.items():
            if layer not in self.layers:
                self.layers[layer] = AlignmentScore(weights.size(1)).to(weights.device)
                self.layers[layer].process_group = self.process_group
            self.layers[layer].update(weights, gold, batch)

    def compute(self) -> dict[str, Tensor]:
        """Return the scores by name, such as `alignment/decoder.1.cross_attention/head_0/accuracy`."""
        scores, accuracies = {}, {}
        for layer, score in self.layers.items():
            for name, values in score.compute().items():
                for head, value in enumerate(torch.atleast_1d(values)):  # torchmetrics squeezes a single head
                    scores[f"alignment/{layer}/head_{head}/{name}"] = value.float()
                    if name == "accuracy":
                        accuracies[layer, head] = value.item()
        self.best_head = max(accuracies, key=accuracies.__getitem__, default=None)
        return scores

    def reset(self) -> None:
        """Discard the scores of all layers."""
        super().reset()
        self.layers = {}
