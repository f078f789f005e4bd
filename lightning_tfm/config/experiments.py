"""Experiments and their claimed results."""

from __future__ import annotations

import difflib
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_tfm.config.settings import read_yaml
from lightning_tfm.errors import UserError

CLAIMS = "claims.yaml"
"""Name of the claims file in a folder of experiments."""


@dataclass(frozen=True)
class Claim:
    """Claimed results of an experiment for one metric, by seed."""

    metric: str
    by_seed: dict[int, float]

    @property
    def value(self) -> float:
        """Return the claimed mean over seeds."""
        return statistics.fmean(self.by_seed.values())


@dataclass(frozen=True)
class Experiment:
    """An experiment and its claims.

    Attributes:
        path: the path of the YAML file.
        description: the comment in the first line of the YAML file; empty if there is none.
        claims: the claims; empty if there are none.
        seconds: the claimed training seconds; 0 if there is no claim.
        machine: the machine on which the training time was measured.
    """

    path: Path
    description: str
    claims: tuple[Claim, ...] = ()
    seconds: float = 0.0
    machine: str = ""

    @property
    def name(self) -> str:
        """Return the name of the YAML file without its suffix."""
        return self.path.stem


def packaged_folder() -> Path:
    """Return the folder of the project's experiments, in the installed package or in a checkout."""
    installed = Path(__file__).parents[1] / "experiments"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "experiments"


def default_folder() -> Path:
    """Return `experiments/` in the current folder or, if it does not exist, the folder of the project's experiments."""
    return Path("experiments") if Path("experiments").is_dir() else packaged_folder()


def find_experiment(name: str) -> Path:
    """Return the path of a YAML file, or of an experiment of the current folder or the project, or raise UserError."""
    folders = (Path("experiments"), packaged_folder())
    is_path = name.endswith((".yaml", ".yml"))
    for path in [Path(name)] if is_path else [folder / f"{name}.yaml" for folder in folders]:
        if path.is_file():
            return path
    names = [path.stem for folder in folders for path in folder.glob("*.yaml") if path.name != CLAIMS]
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "`lightning-tfm list` shows the experiments"
    raise UserError(f"{name!r} must be a YAML file or the name of an experiment, but is neither; {hint}")


def list_experiments(folder: Path) -> list[Experiment]:
    """Return the experiments of a folder, sorted by name; YAML files without a model or data are not experiments."""
    claims = _read_claims(folder)
    paths = [path for path in sorted(folder.glob("*.yaml")) if path.name != CLAIMS]
    return [_experiment(path, claims) for path in paths if {"data", "model"} <= read_yaml(path, "NAME").keys()]


def read_experiment(path: Path) -> Experiment:
    """Read an experiment, and its claims in `claims.yaml` beside it; raise UserError if a YAML file is invalid."""
    read_yaml(path, "NAME")  # report mistakes before its run starts
    return _experiment(path, _read_claims(path.parent))


def _read_claims(folder: Path) -> dict[str, Any]:
    """Return the content of `claims.yaml` in a folder, by experiment; empty if the file does not exist."""
    path = folder / CLAIMS
    return read_yaml(path, "NAME") if path.is_file() else {}


def _experiment(path: Path, claims: dict[str, Any]) -> Experiment:
    first_line = path.read_text(encoding="utf-8").partition("\n")[0]
    description = first_line.removeprefix("#").strip() if first_line.startswith("#") else ""
    if path.stem not in claims:
        return Experiment(path, description)
    try:
        by_metric = dict(claims[path.stem])
        training = by_metric.pop("training")
        stated = tuple(
            Claim(metric, {int(seed): float(value) for seed, value in by_seed.items()})
            for metric, by_seed in by_metric.items()
        )
        if any(len(claim.by_seed) < 2 for claim in stated):
            raise ValueError("one seed has no spread")
        return Experiment(path, description, stated, float(training["seconds"]), str(training["machine"]))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(
            f"{str(path.with_name(CLAIMS))!r} must state the results of {path.stem} for two seeds or more, such as "
            f"{path.stem}: {{test/exact_match: {{11: 1.0, 12: 0.9998}}, training: {{seconds: 20, machine: two cores}}}}"
        ) from None
