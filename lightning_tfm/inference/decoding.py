"""Greedy decoding, sampling and beam search with any step function.

A step function takes the last tokens (B) and a state, and returns the logits (B, V) of the next tokens and the new
state. A state is a nested tuple of tensors whose first dimension is the batch; `reorder_state` selects its rows. All
functions decode whole batches and stop when every row has ended. Beam search removes rows that have ended, so the
number of rows may shrink between two steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_tfm.errors import UserError
from lightning_tfm.networks.network import Memory, State
from lightning_tfm.tokenization import BOS, EOS, PAD

Step = Callable[[Tensor, State], tuple[Tensor, State]]
SampleFn = Callable[[Tensor], Tensor]
"""Function from logits (B, V) to the next tokens (B)."""


def reorder_state(state: State, rows: Tensor, same_sources: bool = False) -> State:
    """Select rows of every tensor of a state by their indices, in their new order.

    With `same_sources`, each row is replaced by a row with the same source, so that memories need not be copied.
    """
    if isinstance(state, Tensor):
        return state.index_select(0, rows)
    if isinstance(state, Memory):
        return state if same_sources else Memory(reorder_state(part, rows) for part in state)
    return tuple(reorder_state(part, rows, same_sources) for part in state)


PATIENCE = 2
"""Number of finished sequences with which a beam search ends, divided by the number of beams (Kasai et al. 2024).

