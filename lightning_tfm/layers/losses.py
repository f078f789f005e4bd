"""Negative log-likelihoods of tokens and of sequences."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from lightning_tfm.layers.precision import at_least_float32
from lightning_tfm.tokenization import PAD


def token_nll(logits: Tensor, target_out: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the sum of -log p over all tokens except padding, in nats.

    Args:
        logits: the logits (B, T, V).
        target_out: the targets (B, T).
        label_smoothing: probability moved from the target to all tokens uniformly (Szegedy et al. 2016).
    """
    return F.cross_entropy(
        at_least_float32(logits.flatten(0, 1)),  # a sum in half precision loses most terms
        target_out.flatten(),
        ignore_index=PAD,
        label_smoothing=label_smoothing,
        reduction="sum",
    )


def sequence_nll(logits: Tensor, target_out: Tensor) -> Tensor:
    """Return the sum of -log p of the targets (B, T) of each sequence (B), in nats, given logits (B, T, V)."""
    logits = at_least_float32(logits.flatten(0, 1))
    nll = F.cross_entropy(logits, target_out.flatten(), ignore_index=PAD, reduction="none")
    return nll.view_as(target_out).sum(1)
