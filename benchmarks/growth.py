"""Growth of time and memory with the size of models and data: `python -m benchmarks.growth` writes GROWTH.md."""

from __future__ import annotations

import argparse
import gc
import json
import random
import string
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.__main__ import FOLDER, machine, number, state, table_lines
from benchmarks.framework import EXPERIMENTS, run_start
from benchmarks.measure import THREADS, Block, Built, Side, one_round, pinned, reset_peak, resident, started
from benchmarks.steps import nano_step, our_step, parameters_of, plain_step, repeated
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


class LongerTutorial(peers.TutorialDateLSTM):
    """Model of the date tutorial for targets of any length."""

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        return super().forward(source, target_in.size(1))


def network_of(family: str, is_ours: bool, size: Size) -> nn.Module:
    """Return the network of one side.

    Args:
        family: a key of PEERS.
        is_ours: whether the side is ours.
        size: the size of the network.
    """
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
    """Return a training step of one side.

    Args:
        family: a key of PEERS.
        is_ours: whether the side is ours.
        network: the network.
    """
    if is_ours:
        return our_step(network, clip=1.0 if family == "GPT" else None)  # as nanoGPT
    return nano_step(network) if family == "GPT" else plain_step(network)


PEERS = {"Transformer": "nn.Transformer", "GPT": "nanoGPT's formulation", "attention LSTM": "the date tutorial"}
"""Peer of each family."""


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
            step(batch)
            begun = time.perf_counter()
            step(batch)
            seconds = time.perf_counter() - begun
            yield Block(resident("VmHWM") - before, seconds)
            work = repeated(step, [batch], [1], max(1, round(SECONDS / seconds)))
            for _ in range(2 * ROUNDS):
                yield work()
            del step, work

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
        (_, ours), (_, peer) = (
            stack.enter_context(
                started(Side(build_steps, {"family": family, "is_ours": is_ours, "sizes": sizes}), warm=False)
            )
            for is_ours in (True, False)
        )
        for axis, value in values:
            memory = ours().amount, peer().amount
            rates = zip(*(one_round(ours, peer) for _ in range(ROUNDS)), strict=True)
            yield Point(family, axis, value, *(1 / median(side) for side in rates), *memory)


def write_pairs(folder: Path, sizes: dict[str, int]) -> None:
    """Write tables of random words and the same words in capitals.

    Args:
        folder: the folder of the tables.
        sizes: the number of pairs in each split.
    """
    draw = random.Random(0)
    for split, size in sizes.items():
        with (folder / f"{split}.tsv").open("w", encoding="utf-8") as file:
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
            write_pairs(folder, {"train": pairs, "val": 100})
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


def sizes_of(point: Point) -> list[str]:
    """Return the number of parameters of each side at a point; empty for data."""
    if point.family == "data":
        return ["", ""]
    size = replace(Size(), **{point.axis: point.value})
    with torch.device("meta"):
        return [f"{parameters_of(network_of(point.family, is_ours, size)):,}" for is_ours in (True, False)]


def markdown(points: list[Point]) -> str:
    """Return the text of GROWTH.md."""
    base, fits, body = Size(), [], []
    for (family, axis), curve in by_curve(points).items():
        values = [point.value for point in curve]
        powers = [exponent(values, [getattr(point, name) for point in curve]) for name in QUANTITIES]
        bounds = f"{values[-FITTED]:,} to {values[-1]:,}", str(BOUNDS[axis])
        fits.append((family, axis, *bounds, *(f"{power:.2f}" for power in powers)))
        for point in curve:
            figures = [number(factor * getattr(point, name)) for name, factor in QUANTITIES.items()]
            body.append((family, axis, f"{point.value:,}", *figures, *sizes_of(point), point.machine, point.commit))
    models = ", ".join(f"{peer} ({family})" for family, peer in PEERS.items())
    lines = [
        "# Growth",
        "",
        "This page shows how the time and the peak memory of a training step grow with the width, the length, the "
        "batch and the vocabulary, and how those of the start of a run grow with the number of training pairs. "
        f"`python -m benchmarks.growth` measures them. Times of steps are medians of {ROUNDS} rounds with {THREADS} "
        "threads, alternately of ours and the peer; memory and starts are single measurements.",
        "",
        f"Apart from what grows, the width is {base.width}, sources and targets have {base.length} tokens, a batch has "
        f"{base.batch} rows, and the vocabulary has {base.vocabulary} ids. The peers are {models} and yoyodyne (data). "
        "Ours keeps freed memory; the date tutorial has the fused Adam of our benchmarks, without clipping. The "
        "attention LSTM and the date tutorial have different numbers of parameters, and are measured up to a length of "
        f"{LONGEST['attention LSTM']}, since the tutorial keeps a copy of all keys for each step of the decoder. The "
        "memory of a step is the peak of two steps, minus the memory before the model is built.",
        "",
        "For data, `fit` starts `tsv_transformer` without W&B, and yoyodyne a pointer-generator LSTM of width 32, both "
        "with batches of 64, on tables of words of 6 to 12 letters and the same words in capitals. The time includes "
        "the imports, and the memory is the peak of the process, excluding yoyodyne's worker process. The "
        "models differ, so only the growth with the pairs is comparable.",
        "",
        "![Time of a step by size](growth_time.png)",
        "",
        "![Peak memory of a step by size](growth_memory.png)",
        "",
        f"An exponent is the slope through the last {FITTED} points of a curve on logarithmic axes. The column "
        '"at most" is its largest expected value: 2 by width (weights) and by length (attention scores), otherwise 1. '
        "Tests check ours, with a tolerance of 0.1 for caches and the varying speed of the machine.",
        "",
        *table_lines(
            ("model", "by", "fitted", "at most", "time, ours", "time, peer", "memory, ours", "memory, peer"), fits
        ),
        "",
        *table_lines(
            (
                *("model", "by", "value", "ours, ms", "peer, ms", "ours, MiB", "peer, MiB"),
                *("ours, parameters", "peer, parameters", "machine", "commit"),
            ),
            body,
        ),
    ]
    return "\n".join(lines) + "\n"


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


def rounded(point: Point) -> Point:
    """Return a point whose measured values have four significant digits."""
    return replace(point, **{name: float(f"{getattr(point, name):.4g}") for name in QUANTITIES})


def publish(points: list[Point], folder: Path = FOLDER) -> None:
    """Replace the curves of the points in growth.json, and regenerate GROWTH.md and its pictures.

    Args:
        points: whole curves.
        folder: the folder of growth.json.
    """
    path = folder / "growth.json"
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    curves = by_curve([Point(**point) for point in earlier]) | by_curve(points)
    order = [(family, axis) for family in PEERS for axis in AXES] + [("data", "pairs")]
    kept = [rounded(point) for key in order for point in curves.get(key, ())]
    write_text(path, json.dumps([asdict(point) for point in kept], indent=1) + "\n")
    write_text(folder / "GROWTH.md", markdown(kept))
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
    measured_on, commit = machine(), state()
    for name in chosen:
        points = []
        with pinned():
            for point in data_points() if name == "data" else step_points(name):
                points.append(replace(point, machine=measured_on, commit=commit))
                print(
                    f"{point.family}, {point.axis} {point.value:,}: {point.ours:.4g} and {point.peer:.4g} s", flush=True
                )
        publish(points)


if __name__ == "__main__":
    main()
