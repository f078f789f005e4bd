"""Base class of predictors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from lightning_tfm.errors import UserError
from lightning_tfm.inference.attention_maps import AttentionMap, links
from lightning_tfm.inference.decoding import DecodingOptions
from lightning_tfm.inference.prediction import Alternative, LinePrediction, Output, OutputStep, Score, TeacherForced
from lightning_tfm.networks import Network
from lightning_tfm.networks.network import TextNetwork
from lightning_tfm.tokenization import BOS, EOS, PAD, Ids, Tokenizer, name_symbols, normalize_text

SPECIAL_NAMES = {PAD: "PAD", BOS: "BOS", EOS: "EOS"}
"""Names of the special tokens."""

BATCH_SIZE = 256
"""Maximum number of lines in a batch, or of beams in a beam search."""

ALTERNATIVES = 4
"""Number of alternatives of a step."""

MAX_BATCHED_LENGTH = 1_000
"""Maximum length of a line, in tokens, that is batched with other lines, which are padded to the same length."""

Encoded = TypeVar("Encoded")
Result = TypeVar("Result")


class Predictor(nn.Module, ABC):
    """Base class of predictors, which compute outputs and log probabilities for lines of text with a trained network.

    Args:
        network: the network.
        tokenizer: the tokenizer of the data.

    Attributes:
        longest_source: the number of tokens in the longest training source; None if texts are split into windows.
        shortest_source: the number of tokens in the shortest training source; None if texts are split into windows.
        alignment_head: the layer and the head that agree best with a gold alignment; None if unknown.
        task: the name of the task in model.json and in the explorer; "other" if neither depends on it.
        predictor_arguments: the hyper-parameters of the task that are arguments of the predictor's constructor.
        decoding_options: the fields of DecodingOptions that the task uses.
        gives_scores: whether the task defines a log probability of a line.
        outputs_are_long: whether an output may have many lines.
        excluded_ids: the ids that are never an alternative.
    """

    task: ClassVar[str] = "other"
    predictor_arguments: ClassVar[tuple[str, ...]] = ()
    decoding_options: ClassVar[tuple[str, ...]] = ()
    gives_scores: ClassVar[bool] = False
    outputs_are_long: ClassVar[bool] = False
    excluded_ids: tuple[int, ...] = ()

    def __init__(self, network: Network, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.network = network
        self.tokenizer = tokenizer
        self.longest_source: int | None = None
        self.shortest_source: int | None = None
        self.alignment_head: tuple[str, int] | None = None

    @classmethod
    def task_name(cls) -> str:
        """Return the name of the task, for messages."""
        return cls.__name__.removesuffix("Predictor")

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return next(self.network.parameters()).device

    def predict(
        self,
        lines: Sequence[str],
        options: DecodingOptions = DecodingOptions(),
        generator: torch.Generator | None = None,
        progress: Callable[[int], object] = lambda number: None,
    ) -> list[LinePrediction]:
        """Return the outputs for each line of input, computed in batches of lines of similar length.

        Sampling draws from the generator, by default a new one with the seed of the options. The function `progress` is
        called after each batch with the number of its lines.

        Raises:
            UserError: see `check_options`.
        """
        self.check_options(options)
        source_of_randomness = generator or torch.Generator(self.device).manual_seed(options.seed)
        encoded, errors = _encode(lines, self.encode_line)
        sources = {number: ids for number, (ids, _) in encoded.items()}

        def compute(batch: list[Ids]) -> list[list[Output]]:
            return self.predict_ids(batch, options, source_of_randomness)

        with self._evaluating():
            results = _in_batches(sources, len, compute, max(1, BATCH_SIZE // options.beam_size), progress)
            results = {number: self._copied(lines[number], outputs) for number, outputs in results.items()}
            if options.alignments:
                results = {number: self._aligned(lines[number], outputs) for number, outputs in results.items()}
        return [
            LinePrediction(results[n], encoded[n][1]) if n in results else LinePrediction(None, errors[n])
            for n in range(len(lines))
        ]

    def check_options(self, options: DecodingOptions) -> None:
        """Raise UserError if an option is set that the task does not use, or exceeds a limit of the model."""
        options.check_used(self.decoding_options, self.task_name())

    def score(
        self,
        lines: Sequence[str],
        progress: Callable[[int], object] = lambda number: None,
        with_steps: bool = False,
    ) -> list[Score]:
        """Return the log probability of each line: of a target given its source, or of a text.

        Lines are as in the training data: a source and its target separated by a tab, or a text. For `progress`, see
        `predict`. With `with_steps`, scores have steps.

        Raises:
            UserError: if the task does not define a log probability of a line.
        """
        if not self.gives_scores:
            raise UserError(f"the task of the model must score lines, but {self.task_name()} does not")
        encoded, errors = _encode(lines, self.encode_pair)
        pairs = {number: pair for number, (*pair, _) in encoded.items()}

        def compute(batch: list[list[Ids]]) -> list[Score]:
            return self.score_ids([(source, target) for source, target in batch], with_steps)

        with self._evaluating():
            results = _in_batches(pairs, lambda pair: sum(map(len, pair)), compute, BATCH_SIZE, progress)
        return [
            results[n]._replace(note=encoded[n][2]) if n in results else Score(None, 0, errors[n])
            for n in range(len(lines))
        ]

    @abstractmethod
    def encode_line(self, line: str) -> tuple[Ids, str]:
        """Return the ids of a line of input and a warning, which may be empty; raise UserError if it has no output."""

    @abstractmethod
    def predict_ids(
        self, sources: list[Ids], options: DecodingOptions, generator: torch.Generator
    ) -> list[list[Output]]:
        """Return the outputs for each line of a batch, the best first."""

    def copy_unknown(self, source: str, output: str) -> str:
        """Return an output with symbols of its source in place of unknown ones; by default, the output itself."""
        return output

    def encode_pair(self, line: str) -> tuple[Ids, Ids, str]:
        """Return the ids of a source, which may be empty, those of its target, and a warning, which may be empty.

        Raises:
            UserError: if the line cannot be scored.
        """
        raise NotImplementedError

    def score_ids(self, pairs: list[tuple[Ids, Ids]], with_steps: bool) -> list[Score]:
        """Return the log probability of each target given its source, for a batch of pairs; with steps if requested."""
        raise NotImplementedError

    def most_probable(self, log_probabilities: Tensor, number: int) -> list[list[Alternative]]:
        """Return up to `number` most probable ids of each step, except the excluded ones and those of probability 0.

        Args:
            log_probabilities: the log probabilities (T, V).
            number: the number of ids.
        """
        excluded = torch.tensor(self.excluded_ids, dtype=torch.long, device=log_probabilities.device)
        values = log_probabilities.index_fill(1, excluded, -torch.inf)
        best, ids = values.topk(min(number, values.size(1)))
        return [
            [Alternative(id, self.output_symbol(id), math.exp(value)) for id, value in step if value > -math.inf]
            for step in map(zip, ids.tolist(), best.tolist())
        ]

    def steps(self, logits: Tensor, ids: Tensor) -> list[OutputStep]:
        """Return the steps of an output, for logits (T, V) and the chosen ids (T)."""
        chosen = ids.unsqueeze(1)
        log_probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        values = log_probabilities.gather(1, chosen).squeeze(1)
        others = self.most_probable(log_probabilities.scatter(1, chosen, -torch.inf), ALTERNATIVES)
        return [
            OutputStep(id, self.output_symbol(id), value, alternatives)
            for id, value, alternatives in zip(ids.tolist(), values.tolist(), others, strict=True)
        ]

    def align(self, source: str, target: str) -> AttentionMap:
        """Return attention weights over the source and EOS, as a single head, which align a target with its source.

        Raises:
            UserError: if the task has no pairs of a source and a target, as by default.
        """
        raise UserError(f"the task of the model must align lines, but {self.task_name()} does not")

    def teacher_forced(self, line: str) -> TeacherForced:
        """Return a line and the output of the model, for teacher forcing.

        Raises:
            UserError: if the line has no output.
        """
        raise UserError(f"the task of the model must have one output for a line, but {self.task_name()} does not")

    def output_symbol(self, id: int) -> str:
        """Return the symbol of an index of the logits; by default, of a token, with the names of special tokens."""
        return SPECIAL_NAMES.get(id) or self.tokenizer.decode([id])

    def output_text(self, line: str) -> str:
        """Return the output for a line; raise UserError if there is none."""
        (prediction,) = self.predict([line])
        if prediction.text is None:
            raise UserError(f"a text must have an output, but {line!r} has none: {prediction.note}")
        return prediction.text

    def example_inputs(self, rows: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw random arguments of the network's `forward`, by name, for export; by default, of a TextNetwork."""
        return {"text": self.network.random_ids(rows, length, generator, self.tokenizer.ids_per_token)}

    def max_input_lengths(self) -> dict[str, int | None]:
        """Return the maximum length of each argument of `forward`; None if unlimited.

        Arguments that are always empty are omitted. The default is that of a TextNetwork.
        """
        return {"text": cast(TextNetwork, self.network).max_length}

    def attention(self, content: Mapping[str, Any]) -> list[AttentionMap]:
        """Return the attention maps of all layers for the content of an AttentionExample or a Prediction, if any.

        The weights are those of the prediction if there is one, otherwise of the target. The gold alignment, which is
        that of the target, is kept if both are equal.

        Raises:
            UserError: if a text cannot be encoded.
        """
        return []

    def example(self, line: str, output: str) -> dict[str, Any]:
        """Return a line and its output as the content of an AttentionExample."""
        return {"source": clean_line(line), "target": output, "prediction": output, "alignment": None}

    def given_example(self, line: str) -> dict[str, Any]:
        """Return a line that can be scored as the content of an AttentionExample; by default, a text."""
        return self.example(line, clean_line(line))

    def tokenize(self, line: str) -> Ids:
        """Return the ids of a line of input; raise UserError if it has no tokens, or one that cannot be encoded."""
        if not line:
            raise UserError("the text is empty")
        ids = self.tokenizer.encode(line)
        if not ids:
            raise UserError("it has no tokens")
        return ids

    def check_columns(self, source: str) -> str:
        """Return a warning about the tab-separated columns of a source, which may be empty.

        A source has too many if it is read as one text, and too few without the features of the training data.

        Raises:
            UserError: if it has more columns than in the training data, like a line of a table that also holds the
                targets, or fewer sources.
        """
        expected, number = self.tokenizer.num_columns, source.count("\t") + 1
        sources = self.tokenizer.num_sources
        if expected is not None and sources > 1 and not sources <= number <= expected:
            features = " and their features" if expected > sources else ""
            raise UserError(
                f"it must hold {expected} columns, separated by tabs, of {sources} sources{features}, but has {number}"
            )
        if expected is None and number > 1:
            return (
                f"it has {number} columns, separated by tabs, read as one text; select the column of the source, for "
                "example with cut -f1"
            )
        if expected is not None and number > expected:
            columns = "the column of the source" if expected == 1 else "the columns of the source and its features"
            raise UserError(
                f"it must hold only {columns}, but has {number} columns, separated by tabs; "
                f"select {'it' if expected == 1 else 'them'}, as with cut -f{'1' if expected == 1 else '1,2'}"
            )
        if expected is not None and number < expected:
            _, space, last = source.rpartition(" ")
            if space and not self.tokenizer.unknown_symbols("\t" * sources + last):
                return f"it has no features, which follow a tab; type a tab before {last!r} in place of the space"
            return "it has no features, unlike the training data; add a tab and the features"
        return ""

    def input_note(self, ids: Ids, texts: Sequence[str], *others: str) -> str:
        """Return the warnings about a line of input: others, those of unknown tokens, and that of an unusual length.

        Args:
            ids: the ids of the line.
            texts: the parts of the line, without masks.
            others: further warnings, which may be empty.
        """
        notes, number = [*filter(None, others)], len(ids)
        if unknown := [symbol for text in texts for symbol in self.tokenizer.unknown_symbols(text)]:
            notes.append(f"{len(unknown)} of {number} tokens are not in the vocabulary: {name_symbols(unknown)}")
        if self.longest_source is not None and number > self.longest_source:
            notes.append(f"it has {number} tokens, more than any training text ({self.longest_source})")
        if self.shortest_source is not None and number < self.shortest_source:
            notes.append(f"it has {number} tokens, fewer than any training text ({self.shortest_source})")
        return "; ".join(notes)

    def _copied(self, line: str, outputs: list[Output]) -> list[Output]:
        """Return the outputs for a line with the symbols that they copy from it, see `copy_unknown`."""
        source = clean_line(line)
        return [output._replace(text=self.copy_unknown(source, output.text)) for output in outputs]

    def _aligned(self, line: str, outputs: list[Output]) -> list[Output]:
        """Return the outputs for a line with their alignments."""
        source = clean_line(line)
        words = self.tokenizer.word_indices
        return [
            output._replace(alignment=links(self.align(source, output.text), words(source), words(output.text)))
            for output in outputs
        ]

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Switch to evaluation mode and disable gradients within the context."""
        was_training = self.training
        self.eval()
        try:
            with torch.inference_mode():
                yield
        finally:
            self.train(was_training)


def valid_line(line: str) -> str:
    """Normalize a line like the training data; raise UserError if it is not valid UTF-8."""
    if any("\ud800" <= character <= "\udfff" for character in line):
        raise UserError("it is not valid UTF-8; save the input in UTF-8, as with iconv -t UTF-8")
    return normalize_text(line)


def clean_line(line: str) -> str:
    """Clean a line like the training data: normalize it, and strip whitespace around its fields."""
    return strip_fields(normalize_text(line))


def strip_fields(line: str) -> str:
    """Strip whitespace around the tab-separated fields of a line, as in the training data."""
    return "\t".join(field.strip() for field in line.split("\t")).rstrip("\t")


def _encode(lines: Sequence[str], encode: Callable[[str], Encoded]) -> tuple[dict[int, Encoded], dict[int, str]]:
    """Encode lines; return the ids of valid lines and the errors of the others, by index."""
    encoded, errors = {}, {}
    for number, line in enumerate(lines):
        try:
            encoded[number] = encode(valid_line(line))
        except UserError as error:
            errors[number] = str(error)
    return encoded, errors


def _in_batches(
    items: dict[int, Encoded],
    length: Callable[[Encoded], int],
    compute: Callable[[list[Encoded]], list[Result]],
    size: int,
    progress: Callable[[int], object],
) -> dict[int, Result]:
    """Return the result for each item, computed in batches of at most `size` items of similar length.

    The function progress is called after each batch with the number of its items.
    """
    order = sorted(items, key=lambda number: length(items[number]))
    batched = [number for number in order if length(items[number]) <= MAX_BATCHED_LENGTH]
    groups = [batched[start : start + size] for start in range(0, len(batched), size)]
    groups += [[number] for number in order[len(batched) :]]
    results: dict[int, Result] = {}
    for group in groups:
        results |= dict(zip(group, compute([items[number] for number in group]), strict=True))
        progress(len(group))
    return results
