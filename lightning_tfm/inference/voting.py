"""Majority vote of the members of an ensemble."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_tfm.errors import UserError
from lightning_tfm.inference.decoding import Step, beam_search, decode, recording
from lightning_tfm.layers.losses import sequence_nll
from lightning_tfm.networks import Ensemble, Network
from lightning_tfm.networks.network import State
from lightning_tfm.tokenization import PAD


def check_vote(network: Network) -> None:
    """Raise UserError unless a network has members that can vote."""
    if not isinstance(network, Ensemble):
        raise UserError(
            f"vote must not be set for {type(network).__name__}, which has no members; write an ensemble of runs with: "
            "lightning-tfm ensemble"
        )


def vote(
    network: Ensemble, state: State, max_length: int, beam_size: int = 1, n_best: int = 1
) -> tuple[Tensor, Tensor]:
    """Find the sequences with the most votes of the members of an ensemble for each row.

    Each member decodes K = beam_size sequences by a beam search of its own, or greedily if K is 1, and gives 1 / r
    votes to its r-th best. So K = 1 is the majority vote of the baseline of SIGMORPHON 2021, task 1 (Ashby et al.
    2021). Of sequences with equally many votes, that with the higher mean log probability per token is first, over the
    members that have decoded it.

    Returns:
        The tokens (B, N, T) of N = n_best <= K sequences, each as returned by `decode`, and their votes (B, N) in
        descending order; -inf if fewer than N sequences were found.
    """
    members = zip(network.members, state, strict=True)
    found = [_best(member.decode_step, own, max_length, beam_size) for member, own in members]
    longest = max(tokens.size(2) for tokens, _ in found)
    padded = [F.pad(tokens, (0, longest - tokens.size(2)), value=PAD) for tokens, _ in found]
    candidates = torch.cat(padded, dim=1)  # (B, C, T), of all members
    scores = torch.cat([scores for _, scores in found], dim=1)  # (B, C)
    ranks = torch.arange(1, beam_size + 1, device=scores.device).repeat(len(found))
    exist = scores.isfinite()  # there may be fewer than K
    same = (candidates.unsqueeze(2) == candidates.unsqueeze(1)).all(-1) & exist.unsqueeze(1)  # (B, C, C)
    # The sum of fractions is rounded, so that it does not depend on the order of the members.
    votes = (same / ranks.double()).sum(2).round(decimals=9)
    means = (same * scores.masked_fill(~exist, 0).unsqueeze(1)).sum(2) / same.sum(2).clamp(min=1)
    is_repeated = same.tril(-1).any(2)
    votes = votes.masked_fill(is_repeated | ~exist, -torch.inf)
    order = means.argsort(dim=1, descending=True, stable=True)
    votes, best = votes.gather(1, order).sort(dim=1, descending=True, stable=True)
    rows = torch.arange(len(order), device=order.device).unsqueeze(1)
    best = order.gather(1, best)[:, :n_best]
    return candidates[rows, best].masked_fill(votes[:, :n_best, None].isneginf(), PAD), votes[:, :n_best]


def _best(step: Step, state: State, max_length: int, beam_size: int) -> tuple[Tensor, Tensor]:
    """Return the best tokens (B, K, T) of a network, and their mean log probabilities per token (B, K)."""
    if beam_size > 1:
        return beam_search(step, state, max_length, beam_size, n_best=beam_size)
    step, logits = recording(step)
    tokens = decode(step, state, max_length)
    scores = -sequence_nll(torch.stack(logits, dim=1), tokens) / (tokens != PAD).sum(1)
    return tokens.unsqueeze(1), scores.unsqueeze(1)
