"""Ensemble of trained networks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from inspect import isabstract, isclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from lightning_tfm.errors import UserError
from lightning_tfm.layers import at_least_float32
from lightning_tfm.networks.network import DataProperties, Seq2SeqNetwork, Side, State


class Ensemble(Seq2SeqNetwork):
    """Average of the probabilities of trained networks, its members, which may be of different classes.

    The logits are log probabilities, those of the mean distribution of the next token over the members.

    Args:
        vocab_size: number of ids, shared by all members.
        members: the networks, each as `class_path`, its class, and `init_args`, the arguments of its constructor.

    Raises:
        UserError: if there are no members, if one has another number of ids, or if its class is no network from source
            to target.

    Note:
        The constructor imports the classes of the members. `lightning_tfm.load` and the commands check before that they
        are trusted.
    """

    members: Sequence[Seq2SeqNetwork]

    def __init__(self, vocab_size: int, members: list[dict[str, Any]]) -> None:
        super().__init__()
        if not members:
            raise UserError("members must have at least one network, but is empty; name the checkpoints to join")
        networks = [_member_class(member)(**member.get("init_args", {})) for member in members]
        for network in networks:
            if (size := network.hyper_parameters.get("vocab_size", vocab_size)) != vocab_size:
                raise UserError(
                    f"vocab_size must be that of all members, but is {vocab_size}, and a member has {size}; join "
                    "networks that were trained with one vocabulary"
                )
        self.members = nn.ModuleList(networks)  # type: ignore[assignment]  # of networks
        self.hyper_parameters = {"vocab_size": vocab_size, "members": [*map(_description, networks)]}
        self.max_length = min((n.max_length for n in networks if n.max_length is not None), default=None)
        self.is_traceable = all(network.is_traceable for network in networks)

    @classmethod
    def from_data(cls, data: DataProperties, **settings: Any) -> Self:
        """Construct an ensemble whose members fit a data module, see `Network.from_data`."""
        members = [
            {**member, "init_args": _member_class(member).complete_settings(data, member.get("init_args", {}))}
            for member in settings["members"]
        ]
        return super().from_data(data, **settings | {"members": members})

    @property
    def head(self) -> nn.Linear:  # type: ignore[override]  # an attribute
        """Raise UserError, since each member has an output layer of its own."""
        raise UserError(
            "the network must have one output layer, but an Ensemble has one for each member; train or inspect its "
            "members one by one"
        )

    def check_lengths(self, source_length: int, target_length: int = 0) -> None:
        for member in self.members:
            member.check_lengths(source_length, target_length)

    def max_lengths(self, target_length: int) -> tuple[int | None, int | None]:
        sides = zip(*(member.max_lengths(target_length) for member in self.members), strict=True)
        source, target = (min((limit for limit in side if limit is not None), default=None) for side in sides)
        return source, target

    def side(self, name: str) -> Side:
        """Return the side of a part of a member, whose name begins with `members.INDEX`."""
        _, index, part = name.split(".", 2)
        return self.members[int(index)].side(part)

    def source_attention(self, maps: dict[str, Tensor], source: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for index, member in enumerate(self.members):
            start = f"members.{index}."
            own = {name.removeprefix(start): weights for name, weights in maps.items() if name.startswith(start)}
            found |= {start + name: weights for name, weights in member.source_attention(own, source).items()}
        return found

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        return _mean([member(source, target_in) for member in self.members])

    def encode(self, source: Tensor) -> State:
        return tuple(member.encode(source) for member in self.members)

    def decode_step(self, token: Tensor, state: State) -> tuple[Tensor, State]:
        steps = [member.decode_step(token, own) for member, own in zip(self.members, state, strict=True)]
        return _mean([logits for logits, _ in steps]), tuple(following for _, following in steps)

    def logits(self, source: Tensor, target_in: Tensor, state: State) -> Tensor:
        members = zip(self.members, state, strict=True)
        return _mean([member.logits(source, target_in, own) for member, own in members])


def _mean(logits: Sequence[Tensor]) -> Tensor:
    """Return the logarithm of the mean of the distributions of logits (..., V) of equal shapes."""
    log_probs = torch.stack([at_least_float32(each).log_softmax(-1) for each in logits])
    return log_probs.logsumexp(0) - math.log(len(logits))


def _member_class(member: dict[str, Any]) -> type[Seq2SeqNetwork]:
    """Import the class of a member."""
    path = str(member.get("class_path"))
    module, _, name = path.rpartition(".")
    cls = getattr(import_module(module), name, None) if module else None
    if not (isclass(cls) and issubclass(cls, Seq2SeqNetwork)) or isabstract(cls) or issubclass(cls, Ensemble):
        raise UserError(
            f"members must be networks from source to target, each with a class_path, but one is {path!r}; try "
            "lightning_tfm.networks.Transformer"
        )
    return cls


def _description(network: Seq2SeqNetwork) -> dict[str, Any]:
    """Return the class and the arguments of a network as plain values."""
    cls = type(network)
    return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": network.hyper_parameters}
