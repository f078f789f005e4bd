"""Interventions in a network while it runs: record, scale or replace the outputs of its components.

Shapes: batch B, tokens T, width D, heads H.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_tfm.errors import UserError, nearest
from lightning_tfm.layers import AddNorm, Attention, FeedForward, HardMonotonicAttention, attention_layers
from lightning_tfm.layers.attention import run_eagerly

Edit = Callable[[Tensor], Tensor]
"""Function from an output to the output that replaces it, of the same shape."""


class Component(NamedTuple):
    """Part of a network whose output can be recorded and replaced.

    Attributes:
        name: its name in the network, such as `decoder.1.cross_attention`.
        kind: "embedding"; "attention" and "feed_forward", which are added to the residual stream; or "layer", the
            stream after a layer. In a recurrent network, "attention" is the context, and "states" are the states of the
            encoder.
        num_heads: the number of heads H of an attention; 1 for others.
    """

    name: str
    kind: Literal["embedding", "attention", "feed_forward", "layer", "states"]
    num_heads: int = 1


EMBEDDINGS = ("embedding", "source_embedding", "target_embedding")
"""Names of the embeddings of a network."""

STATES = ("encoder_states", "start")
"""Names of the modules whose outputs are the states of a recurrent encoder, (B, S, E) or (B, E)."""


class Part(NamedTuple):
    """A head, or a whole component if `head` is None."""

    name: str
    head: int | None = None

    def __str__(self) -> str:
        return self.name if self.head is None else f"{self.name}.{self.head}"


class _Point(NamedTuple):
    """The modules whose hooks read a component: its output, and the heads before they are projected to it."""

    component: Component
    output: nn.Module
    projection: nn.Module | None = None


def _points(network: nn.Module) -> dict[str, _Point]:
    points = []
    for name, module in network.named_modules():
        sums = [child for child in module.children() if isinstance(child, AddNorm)]
        if isinstance(module, Attention) and not isinstance(module, HardMonotonicAttention):  # which has no context
            projection = getattr(module, "out_proj", None)
            component = Component(name, "attention", module.num_heads)
            points.append(_Point(component, projection or module, projection))
        elif isinstance(module, FeedForward):
            points.append(_Point(Component(name, "feed_forward"), module))
        elif name in EMBEDDINGS:
            points.append(_Point(Component(name, "embedding"), module))
        elif name in STATES:
            points.append(_Point(Component(name, "states"), module))
        elif sums:
            points.append(_Point(Component(name, "layer"), sums[-1]))
    return {point.component.name: point for point in points}


def components(network: nn.Module) -> list[Component]:
    """Return the components of a network, in the order of its modules."""
    return [point.component for point in _points(network).values()]


class _EditedForward:
    """Replacement of the `forward` of an attention layer that edits its weights.

    After a call, `weights` of the layer returns the edited weights. A hook would instead compute the context twice, and
    run the hooks of the layer's modules twice.
    """

    def __init__(self, layer: Attention) -> None:
        self.layer = layer
        self.edits: list[Edit] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        vars(self.layer).pop("weights", None)
        weights = self.layer.edited_weights(self._edit, *args, **kwargs)
        vars(self.layer)["weights"] = lambda *_, **__: weights
        return self.layer.with_weights(weights, *args, **kwargs)

    def _edit(self, weights: Tensor) -> Tensor:
        for edit in self.edits:
            weights = edit(weights)
        return weights

    def remove(self) -> None:
        """Restore the methods of the layer."""
        for name in ("forward", "weights"):
            vars(self.layer).pop(name, None)


class Interventions:
    """Interventions in the components of a network, see `interventions`.

    Those in attention weights take effect first, then those in heads, then those in whole components, each in the order
    of the calls.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.points = _points(network)
        self.attention = attention_layers(network)
        self.hooks = ExitStack()
        self.have_ended = False

    def edit(self, name: str, edit: Edit, head: int | None = None) -> None:
        """Replace the output of a component by a function of it.

        Args:
            name: the name of the component, see `components`.
            edit: the function from the output (B, T, D) to another one of this shape. It is called once for each call
                of the component: while a sequence is decoded, T is 1.
            head: the index of a head, whose context (B, T, D/H) is replaced instead.

        Raises:
            UserError: if there is no such component or head, or the context has ended.
        """
        self._check_context()
        if name not in self.points:
            raise UserError(f"the network has no component {name!r}{nearest(name, self.points)}")
        component, output, projection = self.points[name]
        if head is not None and component.kind != "attention":
            raise UserError(f"head must be None for {name}, which has no heads, but is {head}")
        _check_head(name, head, component.num_heads)
        if head is not None and projection is not None:
            hook = projection.register_forward_pre_hook(
                lambda _, arguments: _edit_head(arguments[0], edit, head, component.num_heads)
            )
        else:
            hook = output.register_forward_hook(lambda _, __, result: _edit_output(result, edit))
        self.hooks.callback(hook.remove)

    def record(self, name: str, head: int | None = None) -> list[Tensor]:
        """Return a list to which each call of a component appends its output, see `edit`."""
        outputs: list[Tensor] = []

        def record(output: Tensor) -> Tensor:
            outputs.append(output)
            return output

        self.edit(name, record, head)
        return outputs

    def scale(self, name: str, by: float | Tensor, head: int | None = None) -> None:
        """Multiply the output of a component, or the context of a head, by a number; 0 ablates it."""
        self.edit(name, lambda output: output * by, head)

    def replace(self, name: str, value: Tensor, head: int | None = None) -> None:
        """Replace the output of a component, or the context of a head, by a value that can be broadcast to it."""
        self.edit(name, lambda output: value.to(output).expand_as(output), head)

    def edit_weights(self, name: str, edit: Edit, head: int | None = None) -> None:
        """Replace the weights of an attention layer by a function of them.

        Within the context, `attention_maps` records the edited weights.

        Args:
            name: the name of an `Attention` of the network, which need not be a component.
            edit: the function from the weights (B, H, T, S) to others of this shape. It is called once for each call of
                the layer: while a sequence is decoded, T is 1. For monotonic attention, whose weights depend on those
                of the previous query, it is called once for each query.
            head: the index of a head, whose weights (B, T, S) are replaced instead.

        Raises:
            UserError: if there is no such layer or head, or the context has ended.
        """
        self._check_context()
        if name not in self.attention:
            raise UserError(f"the network has no attention layer {name!r}{nearest(name, self.attention)}")
        layer = self.attention[name]
        _check_head(name, head, layer.num_heads)
        if "forward" not in vars(layer):
            forward = vars(layer)["forward"] = _EditedForward(layer)
            self.hooks.callback(forward.remove)
            # AttentionLSTM calls a layer with hooks also in training, instead of a fused function.
            self.hooks.callback(layer.register_forward_hook(lambda *_: None).remove)
        edits = vars(layer)["forward"].edits
        edits.append(edit if head is None else lambda weights: _edit_weights_of_head(weights, edit, head))
        self.hooks.callback(edits.pop)

    def attend(self, name: str, query: int, key: int, head: int | None = None) -> None:
        """Let one query attend to one key only, with a weight of 1.

        Args:
            name: the name of an attention layer, see `edit_weights`.
            query: the index of the query, as in `attention_maps`: while a sequence is decoded, the queries of all calls
                of the layer are counted, those of the source first if source and target are one sequence. Each call of
                the network's `forward` restarts at 0. A query that is not reached changes nothing.
            key: the index of the key. It may be masked.
            head: the index of a head; None for all heads.

        Raises:
            UserError: as `edit_weights` does; or if query or key is negative, or, when the query is reached, the layer
                has too few keys.
        """
        if query < 0:
            raise UserError(f"query must be at least 0, but is {query}; try 0")
        first = 0  # index of the first query of the next call

        def attend(weights: Tensor) -> Tensor:
            nonlocal first
            T, S = weights.shape[-2:]
            index, first = query - first, first + T
            if not 0 <= index < T:
                return weights
            if not 0 <= key < S:
                raise UserError(f"key must be from 0 to {S - 1} for query {query} of {name}, but is {key}; try {S - 1}")
            weights = weights.clone()
            weights[..., index, :] = 0
            weights[..., index, key] = 1
            return weights

        def restart(*_: Any) -> None:
            nonlocal first
            first = 0

        self.edit_weights(name, attend, head)
        self.hooks.callback(self.network.register_forward_pre_hook(restart).remove)

    def _check_context(self) -> None:
        if self.have_ended:
            raise UserError("interventions must be made within their context, but it has ended; open another one")


