"""From logits to sequences: greedy, sampling and beam search, over any step function.

A step function takes the last tokens (B) and a state, and returns the logits (B, V) of the next ones and the new
state. A state is a nested tuple of tensors whose first dimension is the batch, so that rows can be selected from
any state in one way. All searches work on whole batches and stop when every row has ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_tfm.tokenizer import BOS, EOS, PAD

State = Tensor | tuple["State", ...]
Step = Callable[[Tensor, State], tuple[Tensor, State]]
Choose = Callable[[Tensor], Tensor]
"""Logits (B, V) -> the next tokens (B)."""


def select(state: State, rows: Tensor) -> State:
    """The given rows of every tensor of a state."""
    if isinstance(state, Tensor):
        return state.index_select(0, rows)
    return tuple(select(part, rows) for part in state)


def batch_of(state: State) -> tuple[int, torch.device]:
    """The batch size of a state, and where it lives."""
    while not isinstance(state, Tensor):
        state = state[0]
    return state.size(0), state.device


def _drop_never(logits: Tensor) -> Tensor:
    """PAD and BOS are no answers: no search may choose them."""
    logits = logits.clone()
    logits[:, PAD] = logits[:, BOS] = -math.inf
    return logits


def greedy(logits: Tensor) -> Tensor:
    """Chooses the likeliest token."""
    return logits.argmax(-1)


def sampler(
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Choose:
    """Chooses at random, by probability.

    Args:
        temperature: what the logits are divided by; above 0. Below 1 the distribution is sharper, above 1 flatter.
        top_k: only among the k likeliest tokens.
        top_p: only among the fewest likeliest tokens that together have probability p (Holtzman et al. 2020).
        generator: the source of randomness.
    """

    def choose(logits: Tensor) -> Tensor:
        logits = logits / temperature
        if top_k is not None:
            least = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
            logits = logits.masked_fill(logits < least, -math.inf)
        if top_p is not None:
            ordered, ids = logits.softmax(-1).sort(-1, descending=True)
            surplus = ordered.cumsum(-1) - ordered >= top_p  # the likelier ones are already enough
            logits = logits.masked_fill(torch.zeros_like(surplus).scatter(-1, ids, surplus), -math.inf)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)

    return choose


def decode(step: Step, state: State, max_length: int, choose: Choose = greedy) -> Tensor:
    """Token after token until every row has EOS.

    Returns:
        (B, T) with T <= max_length: each row ends with EOS, if it came to it, and PAD after that.
    """
    batch, device = batch_of(state)
    token = torch.full((batch,), BOS, device=device)
    ended = torch.zeros(batch, dtype=torch.bool, device=device)
    tokens = []
    for _ in range(max_length):
        logits, state = step(token, state)
        token = choose(_drop_never(logits)).masked_fill(ended, PAD)
        tokens.append(token)
        ended = ended | (token == EOS)
        if ended.all():
            break
    return torch.stack(tokens, dim=1) if tokens else token.new_empty(batch, 0)


def go_on(
    encode: Callable[[Tensor], State],
    step: Step,
    tokens: Tensor,
    number: int,
    max_length: int,
    choose: Choose = greedy,
) -> Tensor:
    """What follows a text, token after token: tokens (B, S) -> (B, number).

    The network sees the last max_length tokens at most: where its positions end, it reads the last half of them anew.

    Args:
        encode: a network's, to which a text is a source.
        step: the network's decode_step.
        tokens: of the text, at least one; no padding.
        number: how many tokens to write.
        max_length: where the network's positions end.
        choose: how a token is chosen.
    """
    text, end = tokens, tokens.size(1) + number
    while text.size(1) < end:
        seen = text if text.size(1) < max_length else text[:, -max(1, max_length // 2) :]
        state, token = encode(seen[:, :-1]), seen[:, -1]
        for _ in range(min(max_length - seen.size(1) + 1, end - text.size(1))):
            logits, state = step(token, state)
            logits = _drop_never(logits)
            logits[:, EOS] = -math.inf  # a text has no end
            token = choose(logits)
            text = torch.cat((text, token.unsqueeze(1)), dim=1)
    return text[:, tokens.size(1) :]


def beam_search(
    step: Step, state: State, max_length: int, beam_size: int, length_penalty: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The likeliest sequence that a search over `beam_size` prefixes a row finds.

    A sequence of n tokens, EOS included, scores log p / n^length_penalty: 0 asks for the likeliest, 1 for the
    likeliest a token. Prefixes still open at max_length compete with those that ended.

    Returns:
        tokens (B, T) as `decode` returns them, and their scores (B).
    """
    batch, device = batch_of(state)
    rows = torch.arange(batch, device=device).unsqueeze(1)  # (B, 1)
    state = select(state, rows.expand(batch, beam_size).reshape(-1))  # (B * K rows)
    token = torch.full((batch * beam_size,), BOS, device=device)
    prefixes = token.new_empty(batch, beam_size, 0)
    scores = torch.full((batch, beam_size), -math.inf, device=device)
    scores[:, 0] = 0  # all beams of a row are equal at first: one of them counts
    best = token.new_full((batch, max_length), PAD)
    best_score = torch.full((batch,), -math.inf, device=device)

    def keep_best(candidates: Tensor, candidate_scores: Tensor) -> None:
        """Remembers the best of the candidates (B, K, n), by normalised scores (B, K), where it beats the best."""
        length = candidates.size(-1)
        score, beam = candidate_scores.max(-1)
        better = score > best_score
        best_score[better] = score[better]
        best[better] = PAD
        best[better, :length] = candidates[rows[:, 0], beam][better]

    for length in range(1, max_length + 1):
        logits, state = step(token, state)
        log_probs = _drop_never(logits).float().log_softmax(-1).view(batch, beam_size, -1)
        totals = scores.unsqueeze(-1) + log_probs  # (B, K, V)
        normaliser = length**length_penalty
        ending = torch.cat((prefixes, prefixes.new_full((batch, beam_size, 1), EOS)), dim=-1)
        keep_best(ending, totals[:, :, EOS] / normaliser)
        totals[:, :, EOS] = -math.inf
        scores, flat = totals.flatten(1).topk(beam_size)  # (B, K); the beams that go on
        beam, token = flat // log_probs.size(-1), flat % log_probs.size(-1)
        prefixes = torch.cat((prefixes[rows, beam], token.unsqueeze(-1)), dim=-1)  # (B, K, length)
        state = select(state, (rows * beam_size + beam).flatten())
        token = token.flatten()
        if length == max_length:
            keep_best(prefixes, scores / normaliser)
        # A log probability only falls, so an open prefix can at best keep its own and be as long as allowed.
        elif (best_score >= scores[:, 0] / max_length**length_penalty).all():
            break
    longest = int((best != PAD).sum(1).max()) if max_length else 0
    return best[:, :longest], best_score