On the validation data of Multi30k, after 1,500 steps with AdamW and with five beams, the BLEU is 36.18 with 1, as in
fairseq and by default in CTranslate2, and 36.48 with 2, as if all rows were searched up to the maximum length (36.49).
"""


def batch_of(state: State) -> tuple[int, torch.device]:
    """Return the batch size and the device of a state."""
    while not isinstance(state, Tensor):
        state = state[0]
    return state.size(0), state.device


def _mask_special(logits: Tensor) -> Tensor:
    """Return the logits, or log probabilities, with PAD and BOS, which are never generated, set to -inf."""
    logits = logits.clone()
    logits[:, PAD] = logits[:, BOS] = -math.inf
    return logits


def greedy(logits: Tensor) -> Tensor:
    """Return the most probable tokens (B) of logits (B, V)."""
    return logits.argmax(-1)


def sampler(
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> SampleFn:
    """Return a function that samples the next tokens from the distribution of the logits divided by the temperature.

    Args:
        temperature: a number above 0; below 1, the distribution is sharper, and above 1, flatter.
        top_k: sample only among the k most probable tokens.
        top_p: sample only among the smallest set of most probable tokens with a total probability of at least p
            (nucleus sampling, Holtzman et al. 2020).
        generator: the random number generator.
    """

    def sample_fn(logits: Tensor) -> Tensor:
        logits = logits / temperature
        if top_k is not None:
            least = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
            logits = logits.masked_fill(logits < least, -math.inf)
        if top_p is not None:
            ordered, ids = logits.softmax(-1).sort(-1, descending=True)
            surplus = ordered.cumsum(-1) - ordered >= top_p  # the more probable tokens already reach p
            logits = logits.masked_fill(torch.zeros_like(surplus).scatter(-1, ids, surplus), -math.inf)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)

    return sample_fn


@dataclass(frozen=True)
class DecodingOptions:
    """Options of decoding, which is greedy unless a beam size or a temperature is set.

    Args:
        beam_size: the number of beams; 1 disables beam search.
        n_best: the maximum number of different outputs for each line, at most beam_size.
        vote: whether the members of an ensemble vote, see `lightning_tfm.inference.voting.vote`.
        temperature: the sampling temperature; 0 for greedy decoding, None for the default of the task.
        top_k: sample only among the k most probable tokens.
        top_p: sample only among the most probable tokens with this total probability.
        max_tokens: the maximum number of tokens in an output; None for the default of the task.
        seed: the seed of sampling.
        scores: whether to compute the log probability of each output.
        alignments: whether to align each output with its source.
        steps: whether to return the probability and the alternatives of each token.

    Raises:
        UserError: if an option is out of range, or two options are mutually exclusive.
    """

    beam_size: int = 1
    n_best: int = 1
    vote: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int = 0
    scores: bool = False
    alignments: bool = False
    steps: bool = False

    def __post_init__(self) -> None:
        for name, is_valid, rule, example in (
            ("beam_size", self.beam_size >= 1, "at least 1", 4),
            ("n_best", 1 <= self.n_best <= self.beam_size, f"from 1 to beam_size ({self.beam_size})", self.beam_size),
            ("temperature", not self.temperature or 0.01 <= self.temperature <= 100, "0 or from 0.01 to 100", 0.8),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1", 500),
            ("top_k", self.top_k is None or self.top_k >= 1, "at least 1", 10),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1", 0.9),
            ("seed", 0 <= self.seed < 2**32, f"from 0 to {2**32 - 1}", 1),
        ):
            if not is_valid:
                raise UserError(f"{name} must be {rule}, but is {getattr(self, name)}; try {example}")
        if self.beam_size > 1 and self.temperature:
            raise UserError("beam_size and temperature are mutually exclusive: a beam search does not sample")
        if self.vote and self.temperature:
            raise UserError("vote and temperature are mutually exclusive: the members of an ensemble do not sample")

    def check_used(self, used: Sequence[str], task: str) -> None:
        """Raise UserError if an option is set that a task does not use."""
        supported = f"supports only {', '.join(used)}" if used else "has no decoding options"
        # n_best is checked before beam_size, whose default in generate it is.
        for field in reversed(fields(self)):
            value = getattr(self, field.name)
            if field.name not in (*used, "seed", "steps") and value != field.default:
                raise UserError(
                    f"{field.name} must not be set for a {task}, which {supported}, but is {value}; leave it out"
                )

    def sample_fn(self, generator: torch.Generator, default_temperature: float = 0.0) -> SampleFn:
        """Return the function that selects the next tokens; raise UserError if greedy decoding has top_k or top_p."""
        temperature = default_temperature if self.temperature is None else self.temperature
        if temperature > 0:
            return sampler(temperature, self.top_k, self.top_p, generator)
        if self.top_k is not None or self.top_p is not None:
            raise UserError("top_k and top_p need a temperature above 0, but it is 0; try 1")
        return greedy


def decode(step: Step, state: State, max_length: int, sample_fn: SampleFn = greedy) -> Tensor:
    """Decode token by token until every row has ended with EOS.

    Returns:
        The tokens (B, T) with T <= max_length; each row ends with EOS, followed by PAD, unless it is truncated at
        max_length.
    """
    batch, device = batch_of(state)
    token = torch.full((batch,), BOS, device=device)
    ended = torch.zeros(batch, dtype=torch.bool, device=device)
    tokens = []
    for _ in range(max_length):
        logits, state = step(token, state)
        token = sample_fn(_mask_special(logits)).masked_fill(ended, PAD)
        tokens.append(token)
        ended = ended | (token == EOS)
        if ended.all():
            break
    return torch.stack(tokens, dim=1) if tokens else token.new_empty(batch, 0)


def continue_text(
    encode: Callable[[Tensor], State],
    step: Step,
    tokens: Tensor,
    num_tokens: int,
    max_length: int,
    sample_fn: SampleFn = greedy,
    stop_at_eos: bool = False,
) -> Tensor:
    """Generate the continuation (B, num_tokens) of a text.

    Args:
        encode: `encode` of the network, to which the text is passed as source.
        step: `decode_step` of the network.
        tokens: the text (B, S), of at least one token and without padding.
        num_tokens: the number of tokens to generate.
        max_length: the number of positions of the network.
        sample_fn: the function that selects the next tokens.
        stop_at_eos: whether a continuation may end with EOS, after which it is padded; it is shorter than num_tokens
            if all rows end earlier. Otherwise, EOS is never generated.

    Note:
        The network attends to at most the last max_length tokens. When its positions are used up, the last
        max_length // 2 tokens are encoded again from position 0.
    """
    text, end = tokens, tokens.size(1) + num_tokens
    has_ended = torch.zeros_like(tokens[:, 0], dtype=torch.bool)
    while text.size(1) < end:
        seen = text if text.size(1) <= max_length else text[:, -max(1, max_length // 2) :]
        state, token = encode(seen[:, :-1]), seen[:, -1]
        for _ in range(min(max_length - seen.size(1) + 1, end - text.size(1))):
            logits, state = step(token, state)
            logits = _mask_special(logits)
            if not stop_at_eos:
                logits[:, EOS] = -math.inf
            token = sample_fn(logits)
            if stop_at_eos:
                token = token.masked_fill(has_ended, PAD)
                has_ended |= token == EOS
            text = torch.cat((text, token.unsqueeze(1)), dim=1)
            if stop_at_eos and has_ended.all():
                return text[:, tokens.size(1) :]
    return text[:, tokens.size(1) :]


def recording(step: Step) -> tuple[Step, list[Tensor]]:
    """Wrap a step function; return it with a list, to which each call appends the logits (B, V)."""
    recorded: list[Tensor] = []

    def recording_step(token: Tensor, state: State) -> tuple[Tensor, State]:
        logits, state = step(token, state)
        recorded.append(logits)
        return logits, state

    return recording_step, recorded


class Candidates(NamedTuple):
    """Extended prefixes of a step of a beam search, for each of R rows in descending order of probability.

    Attributes:
        prefixes: the prefixes (R, C, n + 1), which begin with BOS.
        log_probabilities: their log probabilities (R, C); -inf if there are fewer than C.
        are_finished: whether each of the first prefixes (R, K) is a finished sequence.
        kept: the indices (R, K) of the prefixes that the next step extends.
    """

    prefixes: Tensor
    log_probabilities: Tensor
    are_finished: Tensor
    kept: Tensor


def beam_search(
    step: Step,
    state: State,
    max_length: int,
    beam_size: int,
    length_penalty: float = 1.0,
    n_best: int = 1,
    trace: list[Candidates] | None = None,
) -> tuple[Tensor, Tensor]:
    """Find sequences with high scores for each row by beam search.

    A step extends the prefixes of a row, and keeps the K = beam_size most probable of those that do not end with EOS.
    A prefix that ends with EOS is a finished sequence if fewer than K of all extended prefixes are more probable. The
    search of a row ends with PATIENCE x K finished sequences, or at max_length, where open prefixes compete with
    finished sequences. The score of a sequence of n tokens, including EOS, is log p / n^length_penalty, where p is
    normalized over all tokens, including PAD and BOS, as in the loss. A length penalty of 0 favors the most probable
    sequence, and 1 the highest mean log probability per token. Each step appends its candidates to `trace`, if any.

    Returns:
        The tokens (B, N, T) of N = n_best <= K sequences, each as returned by `decode`, and their scores (B, N) in
        descending order; -inf if fewer than N sequences were found.
    """
    batch, device = batch_of(state)
    K, capacity = beam_size, PATIENCE * beam_size
    finished = _Finished(batch, capacity, max_length, device)
    rows = torch.arange(batch, device=device)  # (R), those whose search has not ended
    state = reorder_state(state, rows.repeat_interleave(K))
    prefixes = torch.full((batch, K, 1), BOS, device=device)
    # Lightning changes the default dtype in half precision.
    scores = torch.full((batch, K), -math.inf, dtype=torch.float32, device=device)
    # The beams of a row are the same at first, so only one may be extended.
    scores[:, 0] = 0

    for length in range(1, max_length + 1):
        logits, state = step(prefixes[:, :, -1].flatten(), state)
        prefixes, scores, beams = _extend(prefixes, scores, logits)
        ends = prefixes[:, :, -1] == EOS
        are_finished = (ends & scores.isfinite())[:, :K]
        finished.add(rows, prefixes[:, :K, 1:], scores[:, :K] / length**length_penalty, are_finished)

        searched = (finished.counts[rows] < capacity).nonzero().squeeze(1)
        kept = ends.sort(dim=1, stable=True).indices[:, :K]  # the most probable prefixes that do not end
        if trace is not None:
            trace.append(Candidates(prefixes, scores, are_finished, kept))
        prefixes, scores, beams = (_select(part, kept)[searched] for part in (prefixes, scores, beams))
        origin = (searched.unsqueeze(1) * K + beams).flatten()
        state = reorder_state(state, origin, same_sources=len(searched) == len(rows))
        rows = rows[searched]
        if not len(rows):
            break
    else:
        finished.add_open(rows, prefixes[:, :, 1:], scores / max(1, max_length) ** length_penalty)
    return finished.best(n_best)


def _select(x: Tensor, indices: Tensor) -> Tensor:
    """Return x[r, indices[r, c]] for each row r and column c: (R, C, ...) of x (R, N, ...) and indices (R, C)."""
    return x[torch.arange(len(x), device=x.device).unsqueeze(1), indices]


def _extend(prefixes: Tensor, scores: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the most probable prefixes with one more token: C <= 2K for each row, since at most K of them end.

    The K prefixes of each row (R, K, n) have log probabilities (R, K) and logits (R * K, V) of the next tokens.

    Returns:
        The extended prefixes (R, C, n + 1), their log probabilities (R, C) in descending order, and the indices (R, C)
        of the prefixes they extend.
    """
    R, K, _ = prefixes.shape
    log_probs = _mask_special(logits.float().log_softmax(-1))
    values, ids = log_probs.topk(min(2 * K, log_probs.size(-1)))  # of each prefix
    totals = (scores.flatten().unsqueeze(1) + values).view(R, -1)
    totals, chosen = totals.topk(min(2 * K, totals.size(1)))  # of each row
    beams = chosen // values.size(1)
    tokens = _select(ids.view(R, -1), chosen)
    return torch.cat((_select(prefixes, beams), tokens.unsqueeze(2)), dim=2), totals, beams


