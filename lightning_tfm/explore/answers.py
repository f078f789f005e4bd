"""Answers of the predictors of all tasks, with the symbols of their steps and of their attention maps.

Shapes: source tokens S, answer tokens T, ids V.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_tfm.errors import UserError
from lightning_tfm.inference import (
    ClassifierPredictor,
    LanguageModelPredictor,
    MaskedLanguageModelPredictor,
    Predictor,
    Seq2SeqPredictor,
    TeacherForced,
)
from lightning_tfm.inference.decoding import (
    Candidates,
    SampleFn,
    Step,
    beam_search,
    continue_text,
    decode,
    greedy,
    recording,
)
from lightning_tfm.inference.masked_language_model import MASK_SYMBOL
from lightning_tfm.inference.predictor import strip_fields, valid_line
from lightning_tfm.networks import CausalNetwork
from lightning_tfm.networks.network import Side
from lightning_tfm.tokenization import BOS, EOS, NUM_SPECIAL, PAD, Ids

CONTINUATION = 40
"""Maximum number of tokens by which a language model continues a text in an answer."""


class Answer(NamedTuple):
    """Text with the answer of a network.

    Attributes:
        forced: the text with its answer, for teacher forcing. The steps of the answer are its targets.
        source: the symbols of the text (S).
        note: a warning about the text; may be empty.
        given: the number of steps that belong to the text.
        prefix: the number of forced steps, which follow them.
        first_step: for a network that reads one sequence, the row of its attention maps that predicts the first step;
            otherwise None.
    """

    forced: TeacherForced
    source: list[str]
    note: str
    given: int = 0
    prefix: int = 0
    first_step: int | None = None

    @property
    def symbols(self) -> list[str]:
        """Return the symbol of each step."""
        is_target = self.forced.is_target[0].tolist()
        return [symbol for symbol, counts in zip(self.forced.target_symbols, is_target, strict=True) if counts]

    def position(self, step: int) -> int:
        """Return the index of the target of a step; raise UserError if there is no such step."""
        positions = self.forced.is_target[0].nonzero().squeeze(1).tolist()
        if not 0 <= step < len(positions):
            raise UserError(f"step must be from 0 to {len(positions) - 1}, but is {step}")
        return int(positions[step])

    def axes(self, side: Side) -> tuple[list[str], list[str], int | None]:
        """Return the symbols of the rows and columns of an attention map, and the row that predicts the first step.

        Args:
            side: the side of the attention layer.
        """
        if side == "encoder":
            return self.source, self.source, None
        if side == "source":
            return self.forced.target_symbols, self.source, 0
        if side == "target":
            inputs = [*self.forced.decoder_symbols]
            return inputs, inputs, 0
        return self.forced.input_symbols, self.forced.input_symbols, self.first_step


class Sampled(NamedTuple):
    """Sampled tokens.

    Attributes:
        text: the text of the tokens, which includes the text that they continue, if any.
        tokens: the given and the sampled tokens (T).
        logits: the logits (T, V).
        given: the number of given tokens.
    """

    text: str
    tokens: Tensor
    logits: Tensor
    given: int


class Answers(ABC):
    """Base class of the answers of a predictor."""

    predictor: Any

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.network: Any = predictor.network

    @abstractmethod
    def answer(self, text: str, prefix: Sequence[int]) -> Answer:
        """Return the answer to a text, whose first tokens are forced to be those of a prefix.

        Raises:
            UserError: if the text has no answer, or the prefix cannot begin one.
        """

    def question(self, text: str) -> str:
        """Convert a text of the data to one that the model can answer."""
        return text

    def sample(self, text: str, sample_fn: SampleFn, max_tokens: int) -> Sampled:
        """Return an answer whose tokens are selected by a function, see `decode`."""
        raise NotImplementedError

    def beam(self, text: str, beam_size: int) -> dict[str, Any]:
        """Return the tree of the candidates of a beam search, and its outputs, as plain values."""
        raise NotImplementedError

    def max_lengths(self) -> tuple[int | None, int | None]:
        """Return the maximum lengths of a text and of its answer, in tokens; None if unlimited."""
        return self.network.max_length, None

    @abstractmethod
    def inputs(self, text: str) -> tuple[Tensor, ...]:
        """Return arguments of the network's `forward` for a text without an answer, (1, ...) each."""

    def encode(self, text: str) -> tuple[Ids, str]:
        """Return the ids of a text and a warning, which may be empty.

        Raises:
            UserError: if it has no answer.
        """
        try:
            return self.predictor.encode_line(valid_line(text))
        except UserError as error:
            raise UserError(f"no answer to {text!r}: {error}") from None

    def can_answer(self, text: str) -> bool:
        """Return whether a text has an answer."""
        try:
            self.encode(text)
        except UserError:
            return False
        return True

    def _check_prefix(self, prefix: Sequence[int], max_length: int, can_end: bool = False) -> None:
        """Raise UserError if a prefix has too many ids, or ids of no symbol, except EOS at its end."""
        if len(prefix) > max_length:
            raise UserError(f"prefix must have at most {max_length} ids, but has {len(prefix)}")
        vocab_size = self.predictor.tokenizer.vocab_size
        for id in prefix[:-1] if can_end and prefix and prefix[-1] == EOS else prefix:
            if not NUM_SPECIAL <= id < vocab_size:
                raise UserError(f"prefix must have ids from {NUM_SPECIAL} to {vocab_size - 1}, but has {id}")


