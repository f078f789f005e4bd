"""Attributions of an output to layers, components, positions and symbols.

Shapes: batch B, tokens T, width D, ids V, positions P.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_tfm.errors import UserError
from lightning_tfm.insight.interventions import Component, Part, components, interventions
from lightning_tfm.insight.sample import BATCH_TOKENS, Sample, log_probabilities, logits_of, tokens_of
from lightning_tfm.layers import AddNorm, Attention, FeedForward, Norm
from lightning_tfm.networks import Network
from lightning_tfm.networks.encoder_classifier import drop_words

STEPS, MAX_STEPS = 50, 3_200
"""Number of steps of integrated gradients, which is doubled, up to a maximum, until they are complete."""

COMPLETE = 0.01
"""Maximum error of complete integrated gradients, relative to the difference that they sum to, or in nats."""

LEAST_DIFFERENCE = 0.001
"""Minimum difference between the log probabilities of an output for two inputs, in nats, for patching."""

EMBEDDING, BIAS, OTHER = Part("embedding"), Part("bias"), Part("other")
"""Contributions to the residual stream that are not those of a head or a feed-forward network."""


def stream_layers(network: Network) -> list[Component]:
    """Return the layers of the residual stream from which the output is computed, in order; empty without layers."""
    layers = [component for component in components(network) if component.kind == "layer"]
    return [layer for layer in layers if _stack(layer.name) == _stack(layers[-1].name)]


def _stack(name: str) -> str:
    return name.rpartition(".")[0]


@torch.no_grad()
def logit_lens(network: Network, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Return the logits (B, T, V) that the network would compute if it ended after each layer (nostalgebraist 2020).

    The residual stream after the layer replaces that after the last layer. A network without layers has none, nor has
    a pointer-generator, which copies by the attention of its last layer.
    """
    layers = stream_layers(network) if getattr(network, "pointer", None) is None else []
    with interventions(network) as touch:
        streams = {layer.name: touch.record(layer.name) for layer in layers}
        network(*inputs)
    lens = {}
    for name, (stream,) in streams.items():
        with interventions(network) as touch:
            touch.replace(layers[-1].name, stream)
            lens[name] = logits_of(network, inputs)
    return lens


@torch.no_grad()
def direct_logit_attribution(network: Network, sample: Sample) -> dict[Part, Tensor]:
    """Return the contributions (B, T) of all heads, feed-forward networks, the embedding and the biases to the logits.

    The contributions sum to the logit. The scale of each norm is that of the whole residual stream, so that the norm
    is linear (Elhage et al. 2021).

    Raises:
        UserError: if the logits are not a linear function of a residual stream, as in a recurrent network or with a cap
            of the logits.
    """
    constant = getattr(network, "special_bias", None)  # of ids that a text does not have
    with _recorded(network) as stream:
        logits = network(*sample.inputs)
    expected = stream.logits if constant is None or stream.logits is None else stream.logits + constant
    if not stream.parts or expected is None or not logits.equal(expected):
        raise UserError(
            "direct logit attribution needs a network whose logits are a linear function of the residual stream, "
            f"unlike those of {type(network).__name__} with its settings; try ablations"
        )
    directions = network.head.weight[sample.targets]  # (B, T, D)
    attribution = {part: (value * directions).sum(-1) for part, value in stream.parts.items()}
    for bias in (network.head.bias, constant):
        if bias is not None:
            attribution[BIAS] = attribution[BIAS] + bias[sample.targets]
    return attribution


class _Stream:
    """Decomposition of the residual stream into the contributions of parts (B, T, D), which sum to it."""

    def __init__(self) -> None:
        self.parts: dict[Part, Tensor] = {}
        self.total: Tensor | None = None
        self.updates: dict[int, tuple[Tensor, dict[Part, Tensor]]] = {}  # of sub-layers, by the id of their output
        self.logits: Tensor | None = None

    def add(self, layer: AddNorm, x: Tensor, update: Tensor, output: Tensor) -> None:
        """Add the contributions of a sub-layer to those of x; x begins another stream unless it continues this one."""
        if not self._continues(x):
            self.parts = {EMBEDDING: x, BIAS: torch.zeros_like(x)}
        _, parts = self.updates.get(id(update), (None, {OTHER: update}))
        for part, value in parts.items():
            self.parts[part] = self.parts.get(part, 0) + value
        self.total = x + update
        if not layer.is_pre:
            self.normalize(layer.norm, self.total, output)

    def normalize(self, norm: Norm, x: Tensor, output: Tensor) -> None:
        """Apply a norm with the scale of x (B, T, D) to the contributions."""
        if not self._continues(x):
            return

        def centered(value: Tensor) -> Tensor:  # by layer norm only
            return value - value.mean(-1, keepdim=True) if isinstance(norm, nn.LayerNorm) else value

        eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps  # the default of torch.nn.RMSNorm
        scale = (centered(x).square().mean(-1, keepdim=True) + eps).rsqrt() * norm.weight
        for part, value in self.parts.items():
            self.parts[part] = centered(value[:, -x.size(1) :]) * scale
        if isinstance(norm, nn.LayerNorm) and norm.bias is not None:
            self.parts[BIAS] = self.parts[BIAS] + norm.bias
        self.total = output

    def end(self, features: Tensor, logits: Tensor) -> None:
        """Keep the contributions to the input of the output layer; none if it is not the stream."""
        self.logits = logits
        if not self._continues(features):
            self.parts = {}
        self.parts = {part: value[:, -features.size(1) :] for part, value in self.parts.items()}

    def _continues(self, x: Tensor) -> bool:
        """Return whether x are the last tokens of the stream."""
        total = self.total
        if total is None or x.dim() != total.dim() or x.size(1) > total.size(1):
            return False
        return torch.equal(total[:, -x.size(1) :], x)


