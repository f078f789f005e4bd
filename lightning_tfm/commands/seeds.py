"""`lightning-tfm fit --seeds`: train an experiment once per seed, each in an ordinary run of its own."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any, cast

from lightning_tfm.commands.parser import CommandParser
from lightning_tfm.config.experiments import format_value
from lightning_tfm.config.settings import read_yaml, settings_of_weights, without_seed
from lightning_tfm.errors import Interrupted, UserError, escape_controls, handle_signals, interrupt, shell_quote
from lightning_tfm.fit.cli import TfmCLI, run
from lightning_tfm.runs.children import ChildRun, parse_seeds, run_children
from lightning_tfm.runs.record import Run
from lightning_tfm.system.files import relative
from lightning_tfm.system.progress import progress_bar

EXAMPLE = "1..5"

LAUNCHED = ("WORLD_SIZE", "SLURM_NTASKS")
"""Environment variables in which torchrun and srun set the number of processes that they have started."""


class SettingsCLI(TfmCLI):
    """TfmCLI that parses and checks the settings of `fit`, but runs nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing."""


class SeededRuns:
    """Runs of an experiment that differ in their seed only.

    Args:
        folder: the folder of the runs of the experiment.
        settings: the settings except for the seed.
        max_steps: the number of training steps of a run.

    Attributes:
        folder: the folder.
        max_steps: the number of steps.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], max_steps: int) -> None:
        self.folder, self.max_steps = folder, max_steps
        self._settings = settings
        self._seeds: dict[Path, int | None] = {}  # of each folder; None if its settings differ

    def newest(self) -> dict[int, Path]:
        """Return the folder of the newest run of each seed."""
        configs = [path for path in self.folder.glob(f"version_*/{Run.CONFIG}") if path.is_file()]
        found = {}
        for config in sorted(configs, key=lambda config: config.stat().st_mtime):
            if config not in self._seeds:
                self._seeds[config] = self._seed(config)
            if (seed := self._seeds[config]) is not None:
                found[seed] = config.parent
        return found

    def _seed(self, config: Path) -> int | None:
        """Return the seed of a run; None if its other settings differ."""
        try:
            settings = settings_of_weights(read_yaml(config, "RUN"))
        except UserError:  # edited by the user
            return None
        return settings["seed_everything"] if without_seed(settings) == self._settings else None


def fit_seeds(arguments: list[str]) -> int:
    """Train an experiment once per seed, at most `--jobs` at a time, and print the result of each run.

    Args:
        arguments: the arguments of `fit`, with `--seeds`.

    Returns:
        The exit status: 1 if a run has failed, 0 otherwise.
    """
    options, settings = make_parser().parse_known_args(arguments)
    seeds = parse_seeds(options.seeds, EXAMPLE)
    _check(options, settings)
    runs = _read(settings, seeds[0])
    earlier = runs.newest() if options.ckpt_path == "last" else {}
    resumed: dict[int, Path | None] = {}
    for seed in seeds:
        run = earlier.get(seed)
        if run is not None:
            Run(run).wait()
        if run is not None and Run(run).has_finished:
            print(f"seed {seed}: finished before, {escape_controls(relative(run))}")
        else:
            resumed[seed] = run if run is not None and Run(run).checkpoints() else None
    handle_signals(interrupt)
    try:
        failed = _train(runs, settings, resumed, options.jobs)
    except Interrupted as interrupted:
        interrupted.ckpt_path = "last"
        raise
    print(f"\n{len(seeds) - failed} of {len(seeds)} seeds have finished. To see their mean and compare it:\n")
    print(f"  lightning-tfm compare {shell_quote(relative(runs.folder))}")
    return 1 if failed else 0


def make_parser() -> CommandParser:
    """Return the parser of the options of `fit` about seeds."""
    parser = CommandParser(
        "lightning-tfm fit",
        description="Train an experiment once per seed. All other arguments are those of a single run.",
    )
    parser.add_argument("--seeds", required=True, metavar="SEEDS", help="such as 1..5 or 1,4,9")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="number of runs at a time (default: 1)")
    parser.add_argument(
        "--ckpt_path", choices=["last"], help="last: leave out the seeds that have finished, and resume the others"
    )
    return parser


