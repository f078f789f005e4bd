"""Explorer of a network, which answers questions by plain values that JSON can represent.

Shapes: heads H, answer tokens T, source tokens S, ids V.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from inspect import signature
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_type_hints

import torch
from torch import Tensor

from lightning_tfm.data import TaskDataModule
from lightning_tfm.errors import UserError, nearest
from lightning_tfm.explore.answers import CONTINUATION, Answer, answers_of
from lightning_tfm.explore.changes import ChangedNetwork, Changes
from lightning_tfm.explore.description import describe_model
from lightning_tfm.explore.neighbors import By, Neighbors, draw_rows, example_texts
from lightning_tfm.inference import Alternative, Predictor
from lightning_tfm.inference.decoding import DecodingOptions
from lightning_tfm.inference.predictor import ALTERNATIVES
from lightning_tfm.insight import Sample, components, integrated_gradients, occlusion, outcome
from lightning_tfm.insight.sample import logits_of
from lightning_tfm.insight.texts import as_sample, patch_text
from lightning_tfm.layers import attention_maps
from lightning_tfm.networks import Ensemble
from lightning_tfm.runs.inspection import NetworkRecord

Json = dict[str, Any]
"""Result of a question."""

QUESTIONS = ("answer", "beam", "attributions", "patch", "neighbors", "worst", "sample")
"""Names of the questions, which are methods of `Explorer`."""

TEST_EXAMPLES = 200
"""Number of test examples among which the one with the largest loss is found."""

LIMITS = {
    "alternatives": ALTERNATIVES + 1,
    "continuation": CONTINUATION,
    "beam_size": 50,
    "number": 100,
    "max_tokens": 1_000,
}
"""Maximum numbers of symbols of a step, tokens that continue a text, beams, neighbors and sampled tokens."""

MAX_STEPS = 200
"""Maximum number of steps of integrated gradients, to limit the computation time."""


class Explorer:
    """Questions about the answers of a model.

    Args:
        predictor: the model, which is set to evaluation mode.
        name: its name.
        data: a function that returns its data module after `setup`; without it, questions about data are excluded.
        path: the path of its checkpoint, whose run may contain results of `inspect`; None if there is no checkpoint.
        settings: the arguments of `test` with which the data are loaded, which the Python lines repeat.
        inspection: the results of `inspect_network`; None for those in the run of the checkpoint, if any.

    Raises:
        UserError: if the network is an ensemble, whose parts belong to several networks.
    """

    def __init__(
        self,
        predictor: Predictor,
        name: str = "model",
        data: Callable[[], TaskDataModule] | None = None,
        path: str | Path | None = None,
        settings: Sequence[str] = (),
        inspection: NetworkRecord | None = None,
    ) -> None:
        if isinstance(predictor.network, Ensemble):
            raise UserError("the model must have one network, but is an ensemble; explore its members")
        self.predictor, self.network = predictor.eval(), predictor.network
        self.name, self.path = name, None if path is None else Path(path).resolve()
        self.settings, self.inspection = settings, inspection
        self.answers = answers_of(predictor)
        self._load_data = data

    def describe(self) -> Json:
        """Return the description of the model: its task, parts and questions, and the results of `inspect`, if any."""
        questions = [question for question in QUESTIONS if question not in self.excluded]
        description = describe_model(self.answers, self.path, self.settings, self.inspection)
        return {
            "name": self.name,
            **description,
            "questions": questions,
            "excluded": self.excluded,
            "limits": {**LIMITS},
        }

    @cached_property
    def excluded(self) -> dict[str, str]:
        """Return the unsupported questions, each with the reason."""
        task, kinds = self.predictor.task, {component.kind for component in components(self.network)}
        reasons = {
            "beam": task != "seq2seq" and "needs a network that decodes a target",
            "attributions": "embedding" not in kinds and "needs a network with an embedding",
            "patch": kinds.isdisjoint({"layer", "states"}) and "needs a network with layers or an encoder",
            "neighbors": self._load_data is None and "needs the training data of the checkpoint",
            "worst": self._load_data is None and "needs the test data of the checkpoint",
            "sample": task not in ("seq2seq", "language_model") and "needs a network that decodes a text",
        }
        if task == "masked_language_model":
            reasons["worst"] = "needs test examples with a target"
        return {question: reason for question, reason in reasons.items() if reason}

    def _check(self, question: str) -> None:
        if question in self.excluded:
            raise UserError(f"{question} {self.excluded[question]}")

    # Answers

    @torch.no_grad()
    def answer(
        self, text: str, prefix: Sequence[int] = (), changes: Changes = Changes(), against: str | None = None
    ) -> Json:
        """Return the answer to a text, with its most probable alternatives and the attention weights.

        Args:
            text: the text.
            prefix: the ids of the first tokens of the answer, or of the continuation, which are forced.
            changes: the changes of the network.
            against: the text whose states are patched.

        Raises:
            UserError: if a text has no answer, or the network has no such part.
        """
        with self._changed(text, changes, against).running():
            answer = self.answers.answer(text, prefix)
            with attention_maps(self.network) as maps:
                logits = logits_of(self.network, answer.forced.inputs)
        is_target = answer.forced.is_target
        steps = [*self._steps(logits[is_target], answer.forced.targets[is_target])]
        for number, step in enumerate(steps):
            step["forced"] = number < answer.given + answer.prefix
            step["given"] = number < answer.given
        return {
            "text": text,
            "note": answer.note,
            "source": answer.source,
            "output": answer.forced.output,
            "log_probability": sum(step.pop("log_probability") for step in steps),
            "steps": steps,
            "attention": [self._map(answer, layer, weights[0]) for layer, weights in maps.items()],
        }

    def _changed(self, text: str, changes: Changes, against: str | None = None) -> ChangedNetwork:
        """Return the network with changes; the patched states are those for the other text, with the other changes."""
        others = ChangedNetwork(self.network, replace(changes, patched=()), {})
        if not changes.patched:
            return others
        if against is None:
            raise UserError("against is missing; pass the text whose states to patch in")
        length, other_length = (len(self.answers.encode(each)[0]) for each in (text, against))
        if length != other_length:
            raise UserError(
                f"against must have as many tokens as the text, {length}, but has {other_length}; try another text"
            )
        with others.running() as touch, torch.no_grad():
            inputs = self.answers.answer(against, ()).forced.inputs
            calls = {patched.layer: touch.record(patched.layer) for patched in changes.patched}
            self.network(*inputs)
        states = {layer: torch.cat(outputs, dim=1) for layer, outputs in calls.items()}
        return ChangedNetwork(self.network, changes, states)

    def _steps(self, logits: Tensor, ids: Tensor) -> Iterator[Json]:
        """Yield each step, with its alternatives, for logits (T, V) and the chosen ids (T)."""
        for step in self.predictor.steps(logits, ids):
            chosen = Alternative(step.id, step.symbol, step.probability)
            alternatives = sorted([chosen, *step.alternatives], key=attrgetter("probability"), reverse=True)
            yield {
                **chosen._asdict(),
                "log_probability": step.log_probability,
                "alternatives": [each._asdict() for each in alternatives],
            }

    def _map(self, answer: Answer, layer: str, weights: Tensor) -> Json:
        """Return the attention weights (H, T, S) of a layer."""
        side = self.network.side(layer)
        queries, keys, first_step = answer.axes(side)
        return {
            "layer": layer,
            "side": side,
            "queries": queries,
            "keys": keys,
            "first_step": first_step,
            "weights": weights.double().round(decimals=4).tolist(),
        }

    @torch.no_grad()
    def beam(self, text: str, beam_size: int = 5, changes: Changes = Changes(), against: str | None = None) -> Json:
        """Return the tree of the candidates of a beam search, and its outputs, the best first.

        Args:
            text: the text.
            beam_size: the number of beams.
            changes: the changes of the network.
            against: the text whose states are patched.

        Raises:
            UserError: if a text has no answer, or the network has no such part.
        """
        self._check("beam")
        _check_range("beam_size", beam_size, 5)
        with self._changed(text, changes, against).running():
            return self.answers.beam(text, beam_size)

    # Explanations

    def attributions(
        self,
        text: str,
        prefix: Sequence[int] = (),
        method: Literal["occlusion", "integrated_gradients"] = "occlusion",
        changes: Changes = Changes(),
        against: str | None = None,
        step: int | None = None,
    ) -> Json:
        """Return the contribution of each input symbol to the log probability of each step (T, S), in nats.

        The error is the maximum difference between the sum of the integrated gradients of a step and its exact value;
        None for occlusion.

        Args:
            text: the text.
            prefix: the ids of the first tokens of the answer, see `answer`.
            method: the method, see `occlusion` and `integrated_gradients` of `lightning_tfm.insight`.
            changes: the changes of the network.
            against: the text whose states are patched.
            step: the index of a single step, which takes less time; None for all steps.

        Raises:
            UserError: if a text has no answer, or the network has no such part or step.
        """
        self._check("attributions")
        with self._changed(text, changes, against).running():
            with torch.no_grad():
                answer = self.answers.answer(text, prefix)
            sample, symbols = as_sample(answer.forced), answer.symbols
            if step is not None:
                position, symbols = answer.position(step), [symbols[step]]
                sample = replace(sample, is_target=torch.zeros_like(sample.is_target))
                sample.is_target[0, position] = True
            if method == "occlusion":
                values, error = occlusion(self.network, sample), None
            else:
                values, errors = integrated_gradients(self.network, sample, MAX_STEPS)
                error = errors.abs().max().item()
        return {
            "inputs": answer.forced.input_symbols,
            "targets": symbols,
            "values": values[sample.is_target[0]].tolist(),
            "unit": "nats",
            "method": method,
            "error": error,
        }

    def patch(self, text: str, against: str) -> Json:
        """Return the effect of patching each state of another text, see `patching` of `lightning_tfm.insight`.

        Args:
            text: the text.
            against: the other text, with as many tokens.

        Raises:
            UserError: if a text has no answer, or the texts or their outputs do not fit, see `patching`.
        """
        self._check("patch")
        for each in (text, against):
            self.answers.encode(each)
        forced, other = map(self.predictor.teacher_forced, (text, against))
        # The source is that of the text, and the target that of the other.
        S = forced.inputs[0].size(1) or len(forced.input_symbols)
        symbols = {"input": forced.input_symbols[:S] + other.input_symbols[S:], "decoder": [*other.decoder_symbols]}
        layers = [
            {**each, "symbols": symbols[each["side"]]}
            for each in patch_text(self.network, forced, other)
            if len(each["effects"]) == len(symbols[each["side"]])  # unlike the one state of a recurrent decoder's start
        ]
        return {"layers": layers, "outputs": [forced.output, other.output]}

    # Data

    @cached_property
    def _data(self) -> TaskDataModule:
        assert self._load_data is not None
        return self._load_data()

    @cached_property
    def _neighbors(self) -> Neighbors:
        return Neighbors(self.predictor, self._data)

    @torch.no_grad()
    def neighbors(
        self, text: str, by: By = "source", step: int = 0, prefix: Sequence[int] = (), number: int = 10
    ) -> Json:
        """Return the training examples whose states are the most similar to those of a text, in a random sample.

        Args:
            text: the text.
            by: "source" for the mean state of the source, or "decoder" for the features at a step.
            step: the index of the step.
            prefix: the ids of the first tokens of the answer, see `answer`.
            number: the number of examples.

        Raises:
            UserError: if the text has no answer, or there are no data.
        """
        self._check("neighbors")
        _check_range("number", number, 10)
        if by == "source":
            examples = self._neighbors.nearest(self.answers.inputs(text), by, 0, number)
        else:
            answer = self.answers.answer(text, prefix)
            examples = self._neighbors.nearest(answer.forced.inputs, by, answer.position(step), number)
        searched = len(self._neighbors.rows)
        return {"by": by, "examples": [example._asdict() for example in examples], "searched": searched}

    def worst(self) -> Json:
        """Return the test example with the largest loss in a random sample of TEST_EXAMPLES.

        Raises:
            UserError: if there are no data.
        """
        self._check("worst")
        dataset: Any = self._data.datasets[self._data.test_sets[0]]
        rows = draw_rows(dataset, TEST_EXAMPLES)
        sample = Sample.of(dataset[rows], self.network).to(self.predictor.device)
        nll = outcome(self.network, sample).nll.sum(1)
        source, target = example_texts(dataset, int(rows[int(nll.argmax())]), self.predictor)
        prediction = self.predictor.predict([source])[0].text if target else ""
        return {
            "source": source,
            "target": target,
            "prediction": prediction,
            "nll": nll.max().item(),
            "examples": len(rows),
        }

    # Samples

    @torch.no_grad()
    def sample(
        self,
        text: str,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        max_tokens: int = 100,
    ) -> Json:
        """Return a sampled output, or a sampled continuation of a text, with the surprise of each token in bits.

        Args:
            text: the text.
            temperature: the temperature; 0 for greedy decoding.
            top_k: sample only among the k most probable tokens.
            top_p: sample only among the most probable tokens with this total probability.
            seed: the seed.
            max_tokens: the maximum number of sampled tokens.

        Raises:
            UserError: if the text has no answer, or an option is out of range.
        """
        self._check("sample")
        _check_range("max_tokens", max_tokens, 100)
        options = DecodingOptions(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        sample_fn = options.sample_fn(torch.Generator(self.predictor.device).manual_seed(seed))
        sampled = self.answers.sample(text, sample_fn, max_tokens)
        log_probabilities = sampled.logits.float().log_softmax(-1)
        chosen = log_probabilities.gather(1, sampled.tokens.unsqueeze(1)).squeeze(1)
        steps = [
            {
                "id": id,
                "symbol": self.predictor.output_symbol(id),
                "probability": math.exp(value),
                "surprise": -value / math.log(2),
            }
            for id, value in zip(sampled.tokens.tolist(), chosen.tolist(), strict=True)
        ]
        return {"text": sampled.text, "steps": steps, "given": sampled.given}


def _check_range(name: str, value: int, example: int) -> None:
    """Raise UserError if an argument is not from 1 to its limit; `example` is a valid value."""
    if not 1 <= value <= LIMITS[name]:
        raise UserError(f"{name} must be from 1 to {LIMITS[name]}, but is {value}; try {example}")


def describe(explorers: Sequence[Explorer]) -> Json:
    """Return the descriptions of the explorers' models, and the version of the package."""
    return {"models": [explorer.describe() for explorer in explorers], "version": version("lightning_tfm")}


