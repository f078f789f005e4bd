"""Attention against a gold alignment: where a model looks, and where it should."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_tfm.data import Batch, Pair
from lightning_tfm.tokenizer import EOS, PAD


def gold_links(pairs: Sequence[Pair], batch: Batch) -> Tensor:
    """(B, T, S), True where the alignment of a pair links a target symbol with a source symbol."""
    gold = torch.zeros(*batch.target_out.shape, batch.source.size(1), dtype=torch.bool)
    links = [(row, j, i) for row, pair in enumerate(pairs) for i, j in pair.alignment or ()]
    if links:
        gold[tuple(torch.tensor(links).T)] = True
    return gold.to(batch.source.device)


class AlignmentScore(Metric):
    """How well each head of one layer points at the source symbols that gold links with a target symbol.

    A head links a target symbol with the source symbol that it gives most weight; the source's EOS is no symbol, and
    a head that looks there links with nothing.

    - `accuracy`: the share of target symbols with a gold link that are linked with one of their own.
    - `error_rate`: 1 - (|A n S| + |A n P|) / (|A| + |S|), the alignment error rate (Och & Ney 2003), for links A,
      gold links P and, among those, S, which are sure. A gold link is sure where it is the only one of its target
      symbol; of several, a head need find one: any letter of May says 05. A symbol without any, as the hyphens of a
      date, should be linked with nothing.
    - `entropy`: of the weights over the source, in nats, the mean over target symbols; 0 looks at one place.
    """

    full_state_update = False

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        for name in ("right", "surely_right", "found"):
            self.add_state(name, torch.zeros(num_heads, dtype=torch.long), dist_reduce_fx="sum")
        for name in ("sure", "linked", "symbols"):
            self.add_state(name, torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("entropies", torch.zeros(num_heads), dist_reduce_fx="sum")

    def update(self, weights: Tensor, gold: Tensor, batch: Batch) -> None:
        """Counts a batch.

        Args:
            weights: (B, H, T, S), each row's sum 1.
            gold: (B, T, S), see `gold_links`.
            batch: what was attended to.
        """
        heads = weights.size(1)
        is_source = (batch.source != PAD) & (batch.source != EOS)  # (B, S)
        is_target = (batch.target_out != PAD) & (batch.target_out != EOS)  # (B, T)
        looked = weights.argmax(-1)  # (B, H, T)
        right = gold.unsqueeze(1).expand(-1, heads, -1, -1).gather(-1, looked.unsqueeze(-1)).squeeze(-1)
        found = is_source.unsqueeze(1).expand(-1, heads, -1).gather(-1, looked) & is_target.unsqueeze(1)
        is_sure = gold.sum(-1) == 1  # (B, T)
        entropy = torch.special.entr(weights.float()).sum(-1) * is_target.unsqueeze(1)  # (B, H, T)
        self.right += right.sum((0, 2))
        self.surely_right += (right & is_sure.unsqueeze(1)).sum((0, 2))
        self.found += found.sum((0, 2))
        self.entropies += entropy.sum((0, 2))
        self.sure += is_sure.sum()
        self.linked += gold.any(-1).sum()
        self.symbols += is_target.sum()

    def compute(self) -> dict[str, Tensor]:
        """Of each head (H)."""
        return {
            "accuracy": self.right / self.linked.clamp(min=1),
            "error_rate": 1 - (self.surely_right + self.right) / (self.found + self.sure).clamp(min=1),
            "entropy": self.entropies / self.symbols,
        }
