"""Growth of time and memory with the size of models and data, against the same peers as elsewhere.

`python -m benchmarks.growth [NAME ...]` measures all curves or those of a family in half an hour, and writes
growth.json and two pictures.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import string
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks import peers
from benchmarks.__main__ import FOLDER, machine, state
from benchmarks.framework import EXPERIMENTS, run_start
from benchmarks.measure import Block, Built, Side, one_round, pinned, started
from benchmarks.memory import reset_peak, resident
from benchmarks.steps import nano_step, our_step, plain_step, repeated
from lightning_tfm.data import Batch
from lightning_tfm.networks import GPT, AttentionLSTM, Transformer
from lightning_tfm.plots.style import PALETTE, STYLE
from lightning_tfm.system.files import write_text
from lightning_tfm.system.memory import keep_freed_memory
from lightning_tfm.tokenization import NUM_SPECIAL

ROUNDS = 3
"""Number of rounds of each point, each in the order ours, peer, peer, ours."""

SECONDS = 0.3
"""Approximate time of a block of steps, unless a single step takes longer."""

FITTED = 3
"""Number of largest values through which an exponent is fitted."""


@dataclass(frozen=True)
class Size:
    """Size of a model and of its batch.

    Attributes:
        width: the width of the model.
        length: the number of tokens of each source and target.
        batch: the number of rows.
        vocabulary: the number of ids.
    """

    width: int = 128
    length: int = 32
    batch: int = 4
    vocabulary: int = 100


AXES: dict[str, tuple[int, ...]] = {
    "width": (64, 128, 256, 512, 1024),
    "length": (16, 64, 256, 512, 1024, 2048),
    "batch": (1, 4, 16, 64, 256, 512),
    "vocabulary": (100, 1_000, 10_000, 100_000),
}
"""Values of each attribute of Size, with the others at their defaults."""

LONGEST = {"attention LSTM": 512}
"""Maximum length of models that need too much memory beyond it: the tutorial keeps all its keys at each step."""

PAIRS = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
"""Numbers of training pairs."""

BOUNDS = {"width": 2, "length": 2, "batch": 1, "vocabulary": 1, "pairs": 1}
"""Largest expected exponent by axis: matrices have D^2 weights by width D, and attention T^2 scores by length T."""


PEERS = {"Transformer": "nn.Transformer", "GPT": "nanoGPT's formulation", "attention LSTM": "the date tutorial"}
"""Peer of each family."""


class LongerTutorial(peers.TutorialDateLSTM):
    """Model of the date tutorial for targets of any length."""

    def forward(self, source: torch.Tensor, target_in: torch.Tensor) -> torch.Tensor:
        return super().forward(source, target_in.size(1))


def network_of(family: str, is_ours: bool, size: Size) -> nn.Module:
    """Return the network of one side of a family, a key of PEERS."""
    if family == "attention LSTM":
        network = AttentionLSTM if is_ours else LongerTutorial
        return network(size.vocabulary, size.width, dropout=0.0)
    shape = {"vocab_size": size.vocabulary, "d_model": size.width, "num_heads": 4, "max_length": size.length}
    if family == "GPT":
        return (GPT if is_ours else peers.NanoGPT)(**shape, num_layers=4, bias=False)
    if is_ours:
        return Transformer(**shape, num_layers=2, d_ff=4 * size.width, dropout=0.0, norm="pre")
    return peers.TorchTransformer(**shape, num_layers=2, dropout=0.0)


def step_of(family: str, is_ours: bool, network: Any) -> Callable[[Batch], None]:
    """Return a training step of one side of a family."""
    if is_ours:
        return our_step(network, clip=1.0 if family == "GPT" else None)  # as nanoGPT
    return nano_step(network) if family == "GPT" else plain_step(network)


def batch_of(family: str, size: Size) -> Batch:
    """Return a batch of random tokens without padding; the source is empty for GPT."""
    source, target_in, target_out = torch.randint(NUM_SPECIAL, size.vocabulary, (3, size.batch, size.length))
    source = source[:, :0] if family == "GPT" else source
    return Batch(source, target_in, target_out, torch.arange(size.batch))


def build_steps(family: str, is_ours: bool, sizes: list[Size]) -> Built:
    """Build the training steps of one side at several sizes, which the blocks measure one after the other.

    The first block of a size returns the peak memory in bytes, and the others, two in each round, the number of steps.

    Args:
        family: a key of PEERS.
        is_ours: whether the side is ours, which keeps freed memory.
        sizes: the sizes of the model and of its batch.
    """
    if is_ours:
        keep_freed_memory()

    def blocks() -> Iterator[Block]:
        step_of(family, is_ours, network_of(family, is_ours, Size()))(batch_of(family, Size()))  # loads libraries
        for size in sizes:
            gc.collect()
            before = reset_peak()
            torch.manual_seed(0)
            batch = batch_of(family, size)
            step = step_of(family, is_ours, network_of(family, is_ours, size))
            once = repeated(step, [batch], 1, lambda batch: 1)
            once()
            seconds = once().seconds
            yield Block(resident("VmHWM") - before, seconds)
            work = repeated(step, [batch], max(1, round(SECONDS / seconds)), lambda batch: 1)
            for _ in range(2 * ROUNDS):
                yield work()
            del step, once, work

    return Built({}, partial(next, blocks()))


@dataclass(frozen=True)
class Point:
    """Time and memory of both sides at one value.

    Attributes:
        family: the family of the model, or "data".
        axis: what grows, a key of BOUNDS.
        value: its value.
        ours, peer: the seconds of a step, or until the first step of a run.
        our_memory, peer_memory: the peak memory in bytes of steps, minus that before the model is built, or of the
            whole process.
        machine, commit: where and at which commit it was measured.
    """

    family: str
    axis: str
    value: int
    ours: float
    peer: float
    our_memory: float
    peer_memory: float
    machine: str = ""
    commit: str = ""


def step_points(family: str) -> Iterator[Point]:
    """Measure the training step of a family over all axes."""
    values = [
        (axis, value)
        for axis, values in AXES.items()
        for value in values
        if axis != "length" or value <= LONGEST.get(family, value)
    ]
    sizes = [replace(Size(), **{axis: value}) for axis, value in values]
    with ExitStack() as stack:
        sides = (Side(build_steps, family, is_ours, sizes) for is_ours in (True, False))
        (_, ours), (_, peer) = (stack.enter_context(started(side, warm=False)) for side in sides)
        for axis, value in values:
            memory = ours().amount, peer().amount
            rates = zip(*(one_round(ours, peer) for _ in range(ROUNDS)), strict=True)
            yield Point(family, axis, value, *(1 / median(side) for side in rates), *memory)


def write_pairs(path: Path, size: int) -> None:
    """Write a table of random words and the same words in capitals."""
    draw = random.Random(path.name)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(size):
            word = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(6, 12)))
            file.write(f"{word}\t{word.upper()}\n")


OUR_START = (
    *("-m", "lightning_tfm", "fit", "--config", str(EXPERIMENTS / "tsv_transformer.yaml")),
    *("--data.init_args.train=train.tsv", "--data.init_args.val=val.tsv", "--trainer.accelerator=cpu"),
    *("--trust-package=benchmarks", "--trainer.callbacks+=benchmarks.first_step.FirstStep"),
)
PEER_START = ("-c", "from benchmarks.first_step import train_yoyodyne; train_yoyodyne('.')")


def data_points() -> Iterator[Point]:
    """Measure the start of a run on tables of different sizes, against yoyodyne."""
    for place, pairs in enumerate((PAIRS[0], *PAIRS)):
        with tempfile.TemporaryDirectory() as path:
            folder = Path(path)
            write_pairs(folder / "train.tsv", pairs)
            write_pairs(folder / "val.tsv", 100)
            ours, our_memory = run_start(folder, *OUR_START, mode="disabled")
            peer, peer_memory = run_start(folder, *PEER_START, mode="disabled")
        if place:  # the first run only fills the disk cache
            yield Point("data", "pairs", pairs, ours, peer, our_memory, peer_memory)


def exponent(values: list[int], costs: list[float]) -> float:
    """Return the exponent p of costs ~ value^p, fitted by least squares of the logarithms of the FITTED last points."""
    return float(np.polyfit(np.log(values[-FITTED:]), np.log(costs[-FITTED:]), 1)[0])


def by_curve(points: list[Point]) -> dict[tuple[str, str], list[Point]]:
    """Return the points of each curve, by family and axis."""
    curves: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        curves.setdefault((point.family, point.axis), []).append(point)
    return curves


QUANTITIES = {"ours": 1000.0, "peer": 1000.0, "our_memory": 2.0**-20, "peer_memory": 2.0**-20}
"""Measured attributes of Point, with the factors that convert them to ms and MiB."""


def plot(points: list[Point], quantity: str, path: Path) -> None:
    """Plot all curves of a quantity, on logarithmic axes.

    Args:
        points: the points.
        quantity: "time" or "memory".
        path: the file of the picture.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    names = {"time": ("ours", "peer"), "memory": ("our_memory", "peer_memory")}[quantity]
    curves, (ours_color, peer_color, *_) = by_curve(points), PALETTE
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 6.6), layout="constrained")
        grid = figure.subplots(len(PEERS), len(AXES), sharey="row")
        for row, family in enumerate(PEERS):
            for column, axis in enumerate(AXES):
                axes, curve = grid[row, column], curves[family, axis]
                values = [point.value for point in curve]
                for name, color, marker in zip(names, (ours_color, peer_color), "os", strict=True):
                    costs = [QUANTITIES[name] * getattr(point, name) for point in curve]
                    label = "ours" if name.startswith("our") else PEERS[family]
                    axes.plot(values, costs, marker=marker, markersize=3.5, color=color, label=label)
                axes.set_xscale("log")
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter("{x:,.0f}")
                axes.minorticks_off()
                axes.set_xticks(ticks := AXES[axis][::2], [f"{tick:,}" for tick in ticks])
                axes.grid(axis="y", linewidth=0.4, alpha=0.5)
                if row == len(PEERS) - 1:
                    axes.set_xlabel(axis)
                if column == 0:
                    axes.set_ylabel(f"{family}\n{'ms a step' if quantity == 'time' else 'MiB'}")
                    axes.legend()
    figure.savefig(path, dpi=110)