def ask(explorer: Explorer, question: str, arguments: Mapping[str, Any]) -> Json:
    """Answer a question with JSON values as arguments.

    Args:
        explorer: the explorer.
        question: the name of the question, one of `QUESTIONS`.
        arguments: the arguments of the method by name.

    Raises:
        UserError: if there is no such question, or an argument is missing, unknown or wrong.
    """
    if question not in QUESTIONS:
        raise UserError(f"question must be one of {', '.join(QUESTIONS)}, but is {question!r}")
    method = getattr(explorer, question)
    parameters, kinds = signature(method).parameters, get_type_hints(method)
    for name in arguments:
        if name not in parameters:
            raise UserError(f"{question} has no argument {name!r}{nearest(name, parameters)}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in arguments:
            raise UserError(f"{question} needs the argument {name}")
    return method(**{name: _parse(value, kinds[name], name) for name, value in arguments.items()})


def _parse(value: Any, kind: Any, name: str) -> Any:
    """Convert a JSON value to a type; raise UserError if it does not fit."""
    from pydantic import TypeAdapter, ValidationError  # slow to import

    try:
        return TypeAdapter(kind).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        first, *_ = error.errors()
        place = ".".join(map(str, (name, *first["loc"])))
        problem = first["msg"][:1].lower() + first["msg"][1:]
        raise UserError(f"{place} is wrong: {problem}, but is {str(first['input'])!r:.60}") from None
