"""`lightning-tfm fit --seeds`: train or fork an experiment once per seed, each in an ordinary run of its own."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import cast

from lightning_tfm.commands.parser import CommandParser
from lightning_tfm.comparison.groups import differing, find_groups
from lightning_tfm.config.settings import settings_of_weights, without_seed
from lightning_tfm.errors import (
    Interrupted,
    UserError,
    escape_controls,
    format_command,
    handle_signals,
    interrupt,
    shell_quote,
)
from lightning_tfm.fit.cli import SettingsCLI, run
from lightning_tfm.fit.forking import take_fork
from lightning_tfm.runs.children import ChildRun, run_children
from lightning_tfm.runs.record import Run, describe_fork
from lightning_tfm.system.files import relative
from lightning_tfm.system.progress import progress_bar
from lightning_tfm.system.terminal import format_value

MAX_SEEDS = 1000


class SeededRuns:
    """Runs of an experiment that differ in their seed only.

    Args:
        arguments: the arguments of `fit`, without a seed.
        save_dir: the parent folder of the experiment's folder; None for that of the arguments.
        points: the point `RUN@STEP` at which the fork of each seed begins; empty for runs from the start.

    Attributes:
        folder: the folder of the experiment, which contains the runs.

    Raises:
        UserError: if `fit` would refuse the arguments, or if the runs would have no folders of their own.
    """

    def __init__(
        self, arguments: Sequence[str], save_dir: Path | None = None, points: Mapping[int, str] | None = None
    ) -> None:
        self._forks = {seed: ["--fork", point] for seed, point in (points or {}).items()}
        cli = cast(SettingsCLI, run(["fit", *arguments, *next(iter(self._forks.values()), [])], SettingsCLI))
        settings = cli.settings()
        if settings["trainer"]["logger"] is False:
            raise UserError(
                "trainer.logger must not be false with several seeds, since each run needs a folder; remove it"
            )
        loggers = [logger["init_args"] for logger in settings["trainer"]["logger"]]
        if loggers[0]["version"] is not None:
            raise UserError(
                "trainer.logger must not have a version with several seeds, since each run needs its own folder, but "
                f"has {loggers[0]['version']!r}; remove it"
            )
        self._arguments = [*arguments]
        if save_dir is not None:
            for logger in loggers:
                logger |= {"save_dir": str(save_dir)} if "save_dir" in logger else {}
            self._arguments += ["--trainer.logger", json.dumps(settings["trainer"]["logger"])]
        self.folder = Path(loggers[0]["save_dir"], loggers[0]["name"])
        self._max_steps = settings["trainer"]["max_steps"]
        self._settings = without_seed(settings_of_weights(settings))
        if cli.fork is not None:
            before = cli.fork.run.settings.get("fork")
            forks = [*([before] if before else []), describe_fork(cli.fork.step, cli.changed)]
            self._settings["fork"] = "; ".join(forks)
        self._seed = cache(self._read_seed)

    def newest(self) -> dict[int, Run]:
        """Return the newest run of each seed."""
        modified: dict[Path, tuple[int, int]] = {}
        for config in self.folder.glob(f"version_*/{Run.CONFIG}"):
            with suppress(FileNotFoundError):  # a run without results deletes its folder
                provenance = config.with_name(Run.PROVENANCE)  # names a fork, and is written after the settings
                times = config.stat().st_mtime_ns, provenance.stat().st_mtime_ns if provenance.exists() else 0
                modified[config.parent] = times
        folders = sorted(modified, key=lambda folder: modified[folder])
        runs = {self._seed(folder, modified[folder]): Run(folder) for folder in folders}
        return {seed: run for seed, run in runs.items() if seed is not None}

    def _read_seed(self, folder: Path, modified: tuple[int, int]) -> int | None:
        """Return the seed of a run, whose files were written at these times; None if its other settings differ."""
        run = Run(folder)
        with suppress(UserError):  # edited by the user
            if run.settings == self._settings:
                return int(run.config["seed_everything"])
        return None

    def train(
        self, seeds: Sequence[int], jobs: int = 1, resume: bool = True, stops: bool = False
    ) -> dict[int, Run | None]:
        """Train once per seed, and print the result of each run as soon as it has ended.

        Args:
            seeds: the seeds.
            jobs: the number of runs at a time.
            resume: whether to leave out the seeds that have finished before, and to resume the others.
            stops: whether a run that fails before its first checkpoint stops the others, which would fail as well.

        Returns:
            The run of each seed; None if it has failed.

        Raises:
            UserError: if `stops` and a run fails before its first checkpoint.
        """
        results: dict[int, Run | None] = {}
        resumed: dict[int, list[str]] = {}  # arguments of the seeds to train
        before = self.newest()
        for seed in seeds:
            run = before.get(seed) if resume else None
            if run is not None:
                run.wait()
            if run is not None and run.has_finished:
                results[seed] = run
                print(f"seed {seed}: finished before, {escape_controls(relative(run.folder))}", flush=True)
            else:
                can_resume = run is not None and run.checkpoints()
                resumed[seed] = ["--ckpt_path", str(before.pop(seed).folder)] if can_resume else []

        def start(seed: int) -> ChildRun:
            options = ["--seed_everything", str(seed), *self._forks.get(seed, []), *resumed[seed]]
            arguments = [*self._arguments, *options]
            return ChildRun(arguments, self.folder / f"seed_{seed}.log")

        def watch(children: list[ChildRun]) -> None:
            runs = {seed: run for seed, run in self.newest().items() if run != before.get(seed)}
            for seed, child in zip(resumed, children, strict=False):
                if child.is_running or seed in results:
                    continue
                run = runs.get(seed)
                if stops and child.process.returncode == 2 and run is None:
                    raise UserError(child.last_line)
                results[seed] = run = run if child.process.returncode == 0 else None
                line = f"FAILED: {child.last_line} ({relative(child.log)})" if run is None else _describe(run)
                with bar.external_write_mode():
                    print(f"seed {seed}: {escape_controls(line)}", flush=True)
            if not bar.disable:
                rows = [run.metrics()[-1:] for seed, run in runs.items() if seed in resumed.keys() - results.keys()]
                steps = sum(int(row["step"]) for last in rows for row in last)
                bar.update(steps + self._max_steps * sum(seed in results for seed in resumed) - bar.n)

        with progress_bar("step", total=len(resumed) * self._max_steps) as bar:
            run_children([partial(start, seed) for seed in resumed], jobs, watch)
        return {seed: results[seed] for seed in seeds}


def fit_seeds(arguments: list[str]) -> int:
    """Train or fork an experiment once per seed, at most `--jobs` at a time, and print the result of each run.

    Args:
        arguments: the arguments of `fit`, with `--seeds`.

    Returns:
        The exit status: 1 if a run has failed, 0 otherwise.
    """
    options, settings = make_parser().parse_known_args(arguments)
    seeds = parse_seeds(options.seeds)
    if options.jobs < 1:
        raise UserError(f"--jobs must be at least 1, but is {options.jobs}; try 1")
    settings, point = take_fork(settings)
    if not settings and point is None:
        raise UserError("lightning-tfm fit needs the name of an experiment; `lightning-tfm list` shows them")
    for name in ("--seed_everything", "--dry-run", "--dry_run", "--print_config"):
        if any(argument.partition("=")[0] == name for argument in settings):
            raise UserError(f"{name} must not be given with --seeds, which trains a run for each of them; remove it")
    if any(os.environ.get(name, "1") != "1" for name in ("WORLD_SIZE", "SLURM_NTASKS")):
        raise UserError(
            "--seeds must be used in one process, since it starts the runs itself, but torchrun or srun has started "
            "several; start one, or one run per seed with --seed_everything"
        )
    parents = {} if point is None else find_parents(point, seeds)
    points = {seed: f"{relative(parent.folder)}{_step(cast(str, point))}" for seed, parent in parents.items()}
    runs = SeededRuns(settings, points=points)
    handle_signals(interrupt)
    try:
        results = runs.train(seeds, options.jobs, resume=options.ckpt_path == "last", stops=True)
    except Interrupted as interrupted:
        interrupted.ckpt_path = "last"
        raise
    finished = [run for run in results.values() if run is not None]
    print(f"\n{len(finished)} of {len(seeds)} seeds have finished. To see their mean and compare it:\n")
    folders = [*(parent.folder.parent for parent in parents.values()), runs.folder]
    names = dict.fromkeys(shell_quote(relative(folder)) for folder in folders)
    print(format_command(["lightning-tfm", "compare", *names], sys.stdout))
    return 0 if len(finished) == len(seeds) else 1


def find_parents(point: str, seeds: Sequence[int]) -> dict[int, Run]:
    """Return the newest finished run of each seed among those that `--fork RUNS@STEP` names.

    Forks of these runs are left out, so that further ones may begin at the same runs.

    Args:
        point: the runs, which are named as for `compare`, and the step.
        seeds: the seeds.

    Raises:
        UserError: if a seed has no run, or the runs differ in other settings.
    """
    name = point.removesuffix(_step(point))
    try:
        groups, _ = find_groups([name])
    except UserError as error:
        raise UserError(str(error).replace("GROUP", "--fork")) from None
    folders = {run.folder.resolve() for group in groups for run in group.runs}
    parents = [
        [run for run in group.runs if not any(Path(start["fork"]["run"]).resolve() in folders for start in run.forks)]
        for group in groups
    ]
    parents = [runs for runs in parents if runs]
    if len(parents) > 1:
        names = ", ".join(differing([runs[0].settings for runs in parents]))
        raise UserError(
            f"--fork must name runs that differ only in their seeds with --seeds, but those of {name!r} differ in "
            f"{names}; name some of them by a pattern, such as {relative(parents[0][0].folder.parent)}/version_[0-4]"
        )
    by_seed = {run.summary.seed: run for run in parents[0]}
    if missing := [str(seed) for seed in seeds if seed not in by_seed]:
        raise UserError(
            f"--fork must name an experiment with a finished run of each seed, but {name!r} has none with "
            f"{', '.join(missing)}; its seeds are {', '.join(map(str, sorted(by_seed)))}"
        )
    return {seed: by_seed[seed] for seed in seeds}


def _step(point: str) -> str:
    """Return the end `@STEP` of the name of a point; empty without a step."""
    _, at, step = point.rpartition("@")
    return f"{at}{step}" if at else ""


def make_parser() -> CommandParser:
    """Return the parser of the options of `fit` about seeds."""
    parser = CommandParser(
        "lightning-tfm fit",
        description="Train an experiment once per seed, or fork its runs with --fork NAME@STEP. All other arguments "
        "are those of a single run.",
    )
    parser.add_argument("--seeds", required=True, metavar="SEEDS", help="such as 1..5 or 1,4,9")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="number of runs at a time (default: 1)")
    parser.add_argument(
        "--ckpt_path", choices=["last"], help="last: leave out the seeds that have finished, and resume the others"
    )
    return parser


def parse_seeds(text: str) -> list[int]:
    """Parse seeds such as `7`, `1..5` or `1,4,9`.

    Raises:
        UserError: if the text is not a list of different seeds.
    """
    ranges = [re.fullmatch(r" *(\d{1,10})(?:\.\.(\d{1,10}))? *", part) for part in text.split(",")]
    seeds = [
        seed for part in ranges if part for seed in range(int(part[1]), int(part[2] or part[1]) + 1)[: MAX_SEEDS + 1]
    ]
    if not all(ranges) or not 0 < len(set(seeds)) == len(seeds) <= MAX_SEEDS or max(seeds) >= 2**32:
        raise UserError(
            f"--seeds must be 1 to {MAX_SEEDS} different numbers below {2**32}, such as 7, 1..5 or 1,4,9, but is "
            f"{text!r}; try 1..5"
        )
    return seeds


def _describe(run: Run) -> str:
    """Describe a finished run."""
    summary = run.summary
    headline = f"{summary.headline[0]} {format_value(summary.headline[1])}, " if summary.headline else ""
    return f"{headline}{summary.train_seconds:.0f} s, {relative(run.folder)}"
