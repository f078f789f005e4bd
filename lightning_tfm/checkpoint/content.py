"""Loading of checkpoints without executing code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from types import UnionType
from typing import Any, cast
from zipfile import ZipFile

import torch
from torch import Tensor

from lightning_tfm.checkpoint.archive import verify_checksum
from lightning_tfm.checkpoint.shards import INDEX, copy_shards, gather_shards, is_sharded, verify_shards
from lightning_tfm.errors import DamagedError, UserError
from lightning_tfm.system.files import copy_file

ENSEMBLE = "lightning_tfm.networks.ensemble.Ensemble"
"""Class of the network that consists of those of several checkpoints."""

FORMAT = 2
"""Version of the format of checkpoints, which is increased when its meaning changes."""

MAPPINGS = ("callbacks", "data_fingerprint", "experiment", "hyper_parameters", "loops", "state_dict", "step_settings")
TYPES: dict[str, type | UnionType] = {
    **dict.fromkeys((*MAPPINGS, INDEX), dict),
    **dict.fromkeys(("lr_schedulers", "members", "optimizer_states"), list),
    **dict.fromkeys(("global_step", "skipped_steps"), int),
    "alignment_head": tuple | None,
    **dict.fromkeys(("longest_source", "shortest_source"), int | None),
}
"""Types of the entries of a checkpoint."""

MAX_DEPTH = 100
"""Maximum nesting of the values of a checkpoint."""


class CheckpointReader:
    """Reader of the checkpoint of a command, which checks the content before it restores it.

    A file is read and hashed once: `peek` keeps its content until `take`.
    """

    def __init__(self) -> None:
        self._kept: tuple[Path, dict[str, Any]] | None = None

    def peek(self, path: str | Path) -> dict[str, Any]:
        """Return the content of a checkpoint as `read_index` does, and keep it in place of that of another."""
        if self._kept is None or self._kept[0] != Path(path):
            self._kept = None  # before another content is in memory
            self._kept = Path(path), read_index(path)
        return self._kept[1]

    def take(self, path: str | Path) -> dict[str, Any]:
        """Return the content of a checkpoint as `read_index` does, and no longer keep it."""
        content, self._kept = self.peek(path), None
        return content


def read(path: str | Path) -> dict[str, Any]:
    """Load a checkpoint of plain values and tensors, on the CPU, with the tensors of its shards; see `read_index`."""
    return with_shards(read_index(path), path)


def with_shards(checkpoint: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """Read the tensors of the shards, if any, into the content of `read_index`; raise UserError if they do not fit."""
    if is_sharded(checkpoint):
        try:
            gather_shards(checkpoint, Path(path))
        except Exception:  # the content may be anything
            raise UserError(f"{str(path)!r} must fit its shards, but does not; restore them") from None
    return checkpoint


def read_index(path: str | Path) -> dict[str, Any]:
    """Load a checkpoint as `read` does, with tensors without data in place of those that are in its shards.

    Raises:
        DamagedError: if the file or one of its shards cannot be read, or has changed since it was written.
        UserError: if the file is not a checkpoint of lightning_tfm, has another version of the format, or names classes
            other than those of its module, network and optimizer.
    """
    path = Path(path)
    _check_file(path)
    try:
        _check_archive(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        shards_are_whole = not is_sharded(checkpoint) or verify_shards(path, checkpoint[INDEX])
        if shards_are_whole:
            _check_content(checkpoint, path)
        named = _unexpected_classes(checkpoint["hyper_parameters"])
    except Exception:  # the content may be anything
        raise UserError(f"{str(path)!r} must be a checkpoint of lightning_tfm, but cannot be read as one") from None
    if checkpoint.get("format_version") != FORMAT:
        raise UserError(
            f"{str(path)!r} must have version {FORMAT} of the checkpoint format, but has version "
            f"{checkpoint.get('format_version')}; use the version of lightning_tfm that wrote it"
        )
    if not shards_are_whole:
        raise DamagedError(
            f"{str(path)!r} must have all files of {checkpoint[INDEX]['folder']}, but one is missing or damaged; "
            "restore the folder, or use another checkpoint"
        )
    if named:
        raise UserError(
            f"{str(path)!r} must name only the classes of its module, network and optimizer, but names {named[0]!r}; "
            "do not trust it"
        )
    return checkpoint


def _check_file(path: Path) -> None:
    """Raise DamagedError unless a file was written by `write` and has not changed since."""
    if path.is_dir():
        inside = min([*path.glob("*.ckpt"), *path.glob("*/*.ckpt")], default=None)
        hint = (
            f"try {str(inside)!r}" if inside else "name a file that fit has written, such as .../checkpoints/best.ckpt"
        )
        raise DamagedError(f"the checkpoint must be a file, but {str(path)!r} is a folder; {hint}")
    if not path.is_file():
        raise DamagedError(f"there is no checkpoint {str(path)!r}; train one with: lightning-tfm fit EXPERIMENT")
    try:
        is_unchanged = verify_checksum(path)
    except OSError as error:
        raise DamagedError(f"the checkpoint {str(path)!r} cannot be read: {error.strerror}") from None
    if not is_unchanged:
        raise DamagedError(
            f"{str(path)!r} must be a checkpoint of lightning_tfm, but is damaged or not a checkpoint: its checksum is "
            "wrong or missing; use another, or resume from the newest undamaged one with: fit --ckpt_path last"
        )


def _check_archive(path: Path) -> None:
    """Raise ValueError unless a file is an archive as `torch.save` writes it, which does not grow when it is read."""
    with path.open("rb") as file:
        is_archive = file.read(4) == b"PK\3\4"  # otherwise, torch reads its format before 2020
    entries = ZipFile(path).infolist()
    stored = sum(entry.file_size for entry in entries)
    start = min(entry.header_offset for entry in entries)  # 0 only if ZipFile and torch read the same directory
    if not is_archive or start or stored > path.stat().st_size or any(entry.compress_type for entry in entries):
        raise ValueError("not an archive of torch.save")


def _check_content(checkpoint: dict[str, Any], path: Path) -> None:
    """Check the types of the entries of a checkpoint, and that its values are not larger than its files.

    References to the same list or view of a tensor can represent more values than a file has bytes.

    Raises:
        ValueError: if an entry has another type, or a value is larger or nested too deeply.
    """
    for name, kind in TYPES.items():
        if name in checkpoint.keys() | {"global_step"} and not isinstance(checkpoint[name], kind):
            raise ValueError(f"{name} is not of type {kind}")
    if not all(isinstance(checkpoint.get("experiment", {name: ""}).get(name), str) for name in ("name", "config")):
        raise ValueError("the experiment has no name or configuration")
    index = checkpoint.get(INDEX, {"files": {}})
    left = sum(path.with_name(index["folder"]).joinpath(name).stat().st_size for name in index["files"])
    count, limit = 0, path.stat().st_size
    values: list[tuple[Any, int]] = [(checkpoint, 0)]
    while values:
        value, depth = values.pop()
        if isinstance(value, Tensor):
            size = value.numel() * value.element_size()
            left -= size if value.is_meta else 0
            if value.layout != torch.strided or size > value.untyped_storage().nbytes() or left < 0:
                raise ValueError("a tensor is larger than its data")
        elif isinstance(value, bytes | bytearray | set):
            raise ValueError("a value has another type")
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        if isinstance(inner, list | tuple):
            count += len(inner)
            if count > limit or depth > MAX_DEPTH:
                raise ValueError("there are more values than bytes")
            values += [(each, depth + 1) for each in inner]
    if not all(isinstance(weight, Tensor) for weight in checkpoint["state_dict"].values()):
        raise ValueError("a weight is not a tensor")


def _unexpected_classes(hyper_parameters: dict[str, Any]) -> list[Any]:
    """Return the class paths in hyper-parameters, except for those of the module, the network and the optimizer.

    Those of the members of an ensemble are those of networks, which `lightning_tfm.inference.loading` checks.
    """
    network, arguments = hyper_parameters["network"], hyper_parameters["network"]["init_args"]
    if network.get("class_path") == ENSEMBLE:
        if not isinstance(arguments["members"], list):
            raise ValueError("the members are not a list")
        arguments = {**arguments, "members": [member["init_args"] for member in arguments["members"]]}
    others = {**hyper_parameters, "network": arguments, "optimizer": None, "class_path": None}
    return [path for path in _class_paths(others) if path is not None]


def _class_paths(values: Any) -> Iterator[Any]:
    """Yield the class paths in nested plain values."""
    if isinstance(values, dict):
        yield from (values[name] for name in ("class_path", "_class_path", "_instantiator") if name in values)
        values = values.values()
    elif not isinstance(values, list | tuple):
        return
    for value in values:
        yield from _class_paths(value)


def is_whole(path: Path) -> bool:
    """Return whether a checkpoint and its shards, if any, are complete and unchanged."""
    try:
        if not verify_checksum(path):
            return False
        checkpoint = _map(path)
        return not is_sharded(checkpoint) or verify_shards(path, checkpoint[INDEX])
    except (OSError, UnpicklingError, RuntimeError, LookupError, TypeError, ValueError):
        return False


def copy_checkpoint(path: Path, target: Path) -> None:
    """Copy a whole checkpoint file and its shards, if any, to a path in another folder."""
    checkpoint = _map(path)
    if is_sharded(checkpoint):
        copy_shards(path, checkpoint[INDEX], target)
    copy_file(path, target)


def _map(path: Path) -> dict[str, Any]:
    """Load a checkpoint without a check and without reading its tensors, which are mapped into memory."""
    return cast(dict[str, Any], torch.load(path, map_location="cpu", weights_only=True, mmap=True))


def has_training_state(checkpoint: dict[str, Any]) -> bool:
    """Return whether training can be resumed from a checkpoint, unlike from averaged weights."""
    return "optimizer_states" in checkpoint
