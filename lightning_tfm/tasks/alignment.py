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
"""Maps each score to whether higher values are better. The entropy has no preferred direction and is omitted."""


def gold_links(pairs: Sequence[Pair], batch: Batch) -> Tensor:
    """Return a mask (B, T, S) that is True where the alignment of a pair links a target symbol to a source symbol."""
    gold = torch.zeros(*batch.target_out.shape, batch.source.size(1), dtype=torch.bool)
    links = [(row, j, i) for row, pair in enumerate(pairs) for i, j in pair.alignment or ()]
    if links:
        gold[tuple(torch.tensor(links).T)] = True
    return gold.to(batch.source.device)


class AlignmentScores(Metric):
    """Agreement of each attention head with a gold alignment.

    A head links each target symbol to the source symbol with the largest weight. If the largest weight is at EOS, the
    target symbol has no link.

    - `accuracy`: the fraction of target symbols with gold links that are linked to one of their gold symbols.
    - `aer`: the alignment error rate 1 - (|A n S| + |A n P|) / (|A| + |S|) (Och & Ney 2003), for links A, gold
      links P and sure gold links S. A gold link is sure if it is the only one of its target symbol. Otherwise, any of
      the gold links is correct, such as to any letter of May for 05. Target symbols without gold links, such as the
      hyphens of a date, should have no link.
    - `entropy`: the entropy of the weights over the source, in nats, averaged over target symbols; 0 if each target
      symbol attends to a single position.

    Attributes:
        best_head: the layer and the head with the highest accuracy at the last computation; None before.
    """

    full_state_update = False
    higher_is_better = HIGHER_IS_BETTER  # type: ignore[assignment]  # by score
    by_head: list[Tensor] | Tensor
    symbols: list[Tensor] | Tensor

    def __init__(self) -> None:
        super().__init__()
        self.heads: list[tuple[str, int]] = []  # N heads of all layers
        self.best_head: tuple[str, int] | None = None
        self.add_state("by_head", [], dist_reduce_fx="cat")
        self.add_state("symbols", [], dist_reduce_fx="cat")

    def update(self, maps: Mapping[str, Tensor], gold: Tensor, batch: Batch) -> None:
        """Update the state with a batch.

        Args:
            maps: the attention weights (B, H, T, S) by layer, with sum 1 over S.
            gold: the gold links (B, T, S), see `gold_links`.
            batch: the batch.
        """
        is_source = (batch.source != PAD) & (batch.source != EOS)  # (B, S)
        is_target = (batch.target_out != PAD) & (batch.target_out != EOS)  # (B, T)
        is_sure = gold.sum(-1) == 1  # (B, T)
        rows = torch.arange(len(gold), device=gold.device)[:, None, None]
        columns = torch.arange(gold.size(1), device=gold.device)
        by_layer = []
        for weights in maps.values():
            attended = weights.argmax(-1)  # (B, H, T)
            correct = gold[rows, columns, attended]
            is_linked = is_source[rows, attended] & is_target.unsqueeze(1)
            entropy = torch.special.entr(weights.float()).sum(-1) * is_target.unsqueeze(1)
            counted = (correct, correct & is_sure.unsqueeze(1), is_linked, entropy)
            by_layer.append(torch.stack([value.sum((0, 2)) for value in counted], dim=1))  # (H, 4)
        self.heads = [(layer, head) for layer, weights in maps.items() for head in range(weights.size(1))]
        assert isinstance(self.by_head, list)
        assert isinstance(self.symbols, list)
        self.by_head.append(torch.cat(by_layer).unsqueeze(0))  # (1, N, 4)
        self.symbols.append(torch.stack([value.sum() for value in (is_sure, gold.any(-1), is_target)]).unsqueeze(0))

    def by_name(self) -> dict[str, Tensor]:
        """Return each score of all heads (N), in the order of `heads`."""
        correct, sure_correct, linked, entropies = exact_sum(dim_zero_cat(self.by_head)).unbind(1)  # (N)
        sure, gold, symbols = dim_zero_cat(self.symbols).sum(0)
        accuracy = correct / gold.clamp(min=1)
        return {
            "accuracy": accuracy,
            "aer": 1 - (sure_correct + correct) / (linked + sure).clamp(min=1),
            "entropy": entropies / symbols,
        }

    def compute(self) -> dict[str, Tensor]:
        """Return the scores by name, such as `alignment/decoder.1.cross_attention/head_0/accuracy`."""
        scores = self.by_name()
        self.best_head = self.heads[int(scores["accuracy"].argmax())]
        return {
            f"alignment/{layer}/head_{head}/{name}": values[index]
            for index, (layer, head) in enumerate(self.heads)
            for name, values in scores.items()
        }
