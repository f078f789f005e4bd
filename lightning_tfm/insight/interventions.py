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
from lightning_tfm.layers import AddNorm, Attention, FeedForward, HardMonotonicAttention
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


class Interventions:
    """Interventions in the components of a network, see `interventions`.

    They take effect in the order of the calls, but those in heads before those in whole components.
    """

    def __init__(self, network: nn.Module) -> None:
        self.points = _points(network)
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
        if self.have_ended:
            raise UserError("interventions must be made within their context, but it has ended; open another one")
        if name not in self.points:
            raise UserError(f"the network has no component {name!r}{nearest(name, self.points)}")
        component, output, projection = self.points[name]
        if head is not None and (component.kind != "attention" or not 0 <= head < component.num_heads):
            raise UserError(
                f"head must be from 0 to {component.num_heads - 1} for {name}, but is {head}"
                if component.kind == "attention"
                else f"head must be None for {name}, which has no heads, but is {head}"
            )
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


def _edit_head(contexts: Tensor, edit: Edit, head: int, num_heads: int) -> Tensor:
    """Return the contexts (B, T, D) of all heads with that of one head replaced."""
    heads = list(contexts.chunk(num_heads, dim=-1))
    heads[head] = edit(heads[head])
    return torch.cat(heads, dim=-1)


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
