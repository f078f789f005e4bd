"""Table and chart of scaling.md: memory and step time of GPT by size, strategy and number of devices.

`python docs/scaling.py` prints the table and draws docs/images/scaling.png, in half an hour, without a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch.plugins import MixedPrecision
from matplotlib import rc_context
from matplotlib.figure import Figure

from lightning_tfm.commands.step_cost import StepCost, ddp, divide, fake_processes, replicate, step_cost
from lightning_tfm.data import Batch, MicroBatches
from lightning_tfm.networks import GPT
from lightning_tfm.plots.style import PALETTE, STYLE
from lightning_tfm.tasks import LanguageModel
from lightning_tfm.tokenization import SymbolTokenizer

MODELS = {"124M": (768, 12, 12), "1.5B": (1600, 25, 48), "7B": (4096, 32, 32)}
"""Width, heads and layers; the first two are GPT-2 and GPT-2 XL."""

VOCAB_SIZE, ROWS, LENGTH = 50_257, 8, 1024
"""Size of the vocabulary of GPT-2, and rows and tokens of the batch of a device."""

DEVICES = (1, 2, 4, 8, 64, 256, 1024)

ELASTIC, TENSOR = "elastic", "tensor"
STRATEGIES = {"DDP": ddp, ELASTIC: replicate, "FSDP": divide, TENSOR: divide}
"""Functions that distribute a module, by name of the strategy."""

# Assumptions, see scaling.md.
PEAK = 989e12  # FLOP/s of an H100 SXM in bfloat16
UTILIZATION = 0.4
MEMORY = 80e9
NODE = 8  # devices
NVLINK = 450e9  # bytes/s
NETWORKS = {"InfiniBand": 400e9, "Ethernet": 12.5e9}  # bytes/s of a node
LATENCY = 5e-6  # s per message
BUCKET = 25 * 2**20  # bytes of an all-reduce of DDP


@dataclass(frozen=True)
class Estimate:
    """Estimate for a model, a strategy and a number of devices."""

    model: str
    strategy: str
    devices: int
    cost: StepCost

    @property
    def fits(self) -> bool:
        """Return whether the memory of a device suffices."""
        return self.cost.memory <= MEMORY

    @property
    def computing(self) -> float:
        """Return the seconds of the matrix products."""
        return self.cost.flops / (PEAK * UTILIZATION)

    def communicating(self, network: str) -> float:
        """Return the seconds of the collectives over a network, or over NVLink in one node."""
        n = self.devices
        bandwidth = NVLINK if n <= NODE else min(NVLINK, NETWORKS[network])
        reductions = self.cost.collectives["allreduce"]
        if self.strategy == "DDP":
            reductions = math.ceil(self.cost.gradients / BUCKET) if n > 1 else 0
        others = sum(self.cost.collectives.values()) - self.cost.collectives["allreduce"]
        messages = reductions * 2 * math.log2(n) + others * (n - 1)  # in a tree, and in a ring
        return self.cost.sent / bandwidth + messages * LATENCY

    def efficiency(self, network: str) -> float:
        """Return the speed of a device relative to one without communication."""
        communicating = self.communicating(network)
        if self.strategy in (ELASTIC, TENSOR):  # their communication does not overlap with computing
            return self.computing / (self.computing + communicating)
        return self.computing / max(self.computing, communicating)


def estimates() -> Iterator[Estimate]:
    """Plan all models, strategies and numbers of devices."""
    tokenizer = SymbolTokenizer([chr(0x4E00 + number) for number in range(VOCAB_SIZE - 3)])
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    batch = Batch(ids[:, :0], ids, ids, torch.arange(ROWS))
    for name, (d_model, num_heads, num_layers) in MODELS.items():

        def make(d_model: int = d_model, num_heads: int = num_heads, num_layers: int = num_layers) -> LanguageModel:
            return LanguageModel(GPT(VOCAB_SIZE, d_model, num_heads, num_layers, max_length=LENGTH), tokenizer)

        for label, strategy in STRATEGIES.items():
            for number in DEVICES:
                size = number if label == TENSOR else 1
                if label == TENSOR and (not 1 < number <= NODE or num_heads % number):
                    continue
                with fake_processes(number, size) as mesh:
                    precision = MixedPrecision("bf16-mixed", "cpu")
                    given = MicroBatches((batch,)) if label == ELASTIC else batch
                    cost = step_cost(make, given, strategy, mesh, precision)
                yield Estimate(name, label, number, cost)


def table(rows: list[Estimate]) -> str:
    """Return the table of the page in Markdown."""
    header = ("model", "strategy", "devices", "memory", "computing", *NETWORKS, "efficiency")
    lines = ["| " + " | ".join(header) + " |", "|---|---|" + "---:|" * (len(header) - 2)]
    for row in rows:
        fits_nowhere = row.devices > 1 and not row.fits and row.strategy in ("DDP", ELASTIC)
        if fits_nowhere or (row.devices in (2, 4) and row.strategy != TENSOR):  # these are in the chart
            continue
        times = [f"{1e3 * seconds:,.0f} ms" for seconds in (row.computing, *map(row.communicating, NETWORKS))]
        shares = " / ".join(f"{row.efficiency(network):.0%}" for network in NETWORKS)
        cells = (
            row.model,
            row.strategy,
            f"{row.devices:,}",
            f"{row.cost.memory / 2**30:.1f} GiB",
            *times,
            shares if row.fits else "does not fit",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows: list[Estimate], path: Path) -> None:
    """Draw the efficiency by number of devices, for models that fit into memory."""
    with rc_context(STYLE):
        figure = Figure(figsize=(7, 3), layout="constrained")
        for axes, network in zip(figure.subplots(1, len(NETWORKS), sharey=True), NETWORKS, strict=True):
            for color, model in zip(PALETTE, MODELS, strict=False):
                for strategy, line in (("DDP", "o-"), ("FSDP", "s--")):
                    shown = [row for row in rows if (row.model, row.strategy, row.fits) == (model, strategy, True)]
                    points = [(row.devices, row.efficiency(network)) for row in shown]
                    if points:
                        style = {"color": color, "linewidth": 1.5, "markersize": 4}
                        axes.plot(*zip(*points, strict=True), line, label=f"{model}, {strategy}", **style)
            axes.set_xscale("log", base=2)
            axes.set_xticks(DEVICES, [f"{number:,}" for number in DEVICES])
            axes.minorticks_off()
            axes.set_ylim(0, 1.05)
            axes.set_xlabel("devices")
            axes.set_title(network)
        figure.axes[0].set_ylabel("estimated efficiency")
        figure.axes[0].legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Print the table and draw the chart."""
    rows = list(estimates())
    print(table(rows))
    draw(rows, Path(__file__).parent / "images/scaling.png")


if __name__ == "__main__":
    main()
