"""Base classes of the networks."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Protocol, Self

import torch
from torch import Tensor, nn

from lightning_tfm.errors import UserError
from lightning_tfm.layers import Attention, PointerGenerator
from lightning_tfm.tokenization import NUM_SPECIAL, PAD

State = Tensor | tuple[Any, ...]
"""State of a decoder between two steps: a nested tuple of tensors whose first dimension is the batch."""


Side = Literal["encoder", "source", "target", "sequence"]
"""Tokens that a part of a network reads.

"encoder": those of the source; "target": those of the target; "source": both, as in cross-attention, from the target to
the source; "sequence": those of a single sequence, which may be a source followed by a target.
"""


class Memory(tuple[Any, ...]):
    """Part of a `State` that depends only on the source and is the same after every step."""


def check_max_length(max_length: int | None) -> int:
    """Return max_length, or raise UserError if it is None."""
    if max_length is None:
        raise UserError("max_length must be set, but is None; set it, or construct the network with from_data")
    return max_length


def complete(settings: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return settings with a default in place of each that is missing or None."""
    return settings | {name: value for name, value in defaults.items() if settings.get(name) is None}


class DataProperties(Protocol):
    """Properties of a data module that a network depends on.

    Attributes:
        vocab_size: number of ids.
        max_source_length: maximum length of a source in tokens, including EOS.
        max_target_length: maximum length of a target in tokens, including EOS; 0 if there are no targets.
    """

    vocab_size: int
    max_source_length: int
    max_target_length: int


class Network(nn.Module, ABC):
    """Base class of networks in plain PyTorch, for any training loop.

    Attributes:
        hyper_parameters: the arguments of the constructor by name, which must be plain values;
            `type(network)(**hyper_parameters)` constructs the network when a checkpoint is loaded.
        least: the lower bounds of integer arguments, where they differ from 1.
        head: the output layer, from features to logits.
        max_length: maximum length of a source and of a target in tokens; None if unlimited.
        is_traceable: whether `torch.export` can trace `forward` for any length.
    """

    hyper_parameters: dict[str, Any]
    least: ClassVar[Mapping[str, int]] = {}
    head: nn.Linear
    max_length: int | None = None
    is_traceable = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in vars(cls):
            cls.__init__ = _recording(cls.__init__)  # type: ignore[method-assign]

    @property
    def is_recurrent(self) -> bool:
        """Return whether the network has recurrent layers of torch, whose kernels compute all steps in one call."""
        return any(isinstance(layer, nn.RNNBase) for layer in self.modules())

    @classmethod
    def data_settings(cls, data: DataProperties) -> dict[str, Any]:
        """Return the arguments of the constructor that depend on the data."""
        return {"vocab_size": data.vocab_size}

    @classmethod
    def complete_settings(cls, data: DataProperties, settings: dict[str, Any]) -> dict[str, Any]:
        """Return settings of the constructor with those of the data in place of each that is missing or None."""
        return complete(settings, cls.data_settings(data))

    @classmethod
    def from_data(cls, data: DataProperties, **settings: Any) -> Self:
        """Construct a network that fits a data module, see `complete_settings`."""
        return cls(**cls.complete_settings(data, settings))

    def check_lengths(self, source_length: int, target_length: int = 0) -> None:
        """Raise UserError if sequences of these lengths, in tokens, have more positions than the network."""
        for side, length in (("source", source_length), ("target", target_length)):
            if self.max_length is not None and length > self.max_length:
                raise self._too_long(f"{side if target_length else 'input'} has {length}", length)

    def _too_long(self, tokens: str, length: int) -> UserError:
        return UserError(
            f"the longest {tokens} tokens, but the model has max_length {self.max_length} positions; "
            f"try max_length {length}"
        )

    def side(self, name: str) -> Side:
        """Return the side of a part of the network by name, see `Side`."""
        return "sequence"

    def random_ids(self, rows: int, length: int, generator: torch.Generator, ids_per_token: int = 1) -> Tensor:
        """Draw random, right-padded ids (rows, length), or (rows, length, G) with G > 1 ids per token.

        A single row has no padding.
        """
        vocab_size = self.hyper_parameters["vocab_size"]
        ids = torch.randint(NUM_SPECIAL, vocab_size, (rows, length, ids_per_token), generator=generator)
        lengths = torch.randint(1, length + 1, (rows, 1), generator=generator)
        padding = torch.arange(length) >= lengths.clamp(min=length if rows == 1 else 1)
        return ids.masked_fill(padding.unsqueeze(-1), PAD).squeeze(-1)


