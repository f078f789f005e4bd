"""Changes to a network during an answer: ablated parts, drawn attention weights and patched states.

Shapes: batch B, positions P, width D.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from lightning_tfm.errors import UserError, nearest
from lightning_tfm.insight import Interventions, Part, components, interventions
from lightning_tfm.networks import Network

SWITCHABLE = ("attention", "feed_forward", "layer")
"""Kinds of components that can be switched off."""

FORBID_OTHERS: dict[str, str] = {"extra": "forbid"}
"""Pydantic configuration that rejects unknown fields."""


@dataclass(frozen=True)
class Drawn:
    """Attention weight of 1 from one query to one key, and 0 to all others.

    Attributes:
        layer: the name of the attention layer.
        query: the index of the query, a row of the layer's map in an answer.
        key: the index of the key, a column of the map.
        head: the index of the head; None for all heads.
    """

    __pydantic_config__: ClassVar = FORBID_OTHERS

    layer: str
    query: int
    key: int
    head: int | None = None


@dataclass(frozen=True)
class Patched:
    """Replacement of the output of a component at one position by its output for another text.

    Attributes:
        layer: the name of the component, such as a layer, or the states of a recurrent encoder.
        position: the index of the token.
    """

    __pydantic_config__: ClassVar = FORBID_OTHERS

    layer: str
    position: int


@dataclass(frozen=True)
class Changes:
    """Changes to a network during an answer.

    Attributes:
        off: the names of heads, such as `decoder.1.cross_attention.0`, whose contexts are set to 0, and of attention
            layers and feed-forward networks, whose outputs are set to 0. The name of a layer stands for all of its
            sub-layers; the residual stream is kept.
        drawn: the drawn attention weights.
        patched: the patched states.
    """

    __pydantic_config__: ClassVar = FORBID_OTHERS

    off: Sequence[str] = ()
    drawn: Sequence[Drawn] = ()
    patched: Sequence[Patched] = ()


class ChangedNetwork:
    """Network with changes.

    Args:
        network: the network.
        changes: the changes.
        states: the outputs (1, P, D) of the patched components for the other text, by name.

    Raises:
        UserError: if the network has no such part, or the other text no such position.
    """

    def __init__(self, network: Network, changes: Changes, states: Mapping[str, Tensor]) -> None:
        self.network, self.changes, self.states = network, changes, states
        self.off = [part for name in changes.off for part in _parts(network, name)]
        for patched in changes.patched:
            P = states[patched.layer].size(1)
            if not 0 <= patched.position < P:
                raise UserError(
                    f"position must be from 0 to {P - 1} for {patched.layer} and the other text, but is "
                    f"{patched.position}"
                )

    @contextmanager
    def running(self) -> Iterator[Interventions]:
        """Apply the changes within the context.

        Within it, the network may decode one sequence, and then call `forward` any number of times.
        """
        with interventions(self.network) as touch:
            for part in self.off:
                touch.scale(part.name, by=0.0, head=part.head)
            for drawn in self.changes.drawn:
                touch.attend(drawn.layer, drawn.query, drawn.key, drawn.head)
            for patched in self.changes.patched:
                _patch(touch, patched, self.states[patched.layer])
            yield touch


def _parts(network: Network, name: str) -> list[Part]:
    """Return the part with a name, or the sub-layers of the layer with this name."""
    kinds = {component.name: component for component in components(network)}
    if name in kinds and kinds[name].kind in SWITCHABLE:
        sublayers = [Part(other) for other in kinds if other.startswith(f"{name}.")]
        return sublayers if kinds[name].kind == "layer" else [Part(name)]
    layer, _, head = name.rpartition(".")
    if layer in kinds and kinds[layer].kind == "attention" and head.isdecimal() and int(head) < kinds[layer].num_heads:
        return [Part(layer, int(head))]
    names = [other for other, component in kinds.items() if component.kind in SWITCHABLE]
    raise UserError(f"off must name heads, sub-layers or layers, but the network has no {name!r}{nearest(name, names)}")


def _patch(touch: Interventions, patched: Patched, state: Tensor) -> None:
    """Replace the output of a component at one position, counted over all calls, by that of a state (1, P, D)."""
    first = 0  # position of the first output of the next call

    def patch(output: Tensor) -> Tensor:
        nonlocal first
        index, first = patched.position - first, first + output.size(1)
        if 0 <= index < output.size(1):
            output = output.clone()
            output[:, index] = state[:, patched.position]
        return output

    def restart(*_: Any) -> None:
        nonlocal first
        first = 0

    touch.edit(patched.layer, patch)
    touch.hooks.callback(touch.network.register_forward_pre_hook(restart).remove)
