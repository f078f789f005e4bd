"""`lightning-tfm reproduce`: run experiments over seeds, and compare results with claims.

Settings are chosen on validation data with seeds 1 to 3. Claims are based on the held-out seeds 11 to 15, and tested
with seeds 21 to 23. A claim holds if the mean over the tested seeds is within the 99% prediction interval (Student's
t) computed from the claimed seeds, or within 0.1% of the claim.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from lightning_tfm.commands.parser import CommandParser, trust_arguments
from lightning_tfm.commands.seeds import SeededRuns, parse_seeds
from lightning_tfm.comparison.statistics import COVERAGE, student_reach
from lightning_tfm.config.experiments import (
    CLAIMS,
    Claim,
    Experiment,
    default_folder,
    find_experiment,
    list_experiments,
    read_experiment,
)
from lightning_tfm.config.settings import read_json
from lightning_tfm.errors import UserError, handle_signals, interrupt
from lightning_tfm.runs.record import Run
from lightning_tfm.system.files import write_text
from lightning_tfm.system.terminal import LiteralConsole, format_value, print_table
from lightning_tfm.system.versions import framework, hardware, versions

SEEDS = "21..23"
"""Default seeds for testing claims, which were not used for settings or claims."""

CONFIDENCE = 0.99
"""Coverage of the prediction interval of a claim."""

RESOLUTION = 1e-3
"""Minimum half-width of the interval as a fraction of the claim, since the claimed seeds may agree by chance."""


RESULTS = "reproduce.json"
"""File in the output folder with the results and their source."""


def reproduce(arguments: list[str]) -> int:
    """Train experiments, compare their results with the claims, and write reproduce.json and RESULTS.md.

    Returns:
        The exit status: 1 if a claim does not hold, 0 otherwise.
    """
    options = make_parser().parse_args(arguments)
    os.environ.setdefault("WANDB_MODE", "disabled")  # the runs are not experiments of the user
    seeds = parse_seeds(options.seeds)
    experiments = _experiments(options.names)
    source = _checked_source(options.output)
    trusted = trust_arguments(options.trust_package)
    groups = [SeededRuns(["--config", str(experiment.path), *trusted], options.output) for experiment in experiments]
    handle_signals(interrupt)
    results: list[Result] = []
    if not (options.output / RESULTS).exists():
        _write(options.output, source, results)
    for number, (experiment, group) in enumerate(zip(experiments, groups, strict=True), start=1):
        print(f"{number}/{len(experiments)} {experiment.name}", flush=True)
        runs = group.train(seeds)
        results += [compared(experiment.name, claim, runs) for claim in experiment.claims]
        _write(options.output, source, results)
    print_table(HEADER[:5], [row[:5] for row in _rows(results)], LiteralConsole())
    held = sum(result.holds for result in results)
    print(f"{held} of {len(results)} claims hold; written: {options.output / 'RESULTS.md'}")
    return 0 if held == len(results) else 1


def make_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        "lightning-tfm reproduce",
        description="Train experiments over seeds, and compare the results with their claims. Run an interrupted "
        "command again to resume it.",
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


def _experiments(names: Sequence[str]) -> list[Experiment]:
    """Return the experiments of some names; by default, all that have claims."""
    if not names:
        return [experiment for experiment in list_experiments(default_folder()) if experiment.claims]
    experiments = [read_experiment(find_experiment(name)) for name in names]
    for experiment in experiments:
        if not experiment.claims:
            raise UserError(f"NAME must be an experiment with claims, but {experiment.name} has none in {CLAIMS}")
    if len({experiment.name for experiment in experiments}) < len(experiments):
        raise UserError("NAME must name each experiment once, but one is given twice; remove it")
    return experiments


class Results(TypedDict):
    """Part of reproduce.json that later commands read."""

    source: dict[str, Any]


def _checked_source(output: Path) -> dict[str, Any]:
    """Return the commit, a hash of uncommitted changes, the versions and the hardware, which determine the results.

    Raises:
        UserError: if `output` contains results with another source, which would not be comparable.
    """
    state, diff = framework()
    source = {
        "commit": state["commit"],
        "uncommitted changes": hashlib.sha256(diff.encode()).hexdigest()[:16] if diff else None,
        "versions": versions(),
        "hardware": hardware(),
    }
    if output.is_file():
        raise UserError(f"--output must be a folder, but {str(output)!r} is a file; choose another")
    path = output / RESULTS
    earlier = read_json(path, Results)["source"] if path.exists() else source
    for name, value in source.items():
        if earlier.get(name) != value:
            raise UserError(
                f"--output must be a folder whose runs have the same {name}, but {str(output)!r} differs; "
                "choose another folder, or delete it"
            )
    return source


@dataclass(frozen=True)
class Result:
    """Claim of an experiment beside the results of other seeds.

    Attributes:
        experiment: the name of the experiment.
        metric: the metric.
        claimed: the claimed mean.
        tolerance: the half-width of its 99% prediction interval (Student's t).
        values: the value of each seed; None if it is missing or not finite, or if the run has failed.
        mean: the mean; None if a value is.
        interval: the 95% confidence interval (Student's t) of the mean; None for a single seed.
        holds: whether the mean is within the prediction interval.
        train_seconds: the mean training time of the runs that have finished.
    """

    experiment: str
    metric: str
    claimed: float
    tolerance: float
    values: dict[int, float | None]
    mean: float | None
    interval: tuple[float, float] | None
    holds: bool
    train_seconds: float | None


def compared(experiment: str, claim: Claim, runs: Mapping[int, Run | None]) -> Result:
    """Compare a claim of an experiment with the run of each seed, which is None if it has failed."""
    summaries = {seed: run.summary for seed, run in runs.items() if run is not None}
    logged = {seed: summary.metrics.get(claim.metric, math.nan) for seed, summary in summaries.items()}
    values = {seed: value if math.isfinite(value := logged.get(seed, math.nan)) else None for seed in runs}
    finite = [value for value in values.values() if value is not None]
    mean = statistics.fmean(finite) if len(finite) == len(runs) else None
    reach = student_reach(finite, COVERAGE) if len(finite) > 1 else None
    return Result(
        experiment,
        claim.metric,
        claim.value,
        tolerance(claim, len(runs)),
        values,
        mean,
        None if mean is None or reach is None else (mean - reach, mean + reach),
        mean is not None and abs(mean - claim.value) <= tolerance(claim, len(runs)) + 1e-9,
        statistics.fmean(summary.train_seconds or 0 for summary in summaries.values()) if summaries else None,
    )


def tolerance(claim: Claim, number: int) -> float:
    """Return the half-width of the prediction interval of a claim for the mean of a number of other seeds."""
    return max(student_reach([*claim.by_seed.values()], CONFIDENCE, number), RESOLUTION * abs(claim.value))


HEADER = ("experiment", "metric", "claimed", "mean", "result", "95% interval", "by seed", "training")
"""Names of the columns of the results, of which a terminal shows the first five."""


def _rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Return the cells of the results."""
    return [
        (
            result.experiment,
            result.metric,
            f"{format_value(result.claimed)} ± {result.tolerance:.2g}",
            _number(result.mean),
            "PASS" if result.holds else "FAIL",
            " to ".join(map(format_value, result.interval or ())),
            ", ".join(map(_number, result.values.values())),
            "" if result.train_seconds is None else f"{result.train_seconds:.0f} s",
        )
        for result in results
    ]


def _number(value: float | None) -> str:
    return "none" if value is None else format_value(value)


def _write(output: Path, source: dict[str, Any], results: Sequence[Result]) -> None:
    """Write reproduce.json and RESULTS.md with the results so far."""
    made = datetime.now(UTC).isoformat(timespec="seconds")
    content = {"time": made, "source": source, "results": [asdict(result) for result in results]}
    write_text(output / RESULTS, json.dumps(content, indent=2) + "\n")
    machine = f"{source['hardware']['cores']} cores of {source['hardware']['processor']}"
    commit = f"{source['commit']}{', with uncommitted changes' if source['uncommitted changes'] else ''}"
    text = f"# Results\n\nBy `lightning-tfm reproduce` at {made}, commit {commit}, on {machine}.\n\n"
    lines = [HEADER, ["---"] * len(HEADER), *_rows(results)]
    write_text(output / "RESULTS.md", text + "".join(f"| {' | '.join(line)} |\n" for line in lines))
