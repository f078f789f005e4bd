"""Sharded checkpoints: each process writes its part of the large tensors, in safetensors files.

A sharded checkpoint is a checkpoint file without the large tensors, and a folder `NAME_step_N.shards` beside it with a
file for each process, written by torch.distributed.checkpoint. The checkpoint file, which holds the checksums of these
files, is written last, so a checkpoint is complete or not there at all.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from lightning_tfm.errors import UserError
from lightning_tfm.system.files import copy_file, make_folder, synchronize

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

INDEX = "shards"
"""Key of a sharded checkpoint, with the folder, the checksums of its files, and the order of rows in fused matrices."""


def is_sharded(checkpoint: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint, as read by `read_index`, has tensors in other files."""
    return INDEX in checkpoint


def new_folder(path: Path, step: int) -> Path:
    """Return the path of a new folder for the shards of a checkpoint after a step; called by all processes."""
    names = [f"{path.stem}_step_{step}.shards"]
    while path.with_name(names[-1]).exists():  # of a replaced or unfinished checkpoint
        names.append(f"{path.stem}_step_{step}_{len(names)}.shards")
    chosen = [names[-1]]
    torch.distributed.broadcast_object_list(chosen)
    return path.with_name(chosen[0])


def write_shards(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, str]:
    """Write the shards of distributed tensors, and return the SHA-256 checksum of each file; called by all processes.

    Raises:
        UserError: on all processes, if one cannot write.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter  # slow to import
    from torch.distributed.checkpoint.state_dict_saver import save

    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    written, addresses = {}, set()
    # Tied weights share memory, which the format does not allow.
    for key, tensor in tensors.items():
        address = cast("DTensor", tensor).to_local().data_ptr()
        written[key] = tensor.clone() if address in addresses else tensor
        addresses.add(address)
    torch.distributed.barrier()  # after all processes have chosen the folder
    own: dict[str, str] = {}
    failure = None
    try:
        make_folder(folder)
        save(written, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
        files = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")
        own = {path.name: _checksum(path) for path in files[rank::world_size]}
    except CheckpointException as error:  # on all processes
        failure = str(next(iter(error.failures.values()))[0])
    except OSError as error:
        failure = str(error)
    gathered: list[tuple[dict[str, str], str | None]] = [({}, None)] * world_size
    torch.distributed.all_gather_object(gathered, (own, failure))
    failures = [failure for _, failure in gathered if failure is not None]
    if failures:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise UserError(
            f"the shards {str(folder)!r} cannot be written: {failures[0]}; the checkpoint before is kept; free disk "
            "space, or choose a writable folder, then resume with --ckpt_path last"
        )
    synchronize(folder)
    return {name: checksum for part, _ in gathered for name, checksum in part.items()}


def read_shards(tensors: dict[str, Tensor], path: Path, index: Mapping[str, Any], no_dist: bool = False) -> None:
    """Read tensors from the shards of a checkpoint by key, in place; called by all processes unless `no_dist` is set.

    Distributed tensors may have any layout. The index is the value of INDEX in the checkpoint.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader  # slow to import
    from torch.distributed.checkpoint.state_dict_loader import load

    load(tensors, storage_reader=HuggingFaceStorageReader(str(path.with_name(index["folder"]))), no_dist=no_dist)


def verify_shards(path: Path, index: Mapping[str, Any]) -> bool:
    """Return whether all files of a sharded checkpoint exist and have not changed."""
    folder = path.with_name(index["folder"])
    return all(
        (folder / name).is_file() and _checksum(folder / name) == value for name, value in index["files"].items()
    )


def shard_folders(path: Path) -> list[Path]:
    """Return the folders with shards of a checkpoint file; more than one if a process was killed between two."""
    return sorted(path.parent.glob(f"{path.stem}_step_*.shards"))


def remove_shards(path: Path, kept: str | None = None) -> None:
    """Remove the folders with shards of a checkpoint file, which may not exist, except one."""
    for folder in shard_folders(path):
        if folder.name != kept:
            shutil.rmtree(folder, ignore_errors=True)


def _placeholders(content: Any, key: str = "") -> Iterator[tuple[dict[Any, Any], Any, str]]:
    """Yield the tensors of a checkpoint that are in its shards: the dictionary, its key, and the key in the shards."""
    if isinstance(content, dict):
        for name, value in content.items():
            if isinstance(value, Tensor) and value.is_meta:
                yield content, name, f"{key}{name}"
            else:
                yield from _placeholders(value, f"{key}{name}/")
    elif isinstance(content, list):
        for number, value in enumerate(content):
            yield from _placeholders(value, f"{key}{number}/")


def gather_shards(checkpoint: dict[str, Any], path: Path) -> None:
    """Read the tensors of the shards into a checkpoint, in place, as a single process would have saved them."""
    index = checkpoint.pop(INDEX)
    entries = list(_placeholders(checkpoint))
    if not entries:
        return
    tensors = {key: torch.empty(state[name].shape, dtype=state[name].dtype) for state, name, key in entries}
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that a single process reads
        read_shards(tensors, path, index, no_dist=True)
    for state, name, key in entries:
        parts = index["fused"].get(key, (1,))
        state[name] = part_major(tensors[key], parts, index["tensor_parallel_size"])


def copy_shards(path: Path, index: Mapping[str, Any], target: Path) -> None:
    """Copy the shards of a checkpoint, whose copy has the path `target` in another folder."""
    source, copy = (file.with_name(index["folder"]) for file in (path, target))
    shutil.copytree(source, copy, copy_function=copy_file, dirs_exist_ok=True)


def rank_major(rows: Tensor, parts: Sequence[int], size: int) -> Tensor:
    """Return the rows of a fused projection such that each process has its share of all parts in consecutive rows.

    Args:
        rows: the rows in the order of one process, see `part_major`.
        parts: the relative sizes of the parts, such as those of queries, keys and values.
        size: the number of processes.
    """
    if len(parts) == 1:
        return rows
    shares = [part.chunk(size) for part in _split(rows, parts)]
    return torch.cat([share for of_rank in zip(*shares, strict=True) for share in of_rank])


def part_major(rows: Tensor, parts: Sequence[int], size: int) -> Tensor:
    """Return the rows of a fused projection in the order of one process: all queries, then all keys, all values.

    The arguments are those of `rank_major`, whose inverse this is.
    """
    if len(parts) == 1:
        return rows
    shares = [_split(of_rank, parts) for of_rank in rows.chunk(size)]
    return torch.cat([share for part in zip(*shares, strict=True) for share in part])


def _split(rows: Tensor, parts: Sequence[int]) -> tuple[Tensor, ...]:
    """Return parts of relative sizes."""
    unit = len(rows) // sum(parts)
    return rows.split([part * unit for part in parts])


def _checksum(path: Path) -> str:
    """Return the SHA-256 checksum of a file, after it is synchronized to disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
