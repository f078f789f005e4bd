"""What is measured on a set of sequences: each counts its samples once, on any number of devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric

from lightning_tfm.data import Batch
from lightning_tfm.tokenizer import PAD


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32 if it has half precision, unchanged otherwise."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def token_nll(logits: Tensor, target_out: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Sum over real tokens of -log p, in nats; padding is not scored.

    Args:
        logits: (B, T, V).
        target_out: (B, T).
        label_smoothing: probability that the targets give up to all tokens alike (Szegedy et al. 2016).
    """
    return F.cross_entropy(
        at_least_float32(logits.flatten(0, 1)),  # a sum in half precision would lose most terms
        target_out.flatten(),
        ignore_index=PAD,
        label_smoothing=label_smoothing,
        reduction="sum",
    )


def sequence_nll(logits: Tensor, target_out: Tensor) -> Tensor:
    """Of each sequence (B): the sum over its tokens of -log p, in nats; logits (B, T, V), target_out (B, T)."""
    logits = at_least_float32(logits.flatten(0, 1))
    nll = F.cross_entropy(logits, target_out.flatten(), ignore_index=PAD, reduction="none")
    return nll.view_as(target_out).sum(1)


class Mean(Metric):
    """Mean over all values of all devices, whose sum stays in float32 or wider in every precision.

    Note:
        `torchmetrics.MeanMetric` does not fit: `module.to(torch.bfloat16)` converts its sums too, and it leaves NaN out
        of the mean or, if told not to, ignores the weights.
    """

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float32), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, total: Tensor, count: Tensor | int) -> None:
        """Add the sum and the number of some values."""
        self.total += total
        self.count += count

    def compute(self) -> Tensor:
        """Return the mean; NaN if any value is."""
        return self.total / self.count

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> nn.Module:
        def keep_wide(state: Tensor) -> Tensor:
            moved = fn(state)
            return moved if torch.promote_types(moved.dtype, torch.float32) == moved.dtype else state.to(moved.device)

        return super()._apply(keep_wide, exclude_state)


class Perplexity(Mean):
    """exp(sum of -log p / number of tokens), taken once, at the end."""

    def compute(self) -> Tensor:
        return super().compute().exp()


class SequenceMetrics(nn.ModuleDict):
    """Loss, perplexity and accuracy by token, exact match by sequence."""

    def __init__(self) -> None:
        super().__init__(
            {
                "loss": Mean(),
                "perplexity": Perplexity(),
                "token_accuracy": Mean(),
                "exact_match": Mean(),
            }
        )

    def count(self, batch: Batch, logits: Tensor, exact: Tensor) -> None:
        """Counts a batch.

        Args:
            batch: what was asked, and the right answer.
            logits: (B, T, V), given the right answer's beginnings.
            exact: (B), whether the text of the model's own answer is that of the right one.
        """
        tokens = (batch.target_out != PAD).sum()
        nll = token_nll(logits, batch.target_out)
        self["loss"].update(nll, tokens)
        self["perplexity"].update(nll, tokens)
        right = (logits.argmax(-1) == batch.target_out) & (batch.target_out != PAD)
        self["token_accuracy"].update(right.sum(), tokens)
        self["exact_match"].update(exact.sum(), len(exact))


class SentenceScores:
    """BLEU (Papineni et al. 2002) and chrF (Popović 2015) of all answers, from 0 to 100, by sacrebleu (Post 2018)."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.signatures: dict[str, str] = {}  # of the last ones: how they were computed

    def count(self, answers: Sequence[str], references: Sequence[str]) -> None:
        """Counts some answers, each with its one reference."""
        self.lines += zip(answers, references, strict=True)

    def compute(self) -> dict[str, float]:
        """The scores of what all processes have counted since the last time."""
        from sacrebleu.metrics import BLEU, CHRF  # takes a while to import

        lines, self.lines = gathered(self.lines), []
        answers, references = (list(side) for side in zip(*lines, strict=True))
        metrics = {"bleu": BLEU(force=True), "chrf": CHRF()}  # which would warn of full stops set apart
        scores = {name: metric.corpus_score(answers, [references]).score for name, metric in metrics.items()}
        self.signatures = {name: str(metric.get_signature()) for name, metric in metrics.items()}
        return scores


def gathered(lines: list[Any]) -> list[Any]:
    """Those of all processes."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return lines
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, lines)
    return [line for part in parts for line in part]
