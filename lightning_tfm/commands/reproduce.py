"""`lightning-tfm reproduce`: run experiments over seeds, and compare the results with their claims.

Settings are chosen on validation data with seeds 1 to 3. Claims are based on the held-out seeds 11 to 15, and tested
with seeds 21 to 23. A claim holds if the mean over the tested seeds is within the 99 % prediction interval (Student's
t) computed from the claimed seeds, or within 0.1 % of the claim.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from lightning_tfm.commands.parser import CommandParser
from lightning_tfm.config.experiments import (
    CLAIMS,
    HEADLINES,
    Experiment,
    confidence_interval,
    default_folder,
    find_experiment,
    format_value,
    list_experiments,
    read_experiment,
)
from lightning_tfm.config.settings import read_json
from lightning_tfm.errors import UserError, handle_signals, interrupt
from lightning_tfm.runs import record
from lightning_tfm.runs.children import ChildRun, parse_seeds, run_children
from lightning_tfm.system.files import write_text
from lightning_tfm.system.terminal import LiteralConsole
from lightning_tfm.system.versions import framework, hardware, versions

SEEDS = "21..23"
"""Default seeds for testing claims, which were not used for settings or claims."""

COSTS = ("training", "samples/s", "parameters")
"""Columns of the results table with one value per experiment instead of per claim."""


@dataclass(frozen=True)
class Run:
    """Run of an experiment with one seed: its summary, or the reason for its failure."""

    seed: int
    summary: record.Summary | None
    failure: str | None = None


def reproduce(arguments: list[str]) -> int:
    """Run experiments, compare their results with the claims, and write reproduce.json and RESULTS.md.

    Args:
        arguments: the command-line arguments.

    Returns:
        The exit status: 1 if a claim does not hold, 0 otherwise.
    """
    options = _parse(arguments)
    if options.names:
        experiments = [read_experiment(find_experiment(name)) for name in options.names]
    else:
        experiments = [experiment for experiment in list_experiments(default_folder()) if experiment.claims]
    for experiment in experiments:
        if not experiment.claims:
            raise UserError(f"NAME must be an experiment with claims, but {experiment.name} has none in {CLAIMS}")
    if len({experiment.name for experiment in experiments}) < len(experiments):
        raise UserError("NAME must name each experiment once, but one is given twice; remove it")
    source = _source()
    handle_signals(interrupt)

    runs: dict[str, list[Run]] = {experiment.name: [] for experiment in experiments}
    jobs = [(seed, experiment) for seed in options.seeds for experiment in experiments]
    for seed, experiment in jobs:
        _check(_folder(options.output, experiment, seed), experiment, source)
    console = LiteralConsole(stderr=True, soft_wrap=True)
    description, now = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[now]}")
    columns = (description, BarColumn(10), TimeElapsedColumn(), TimeRemainingColumn(), now)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("", total=sum(experiment.seconds for _, experiment in jobs), now="")
        done = 0.0
        for number, (seed, experiment) in enumerate(jobs, start=1):
            title = f"{number}/{len(jobs)} {experiment.name} seed {seed}"
            progress.update(bar, description=title)
            folder = _folder(options.output, experiment, seed)
            for started in folder.glob("runs/*/version_*"):
                record.Run(started).wait()
            run = _finished(folder, seed)
            if run is None:
                write_text(folder / "source.json", json.dumps({**source, "yaml": experiment.text}))
                show = partial(_show, progress, bar, done, experiment, folder)
                start = partial(ChildRun, _arguments(experiment, seed, folder, options.trust_package), folder / "log")
                (child,) = run_children([start], watch=show)
                run = _finished(folder, seed) or Run(seed, None, f"{child.last_line} ({child.log})")
            done += experiment.seconds
            progress.update(bar, completed=done)
            runs[experiment.name].append(run)
            console.print(f"{title}: {_describe(experiment, run)}")
            _write(options.output, source, experiments, runs)
    rows = [row for experiment in experiments for row in compared(experiment, runs[experiment.name])]
    _print(experiments, runs)
    failed = [row for row in rows if not row["holds"]]
    print(f"\n{len(rows) - len(failed)} of {len(rows)} claims hold; written: {options.output / 'RESULTS.md'}")
    return 1 if failed else 0


def make_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        "lightning-tfm reproduce",
        description="Run experiments, and compare the results with their claims. Run an interrupted command again to "
        "resume it.",
    )
    parser.add_argument(
        "names", metavar="NAME", nargs="*", help="an experiment or a YAML file (default: all experiments with claims)"
    )
    parser.add_argument("--seeds", default=SEEDS, metavar="SEEDS", help=f"such as 7, 1..5 or 1,4,9 (default: {SEEDS})")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/reproduce"),
        metavar="DIR",
        help="folder of the runs and results (default: runs/reproduce)",
    )
    parser.add_trust_package()
    return parser


def _parse(arguments: list[str]) -> Namespace:
    options = make_parser().parse_args(arguments)
    options.seeds = parse_seeds(options.seeds, SEEDS)
    if options.output.is_file():
        raise UserError(f"--output must be a folder, but {str(options.output)!r} is a file; choose another")
    return options


def _source() -> dict[str, Any]:
    """Return the commit, a hash of uncommitted changes, the versions and the hardware, which determine the results."""
    state, diff = framework()
    return {
        "commit": state["commit"],
        "uncommitted changes": hashlib.sha256(diff.encode()).hexdigest()[:16] if diff else None,
        "versions": versions(),
        "hardware": hardware(),
    }


def _folder(output: Path, experiment: Experiment, seed: int) -> Path:
    return output / experiment.name / f"seed_{seed}"


def _check(folder: Path, experiment: Experiment, source: dict[str, Any]) -> None:
    """Check that the run in a folder, if any, has the same source and YAML file.

    Raises:
        UserError: if it has not, since the results would not be comparable.
    """
    path = folder / "source.json"
    if not path.exists():
        return
    try:
        earlier = read_json(path)
    except UserError:
        raise UserError(
            f"--output must be a folder of reproduce's own runs, but {str(path)!r} is damaged; delete {str(folder)!r}"
        ) from None
    for name, ours in {**source, "yaml": experiment.text}.items():
        if earlier.get(name) != ours:
            raise UserError(
                f"--output must be a folder whose runs have the same {name}, but {str(folder)!r} differs; "
                "choose another folder, or delete it"
            )


def _finished(folder: Path, seed: int) -> Run | None:
    summaries = [run.summary for run in map(record.Run, folder.glob("runs/*/version_*")) if run.has_finished]
    return Run(seed, summaries[0]) if summaries else None


def _arguments(experiment: Experiment, seed: int, folder: Path, trust_packages: Sequence[str]) -> list[str]:
    """Return the arguments of `fit` that train and test one seed, or resume it, and whose loggers write to `folder`."""
    arguments = ["--config", str(experiment.path), "--seed_everything", str(seed), "--ckpt_path", "last"]
    if trust_packages:
        arguments += ["--trust-package", ",".join(trust_packages)]
    return [*arguments, "--trainer.logger", json.dumps(_loggers(experiment, folder))]


def _show(
    progress: Progress, bar: TaskID, done: float, experiment: Experiment, folder: Path, children: list[ChildRun]
) -> None:
    """Show the progress of a run, after runs of `done` seconds."""
    seconds = min(children[0].seconds, experiment.seconds)
    progress.update(bar, completed=done + seconds, now=_logged(folder))


def _loggers(experiment: Experiment, folder: Path) -> list[dict[str, Any]]:
    """Return the settings of the experiment's loggers, starting with a CSVLogger, to write to `folder`."""
    loggers = (yaml.safe_load(experiment.text).get("trainer") or {}).get("logger")
    loggers = loggers if isinstance(loggers, list) else [loggers] if isinstance(loggers, dict | str) else []
    loggers = [{"class_path": logger} if isinstance(logger, str) else logger for logger in loggers]
    loggers.sort(key=lambda logger: not logger["class_path"].endswith("CSVLogger"))
    if not loggers or not loggers[0]["class_path"].endswith("CSVLogger"):
        loggers.insert(0, {"class_path": "lightning.pytorch.loggers.CSVLogger"})
    own = {"name": experiment.name, "save_dir": str(folder / "runs")}
    return [
        {"class_path": logger["class_path"], "init_args": (logger.get("init_args") or {}) | own} for logger in loggers
    ]


