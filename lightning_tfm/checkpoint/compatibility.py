"""Compatibility of a checkpoint with a model and a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Size, Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from lightning_tfm.checkpoint.content import has_training_state
from lightning_tfm.config.settings import flatten
from lightning_tfm.errors import UserError

TRAINING = ("global_step", "loops", "callbacks", "optimizer_states", "lr_schedulers")
"""Keys of a checkpoint that are required to resume training, in addition to weights and hyper-parameters."""

FIXED = ("trainer.accumulate_grad_batches", "trainer.strategy.init_args.num_micro_batches")
"""Settings of a step that a fork cannot change, since the position in the stream counts their batches."""

MAX_TABLE = 10_000_000
"""Maximum elements of a table of positions that a small checkpoint may request."""


@contextmanager
def bounded_by(weights: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Iterator[None]:
    """Stop the construction of a network in this context once its weights exceed those of a checkpoint.

    Without this limit, a small file could name a network that fills the memory or takes hours to construct. Tables of
    positions are not parameters, so their size is checked before, from the arguments of the constructor.

    Raises:
        UserError: if the weights exceed the limit, which allows for weights that are replaced when tied.
    """
    stored = {weight.untyped_storage().data_ptr() or name: weight for name, weight in weights.items()}
    elements = sum(weight.numel() for weight in stored.values())
    left = 4 * elements
    excess = UserError(
        "the network must fit the weights of the checkpoint, but is larger; use the settings of the checkpoint"
    )
    tables: dict[str, dict[str, int]] = {}  # by the prefix of the names, which differs between members of an ensemble
    for name, value in flatten(dict(settings)).items():
        prefix, _, last = name.rpartition(".")
        if last in ("max_length", "d_model", "d_head", "num_heads") and isinstance(value, int):
            tables.setdefault(prefix, {})[last] = abs(value)
    sizes = (table.pop("max_length", 1) * max(table.values(), default=1) for table in tables.values())
    if sum(sizes) > MAX_TABLE + 10 * elements:
        raise excess

    def register(module: nn.Module, name: str, weight: nn.Parameter | None) -> None:
        nonlocal left
        left -= 0 if weight is None else weight.numel()
        if left < 0:
            raise excess  # before memory is allocated

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
    forking: bool = False,
) -> None:
    """Check that a checkpoint fits the hyper-parameters of the model, the shapes of its weights by name, and the run.

    To resume training, the optimizer, the learning rate schedule, weight averaging and `TaskModule.step_settings` must
    also match, except that a fork may change all settings but those in `FIXED` and the architecture.

    Raises:
        UserError: if they do not fit; the message names the first difference.
    """
    incompatible = UserError(
        f"{str(path)!r} must be a checkpoint of this version of lightning_tfm, but is incompatible"
    )
    try:
        saved = checkpoint["hyper_parameters"]
        if resuming:
            _check_training_state(checkpoint, path, averages)
        _check_equal(path, _settings(saved, resuming, forking), _settings(hyper_parameters, resuming, forking))
        both = [_arguments(parameters) for parameters in (saved, hyper_parameters)]
        sizes = [arguments.get("vocab_size") for arguments in both]
        lengths = [[value for name, value in arguments.items() if _is_named(name, "max_length")] for arguments in both]
        if saved["tokenizer"] != hyper_parameters["tokenizer"]:
            raise UserError(
                f"the vocabulary of the data must match the checkpoint {str(path)!r} ({sizes[0]} ids), but differs "
                f"({sizes[1]} ids); use the data it was trained on"
            )
        if resuming:  # last: a difference in the model or the data matters more
            current = {name: step_settings[name] for name in step_settings if not forking or name in FIXED}
            _check_equal(path, {name: checkpoint["step_settings"].get(name) for name in current}, current)
        if {name: weight.shape for name, weight in checkpoint["state_dict"].items()} == shapes:
            return
    except (AttributeError, KeyError, TypeError):
        raise incompatible from None
    for before, now in zip(*lengths, strict=False):  # of the network, or of the members of an ensemble
        if before != now:
            raise UserError(
                f"the maximum length of the data must be that of the checkpoint {str(path)!r}, whose positions are "
                f"learned (max_length {before}, not {now}); use its config.yaml, and delete longer texts"
            )
    raise incompatible


def _arguments(hyper_parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the network by name, those of the members of an ensemble by dotted name."""
    return flatten(hyper_parameters["network"]["init_args"])


def _is_named(name: str, *last: str) -> bool:
    return name.rpartition(".")[2] in last


def _settings(hyper_parameters: dict[str, Any], resuming: bool, forking: bool) -> dict[str, Any]:
    """Return the settings in which a checkpoint and a model must agree, by name."""
    optimizer, arguments = hyper_parameters["optimizer"], _arguments(hyper_parameters)
    # Unless positions are learned, a network can be evaluated on longer texts than those in training.
    apart = ["vocab_size"] if resuming else ["vocab_size", "max_length"]
    apart += ["dropout", "word_dropout"] if forking else []
    settings = {
        "model.network.class_path": hyper_parameters["network"]["class_path"],
        "model.class_path": hyper_parameters.get("class_path"),
        "labels": hyper_parameters.get("labels"),
        **{f"model.network.{name}": value for name, value in arguments.items() if not _is_named(name, *apart)},
    }
    if resuming:
        settings["model.optimizer.class_path"] = optimizer["class_path"]
    if resuming and not forking:
        for part, values in (("optimizer", optimizer["init_args"]), ("lr_schedule", hyper_parameters["lr_schedule"])):
            settings |= {f"model.{part}.{name}": value for name, value in values.items()}
    return settings


def _check_equal(path: str | Path, saved: dict[str, Any], current: dict[str, Any]) -> None:
    for name in {**saved, **current}:
        if saved.get(name) != current.get(name):
            raise UserError(
                f"{name} must match the checkpoint {str(path)!r} ({saved.get(name)}), but is {current.get(name)}; use "
                "its config.yaml"
            )


def _check_training_state(checkpoint: dict[str, Any], path: str | Path, averages: bool) -> None:
    """Check that a checkpoint has all that a run needs to be resumed; raise KeyError if it lacks one of TRAINING."""
    if not has_training_state(checkpoint):
        raise UserError(
            f"{str(path)!r} must hold the optimizer's state to resume its run, but holds only weights, as "
            "an average does; resume from one of the run's own checkpoints"
        )
    if missing := set(TRAINING) - checkpoint.keys():
        raise KeyError(*missing)
    if ("averaging_state" in checkpoint) is not averages:
        raise UserError(
            f"trainer.callbacks must {'not ' * averages}contain WeightAveraging to resume from {str(path)!r}, "
            f"which was trained with{'out' * averages} it; use its config.yaml"
        )
