"""Loading of checkpoints without executing code."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch

from lightning_tfm.checkpoint.archive import verify_checksum
from lightning_tfm.checkpoint.shards import INDEX, copy_shards, gather_shards, is_sharded, verify_shards
from lightning_tfm.errors import UserError
from lightning_tfm.files import atomic_write

FORMAT = 1
"""Version of the format of checkpoints, which is increased when its meaning changes."""


def read(path: str | Path) -> dict[str, Any]:
    """Load a checkpoint, which may only contain plain values and tensors, on the CPU, with the tensors of its shards.

    Raises:
        UserError: see `read_index`.
    """
    checkpoint = read_index(path)
    if is_sharded(checkpoint):
        gather_shards(checkpoint, Path(path))
    return checkpoint


def read_index(path: str | Path) -> dict[str, Any]:
    """Load a checkpoint as `read` does, with tensors without data in place of those that are in its shards.

    Raises:
        UserError: if the file does not exist, is damaged, is not a checkpoint of lightning_tfm, has another version of
            the format, or names classes other than those of its module, network and optimizer.
    """
    path = Path(path)
    if path.is_dir():
        inside = next((path / name for name in ("best.ckpt", "checkpoints/best.ckpt") if (path / name).is_file()), None)
        hint = (
            f"try {str(inside)!r}" if inside else "name a file that fit has written, such as .../checkpoints/best.ckpt"
        )
        raise UserError(f"the checkpoint must be a file, but {str(path)!r} is a folder; {hint}")
    if not path.is_file():
        raise UserError(f"there is no checkpoint {str(path)!r}; train one with: lightning-tfm fit --config YAML")
    try:
        whole = verify_checksum(path)
    except OSError as error:
        raise UserError(f"the checkpoint {str(path)!r} cannot be read: {error.strerror}") from None
    if not whole:
        raise UserError(
            f"{str(path)!r} must be a checkpoint of lightning_tfm, but is damaged or not a checkpoint: its checksum is "
            "wrong or missing; use another, or resume from the newest undamaged one with: fit --ckpt_path last"
        )
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        hyper_parameters, _ = checkpoint["hyper_parameters"], checkpoint["state_dict"].items()
        network = hyper_parameters["network"]
        named = list(_class_paths({**hyper_parameters, "network": None, "optimizer": None, "class_path": None}))
        named = [name for name in [*named, *_class_paths(network["init_args"])] if name is not None]
    except (UnpicklingError, RuntimeError, EOFError, OSError, AttributeError, LookupError, TypeError, ValueError):
        raise UserError(f"{str(path)!r} must be a checkpoint of lightning_tfm, but cannot be read as one") from None
    if checkpoint.get("format_version") != FORMAT:
        raise UserError(
            f"{str(path)!r} must have version {FORMAT} of the checkpoint format, but has version "
            f"{checkpoint.get('format_version')}; use the version of lightning_tfm that wrote it"
        )
    if is_sharded(checkpoint) and not verify_shards(path, checkpoint[INDEX]):
        raise UserError(
            f"{str(path)!r} must have all files of {checkpoint[INDEX]['folder']}, but one is missing or damaged; "
            "restore the folder, or use another checkpoint"
        )
    if named:
        raise UserError(
            f"{str(path)!r} must name only the classes of its module, network and optimizer, but names {named[0]!r}; "
            "do not trust it"
        )
    return checkpoint


def _class_paths(values: Any) -> Iterator[Any]:
    """Yield the class paths in nested plain values."""
    if isinstance(values, dict):
        for name, value in values.items():
            if name in ("class_path", "_class_path", "_instantiator"):
                yield value
            yield from _class_paths(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _class_paths(value)


def latest_valid(paths: Iterable[Path]) -> tuple[Path | None, list[Path]]:
    """Return the newest undamaged checkpoint with training state, and the newer damaged or unreadable ones.

    Raises:
        UserError: if `read` rejects a file with a valid checksum.
    """
    damaged: list[Path] = []
    for path in sorted(paths, key=lambda path: (path.stat().st_mtime_ns, path.as_posix()), reverse=True):
        if not is_whole(path):
            damaged.append(path)
        elif has_training_state(read_index(path)):
            return path, damaged
    return None, damaged


def is_whole(path: Path) -> bool:
    """Return whether a checkpoint and its shards, if any, are complete and unchanged."""
    try:
        if not verify_checksum(path):
            return False
        checkpoint = _map(path)
        return not is_sharded(checkpoint) or verify_shards(path, checkpoint[INDEX])
    except (OSError, UnpicklingError, RuntimeError, KeyError):
        return False


def copy_checkpoint(path: Path, target: Path) -> None:
    """Copy a checkpoint file and its shards, if any.

    Args:
        path: the path of the file, for which `is_whole` is true.
        target: the path of the copy, in another folder.
    """
    checkpoint = _map(path)
    if is_sharded(checkpoint):
        copy_shards(path, checkpoint[INDEX], target)
    with path.open("rb") as source, atomic_write(target) as file:
        shutil.copyfileobj(source, file)


def _map(path: Path) -> dict[str, Any]:
    """Load a checkpoint without a check and without reading its tensors, which are mapped into memory."""
    return cast(dict[str, Any], torch.load(path, map_location="cpu", weights_only=True, mmap=True))


def has_training_state(checkpoint: dict[str, Any]) -> bool:
    """Return whether training can be resumed from a checkpoint, unlike from averaged weights."""
    return "optimizer_states" in checkpoint
