"""Checkpoints: written whole or not at all, read as data and never as code, with a clear word where one is damaged.

A checkpoint is what `torch.save` writes, a zip archive, with its SHA-256 in the archive's comment: `torch.load` reads
it as it is, and `unzip -z` shows the sum.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO, NamedTuple

import torch
from lightning.fabric.plugins import CheckpointIO
from torch import Size

from lightning_tfm import networks
from lightning_tfm.errors import UserError
from lightning_tfm.files import replacing
from lightning_tfm.networks import Network
from lightning_tfm.tokenizer import Tokenizer, restored
from lightning_tfm.trust import import_allowed

PREFIX = "network."
"""What the names of a network's weights begin with in a LightningModule's checkpoint."""

TRAINING = ("global_step", "loops", "callbacks", "optimizer_states", "lr_schedulers")
"""What a checkpoint holds beside weights and hyper-parameters, for training to go on."""

COMMENT_LENGTH = 2
"""Bytes at the end of a zip archive that say how long the comment after them is; torch writes none."""


def write(content: dict[str, Any], path: str | Path) -> None:
    """Writes a checkpoint beside `path`, waits until it is on the disk, and puts it in its place.

    Whatever happens meanwhile, `path` is what it was or what it should be. It takes no memory of the content's size.

    Raises:
        UserError: if it cannot be written.
    """
    path = Path(path)
    writer = None
    try:
        with replacing(path) as file:
            writer = _SummingWriter(file)
            torch.save(content, writer)
            writer.close()
    except BaseException as error:
        failure = writer.failure if writer and writer.failure else error  # torch hides what its file has raised
        if not isinstance(failure, OSError):
            raise failure from None
        raise UserError(
            f"the checkpoint {str(path)!r} cannot be written: {failure.strerror}; "
            + ("the one before it is kept" if path.exists() else "nothing was overwritten")
            + "; make room, or choose a folder that can be written, then go on with --ckpt_path last"
        ) from None


class _SummingWriter:
    """A file that adds up what is written to it. It keeps the last bytes back: the sum goes in their place."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.sum = hashlib.sha256()
        self.kept = b""
        self.failure: BaseException | None = None

    def write(self, data: bytes) -> int:
        rest = memoryview(data)
        end = self.kept + bytes(rest[-COMMENT_LENGTH:])  # nearly all of the data is written without a copy
        try:
            if len(rest) > COMMENT_LENGTH:
                self._write(self.kept)
                self._write(rest[:-COMMENT_LENGTH])
            else:
                self._write(end[:-COMMENT_LENGTH])
        except BaseException as error:
            self.failure = error
            raise
        self.kept = end[-COMMENT_LENGTH:]
        return len(data)

    def _write(self, data: bytes | memoryview) -> None:
        self.sum.update(data)
        self.file.write(data)

    def flush(self) -> None:
        """Needed by torch.save; nothing is done before `close`."""

    def close(self) -> None:
        """Ends the archive with its sum."""
        self.file.write(_comment(self.sum))


def _comment(total: hashlib._Hash) -> bytes:
    """The end of an archive that adds up to `total`: the comment's length, and the comment."""
    comment = f"sha256:{total.hexdigest()}".encode()
    return struct.pack("<H", len(comment)) + comment


def is_whole(path: str | Path) -> bool:
    """Whether a file is a checkpoint that `write` has written, and no bit of it has changed since.

    Raises:
        OSError: if it cannot be read.
    """
    length = len(_comment(hashlib.sha256()))
    with Path(path).open("rb") as file:
        size = file.seek(0, os.SEEK_END) - length
        if size < 0:
            return False
        file.seek(0)
        total = hashlib.sha256()
        while size and (chunk := file.read(min(size, 1 << 20))):
            total.update(chunk)
            size -= len(chunk)
        return size == 0 and file.read() == _comment(total)


def newest(paths: Iterable[Path]) -> tuple[Path | None, list[Path]]:
    """Return the newest whole checkpoint with a training state, and the newer ones that are damaged or unreadable.

    Raises:
        UserError: as `read`, if the newest whole file is no checkpoint of lightning_tfm.
    """
    damaged: list[Path] = []
    for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        whole = False
        with suppress(OSError):
            whole = is_whole(path)
        if not whole:
            damaged.append(path)
        elif _has_training_state(read(path)):
            return path, damaged
    return None, damaged


