"""Experiments and their claimed results."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

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
        text: the content of the YAML file.
        claims: the claims; empty if there are none.
        seconds: the claimed training seconds; 0 if there is no claim.
        machine: the machine on which the training time was measured.
    """

    path: Path
    text: str
    claims: tuple[Claim, ...] = ()
    seconds: float = 0.0
    machine: str = ""

    @property
    def name(self) -> str:
        """Return the name of the YAML file without its suffix."""
        return self.path.stem

    @property
    def description(self) -> str:
        """Return the comment in the first line of the YAML file; empty if there is none."""
        first = self.text.partition("\n")[0]
        return first.removeprefix("#").strip() if first.startswith("#") else ""


def packaged_folder() -> Path:
    """Return the folder of the project's experiments, in the installed package or in a checkout."""
    installed = Path(__file__).parents[1] / "experiments"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "experiments"


def default_folder() -> Path:
    """Return `experiments/` in the current folder or, if it does not exist, the folder of the project's experiments."""
    return Path("experiments") if Path("experiments").is_dir() else packaged_folder()


def find_experiment(name: str) -> Path:
    """Return the path of an experiment.

    Args:
        name: the path of a YAML file, or the name of an experiment, in `experiments/` in the current folder or of the
            project.

    Raises:
        UserError: if there is no such experiment.
    """
    if name.endswith((".yaml", ".yml")):
        candidates = [Path(name)]
    else:
        candidates = [folder / f"{name}.yaml" for folder in (Path("experiments"), packaged_folder())]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        raise UserError(
            f"{name!r} must be a YAML file or the name of an experiment, but is neither; "
            "`lightning-tfm list` shows the experiments"
        )
    return path


def list_experiments(folder: Path) -> list[Experiment]:
    """Return the experiments of a folder, sorted by name; YAML files without a model are not experiments."""
    claims = read_claims(folder)
    paths = [path for path in sorted(folder.glob("*.yaml")) if path.name != CLAIMS]
    return [read_experiment(path, claims) for path in paths if "model" in read_yaml(path, "NAME")]


def read_claims(folder: Path) -> dict[str, Any]:
    """Return the content of `claims.yaml` in a folder, by experiment; empty if the file does not exist."""
    path = folder / CLAIMS
    return read_yaml(path, "NAME") if path.is_file() else {}


def read_experiment(path: Path, claims: dict[str, Any] | None = None) -> Experiment:
    """Read an experiment and its claims.

    Args:
        path: the path of the YAML file.
        claims: the content of `claims.yaml` in the same folder; if None, the file is read.

    Raises:
        UserError: if the YAML file or the claims are invalid.
    """
    read_yaml(path, "NAME")  # an invalid file would otherwise fail only when its run starts, hours later
    text = path.read_text(encoding="utf-8")
    found = (read_claims(path.parent) if claims is None else claims).get(path.stem)
    if found is None:
        return Experiment(path, text)
    try:
        training = found["training"]
        stated = tuple(
            Claim(metric, {int(seed): float(value) for seed, value in by_seed.items()})
            for metric, by_seed in found.items()
            if metric != "training"
        )
        if any(len(claim.by_seed) < 2 for claim in stated):
            raise ValueError("one seed has no spread")
        return Experiment(path, text, stated, float(training["seconds"]), str(training["machine"]))
    except (AttributeError, KeyError, TypeError, ValueError, yaml.YAMLError):
        raise UserError(
            f"{str(path.with_name(CLAIMS))!r} must state the results of {path.stem} for two seeds or more, such as "
            f"{path.stem}: {{test/exact_match: {{11: 1.0, 12: 0.9998}}, training: {{seconds: 20, machine: two cores}}}}"
        ) from None