def _logged(folder: Path) -> str:
    """Describe the run in a folder by its last logged step and main metric."""
    last: dict[str, float] = {}
    for path in folder.glob("runs/*/version_*"):
        for row in record.Run(path).metrics():
            last |= row
    shown = [f"step {last['step']:.0f}"] if "step" in last else []
    shown += [f"{name} {last[name]:.4g}" for name in HEADLINES if name in last][:1]
    return ", ".join(shown)


def _describe(experiment: Experiment, run: Run) -> str:
    if run.summary is None:
        return f"FAILED: {run.failure}"
    reached = ", ".join(f"{claim.metric} {_number(_value(run, claim.metric))}" for claim in experiment.claims)
    return f"{reached} in {run.summary.train_seconds:.0f} s"


def _value(run: Run, metric: str) -> float | None:
    """Return a metric from the summary of a run; None if the run failed, or the value is missing or not finite."""
    value = None if run.summary is None else run.summary.metrics.get(metric)
    return value if value is not None and math.isfinite(value) else None


def compared(experiment: Experiment, runs: list[Run]) -> list[dict[str, Any]]:
    """Return the claims with their results: `values` by seed, `mean`, its 95 % interval (Student's t) and `holds`.

    Args:
        experiment: the experiment.
        runs: the runs of the experiment, one per seed.

    Note:
        If a run has failed, the mean is None and no claim holds.
    """
    rows = []
    for claim in experiment.claims:
        values = [_value(run, claim.metric) for run in runs]
        mean = low = high = None
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            mean = statistics.fmean(known)
            if len(known) > 1:
                low, high = confidence_interval(known)
        tolerance = claim.tolerance(len(runs))
        holds = mean is not None and abs(mean - claim.value) <= tolerance + 1e-9
        found = {"values": values, "mean": mean, "low": low, "high": high, "holds": holds}
        rows.append({**asdict(claim), "value": claim.value, "tolerance": tolerance, **found})
    return rows


