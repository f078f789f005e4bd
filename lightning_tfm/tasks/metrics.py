"""Metrics of sequences, which count each sample exactly once on any number of devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lightning_tfm.data import Batch
from lightning_tfm.layers import at_least_float32
from lightning_tfm.layers.losses import token_nll
from lightning_tfm.tokenization import PAD, pad_sequences


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

    def update(self, total: Tensor, count: Tensor | int) -> None:
        """Update the state with values.

        Args:
            total: the sum of the values.
            count: the number of values.
        """
        assert isinstance(self.totals, list)
        self.totals.append(at_least_float32(total) if total.is_floating_point() else total.float())
        self.count += count

    def compute(self) -> Tensor:
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


class TokenLoss(Loss):
    """Mean loss per token, or another mean per token of which lower values are better."""

    depends_on_tokenizer = True


class Accuracy(Mean):
    """Fraction of correct predictions."""

    higher_is_better = True


class TokenAccuracy(Accuracy):
    """Fraction of tokens that are predicted correctly."""

    depends_on_tokenizer = True


class Perplexity(TokenLoss):
    """Perplexity exp(sum of -log p / number of tokens), computed from the totals over all batches."""

    def compute(self) -> Tensor:
        return super().compute().exp()


def edit_distances(outputs: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> Tensor:
    """Return the edit distance (Levenshtein 1966) of each output to its reference (B), in symbols.

    Args:
        outputs: the symbols of B outputs.
        references: the symbols of B references.
    """
    numbers: dict[str, int] = {}

    def number(texts: Sequence[Sequence[str]]) -> tuple[Tensor, Tensor]:
        return pad_sequences([[numbers.setdefault(symbol, len(numbers)) for symbol in text] for text in texts])

    (output, output_lengths), (reference, reference_lengths) = number(outputs), number(references)  # (B, N), (B, M)
    steps = torch.arange(reference.size(1) + 1)
    distances = steps.expand(len(outputs), -1)  # of the first n symbols of the output to all prefixes (B, M + 1)
    for n, symbol in enumerate(output.unbind(1), start=1):
        changed = torch.minimum(distances[:, 1:] + 1, distances[:, :-1] + (symbol.unsqueeze(1) != reference))
        changed = torch.cat((torch.full_like(distances[:, :1], n), changed), dim=1)
        # A missing symbol costs 1: the minimum over j <= m of changed[j] + m - j.
        changed = (changed - steps).cummin(1).values + steps
        distances = torch.where((output_lengths >= n).unsqueeze(1), changed, distances)
    return distances.gather(1, reference_lengths.unsqueeze(1)).squeeze(1)


class SequenceMetrics(nn.ModuleDict):
    """Loss, perplexity and accuracy per token, exact match per sequence, and symbol error rate (SER).

    The SER is the sum of the edit distances of the outputs to their references, divided by the number of symbols of the
    references: 0 is perfect, and there is no maximum. As in yoyodyne, it is a fraction and not a percentage, and EOS is
    not counted. The symbols are those of the tokenizer, such as characters or words, but characters if its tokens are
    subwords.
    """

    def __init__(self) -> None:
        super().__init__(
            {
                "loss": TokenLoss(),
                "perplexity": Perplexity(),
                "token_accuracy": TokenAccuracy(),
                "exact_match": Accuracy(),
                "ser": TokenLoss(),
            }
        )

    def count(
        self,
        batch: Batch,
        logits: Tensor,
        exact: Tensor,
        outputs: Sequence[Sequence[str]],
        references: Sequence[Sequence[str]],
    ) -> None:
        """Update the metrics with a batch.

        Args:
            batch: the sources and references.
            logits: the logits (B, T, V), given the prefixes of the references.
            exact: whether the text of each decoded output equals the reference (B).
            outputs: the symbols of the decoded outputs.
            references: the symbols of the references.
        """
        tokens = (batch.target_out != PAD).sum()
        nll = token_nll(logits, batch.target_out)
        metrics = cast(Mapping[str, Metric], self)
        metrics["loss"].update(nll, tokens)
        metrics["perplexity"].update(nll, tokens)
        right = (logits.argmax(-1) == batch.target_out) & (batch.target_out != PAD)
        metrics["token_accuracy"].update(right.sum(), tokens)
        metrics["exact_match"].update(exact.sum(), len(exact))
        metrics["ser"].update(edit_distances(outputs, references).sum().to(exact.device), sum(map(len, references)))


class CorpusScores:
    """BLEU (Papineni et al. 2002) and chrF (Popović 2015) of all outputs, from 0 to 100, by sacrebleu (Post 2018).

    Args:
        names: the scores to compute: "bleu", "chrf" or both.
        group: the processes that together have all outputs; None for all processes.
    """

    def __init__(self, names: Sequence[str], group: ProcessGroup | None = None) -> None:
        self.names, self.group = tuple(names), group
        self.lines: list[tuple[str, str]] = []
        self.signatures: dict[str, str] = {}  # sacrebleu's signatures of the last scores

    def count(self, outputs: Sequence[str], references: Sequence[str]) -> None:
        """Add outputs with one reference each."""
        self.lines += zip(outputs, references, strict=True)

    def compute(self) -> dict[str, float]:
        """Return the scores of the outputs added on all processes since the last call."""
        from sacrebleu.metrics import BLEU, CHRF  # slow to import

        lines, self.lines = all_gather_list(self.lines, self.group), []
        outputs, references = (list(side) for side in zip(*lines, strict=True))
        known: dict[str, Callable[[], Any]] = {
            "bleu": lambda: BLEU(force=True),  # suppresses the warning about tokenized input
            "chrf": CHRF,
        }
        metrics = {name: known[name]() for name in self.names}
        scores = {name: metric.corpus_score(outputs, [references]).score for name, metric in metrics.items()}
        self.signatures = {name: str(metric.get_signature()) for name, metric in metrics.items()}
        return scores


def all_gather_list(lines: list[Any], group: ProcessGroup | None = None) -> list[Any]:
    """Gather lists, and return them concatenated in the order of ranks.

    Args:
        lines: the list of this process.
        group: the processes; None for all.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size(group) == 1:
        return lines
    parts: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(parts, lines, group)
    return [line for part in parts for line in part]