def _check(options: Namespace, settings: list[str]) -> None:
    """Check the options, and that no other argument contradicts them."""
    if options.jobs < 1:
        raise UserError(f"--jobs must be at least 1, but is {options.jobs}; try 1")
    for name, reason in (
        ("--seed_everything", "the seeds are those of --seeds"),
        ("--dry-run", "it would run each seed for one batch"),
        ("--print_config", "it prints the settings of a single run"),
    ):
        if any(argument.partition("=")[0] == name for argument in settings):
            raise UserError(f"{name} must not be given with --seeds, since {reason}; remove it")
    if any(os.environ.get(name, "1") != "1" for name in LAUNCHED):
        raise UserError(
            "--seeds must be used in one process, since it starts the runs itself, but torchrun or srun has started "
            "several; start one, or one run per seed with --seed_everything"
        )


def _read(settings: list[str], seed: int) -> SeededRuns:
    """Return the runs of some arguments of `fit`.

    Raises:
        UserError: if `fit` would refuse the arguments, or if its runs would have no folders of their own.
    """
    if not settings:
        raise UserError("lightning-tfm fit needs the name of an experiment; `lightning-tfm list` shows them")
    cli = cast(SettingsCLI, run(["fit", *settings, "--seed_everything", str(seed)], SettingsCLI))
    config = cli.config["fit"]
    if config.trainer.logger is False:
        raise UserError("trainer.logger must not be false with --seeds, since each run needs a folder; remove it")
    logger = config.trainer.logger[0].init_args
    if logger.version is not None:
        raise UserError(
            "trainer.logger must not have a version with --seeds, since each run needs its own folder, but has "
            f"{logger.version!r}; remove it"
        )
    ours = without_seed(settings_of_weights(cli.settings()))
    return SeededRuns(Path(logger.save_dir, logger.name), ours, config.trainer.max_steps)


def _train(runs: SeededRuns, settings: list[str], resumed: dict[int, Path | None], jobs: int) -> int:
    """Train seeds, and print the result of each as soon as its run has ended.

    Args:
        runs: the runs of the experiment.
        settings: the arguments of `fit`, without a seed.
        resumed: the run to resume for each seed; None for a new run.
        jobs: the number of runs at a time.

    Returns:
        The number of seeds that have failed.
    """
    old = set(runs.newest().values()) - set(resumed.values())
    ended: dict[int, bool] = {}  # whether the run of a seed has finished
    threads = None if jobs == 1 or "OMP_NUM_THREADS" in os.environ else max(1, _cores() // jobs)

    def start(seed: int) -> ChildRun:
        begin = ["--ckpt_path", str(resumed[seed])] if resumed[seed] else []
        log = runs.folder / f"seed_{seed}.log"
        return ChildRun([*settings, "--seed_everything", str(seed), *begin], log, threads)

    def watch(children: list[ChildRun]) -> None:
        found = {seed: path for seed, path in runs.newest().items() if path not in old}
        for seed, child in zip(resumed, children, strict=False):
            if seed not in ended and not child.is_running:
                ended[seed] = child.process.returncode == 0 and seed in found
                if child.process.returncode == 2 and seed not in found:  # it would be the same for the other seeds
                    raise UserError(child.last_line.removeprefix("lightning-tfm: error: "))
                with bar.external_write_mode():
                    shown = _result(found[seed]) if ended[seed] else _failure(child)
                    print(f"seed {seed}: {escape_controls(shown)}", flush=True)
        steps = sum(runs.max_steps if seed in ended else _step(found.get(seed)) for seed in resumed)
        bar.update(min(steps, total) - bar.n)

    total = len(resumed) * runs.max_steps
    with progress_bar("step", sys.stderr.isatty(), total=total) as bar:
        run_children([partial(start, seed) for seed in resumed], jobs, watch)
    return list(ended.values()).count(False)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _step(run: Path | None) -> int:
    """Return the last logged step of a run; 0 if there is none."""
    return max((int(row["step"]) for row in Run(run).metrics()), default=0) if run else 0


def _result(run: Path) -> str:
    """Describe a finished run."""
    summary = Run(run).summary
    headline = [f"{name} {format_value(value)}" for name, value in (summary.headline,)] if summary.headline else []
    return ", ".join([*headline, f"{summary.train_seconds:.0f} s", relative(run)])


def _failure(child: ChildRun) -> str:
    return f"FAILED: {child.last_line.removeprefix('lightning-tfm: error: ')} ({relative(child.log)})"