def _has_training_state(checkpoint: dict[str, Any]) -> bool:
    """Return whether training can resume from a checkpoint; an average holds weights alone."""
    return "optimizer_states" in checkpoint


def read(path: str | Path) -> dict[str, Any]:
    """A checkpoint's content, on the CPU: plain values and tensors only.

    Raises:
        UserError: if there is no such file, it is no checkpoint of lightning_tfm, or it is damaged.
    """
    path = Path(path)
    if path.is_dir():
        inside = next((path / name for name in ("best.ckpt", "checkpoints/best.ckpt") if (path / name).is_file()), None)
        mend = f"try {str(inside)!r}" if inside else "name a file that fit has written, as .../checkpoints/best.ckpt"
        raise UserError(f"the checkpoint must be a file, but {str(path)!r} is a folder; {mend}")
    if not path.is_file():
        raise UserError(f"there is no checkpoint {str(path)!r}; train one with: lightning-tfm fit --config YAML")
    try:
        whole = is_whole(path)
    except OSError as error:
        raise UserError(f"the checkpoint {str(path)!r} cannot be read: {error.strerror}") from None
    if not whole:
        raise UserError(
            f"{str(path)!r} must be a checkpoint of lightning_tfm, but is damaged or none: its checksum is wrong or "
            "missing; use another, or go on from the newest good one with: fit --ckpt_path last"
        )
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        hyper_parameters, _ = checkpoint["hyper_parameters"], checkpoint["state_dict"].items()
        network = hyper_parameters["network"]
        named = [*_class_paths(hyper_parameters | {"network": network["init_args"]}), network["class_path"]]
    except (UnpicklingError, RuntimeError, EOFError, OSError, AttributeError, LookupError, TypeError, ValueError):
        raise UserError(f"{str(path)!r} must be a checkpoint of lightning_tfm, but cannot be read as one") from None
    if len(named) > 1:
        raise UserError(f"{str(path)!r} must name no class but its network's, but names {named[0]!r}; do not trust it")
    return checkpoint


