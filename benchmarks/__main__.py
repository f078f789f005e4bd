"""Run the benchmarks, or only those named: `python -m benchmarks [NAME ...] [--full]`; see benchmarks/README.md."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from benchmarks import convergence, decoding, framework, gpu, limits, steps, tables, texts
from benchmarks.measure import ROUNDS, Row, pinned
from lightning_tfm.errors import UserError
from lightning_tfm.plots.style import PALETTE, STYLE
from lightning_tfm.system import versions
from lightning_tfm.system.files import write_text

FOLDER = Path(__file__).parent

Benchmark = Callable[[bool], Iterator[Row]]
"""Function that yields the rows of a benchmark; its argument is whether peers run in full."""

BENCHMARKS: tuple[Benchmark, ...] = (
    convergence.dates_against_tutorial,
    convergence.dates_against_yoyodyne,
    convergence.copying,
    convergence.shakespeare,
    convergence.large_shakespeare,
    convergence.polarity,
    convergence.multi30k,
    tables.inflection,
    tables.pronunciation,
    steps.transformer_steps,
    steps.gpt_steps,
    steps.gpt_settings,
    steps.lstm_steps,
    limits.limits,
    limits.lstm_limits,
    decoding.key_value_cache,
    decoding.batched_dates,
    decoding.against_ctranslate2,
    decoding.translations,
    framework.length_buckets,
    framework.threads,
    framework.trainer_overhead,
    framework.start_up,
    framework.processes,
    framework.elastic,
    framework.saving,
    texts.texts,
    texts.texts_against_litdata,
    texts.large_texts,
    gpu.gpt2_124m,
    gpu.tiny_shakespeare,
    gpu.memory_mapped_text,
    gpu.elastic_determinism,
)
"""All benchmarks, in the order of their rows in RESULTS.md."""

LONG: tuple[Benchmark, ...] = (
    convergence.large_shakespeare,
    convergence.multi30k,
    tables.inflection,
    tables.pronunciation,
    steps.gpt_settings,
    limits.limits,
    decoding.against_ctranslate2,
    decoding.translations,
    framework.elastic,
    texts.large_texts,
)
"""Benchmarks that take ten minutes or more each, and run only if named or with `--full`."""

PUBLISHED = ("results.json", "RESULTS.md", "results.png")

COLUMNS = ("benchmark", "ours", "peer", "unit", "ratio", "90% interval", "target", "met", "machine")

LIMITED = ("", ", same tensors", ", same memory settings")
"""Ends of the names of rows with the same peer as their limit."""


def number(value: float | None) -> str:
    """Format a value with three significant digits, or as an integer from 999.5 on; empty if None or not finite."""
    if value is None or not math.isfinite(value):
        return ""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def cells(row: Row) -> list[str]:
    """Return the cells of COLUMNS; `reached` is appended to our value and `extrapolated` to the peer's."""
    if row.ours is None and not row.reached:
        return [row.name, "", "", row.unit, "not measured", "", row.target, "", row.machine]
    ours, peer = (
        f"{number(value) or 'never'} ({note})" if note else number(value)
        for value, note in ((row.ours, row.reached), (row.peer, row.extrapolated))
    )
    around = f"{number(row.low)} to {number(row.high) or 'never'}" if row.low is not None else ""
    verdict = {True: "yes", False: "no", None: ""}[row.held]
    return [row.name, ours, peer, row.unit, number(row.ratio), around, row.target, verdict, row.machine]


def share_of_limit(row: Row, rows: list[Row]) -> float | None:
    """Return the ratio of a row as a share of its measured limit, or None if it has no limit.

    The limit is 1 / (1 / products + 1 / calls), of the rows "limit: NAME, products" and "limit: NAME, calls", where the
    name of the row is NAME and an end of LIMITED.
    """
    ratios = {other.name: other.ratio for other in rows}
    for end in LIMITED:
        name = f"limit: {row.name.removesuffix(end)}"
        products, calls = (ratios.get(f"{name}, {kind}") for kind in ("products", "calls"))
        if row.name.endswith(end) and row.ratio and products and calls:
            return row.ratio * (1 / products + 1 / calls)
    return None


def markdown(results: dict[str, Any]) -> str:
    """Return the text of RESULTS.md from the content of results.json."""
    rows = [Row(**row) for row in results["rows"]]
    targets = [row for row in rows if row.held is not None]
    header = (*COLUMNS, "of its limit", "checked", "commit", "torch", "notes")
    table = [header, ("---",) * len(header)]
    for row in rows:
        share = share_of_limit(row, rows)
        table.append((*cells(row), f"{share:.0%}" if share else "", row.checked, row.commit, row.torch, row.note))
    lines = [
        "# Results",
        "",
        f"The rows of `make bench FULL=1`: {sum(map(bool, (row.held for row in targets)))} of {len(targets)} measured "
        f"targets met. Figures are medians of {ROUNDS} rounds, or of {len(tables.SEEDS)} seeds on tables, with their "
        '90% intervals; rows of a time to a goal show the expected time. An empty cell under "checked" means that '
        "nothing was compared between the sides. [README.md](README.md) describes the method and explains each missed "
        "target.",
        "",
        "![ratios, with intervals and targets](results.png)",
        "",
        *(f"| {' | '.join(line)} |" for line in table),
    ]
    return "\n".join(lines) + "\n"