def _recording(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that checks its integer arguments, and records its arguments as `hyper_parameters`."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def recording(network: Network, *arguments: Any, **settings: Any) -> None:
        if "hyper_parameters" not in vars(network):  # not called by a subclass
            bound = signature.bind(network, *arguments, **settings)
            bound.apply_defaults()
            _, *recorded = bound.arguments.items()  # without self
            network.hyper_parameters = dict(recorded)
            for name, value in recorded:
                least = network.least.get(name, 1)
                if type(value) is int and value < least and not name.endswith("dropout"):  # which Dropout checks
                    raise UserError(f"{name} must be at least {least}, but is {value}")
        init(network, *arguments, **settings)

    return recording


class TextNetwork(Network):
    """Base class of networks for a single text, with a position for each of at most max_length tokens."""

    max_length: int

    @classmethod
    def data_settings(cls, data: DataProperties) -> dict[str, Any]:
        return super().data_settings(data) | {"max_length": data.max_source_length}

    def check_lengths(self, source_length: int, target_length: int = 0) -> None:
        """Raise UserError if a text has more tokens than the network has positions; it reads no target."""
        super().check_lengths(source_length)


class Seq2SeqNetwork(Network):
    """Base class of networks that map a source sequence to a target sequence."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "forward" in vars(cls) and "logits" not in vars(cls):
            cls.logits = Seq2SeqNetwork.logits  # type: ignore[method-assign]  # a parent's belongs to its own forward

    @property
    def copies(self) -> bool:
        """Return whether the network can copy tokens of the source, by a pointer-generator."""
        return any(isinstance(layer, PointerGenerator) for layer in self.modules())

    def max_lengths(self, target_length: int) -> tuple[int | None, int | None]:
        """Return the maximum lengths of a source and of a target; None if unlimited.

        `target_length` is the maximum length of a target in the data.
        """
        return self.max_length, self.max_length

    def side(self, name: str) -> Side:
        """Return the side of a part of the network; the names of parts of the encoder begin with `encoder`."""
        if name.startswith("encoder"):
            return "encoder"
        layer = self.get_submodule(name)
        return "source" if isinstance(layer, Attention) and layer.over_memory else "target"

    def source_attention(self, maps: dict[str, Tensor], source: Tensor) -> dict[str, Tensor]:
        """Select the weights (B, H, T, S) of the target over the source (B, S) from those of all layers by name."""
        return {name: weights for name, weights in maps.items() if self.side(name) == "source"}

    @abstractmethod
    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        """Return the logits (B, T, V) of the token after each token of target_in.

        Args:
            source: the source (B, S), right-padded with PAD; each row ends with EOS. S is 0 if there is no source.
            target_in: the input of the decoder (B, T), right-padded with PAD; starts with BOS for pairs.
        """

    @abstractmethod
    def encode(self, source: Tensor) -> State:
        """Return the initial state of `decode_step` for source (B, S)."""

    @abstractmethod
    def decode_step(self, token: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the logits (B, V) of the token after `token` (B), and the next state.

        Calling it for each column of target_in gives the logits of `forward`.
        """

    def logits(self, source: Tensor, target_in: Tensor, state: State) -> Tensor:
        """Return the logits of `forward` in evaluation, given the state that `encode` returned for the source.

        Networks with an encoder override this method, so that the source is encoded once.
        """
        return self(source, target_in)


class CausalNetwork(Seq2SeqNetwork):
    """Base class of networks that read source and target as one sequence, and can model a text without a source.

    The maximum length is that of source and target together, in tokens.
    """

    max_length: int

    @classmethod
    def data_settings(cls, data: DataProperties) -> dict[str, Any]:
        return super().data_settings(data) | {"max_length": data.max_source_length + data.max_target_length}

    def span(self, source_length: int, target_length: int) -> int:
        """Return the number of positions of a source and a target."""
        return source_length + target_length

    def check_lengths(self, source_length: int, target_length: int = 0) -> None:
        if (length := self.span(source_length, target_length)) > self.max_length:
            pair = f"source and target have {source_length} + {target_length}"
            raise self._too_long(pair if target_length else f"input has {length}", length)

    def max_lengths(self, target_length: int) -> tuple[int, int]:
        return self.max_length - target_length, target_length

    def side(self, name: str) -> Side:
        return "sequence"

    def source_attention(self, maps: dict[str, Tensor], source: Tensor) -> dict[str, Tensor]:
        """Select the weights (B, H, T, S) of the target over the source, normalized to sum to 1 unless all are 0."""
        S = source.size(1)
        parts = {name: weights[:, :, S:, :S] for name, weights in maps.items()}
        return {
            name: part / part.sum(-1, keepdim=True).clamp(min=torch.finfo(part.dtype).tiny)  # no 0 / 0 at padding
            for name, part in parts.items()
        }