def _class_paths(values: Any) -> Iterator[Any]:
    """What nested plain values name as classes."""
    if isinstance(values, dict):
        for name, value in values.items():
            if name in ("class_path", "_class_path", "_instantiator"):
                yield value
            yield from _class_paths(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _class_paths(value)


class WholeCheckpointIO(CheckpointIO):
    """Lets Lightning write and read checkpoints as this module does."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        write(checkpoint, path)

    def load_checkpoint(self, path: str | Path, map_location: Any = None, weights_only: bool = True) -> dict[str, Any]:
        return read(path)

    def remove_checkpoint(self, path: str | Path) -> None:
        Path(path).unlink(missing_ok=True)


class Trained(NamedTuple):
    """What a checkpoint holds for use.

    Attributes:
        network: in evaluation mode.
        tokenizer: of its inputs and outputs.
        task: "seq2seq", "language modelling" or "classification".
        max_target_length: of a sequence-to-sequence network, where its answers end at the latest, in tokens.
        labels: of a classifier, the names of its classes.
    """

    network: Network
    tokenizer: Tokenizer
    task: str
    max_target_length: int = 0
    labels: tuple[str, ...] = ()


def load(path: str | Path, allow: Sequence[str] = ()) -> Trained:
    """Return the trained network of a checkpoint, and what is needed to use it.

    Args:
        path: the checkpoint.
        allow: packages, installed or in the current folder, whose code is trusted: the network may be one of theirs.

    Raises:
        UserError: as `read`, and if the network is neither of lightning_tfm.networks nor of an allowed package.
    """
    checkpoint = read(path)
    saved = checkpoint["hyper_parameters"]
    name = str(saved["network"]["class_path"])
    known = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in map(vars(networks).get, networks.__all__)}
    cls = known.get(name) or import_allowed(name, allow, f"the checkpoint {str(path)!r}")
    if not (inspect.isclass(cls) and issubclass(cls, Network)) or inspect.isabstract(cls):
        raise UserError(f"the network of {str(path)!r} must be a class that derives from Network, but is {name!r}")
    weights = checkpoint["state_dict"].items()
    try:
        network = cls(**saved["network"]["init_args"])
        network.load_state_dict({key.removeprefix(PREFIX): value for key, value in weights if key.startswith(PREFIX)})
        own = {name: saved[name] for name in ("max_target_length", "labels") if name in saved}
        return Trained(network.eval(), restored(saved["tokenizer"]), saved["task"], **own)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        raise UserError(
            f"the weights of {str(path)!r} must fit its own hyper-parameters, but do not; "
            "it is damaged, or of another version of lightning_tfm"
        ) from None


def averaged(paths: Sequence[str | Path]) -> dict[str, Any]:
    """A checkpoint's content with the mean weights of several, without what training would need to go on.

    Raises:
        UserError: as `read`, and if they are not of one network and vocabulary.
    """
    first = read(paths[0])
    total = {name: weight.double() for name, weight in first["state_dict"].items()}
    for path in paths[1:]:
        other = read(path)
        for part in ("task", "network", "tokenizer", "labels"):
            if other["hyper_parameters"].get(part) != first["hyper_parameters"].get(part):
                raise UserError(
                    f"all checkpoints must have one {part}, but those of {str(paths[0])!r} and {str(path)!r} differ"
                )
        for name, weight in other["state_dict"].items():
            total[name] += weight.double()
    weights = {name: (total[name] / len(paths)).to(weight.dtype) for name, weight in first["state_dict"].items()}
    kept = ("epoch", "global_step", "pytorch-lightning_version", "hyper_parameters", "hparams_name", "loops")
    return {name: first[name] for name in kept if name in first} | {"state_dict": weights, "callbacks": {}}


def check_fits(
    path: str | Path,
    hyper_parameters: dict[str, Any],
    shapes: dict[str, Size],
    goes_on: bool,
    averages: bool,
    step_settings: dict[str, Any],
) -> None:
    """Raises UserError, naming the first difference, unless a checkpoint is of this network and vocabulary.

    Args:
        path: the checkpoint.
        hyper_parameters: those of the model.
        shapes: of the model's weights, by name.
        goes_on: whether its training goes on: then the optimizer, whose state it holds, must be the same too.
        averages: whether the run averages its weights: one that goes on must, or must not, as it did before.
        step_settings: what changes the mathematics of a step, see `TaskModule.step_settings`; compared if `goes_on`.
    """
    checkpoint = read(path)
    odd = UserError(f"{str(path)!r} must be a checkpoint of this version of lightning_tfm, but parts do not fit")
    try:
        saved = checkpoint["hyper_parameters"]
        pairs = [("class_path", saved["network"]["class_path"], hyper_parameters["network"]["class_path"])]
        pairs += [(name, saved.get(name), hyper_parameters.get(name)) for name in ("task", "labels")]
        groups = [(saved["network"]["init_args"], hyper_parameters["network"]["init_args"])]
        if goes_on:
            groups.append((saved["optimization"], hyper_parameters["optimization"]))
            if not _has_training_state(checkpoint):
                raise UserError(
                    f"{str(path)!r} must hold the optimizer's state to go on with its run, but holds weights alone, as "
                    "an average does; go on from one of the run's own checkpoints"
                )
            _ = [checkpoint[part] for part in TRAINING]
            if ("averaging_state" in checkpoint) is not averages:
                raise UserError(
                    f"trainer.callbacks must {'not ' * averages}have a WeightAveraging to go on from {str(path)!r}, "
                    f"whose run has {'none' if averages else 'one'}; use its config.yaml"
                )
        for theirs, ours in groups:
            pairs += [(name, theirs.get(name), ours.get(name)) for name in {**theirs, **ours} if name != "vocab_size"]
        # Last: in a run of other data or of another model, they say little.
        step = checkpoint["step_settings"] if goes_on else {}
        step_pairs = [(name, step.get(name), ours) for name, ours in step_settings.items() if goes_on]
        their_size, our_size = (h["network"]["init_args"]["vocab_size"] for h in (saved, hyper_parameters))
        their_shapes = {name: weight.shape for name, weight in checkpoint["state_dict"].items()}
    except (AttributeError, KeyError, TypeError):
        raise odd from None

    def check_equal(pairs: list[tuple[str, Any, Any]]) -> None:
        for name, their, our in pairs:
            if their != our:
                raise UserError(
                    f"{name} must be that of the checkpoint {str(path)!r} ({their}), but is {our}; use its config.yaml"
                )

    check_equal(pairs)
    if saved["tokenizer"] != hyper_parameters["tokenizer"]:
        raise UserError(
            f"the vocabulary must be that of the checkpoint {str(path)!r} ({their_size} ids), but the "
            f"data's has {our_size} ids and is another one; use the data it was trained on"
        )
    check_equal(step_pairs)
    if their_shapes != shapes:
        raise odd
