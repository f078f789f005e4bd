"""Names of runs: the run and the checkpoint that an argument of a command names."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from lightning_tfm.config.experiments import find_experiment
from lightning_tfm.errors import UserError, nearest, rank_zero_print
from lightning_tfm.runs.record import Run
from lightning_tfm.system.files import relative

ROOT = Path("runs")
"""Folder in which `fit` creates the folders of experiments."""

HELP = "the name of an experiment (its newest finished run), the folder of a run, or a checkpoint"
"""Help of an argument that `named_run` or `named_checkpoint` resolves."""


def named_checkpoint(name: str | Path) -> Path:
    """Return the checkpoint that an argument names: a file, or the best checkpoint of a run, see `named_run`.

    Raises:
        UserError: if no run has this name, or the run has no checkpoint; the reader of a checkpoint reports missing
            files whose names end in .ckpt.
    """
    path = Path(name)
    if path.is_file() or path.suffix == ".ckpt":
        return path
    run = named_run(name)
    checkpoint = run.checkpoint(Run.BEST, Run.LAST)
    if checkpoint is None:
        raise UserError(
            f"RUN must be a run with a checkpoint, but {relative(run.folder)!r} has none; name a checkpoint or another "
            "run, which `lightning-tfm runs` lists"
        )
    return checkpoint


def named_run(name: str | Path) -> Run:
    """Return the run that an argument names.

    Args:
        name: the folder of a run; the folder of an experiment, for its newest finished run; or a checkpoint, for the
            run that wrote it. A folder may also be relative to ROOT, as `lightning-tfm runs` lists it.

    Raises:
        UserError: if no run has this name, or no run of the experiment has finished.
    """
    path = Path(name)
    if path.is_file():
        run = Run.of(Path(os.path.abspath(path)))
        if not run.exists:
            raise UserError(f"RUN must be in the folder of a run, but {str(name)!r} is not; name the folder of a run")
        return Run(Path(relative(run.folder)))
    for folder in (path, ROOT / path) if str(name) else ():  # an empty path would be the current folder
        if Run(folder).exists:
            return Run(folder)
        if runs := [Run(config.parent) for config in sorted(folder.glob(f"*/{Run.CONFIG}"))]:
            return _newest(runs, str(name))
    raise _unknown(str(name))


def _newest(runs: list[Run], name: str) -> Run:
    """Return the run that has finished last, and print its folder."""
    by_state: dict[str, list[Run]] = {}
    for run in runs:
        try:
            by_state.setdefault(run.state, []).append(run)
        except UserError as error:  # a damaged summary
            rank_zero_print(f"skipping {relative(run.folder)}: {error}")
    if not (finished := by_state.get("finished", [])):
        unfinished = [(run.folder, state) for state in ("running", "interrupted") for run in by_state.get(state, [])]
        shown = "".join(f", only {str(folder)!r}, which is {state}" for folder, state in unfinished[:1])
        fix = "name this folder to use its best checkpoint so far" if unfinished else "name a checkpoint"
        raise UserError(f"RUN must have a finished run, but {name!r} has none{shown}; {fix}")

    def age(run: Run) -> tuple[int, int, str]:
        return (run.folder / Run.SUMMARY).stat().st_mtime_ns, len(run.folder.name), run.folder.name

    newest = max(finished, key=age)
    rank_zero_print(f"using {relative(newest.folder)}")
    return newest


def _unknown(name: str) -> UserError:
    """Return the error of a name of no run, with the closest name."""
    if (best := Path(name) / Run.BEST).is_file():
        return UserError(f"RUN must be a run or a checkpoint, but {name!r} is a folder; try {str(best)!r}")
    if name and Path(name).is_dir():
        return UserError(f"RUN must be a run, but {name!r} is a folder without runs; try runs/NAME/version_0")
    runs = [run.folder.relative_to(ROOT) for run in Run.below(ROOT)]
    experiments = {run.parent.as_posix() for run in runs} - {"."}
    known = sorted({run.as_posix() for run in runs} if "/" in name or not experiments else experiments)
    hint = nearest(name.removeprefix(f"{ROOT}/"), known) if known else "; train one with: lightning-tfm fit EXPERIMENT"
    with suppress(UserError):
        find_experiment(name)
        hint = f"; train this experiment first with: lightning-tfm fit {name}"
    return UserError(f"RUN must name a run or a checkpoint, but there is no run {name!r}{hint}")