@contextmanager
def _recorded(network: Network) -> Iterator[_Stream]:
    """Decompose the residual stream of a network that runs within the context."""
    stream, handles = _Stream(), []
    inner = {module.norm for module in network.modules() if isinstance(module, AddNorm)}

    def projected(name: str, num_heads: int, projection: nn.Linear, x: Tensor, update: Tensor) -> None:
        columns = zip(x.chunk(num_heads, -1), projection.weight.chunk(num_heads, 1), strict=True)
        parts = {Part(name, head): F.linear(context, weight) for head, (context, weight) in enumerate(columns)}
        if projection.bias is not None:
            parts[BIAS] = projection.bias.expand_as(update)
        stream.updates[id(update)] = update, parts

    def hook_for(name: str, module: nn.Module) -> Any:
        if isinstance(module, Attention) and hasattr(module, "out_proj"):
            return module.out_proj, lambda layer, args, out: projected(name, module.num_heads, layer, args[0], out)
        if isinstance(module, FeedForward):
            return module, lambda _, __, out: stream.updates.update({id(out): (out, {Part(name): out})})
        if isinstance(module, AddNorm):
            return module, lambda layer, args, out: stream.add(layer, args[0], args[1], out)
        if isinstance(module, Norm) and module not in inner:
            return module, lambda layer, args, out: stream.normalize(layer, args[0], out)
        if module is network.head:
            return module, lambda _, args, out: stream.end(args[0], out)
        return None

    for name, module in network.named_modules():
        if hooked := hook_for(name, module):
            handles.append(hooked[0].register_forward_hook(hooked[1]))
    try:
        yield stream
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def patching(network: Network, inputs: tuple[Tensor, ...], other: Sample) -> dict[str, Tensor]:
    """Return the effects of patching the states of another example, by layer and position (P).

    The output of a layer, or of a recurrent encoder, at one position is replaced by that for the other example (Meng et
    al. 2022). The value is the share of the difference between the log probabilities of the other's targets that this
    restores: 0 if nothing changes, and 1 if the probability is that of the other example.

    Args:
        network: the network, in evaluation mode.
        inputs: the arguments of the network's `forward` for one example, (1, ...) each; to compare two sources, with
            the target of the other example.
        other: the other example.

    Raises:
        UserError: if the inputs have different numbers of tokens, equal tokens or equal outputs.
    """
    if all(ids.equal(others) for ids, others in zip(inputs, other.inputs, strict=True)):
        raise UserError("both inputs must differ, but have equal tokens; try another input")
    for ids, others in zip(inputs, other.inputs, strict=True):
        if ids.shape != others.shape:
            raise UserError(
                f"both inputs must have the same number of tokens, but have {ids.size(1)} and {others.size(1)}; "
                "try another input of the same length"
            )
    with interventions(network) as touch:
        names = [component.name for component in components(network) if component.kind in ("layer", "states")]
        outputs = {name: touch.record(name) for name in names}
        goal = _log_probability(network, other)
    start = _log_probability(network, replace(other, inputs=inputs))
    if (goal - start).abs() < LEAST_DIFFERENCE:
        raise UserError("the inputs must have different outputs, but they have equal ones; try another input")
    effects = {}
    for name, calls in outputs.items():
        (output,) = calls
        P = output.size(1)
        is_patched = torch.eye(P, dtype=torch.bool, device=output.device).unsqueeze(-1)  # (P, P, 1)
        patched = []
        for mask in is_patched.split(max(1, BATCH_TOKENS // sum(ids.size(1) for ids in inputs))):
            batch = Sample(*(repeat(ids, len(mask)) for ids in (inputs, other.targets, other.is_target)))
            with interventions(network) as touch:
                touch.edit(name, lambda x, mask=mask, y=output: torch.where(mask, y, x))  # type: ignore[misc]
                patched.append(_log_probability(network, batch))
        effects[name] = (torch.cat(patched) - start) / (goal - start)
    return effects


def repeat(ids: Any, number: int) -> Any:
    """Return the ids (1, ...), or a tuple of such ids, repeated along the batch dimension."""
    return tuple(repeat(part, number) for part in ids) if isinstance(ids, tuple) else ids.expand(number, *ids.shape[1:])


def _log_probability(network: Network, sample: Sample) -> Tensor:
    """Return the log probability of all targets of each example (B)."""
    return log_probabilities(logits_of(network, sample.inputs), sample).sum(1)


class _Embedded:
    """The log probabilities of the targets of one example, as a function of the embeddings of its input (S, D).

    The input is the source, or the text, or source and target in one sequence.
    """

    def __init__(self, network: Network, sample: Sample) -> None:
        self.network, self.sample = network, sample
        self.name = "source_embedding" if hasattr(network, "source_embedding") else "embedding"
        length = tokens_of(network, "encoder", sample.inputs).size(1)
        with interventions(network) as touch, torch.no_grad():
            outputs = touch.record(self.name)
            network(*sample.inputs)
        if len(outputs) > 1:
            raise UserError(
                f"attributions need separate embeddings of source and target, but {type(network).__name__} shares its "
                "embedding; name them source_embedding and target_embedding"
            )
        self.embeddings = outputs[0].reshape(length, -1)

    def __call__(self, embeddings: Tensor, occluded: Tensor | None = None) -> Tensor:
        """Return the log probabilities (B, T) for embeddings (B, S, D).

        A `NaiveBayes` reads the ids instead, without the `occluded` (B, S) tokens.
        """
        sample = self.sample
        inputs, targets, is_target = (
            repeat(ids, len(embeddings)) for ids in (sample.inputs, sample.targets, sample.is_target)
        )
        if occluded is not None and getattr(self.network, "naive_bayes", None) is not None:
            (text,) = inputs
            inputs = (drop_words(text.view(*occluded.shape, -1), occluded),)
        with interventions(self.network) as touch:
            touch.edit(self.name, lambda output: embeddings.reshape(output.shape))
            return log_probabilities(logits_of(self.network, inputs), Sample(inputs, targets, is_target))


def integrated_gradients(network: Network, sample: Sample, max_steps: int = MAX_STEPS) -> tuple[Tensor, Tensor]:
    """Return the integrated gradients of the log probability of each target for each input symbol (T, S).

    The gradients with respect to the embeddings are averaged on the line from 0 to the embeddings (Sundararajan et al.
    2017). The input is the source, or the text, or source and target in one sequence.

    Note:
        The evidence of a `NaiveBayes` is constant on this line, so only `occlusion` shows its words. With RMSNorm and
        without biases and embedded positions, as in Llama, the first norm is steep near 0, so that max_steps do not
        suffice.

    Args:
        network: the network, in evaluation mode.
        sample: one example.
        max_steps: the maximum number of steps.

    Returns:
        The attributions, and the differences (T) between their sums and those of the log probabilities, which they
        approximate; at most COMPLETE, unless max_steps do not suffice.
    """
    from captum.attr import IntegratedGradients  # slow to import

    embedded = _Embedded(network, sample)
    embeddings = embedded.embeddings
    method = IntegratedGradients(lambda x, steps: embedded(x).gather(1, steps).squeeze(1))
    T, size = sample.targets.size(1), max(1, BATCH_TOKENS // len(embeddings))
    attributions = embeddings.new_zeros(T, len(embeddings))
    errors = embeddings.new_zeros(T)
    remaining, number = sample.is_target[0].nonzero().squeeze(1), STEPS
    while len(remaining) and number <= max_steps:
        for targets in remaining.split(size):
            values, error = method.attribute(
                embeddings.expand(len(targets), -1, -1),
                additional_forward_args=(targets.unsqueeze(1),),
                n_steps=number,
                internal_batch_size=size,
                return_convergence_delta=True,
            )
            attributions[targets], errors[targets] = values.sum(-1).to(errors), error.to(errors)
        differences = (attributions.sum(1) - errors)[remaining].abs()
        remaining = remaining[errors[remaining].abs() > COMPLETE * differences.clamp(min=1)]
        number *= 2
    return attributions, errors


@torch.no_grad()
def occlusion(network: Network, sample: Sample) -> Tensor:
    """Return the decrease of the log probability of each target without each input symbol (T, S).

    The embedding of the symbol is replaced by 0 (Zeiler & Fergus 2014). For a `NaiveBayes`, it is an unknown word.
    """
    embedded = _Embedded(network, sample)
    embeddings = embedded.embeddings
    S = len(embeddings)
    is_occluded = torch.eye(S, dtype=torch.bool, device=embeddings.device)  # (S, S)
    occluded = [
        embedded(embeddings.masked_fill(mask.unsqueeze(-1), 0), mask)
        for mask in is_occluded.split(max(1, BATCH_TOKENS // S))
    ]
    return (embedded(embeddings.unsqueeze(0)) - torch.cat(occluded)).T