class Seq2SeqAnswers(Answers):
    """Answers of a Seq2SeqPredictor: targets, decoded greedily."""

    predictor: Seq2SeqPredictor

    def max_lengths(self) -> tuple[int | None, int | None]:
        length = self.predictor.max_target_length
        return self.network.max_lengths(length)[0], length

    def inputs(self, text: str) -> tuple[Tensor, ...]:
        source, _ = self._source(text)
        return source, torch.full_like(source[:, :1], BOS)

    def _source(self, text: str) -> tuple[Tensor, str]:
        """Return the ids (1, S) of a text, and a warning, see `encode`."""
        ids, note = self.encode(text)
        return torch.tensor([ids], device=self.predictor.device), note

    def answer(self, text: str, prefix: Sequence[int]) -> Answer:
        source, note = self._source(text)
        length = self.predictor.max_target_length
        self._check_prefix(prefix, length, can_end=True)
        targets = decode(self.network.decode_step, self.network.encode(source), length, forcing(prefix))  # (1, T)
        inputs = source, F.pad(targets[:, :-1], (1, 0), value=BOS)
        symbols = [*self.predictor.tokenizer.split(strip_fields(valid_line(text))), "EOS"]
        target_symbols = [*map(self.predictor.output_symbol, targets[0].tolist())]
        input_symbols, decoder_symbols = symbols, ["BOS", *target_symbols[:-1]]
        if isinstance(self.network, CausalNetwork):  # which embeds source and target in one sequence
            input_symbols, decoder_symbols = symbols + decoder_symbols, []
        output = self.predictor.tokenizer.decode(targets[0].tolist())
        is_target = torch.ones_like(targets, dtype=torch.bool)
        forced = TeacherForced(output, inputs, targets, is_target, input_symbols, target_symbols, decoder_symbols)
        return Answer(forced, symbols, note, prefix=len(prefix), first_step=len(symbols))

    def sample(self, text: str, sample_fn: SampleFn, max_tokens: int) -> Sampled:
        length = min(max_tokens, self.predictor.max_target_length)
        step, logits = recording(self.network.decode_step)
        tokens = decode(step, self.network.encode(self._source(text)[0]), length, sample_fn)
        return Sampled(self.predictor.tokenizer.decode(tokens[0].tolist()), tokens[0], torch.cat(logits), given=0)

    def beam(self, text: str, beam_size: int) -> dict[str, Any]:
        state, length = self.network.encode(self._source(text)[0]), self.predictor.max_target_length
        trace: list[Candidates] = []
        best, scores = beam_search(self.network.decode_step, state, length, beam_size, n_best=beam_size, trace=trace)
        nodes, places = self._tree(trace)
        outputs = []
        for row, score in zip(best[0].tolist(), scores[0].tolist(), strict=True):
            if math.isfinite(score):  # there may be fewer than beam_size
                node = places[tuple(id for id in row if id != PAD)]
                output = {"text": self.predictor.tokenizer.decode(row), "score": score}
                outputs.append({**output, "log_probability": nodes[node]["log_probability"], "node": node})
        return {"nodes": nodes, "outputs": outputs}

    def _tree(self, trace: Sequence[Candidates]) -> tuple[list[dict[str, Any]], dict[tuple[int, ...], int]]:
        """Return the nodes of the candidates of a beam search, and the index of each prefix."""
        root = {"token": None, "parent": None, "symbol": "", "log_probability": 0.0, "step": 0, "status": "open"}
        nodes: list[dict[str, Any]] = [{"id": 0, **root, "rank": 0}]
        places: dict[tuple[int, ...], int] = {(): 0}
        for number, step in enumerate(trace, start=1):
            kept, finished = set(step.kept[0].tolist()), set(step.are_finished[0].nonzero().squeeze(1).tolist())
            candidates = zip(step.prefixes[0, :, 1:].tolist(), step.log_probabilities[0].tolist(), strict=True)
            for rank, (prefix, log_probability) in enumerate(candidates):
                if math.isinf(log_probability):
                    break
                node = {
                    "id": len(nodes),
                    "token": prefix[-1],
                    "parent": places[tuple(prefix[:-1])],
                    "symbol": self.predictor.output_symbol(prefix[-1]),
                    "log_probability": log_probability,
                    "step": number,
                    "status": "finished" if rank in finished else "open" if rank in kept else "pruned",
                    "rank": rank,
                }
                places[tuple(prefix)] = len(nodes)
                nodes.append(node)
        return nodes, places


