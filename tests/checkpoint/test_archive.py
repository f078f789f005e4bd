"""The file of a checkpoint: written, read and damaged."""

import hashlib
import itertools
import random
import signal
from collections import Counter

import pytest
import torch

from lightning_tfm.checkpoint import FORMAT, read, verify_checksum, write
from lightning_tfm.errors import Interrupted, UserError
from support.equality import contents, equal


def write_checkpoint(path):
    content = {
        "format_version": FORMAT,
        "global_step": 3,
        "state_dict": {"network.weight": torch.randn(40, 30)},
        "hyper_parameters": {"network": {"class_path": "none", "init_args": {}}},
        "extra": [1, "text", None, 2.5],
    }
    write(content, path)
    return content


def test_checkpoints_are_read_as_written(tmp_path):
    path = tmp_path / "some/where/a.ckpt"
    content = write_checkpoint(path)
    equal(read(path), content)
    equal(torch.load(path, weights_only=True), content)  # torch can read it, too
    assert [other.name for other in path.parent.iterdir()] == ["a.ckpt"]


@pytest.mark.parametrize("version", [None, FORMAT + 1])
def test_checkpoints_of_another_format_are_refused(version, tmp_path):
    content = write_checkpoint(tmp_path / "a.ckpt")
    write(content | {"format_version": version}, tmp_path / "b.ckpt")
    with pytest.raises(UserError, match=f"must have version {FORMAT} of .* but has version {version};"):
        read(tmp_path / "b.ckpt")


BLOCK = 512


def corruptions(data, number):
    """Yield distinct damaged copies of a file, as disks and killed processes leave them, with the kind of damage."""
    draw = random.Random(0)

    def flipped(masks):
        damaged = bytearray(data)
        for place, mask in enumerate(masks, draw.randrange(len(data) - len(masks) + 1)):
            damaged[place] ^= mask
        return bytes(damaged)

    def pieces(*order):
        """Cut the file at three random positions, and join the pieces in the given order."""
        ends = [0, *sorted(draw.sample(range(1, len(data)), 3)), len(data)]
        return b"".join(data[ends[number] : ends[number + 1]] for number in order)

    def zeroed():
        start = draw.randrange(len(data) - BLOCK + 1)
        return data[:start] + bytes(BLOCK) + data[start + BLOCK :]

    kinds = {
        "cut": lambda: data[: draw.randrange(1, len(data))],
        "lengthened": lambda: data + draw.randbytes(draw.randint(1, BLOCK)),
        "a bit flipped": lambda: flipped([1 << draw.randrange(8)]),
        "a block flipped": lambda: flipped(draw.choices(range(1, 256), k=BLOCK)),
        "a block zeroed": zeroed,
        "a piece removed": lambda: pieces(0, 2, 3),
        "a piece repeated": lambda: pieces(0, 1, 1, 2, 3),
        "two pieces swapped": lambda: pieces(0, 2, 1, 3),
    }
    yield "empty", b""
    yield "zeroed", bytes(len(data))
    copies = {data, b"", bytes(len(data))}
    for name in itertools.islice(itertools.cycle(kinds), number - 2):
        while (damaged := kinds[name]()) in copies:
            pass
        copies.add(damaged)
        yield name, damaged


@pytest.mark.parametrize("number", [30, pytest.param(3_000, marks=pytest.mark.run)])
def test_damaged_checkpoints_are_detected(number, tmp_path):
    path = tmp_path / "a.ckpt"
    write_checkpoint(path)
    data = path.read_bytes()
    digests, kinds = {hashlib.sha256(data).digest()}, Counter()
    for name, damaged in corruptions(data, number):
        path.write_bytes(damaged)
        assert not verify_checksum(path), name
        with pytest.raises(UserError, match=r"a\.ckpt' must be a checkpoint of lightning_tfm, but is damaged"):
            read(path)
        digests.add(hashlib.sha256(damaged).digest())
        kinds[name] += 1
    assert len(digests) == number + 1, "all damaged copies differ from each other and from the file"
    print(f"distinct corruptions detected: {number} ({', '.join(f'{count} {name}' for name, count in kinds.items())})")


@pytest.mark.parametrize("error", [Interrupted(signal.SIGINT), KeyboardInterrupt(), MemoryError()], ids=repr)
@pytest.mark.parametrize("handled", [OSError("an earlier error"), Interrupted(signal.SIGTERM)], ids=repr)
def test_an_interruption_while_a_checkpoint_is_written_ends_as_one(error, handled, tmp_path, monkeypatch):
    """Torch then fails to close the file that is half written, and raises an error of its own."""
    write({"weight": torch.zeros(3)}, tmp_path / "last.ckpt")
    before = contents(tmp_path)

    def save(content, file):
        file.write(b"half of the file" * 100)
        try:
            raise error
        finally:
            raise RuntimeError("unexpected pos 1600 vs 1500")

    def write_while_another_is_handled():
        try:
            raise handled
        except BaseException:
            write({"weight": torch.ones(3)}, tmp_path / "last.ckpt")

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(type(error)):
        write_while_another_is_handled()
    assert contents(tmp_path) == before
