"""Compatibility of a checkpoint with a model and a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Size, Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from lightning_tfm.checkpoint.content import has_training_state
from lightning_tfm.errors import UserError

TRAINING = ("global_step", "loops", "callbacks", "optimizer_states", "lr_schedulers")
"""Keys of a checkpoint that are required to resume training, in addition to weights and hyper-parameters."""


MAX_TABLE = 10_000_000
"""Maximum elements of a table of positions that a small checkpoint may request."""


@contextmanager
def bounded_by(weights: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Iterator[None]:
    """Stop the construction of a network in this context once its weights exceed those of a checkpoint.

    Without this limit, a small file could name a network that fills the memory or takes hours to construct. Tables of
    positions are not parameters, so their size is checked before.

    Args:
        weights: the weights of the checkpoint by name.
        settings: the arguments of the network's constructor.

    Raises:
        UserError: if the weights exceed the limit, which allows for weights that are replaced when tied.
    """
    stored = {weight.untyped_storage().data_ptr() or name: weight for name, weight in weights.items()}
    elements = sum(weight.numel() for weight in stored.values())
    left = 4 * elements
    excess = UserError(
        "the network must fit the weights of the checkpoint, but is larger; use the settings of the checkpoint"
    )
    sizes = [value for name in ("max_length", "d_model") if isinstance(value := settings.get(name), int)]
    if math.prod(sizes) > MAX_TABLE + 10 * elements:
        raise excess

    def register(module: nn.Module, name: str, weight: nn.Parameter | None) -> None:
        nonlocal left
        left -= 0 if weight is None else weight.numel()
        if left < 0:
            raise excess  # before the weight is initialized, which would allocate its memory

    handle = register_module_parameter_registration_hook(register)
    try:
        yield
    finally:
        handle.remove()


def check_fits(
    checkpoint: dict[str, Any],
    path: str | Path,
    hyper_parameters: dict[str, Any],
    shapes: dict[str, Size],
    resuming: bool,
    averages: bool,
    step_settings: dict[str, Any],
) -> None:
    """Check that a checkpoint fits the model and the run.

    Args:
        checkpoint: the content of the checkpoint.
        path: the path of the checkpoint, for error messages.
        hyper_parameters: the hyper-parameters of the model.
        shapes: the shapes of the model's weights, by name.
        resuming: whether training is resumed, which also requires the same optimizer and learning rate schedule.
        averages: whether the run averages its weights; must match the checkpoint if `resuming`.
        step_settings: the settings of `TaskModule.step_settings`; must match the checkpoint if `resuming`.

    Raises:
        UserError: if they do not fit; the message names the first difference.
    """
    incompatible = UserError(
        f"{str(path)!r} must be a checkpoint of this version of lightning_tfm, but is incompatible"
    )
    try:
        saved = checkpoint["hyper_parameters"]
        pairs = [("class_path", saved["network"]["class_path"], hyper_parameters["network"]["class_path"])]
        pairs += [(name, saved.get(name), hyper_parameters.get(name)) for name in ("class_path", "labels")]
        groups = [(saved["network"]["init_args"], hyper_parameters["network"]["init_args"])]
        if resuming:
            ours, theirs = hyper_parameters["optimizer"], saved["optimizer"]
            pairs.append(("optimizer", theirs["class_path"], ours["class_path"]))
            groups += [
                (theirs["init_args"], ours["init_args"]),
                (saved["lr_schedule"], hyper_parameters["lr_schedule"]),
            ]
            if not has_training_state(checkpoint):
                raise UserError(
                    f"{str(path)!r} must hold the optimizer's state to resume its run, but holds only weights, as "
                    "an average does; resume from one of the run's own checkpoints"
                )
            _ = [checkpoint[part] for part in TRAINING]
            if ("averaging_state" in checkpoint) is not averages:
                raise UserError(
                    f"trainer.callbacks must {'not ' * averages}contain WeightAveraging to resume from {str(path)!r}, "
                    f"which was trained with{'out' * averages} it; use its config.yaml"
                )
        # Unless positions are learned, a network can be evaluated on longer texts than those in training.
        apart = ("vocab_size",) if resuming else ("vocab_size", "max_length")
        for theirs, ours in groups:
            pairs += [(name, theirs.get(name), ours.get(name)) for name in {**theirs, **ours} if name not in apart]
        # These are compared last, since differences in the model or the data are more relevant.
        step = checkpoint["step_settings"] if resuming else {}
        step_pairs = [(name, step.get(name), ours) for name, ours in step_settings.items() if resuming]
        their_size, our_size = (h["network"]["init_args"]["vocab_size"] for h in (saved, hyper_parameters))
        their_length, our_length = (h["network"]["init_args"].get("max_length") for h in (saved, hyper_parameters))
        their_shapes = {name: weight.shape for name, weight in checkpoint["state_dict"].items()}
    except (AttributeError, KeyError, TypeError):
        raise incompatible from None

    def check_equal(pairs: list[tuple[str, Any, Any]]) -> None:
        for name, their, our in pairs:
            if their != our:
                raise UserError(
                    f"{name} must match the checkpoint {str(path)!r} ({their}), but is {our}; use its config.yaml"
                )

    check_equal(pairs)
    if saved["tokenizer"] != hyper_parameters["tokenizer"]:
        raise UserError(
            f"the vocabulary of the data must match the checkpoint {str(path)!r} ({their_size} ids), but differs "
            f"({our_size} ids); use the data it was trained on"
        )
    check_equal(step_pairs)
    if their_shapes != shapes:
        if their_length != our_length:
            raise UserError(
                f"the maximum length of the data must be that of the checkpoint {str(path)!r}, whose positions are "
                f"learned (max_length {their_length}, not {our_length}); use its config.yaml, and delete longer texts"
            )
        raise incompatible