class _Finished:
    """Finished sequences of each of B rows of a beam search, at most `capacity` of them in a row."""

    def __init__(self, batch: int, capacity: int, max_length: int, device: torch.device) -> None:
        self.tokens = torch.full((batch, capacity, max_length), PAD, device=device)
        self.scores = torch.full((batch, capacity), -math.inf, dtype=torch.float32, device=device)
        self.counts = torch.zeros(batch, dtype=torch.long, device=device)  # also of those beyond the capacity

    def add(self, rows: Tensor, sequences: Tensor, scores: Tensor, are_finished: Tensor) -> None:
        """Add the finished ones of sequences (R, N, n) with scores (R, N) to rows (R), up to the capacity."""
        places = self.counts[rows].unsqueeze(1) + are_finished.cumsum(1) - 1
        row, column = (are_finished & (places < self.scores.size(1))).nonzero(as_tuple=True)
        place = places[row, column]
        self.tokens[rows[row], place, : sequences.size(2)] = sequences[row, column]
        self.scores[rows[row], place] = scores[row, column]
        self.counts = self.counts.index_add(0, rows, are_finished.sum(1))

    def add_open(self, rows: Tensor, sequences: Tensor, scores: Tensor) -> None:
        """Add sequences (R, K, T) that do not end to rows (R), in place of those with lower scores."""
        # A stable sort keeps the earlier of two sequences with equal scores.
        ordered = torch.cat((self.scores[rows], scores), dim=1).sort(dim=1, descending=True, stable=True)
        self.scores[rows], order = (part[:, : self.scores.size(1)] for part in ordered)
        self.tokens[rows] = _select(torch.cat((self.tokens[rows], sequences), dim=1), order)

    def best(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the tokens (B, N, longest) and the scores (B, N) of the best sequences, see `beam_search`."""
        scores, order = (part[:, :number] for part in self.scores.sort(dim=1, descending=True, stable=True))
        tokens = _select(self.tokens, order).masked_fill(scores.isneginf().unsqueeze(2), PAD)
        longest = int((tokens != PAD).sum(2).max()) if tokens.size(2) else 0
        return tokens[:, :, :longest], scores