class LanguageModelAnswers(Answers):
    """Answers of a LanguageModelPredictor: a text with its continuation, decoded greedily."""

    predictor: LanguageModelPredictor

    def question(self, text: str) -> str:
        return text[: len(text) // 2]  # which is continued

    def encode(self, text: str) -> tuple[Ids, str]:
        """Return the ids of a text and a warning, which may be empty.

        If the text has more tokens than the network has positions, only its end is used, in half of the positions.
        """
        ids, note = super().encode(text)
        longest: int = self.network.max_length
        if len(ids) <= longest:
            return ids, note
        used = max(1, longest // 2)
        return ids[-used:], "; ".join(filter(None, (note, f"only the last {used} of {len(ids)} tokens are used")))

    def inputs(self, text: str) -> tuple[Tensor, ...]:
        tokens = torch.tensor([self.encode(text)[0]], device=self.predictor.device)
        return tokens[:, :0], tokens

    def answer(self, text: str, prefix: Sequence[int]) -> Answer:
        ids, note = self.encode(text)
        number = min(CONTINUATION, self.network.max_length - len(ids))
        self._check_prefix(prefix, number)
        tokens = torch.tensor([ids], device=self.predictor.device)
        tokens = torch.cat((tokens, self._continued(self.network.decode_step, tokens, number, forcing(prefix))), dim=1)
        symbols = [*map(self.predictor.output_symbol, tokens[0].tolist())]
        inputs, targets = (tokens[:, :0], tokens[:, :-1]), tokens[:, 1:]
        output = self.predictor.tokenizer.decode(tokens[0].tolist())
        is_target = torch.ones_like(targets, dtype=torch.bool)
        forced = TeacherForced(output, inputs, targets, is_target, symbols[:-1], symbols[1:])
        return Answer(forced, symbols[: len(ids)], note, len(ids) - 1, len(prefix), first_step=0)

    def sample(self, text: str, sample_fn: SampleFn, max_tokens: int) -> Sampled:
        ids, _ = self.encode(text)
        tokens = torch.tensor([ids], device=self.predictor.device)
        step, logits = recording(self.network.decode_step)
        given = [self.network(tokens[:, :0], tokens[:, :-1])[0]] if len(ids) > 1 else []
        tokens = torch.cat((tokens, self._continued(step, tokens, max_tokens, sample_fn)), dim=1)[0]
        output = self.predictor.tokenizer.decode(tokens.tolist())
        return Sampled(output, tokens[1:], torch.cat((*given, *logits)), given=len(ids) - 1)

    def _continued(self, step: Step, tokens: Tensor, number: int, sample_fn: SampleFn) -> Tensor:
        """Return the continuation (1, number) of a text, see `continue_text`."""
        return continue_text(self.network.encode, step, tokens, number, self.network.max_length, sample_fn)


class _TextAnswers(Answers):
    """Base class of the answers of predictors that read a text in one pass, without decoding."""

    def inputs(self, text: str) -> tuple[Tensor, ...]:
        return self.answer(text, ()).forced.inputs

    def answer(self, text: str, prefix: Sequence[int]) -> Answer:
        if prefix:
            raise UserError(f"prefix must be empty for a {self.predictor.task_name()}, but is {[*prefix]}")
        _, note = self.encode(text)
        forced = self.predictor.teacher_forced(text)
        return Answer(forced, forced.input_symbols, note, first_step=self._first_step(forced))

    def _first_step(self, forced: TeacherForced) -> int | None:
        return None


class MaskedAnswers(_TextAnswers):
    """Answers of a MaskedLanguageModelPredictor: the tokens at the masks."""

    predictor: MaskedLanguageModelPredictor

    def question(self, text: str) -> str:
        middle = len(text) // 2
        return f"{text[:middle]}{MASK_SYMBOL}{text[middle + 1 :]}"

    def _first_step(self, forced: TeacherForced) -> int | None:
        return int(forced.is_target[0].long().argmax())


class ClassifierAnswers(_TextAnswers):
    """Answers of a ClassifierPredictor: the label."""

    predictor: ClassifierPredictor


TASKS: dict[type[Predictor], type[Answers]] = {
    Seq2SeqPredictor: Seq2SeqAnswers,
    LanguageModelPredictor: LanguageModelAnswers,
    MaskedLanguageModelPredictor: MaskedAnswers,
    ClassifierPredictor: ClassifierAnswers,
}
"""Answers by the class of the predictor."""


def answers_of(predictor: Predictor) -> Answers:
    """Return the answers of a predictor.

    Raises:
        UserError: if its task is not supported.
    """
    for cls, answers in TASKS.items():
        if isinstance(predictor, cls):
            return answers(predictor)
    names = ", ".join(cls.__name__ for cls in TASKS)
    raise UserError(f"the predictor must be one of {names}, but is a {type(predictor).__name__}")


def forcing(prefix: Sequence[int]) -> SampleFn:
    """Return a function that selects the tokens of a prefix, then the most probable tokens."""
    remaining = iter(prefix)

    def sample_fn(logits: Tensor) -> Tensor:
        token = next(remaining, None)
        return greedy(logits) if token is None else torch.full((len(logits),), token, device=logits.device)

    return sample_fn