def table(experiments: list[Experiment], runs: dict[str, list[Run]]) -> str:
    """Return the results as a Markdown table.

    Args:
        experiments: the experiments.
        runs: the runs so far, by name of the experiment.
    """
    lines = _cells(experiments, runs)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    return "".join("| " + " | ".join(map(str.ljust, line, widths)) + " |\n" for line in lines)


def _cells(experiments: list[Experiment], runs: dict[str, list[Run]]) -> list[tuple[str, ...]]:
    """Return the rows of the table of results, starting with the header."""
    lines: list[tuple[str, ...]] = [("experiment", "metric", "claimed", "mean", "95 % interval", "by seed", "", *COSTS)]
    for experiment in experiments:
        summaries = [run.summary for run in runs[experiment.name] if run.summary is not None]
        if not runs[experiment.name]:
            continue
        for index, row in enumerate(compared(experiment, runs[experiment.name])):
            cost = ("", "", "")
            if index == 0 and summaries:
                seconds = statistics.fmean(summary.train_seconds or 0.0 for summary in summaries)
                speed = statistics.fmean(summary.samples_per_second or 0.0 for summary in summaries)
                cost = (f"{seconds:.0f} s", f"{speed:,.0f}", f"{summaries[0].parameters:,}")
            interval = "" if row["low"] is None else f"{_number(row['low'])} to {_number(row['high'])}"
            lines.append(
                (
                    f"`{experiment.name}`" if index == 0 else "",
                    row["metric"],
                    f"{_number(row['value'])} ± {row['tolerance']:.2g}",
                    _number(row["mean"]),
                    interval,
                    ", ".join(map(_number, row["values"])),
                    "PASS" if row["holds"] else "FAIL",
                    *cost,
                )
            )
    return lines


def _print(experiments: list[Experiment], runs: dict[str, list[Run]]) -> None:
    """Print the table of results; in a terminal, only its main columns."""
    console = LiteralConsole()
    if not console.is_terminal:
        print(table(experiments, runs), end="")
        return
    header, *lines = _cells(experiments, runs)
    shown = [header.index(name) for name in ("experiment", "metric", "claimed", "mean", "")]
    narrow = Table(*(Column(header[index] or "result", overflow="fold") for index in shown), box=box.SIMPLE_HEAD)
    for line in lines:
        narrow.add_row(*(line[index].strip("`") for index in shown))
    console.print(narrow)


def _number(value: float | None) -> str:
    return "none" if value is None else format_value(value)


def _write(output: Path, source: dict[str, Any], experiments: list[Experiment], runs: dict[str, list[Run]]) -> None:
    """Write reproduce.json and RESULTS.md with the results so far."""
    made = datetime.now(UTC).isoformat(timespec="seconds")
    content = {
        "time": made,
        "source": source,
        "experiments": [
            {
                "name": experiment.name,
                "claims": compared(experiment, runs[experiment.name]),
                "training": {"seconds": experiment.seconds, "machine": experiment.machine},
                "runs": [asdict(run) for run in runs[experiment.name]],
            }
            for experiment in experiments
            if runs[experiment.name]
        ],
    }
    write_text(output / "reproduce.json", json.dumps(content, indent=2) + "\n")
    machine = f"{source['hardware']['cores']} cores of {source['hardware']['processor']}"
    state = f"commit {source['commit']}" + (", with uncommitted changes" if source["uncommitted changes"] else "")
    text = f"# Results\n\nBy `lightning-tfm reproduce` at {made}, {state}, on {machine}.\n\n{table(experiments, runs)}"
    write_text(output / "RESULTS.md", text)
