"""Metrics of sequences, which count each sample exactly once on any number of devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lightning_tfm.layers import at_least_float32


def exact_sum(values: Tensor) -> Tensor:
    """Return the sum of values over the first dimension, rounded once, so that it does not depend on their order.

    Args:
        values: the values (N, ...), in at most float64.
    """
    if not values.isfinite().all():
        return values.sum(0)
    columns = values.flatten(1).T if values.dim() > 1 else values.unsqueeze(0)
    sums = torch.tensor([math.fsum(column) for column in columns.tolist()], dtype=torch.float64)
    return sums.view(values.shape[1:]).to(values)


class Mean(Metric):
    """Mean of all values on all devices, for every precision with sums in at least float32.

    The sums of the batches are added by `exact_sum`, so the mean does not depend on the number of processes. Subclasses
    say whether higher values are better.

    Attributes:
        depends_on_tokenizer: whether the values are per token, so that those of two tokenizers are not comparable.

    Note:
        `torchmetrics.MeanMetric` is not suitable: `module.to(torch.bfloat16)` also converts its sums, and it excludes
        NaN from the mean or, if configured to keep NaN, ignores the weights.
    """

    full_state_update = False
    depends_on_tokenizer = False
    totals: list[Tensor] | Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("totals", [], dist_reduce_fx="cat")
        self.add_state("count", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, total: Tensor | int, count: Tensor | int) -> None:
        """Update the state with values.

        Args:
            total: the sum of the values.
            count: the number of values.
        """
        assert isinstance(self.totals, list)
        self.totals.append(at_least_float32(torch.as_tensor(total, device=self.count.device)))
        self.count += count

    def compute(self) -> Any:
        """Return the mean; NaN if any value is NaN."""
        return exact_sum(dim_zero_cat(self.totals)) / self.count

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> nn.Module:
        def keep_wide(state: Tensor) -> Tensor:
            moved = fn(state)
            return moved if torch.promote_types(moved.dtype, torch.float32) == moved.dtype else state.to(moved.device)

        return super()._apply(keep_wide, exclude_state)


class Loss(Mean):
    """Mean loss."""

    higher_is_better = False


class ErrorRate(Loss):
    """Number of errors per symbol of the references."""

    depends_on_tokenizer = True


class WordErrorRate(Loss):
    """Percentage of outputs that differ from their reference."""

    def compute(self) -> Tensor:
        """Return the percentage, from 0 to 100."""
        return 100 * super().compute()


class TokenLoss(Loss):
    """Mean loss per token, and the perplexity exp(loss), from the totals over all batches."""

    depends_on_tokenizer = True

    def compute(self) -> dict[str, Tensor]:
        """Return `loss` and `perplexity`."""
        loss = super().compute()
        return {"loss": loss, "perplexity": loss.exp()}


class TextLosses(Loss):
    """Mean loss per token of each text of a mixture.

    Args:
        names: the names of the texts.
    """

    depends_on_tokenizer = True

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = names
        self.add_state("count", torch.zeros(len(names), dtype=torch.long), dist_reduce_fx="sum")

    def compute(self) -> dict[str, Tensor]:
        """Return `loss/NAME` of each text with tokens; `update` adds sums (1, texts) and numbers of tokens (texts)."""
        losses = zip(self.names, super().compute(), self.count, strict=True)
        return {f"loss/{name}": loss for name, loss, count in losses if count}


class Accuracy(Mean):
    """Fraction of correct predictions."""

    higher_is_better = True


class TokenAccuracy(Accuracy):
    """Fraction of tokens that are predicted correctly."""

    depends_on_tokenizer = True


class CorpusScores(Metric):
    """BLEU (Papineni et al. 2002) and chrF (Popović 2015) of all outputs, from 0 to 100, by sacrebleu (Post 2018).

    Args:
        names: the scores to compute: "bleu", "chrf" or both.

    Attributes:
        signatures: sacrebleu's signatures of the last scores, by name.
    """

    full_state_update = False
    higher_is_better = True

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = tuple(names)
        self.lines: list[tuple[str, str]] = []
        self.signatures: dict[str, str] = {}

    def update(self, outputs: Sequence[str], references: Sequence[str]) -> None:
        """Add outputs with one reference each."""
        self.lines += zip(outputs, references, strict=True)

    def compute(self) -> dict[str, Tensor]:
        """Return the scores of the outputs added on all processes, by name."""
        from sacrebleu.metrics import BLEU, CHRF  # slow to import

        outputs, references = zip(*all_gather_list(self.lines, self.process_group), strict=True)
        scores = {}
        for name in self.names:
            metric = BLEU(force=True) if name == "bleu" else CHRF()  # `force` hides the warning about tokenized input
            score = metric.corpus_score(outputs, [references]).score
            scores[name] = torch.tensor(score, dtype=torch.float32, device=self.device)
            self.signatures[name] = str(metric.get_signature())
        return scores

    def reset(self) -> None:
        """Discard all outputs."""
        super().reset()
        self.lines = []


def all_gather_list(lines: list[Any], group: ProcessGroup | None = None) -> list[Any]:
    """Gather lists, and return them concatenated in the order of ranks."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size(group) == 1:
        return lines
    parts: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(parts, lines, group)
    return [line for part in parts for line in part]
