"""Growth of time and memory with the size of models and data, against the peers of the other benchmarks.

`python -m benchmarks.growth [NAME ...]` measures all curves, or those of a family, in half an hour, and writes
growth.json and two pictures. No curve may grow faster than its bound.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import string
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.__main__ import FOLDER, machine, state
from benchmarks.framework import EXPERIMENTS, run_start
from benchmarks.measure import Block, Built, Side, one_round, pinned, started
from benchmarks.memory import reset_peak, resident
from benchmarks.steps import Step, nano_step, our_step, plain_step, repeated
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

PEERS = {"Transformer": "nn.Transformer", "GPT": "nanoGPT's formulation", "attention LSTM": "the date tutorial"}
"""Peer of each family of models; that of "data" is yoyodyne."""


@dataclass(frozen=True)
class Size:
    """Size of a model and of its batch: its width, the tokens of each source and target, the rows, and the ids."""

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
"""Numbers of training pairs of "data"."""

BOUNDS = {"width": 2, "length": 2, "batch": 1, "vocabulary": 1, "pairs": 1}
"""Largest expected exponent by axis: matrices have D^2 weights by width D, and attention T^2 scores by length T."""


@dataclass(frozen=True)
class Point:
    """Seconds and peak bytes of both sides at one value of an axis.

    Those of a family are of a step, and the memory without that before the model is built. Those of "data" are of the
    start of a run until its first step, and of its whole process.
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


QUANTITIES = {"ours": 1000.0, "peer": 1000.0, "our_memory": 2.0**-20, "peer_memory": 2.0**-20}
"""Measured attributes of Point, with the factors that convert them to ms and MiB."""


class LongerTutorial(peers.TutorialDateLSTM):
    """Model of the date tutorial for targets of any length."""

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        return super().forward(source, target_in.size(1))


def network_of(family: str, is_ours: bool, size: Size) -> nn.Module:
    """Return the network of one side of a family."""
    if family == "attention LSTM":
        return (AttentionLSTM if is_ours else LongerTutorial)(size.vocabulary, size.width, dropout=0.0)
    shape = {"vocab_size": size.vocabulary, "d_model": size.width, "num_heads": 4, "max_length": size.length}
    if family == "GPT":
        return (GPT if is_ours else peers.NanoGPT)(**shape, num_layers=4, bias=False)
    if is_ours:
        return Transformer(**shape, num_layers=2, d_ff=4 * size.width, dropout=0.0, norm="pre")
    return peers.TorchTransformer(**shape, num_layers=2, dropout=0.0)


def step_of(family: str, is_ours: bool, size: Size) -> tuple[Step, Batch]:
    """Return a training step of one side of a family, and a batch of random tokens without padding for it."""
    source, target_in, target_out = torch.randint(NUM_SPECIAL, size.vocabulary, (3, size.batch, size.length))
    source = source[:, :0] if family == "GPT" else source
    network = network_of(family, is_ours, size)
    if is_ours:
        step = our_step(network, clip=1.0 if family == "GPT" else None)  # as nanoGPT
    else:
        step = nano_step(network) if family == "GPT" else plain_step(network)
    return step, Batch(source, target_in, target_out, torch.arange(size.batch))


def build_steps(family: str, is_ours: bool, sizes: list[Size]) -> Built:
    """Build the training steps of one side at several sizes, which the blocks measure one after the other.

    The first block of a size returns the peak memory in bytes, and the others, two in each round, the number of steps.
    """
    if is_ours:
        keep_freed_memory()

    def blocks() -> Iterator[Block]:
        step, batch = step_of(family, is_ours, Size())
        step(batch)  # loads libraries
        for size in sizes:
            del step, batch
            gc.collect()
            before = reset_peak()
            torch.manual_seed(0)
            step, batch = step_of(family, is_ours, size)
            once = repeated(step, [batch], 1, lambda _: 1)
            once()
            seconds = once().seconds
            yield Block(resident("VmHWM") - before, seconds)
            block = repeated(step, [batch], max(1, round(SECONDS / seconds)), lambda _: 1)
            for _ in range(2 * ROUNDS):
                yield block()
            del once, block

    return Built({}, partial(next, blocks()))


def step_points(family: str) -> Iterator[Point]:
    """Measure the training step of a family over all axes."""
    longest = AXES | {"length": [length for length in AXES["length"] if length <= LONGEST.get(family, length)]}
    values = [(axis, value) for axis, values in longest.items() for value in values]
    sizes = [Size(**{axis: value}) for axis, value in values]
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


def data_points(sizes: tuple[int, ...] = PAIRS) -> Iterator[Point]:
    """Measure the start of a run on tables of different sizes, against yoyodyne."""
    for place, pairs in enumerate((sizes[0], *sizes)):
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
    return {key: list(curve) for key, curve in groupby(points, lambda point: (point.family, point.axis))}


def plot(points: list[Point], quantity: str, path: Path) -> None:
    """Plot all curves of the "time" or the "memory", on logarithmic axes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    names = {"time": ("ours", "peer"), "memory": ("our_memory", "peer_memory")}[quantity]
    curves = by_curve(points)
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 6.6), layout="constrained")
        grid = figure.subplots(len(PEERS), len(AXES), sharey="row")
        for cells, family in zip(grid, PEERS, strict=True):
            for axes, axis in zip(cells, AXES, strict=True):
                values = [point.value for point in curves[family, axis]]
                for name, label, color, marker in zip(names, ("ours", PEERS[family]), PALETTE, "os", strict=False):
                    costs = [QUANTITIES[name] * getattr(point, name) for point in curves[family, axis]]
                    axes.loglog(values, costs, marker=marker, markersize=3.5, color=color, label=label)
                axes.yaxis.set_major_formatter("{x:,.0f}")
                axes.minorticks_off()
                axes.set_xticks(ticks := AXES[axis][::2], [f"{tick:,}" for tick in ticks])
                axes.grid(axis="y", linewidth=0.4, alpha=0.5)
            cells[0].set_ylabel(f"{family}\n{'ms a step' if quantity == 'time' else 'MiB'}")
            cells[0].legend()
        for axes, axis in zip(grid[-1], AXES, strict=True):
            axes.set_xlabel(axis)
    figure.savefig(path, dpi=110)


def publish(points: list[Point], folder: Path = FOLDER) -> None:
    """Replace the curves of the points in growth.json, and draw its pictures again."""
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
    families = [*PEERS, "data"]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"family, of {', '.join(families)}; by default, all")
    names = parser.parse_args().names or families
    if unknown := set(names) - set(families):
        parser.error(f"NAME must be one of {', '.join(families)}, but is {sorted(unknown)[0]!r}")
    if sys.platform != "linux":
        parser.error("peak memory is measured on Linux only")
    origin = {"machine": machine(), "commit": state()}
    for name in names:
        with pinned():
            points = []
            for point in data_points() if name == "data" else step_points(name):
                points.append(replace(point, **origin))
                print(point, flush=True)
        publish(points)


if __name__ == "__main__":
    main()