def plot(rows: list[Row], path: Path) -> None:
    """Plot the ratios of all rows with a target, with their intervals, on a logarithmic axis."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    met, missed, *_ = PALETTE
    # "ms a step" is the only ratio where lower is better
    rows = [row for row in rows if row.held is not None and row.ratio is not None and row.unit != "ms a step"][::-1]
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 0.3 * len(rows) + 0.8), layout="constrained")
        axes = figure.subplots()
        for place, row in enumerate(rows):
            color = missed if row.held is False else met
            axes.plot([row.low, row.high], [place, place], color=color, linewidth=3)
            axes.plot(row.ratio, place, "s" if row.held is False else "o", color=color)
            axes.plot(float(row.target.split()[1]), place, "|", color="black", markersize=14)
        axes.axvline(1, color="gray", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xticks(ticks := [0.5, 1, 2, 5, 10, 20, 50, 100], [str(tick) for tick in ticks])
        axes.minorticks_off()
        names = [f"{row.name} ({row.extrapolated})" if row.extrapolated else row.name for row in rows]
        axes.set_yticks(range(len(rows)), names)
        axes.set_ylim(-0.7, len(rows) - 0.3)
        figure.supxlabel("ours / peer (line: 90% interval, bar: target; dot: target met, square: not met)", fontsize=9)
    figure.savefig(path, dpi=110)


def publish(rows: list[Row], folder: Path = FOLDER) -> None:
    """Update the rows of one benchmark in results.json, and regenerate RESULTS.md and results.png."""
    path = folder / "results.json"
    earlier = [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]] if path.exists() else []
    names = [benchmark.__name__ for benchmark in BENCHMARKS]
    kept = [row for row in earlier if row.benchmark in names and row.benchmark != rows[0].benchmark]
    rows = sorted((*kept, *rows), key=lambda row: names.index(row.benchmark))
    results = {"rows": [row.as_dict() for row in rows]}
    write_text(path, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    write_text(folder / "RESULTS.md", markdown(results))
    plot(rows, folder / "results.png")


def machine() -> str:
    """Describe the machine: the processor, its instruction set, the number of cores, and the GPUs if any."""
    hardware = versions.hardware()
    processor, instructions = hardware["processor"], hardware["instruction_set"]
    if instructions.startswith("AVX"):
        processor += f" with {instructions}"
    return ", ".join([processor, f"{hardware['cores']} cores", *hardware["gpus"]])


def state() -> str:
    """Return the short hash of the current commit, followed by + if files other than PUBLISHED differ from it."""
    published = [f":(exclude){name}" for name in PUBLISHED]
    changed = versions.run_git(FOLDER, "status", "--porcelain", ":/", *published)
    return versions.run_git(FOLDER, "rev-parse", "--short=7", "HEAD").strip() + ("+" if changed else "")


def main() -> None:
    """Run the benchmarks and publish their results."""
    names = {benchmark.__name__: benchmark for benchmark in BENCHMARKS}
    on_gpu = [benchmark for benchmark in BENCHMARKS if benchmark.__module__ == gpu.__name__]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    listed, long = ", ".join(names), ", ".join(benchmark.__name__ for benchmark in LONG)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"`gpu`, or some of {listed} (default: all but the long ones)"
    )
    full = f"run peers in full instead of shortened; without NAME, also run the long ones: {long}"
    parser.add_argument("--full", action="store_true", help=full)
    options = parser.parse_args()
    unknown = set(options.names) - {"gpu", *names}
    if unknown:
        parser.error(f"NAME must be one of {listed}, but is {sorted(unknown)[0]!r}")

    console, origin = Console(stderr=True), {"machine": machine(), "commit": state(), "torch": str(torch.__version__)}
    usual = [benchmark for benchmark in BENCHMARKS if options.full or benchmark not in LONG]
    chosen = [each for name in options.names for each in (on_gpu if name == "gpu" else [names[name]])] or usual
    # Refreshing the progress takes time from the benchmarks.
    progress = {"console": console, "refresh_per_second": 1, "disable": not console.is_terminal}
    for benchmark in track(chosen, "benchmarks", **progress):
        rows = []
        with nullcontext(True) if benchmark.__module__ == gpu.__name__ else pinned() as is_pinned:
            try:
                for row in benchmark(options.full):
                    note = row.note if is_pinned else f"{row.note}; not pinned to cores".removeprefix("; ")
                    rows.append(replace(row, note=note, benchmark=benchmark.__name__, **origin))
                    console.print(" | ".join(cells(rows[-1])), highlight=False, soft_wrap=True)
            except UserError as error:  # such as a missing file or GPU; the published rows stay
                console.print(f"{benchmark.__name__} is not measured: {error}", highlight=False, soft_wrap=True)
                continue
        publish(rows)
    print("written: results.json, RESULTS.md and results.png in benchmarks/")


if __name__ == "__main__":
    main()
