"""What every network can do: the signatures that modules, decoding and data rely on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from lightning_tfm.decoding import State
from lightning_tfm.errors import UserError
from lightning_tfm.layers import SelfAttention


class Network(nn.Module, ABC):
    """A model in plain PyTorch, usable in any training loop.

    Args:
        hyper_parameters: the constructor's arguments by name, plain values: `type(network)(**hyper_parameters)`
            builds the same network again, which is how a checkpoint is read.

    Attributes:
        head: the output layer: from features to logits.
    """

    head: nn.Linear

    def __init__(self, **hyper_parameters: Any) -> None:
        super().__init__()
        self.hyper_parameters = hyper_parameters
        for name, value in hyper_parameters.items():
            if name.endswith("dropout"):
                if value is not None and not 0 <= value < 1:
                    raise UserError(f"{name} must be at least 0 and below 1, but is {value}; try 0.1")
            elif type(value) is int and value < 1:
                raise UserError(f"{name} must be at least 1, but is {value}")

    @abstractmethod
    def check_lengths(self, source_length: int, target_length: int) -> None:
        """Raises UserError, with both lengths, if the positions do not reach that far (lengths in tokens)."""


class Seq2SeqNetwork(Network):
    """A network that answers a sequence with another."""

    def over_source(self, maps: dict[str, Tensor], source: Tensor) -> dict[str, Tensor]:
        """Of `attention_maps`, those of the target over the source (B, S): layer name -> (B, H, T, S)."""
        over_itself = [name for name in maps if isinstance(self.get_submodule(name), SelfAttention)]
        return {name: weights for name, weights in maps.items() if name not in over_itself}

    @abstractmethod
    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        """Logits (B, T, V) of the token after each of target_in (B, T), given source (B, S).

        Both are right-padded with PAD. A source ends with EOS, or is empty (S = 0) where there is none; target_in
        begins with BOS.
        """

    @abstractmethod
    def encode(self, source: Tensor) -> State:
        """The state from which `decode_step` starts, for source (B, S)."""

    @abstractmethod
    def decode_step(self, token: Tensor, state: State) -> tuple[Tensor, State]:
        """Logits (B, V) of the token after `token` (B), and the state that knows it.

        Feeding target_in column by column gives the logits of `forward`.
        """