def publish(points: list[Point], folder: Path = FOLDER) -> None:
    """Replace the curves of the points in growth.json, and draw its pictures again.

    Args:
        points: whole curves, whose measured values are rounded to four significant digits.
        folder: the folder of growth.json.
    """
    path = folder / "growth.json"
    earlier = [Point(**point) for point in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []
    points = [replace(p, **{name: float(f"{getattr(p, name):.4g}") for name in QUANTITIES}) for p in points]
    curves = by_curve(earlier) | by_curve(points)
    order = [(family, axis) for family in PEERS for axis in AXES] + [("data", "pairs")]
    kept = [point for key in order for point in curves.get(key, ())]
    write_text(path, "[\n" + ",\n".join(json.dumps(asdict(point)) for point in kept) + "\n]\n")
    if all(key in curves for key in order[:-1]):
        for quantity in ("time", "memory"):
            plot(kept, quantity, folder / f"growth_{quantity}.png")


def main() -> None:
    """Measure all curves, or those of the named families, and publish them."""
    names = (*PEERS, "data")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"curves, of {', '.join(names)}; by default, all")
    chosen = parser.parse_args().names or names
    if unknown := set(chosen) - set(names):
        parser.error(f"NAME must be one of {', '.join(names)}, but is {sorted(unknown)[0]!r}")
    if sys.platform != "linux":
        parser.error("peak memory is measured on Linux only")
    origin = {"machine": machine(), "commit": state()}
    for name in chosen:
        points = []
        with pinned():
            for point in data_points() if name == "data" else step_points(name):
                points.append(replace(point, **origin))
                costs = f"{point.ours:.4g} and {point.peer:.4g} s"
                print(f"{point.family}, {point.axis} {point.value:,}: {costs}", flush=True)
        publish(points)


if __name__ == "__main__":
    main()