def _check_head(name: str, head: int | None, num_heads: int) -> None:
    if head is not None and not 0 <= head < num_heads:
        raise UserError(f"head must be from 0 to {num_heads - 1} for {name}, but is {head}")


def _edit_head(contexts: Tensor, edit: Edit, head: int, num_heads: int) -> Tensor:
    """Return the contexts (B, T, D) of all heads with that of one head replaced."""
    heads = list(contexts.chunk(num_heads, dim=-1))
    heads[head] = edit(heads[head])
    return torch.cat(heads, dim=-1)


def _edit_weights_of_head(weights: Tensor, edit: Edit, head: int) -> Tensor:
    """Return the weights (B, H, T, S) with those of one head replaced."""
    heads = list(weights.unbind(1))
    heads[head] = edit(heads[head])
    return torch.stack(heads, dim=1)


def _edit_output(result: Any, edit: Edit) -> Any:
    """Return the result of a module, whose output comes first and may lack T, with its output replaced."""
    output = result[0] if isinstance(result, tuple) else result
    edited = edit(output.unsqueeze(1)).squeeze(1) if output.dim() == 2 else edit(output)
    return (edited, *result[1:]) if isinstance(result, tuple) else edited


@contextmanager
def interventions(network: nn.Module) -> Iterator[Interventions]:
    """Return the interventions in a network, which end with the context.

    For example, this predicts without the second head of a cross-attention:

        with interventions(module.network) as touch:
            touch.scale("decoder.1.cross_attention", by=0.0, head=1)
            print(module.predict(["Thursday, May 3, 1979"])[0].text)

    Note:
        A compiled network runs eagerly within the context, since compiled code skips the hooks.
    """
    touch = Interventions(network)
    try:
        with run_eagerly(), touch.hooks:
            yield touch
    finally:
        touch.have_ended = True
