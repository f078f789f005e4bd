"""Specification of a sweep: the searched settings, the objective, the sampler and the pruner, read from a YAML file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from lightning_tfm.config.settings import read_yaml
from lightning_tfm.errors import UserError, nearest

SAMPLERS = ("random", "grid", "tpe")

MAX_TRIALS = 10_000

DIGITS = 4
"""Number of significant digits of a sampled float, so that it can be read and typed."""

OWN = (
    "checkpoint.mode",
    "checkpoint.monitor",
    "ckpt_path",
    "config",
    "dry_run",
    "print_config",
    "skip_test",
    "trainer.logger",
    "trust_package",
)
"""Settings of `fit` that the sweep sets, or that are not settings of the training."""


@dataclass(frozen=True)
class Objective:
    """Objective of a sweep.

    Attributes:
        metric: a metric of the validation, such as `val/exact_match`.
        mode: "max" if higher values of the metric are better, "min" if lower values are.
        reach: None to search for the best value of the metric; otherwise, for the fewest steps to this value.
    """

    metric: str
    mode: Literal["max", "min"]
    reach: float | None = None

    @property
    def sign(self) -> int:
        """Return the factor of the metric with which lower values are better."""
        return 1 if self.mode == "min" else -1

    @property
    def description(self) -> str:
        """Return the objective in words."""
        if self.reach is None:
            return f"{'lowest' if self.mode == 'min' else 'highest'} {self.metric}"
        return f"fewest steps to {self.metric} {'<=' if self.mode == 'min' else '>='} {self.reach:g}"


@dataclass(frozen=True)
class Asha:
    """Asynchronous successive halving (Li et al. 2018): trials that are not among the best at a rung are pruned.

    The rungs are at `min_steps`, `min_steps * reduction_factor`, `min_steps * reduction_factor**2` and so on. Of the
    trials that reach a rung, about one in `reduction_factor` goes on.
    """

    min_steps: int
    reduction_factor: int = 4


@dataclass(frozen=True)
class Range:
    """Range of numbers.

    Attributes:
        min, max: the bounds, inclusive; integers if both are.
        log: whether to sample uniformly in the logarithm.
        step: the distance of two values; None for every number of the range.
    """

    min: float
    max: float
    log: bool = False
    step: float | None = None

    @property
    def is_integer(self) -> bool:
        """Return whether all values are integers."""
        return isinstance(self.min, int) and isinstance(self.max, int) and not isinstance(self.step, float)

    @property
    def bounds(self) -> list[Any]:
        """Return the values to check before the first trial."""
        return [self.min, self.max]

    @property
    def grid(self) -> list[Any] | None:
        """Return all values; None if there are infinitely many."""
        if self.step is None and not (self.is_integer and not self.log):
            return None
        # In decimals, as they are written: in floats, 0 + 3 * 0.1 is above 0.3.
        low, high, step = (Decimal(str(number)) for number in (self.min, self.max, self.step or 1))
        kind = int if self.is_integer else float
        return [kind(low + index * step) for index in range(int((high - low) // step) + 1)]

    def distribution(self) -> Any:
        """Return the distribution for Optuna."""
        from optuna.distributions import FloatDistribution, IntDistribution

        if self.is_integer:
            return IntDistribution(int(self.min), int(self.max), log=self.log, step=int(self.step or 1))
        return FloatDistribution(self.min, self.max, log=self.log, step=self.step)

    def rounded(self, value: Any) -> Any:
        """Round a sampled value to a few significant digits, within the bounds."""
        if self.is_integer or self.step is not None:
            return value
        return min(max(float(f"{value:.{DIGITS}g}"), self.min), self.max)


@dataclass(frozen=True)
class Values:
    """Values without an order, such as the names of classes."""

    values: tuple[Any, ...]

    @property
    def bounds(self) -> list[Any]:
        """Return the values to check before the first trial."""
        return list(self.values)

    grid = bounds

    def distribution(self) -> Any:
        """Return the distribution for Optuna."""
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(self.values)

    def rounded(self, value: Any) -> Any:
        """Return the value."""
        return value


@dataclass(frozen=True)
class Specification:
    """Specification of a sweep.

    Attributes:
        experiment: the name or the YAML file of the experiment.
        objective: the objective.
        search: the range or the values of each searched setting, by its name on the command line of `fit`.
        trials: the number of trials.
        settings: settings of all trials that differ from the experiment.
        sampler: "random", "grid" or "tpe" (Tree-structured Parzen Estimator, Bergstra et al. 2011).
        seed: the seed of the sampler.
        asha: the pruner; None to train all trials to their end.
        parallel: the largest number of trials that run at the same time with "tpe", on all machines. The settings of
            a trial depend on the results of all trials except the `parallel - 1` before it.
        threads: the number of threads of each trial.
    """

    experiment: str
    objective: Objective
    search: dict[str, Range | Values]
    trials: int
    settings: dict[str, Any]
    sampler: str = "random"
    seed: int = 1
    asha: Asha | None = None
    parallel: int = 4
    threads: int = 1

    @property
    def short_names(self) -> dict[str, str]:
        """Return the last part of the name of each searched setting, or the whole name if several have this part."""
        last = {name: name.rpartition(".")[2] for name in self.search}
        return {name: short if list(last.values()).count(short) == 1 else name for name, short in last.items()}

    def points(self) -> Iterator[tuple[Any, ...]]:
        """Yield the points of the grid."""
        return itertools.product(*(space.grid or () for space in self.search.values()))


def read_specification(path: Path) -> Specification:
    """Read and check the specification of a sweep.

    Args:
        path: the YAML file.

    Raises:
        UserError: if the file is not a valid specification. The settings are checked later, by the parser of `fit`.
    """
    found = read_yaml(path, "SPEC")
    if "parameters" in found and "command" in found:
        raise UserError(
            f"SPEC must be a sweep of this command, but {str(path)!r} is one of W&B; try wandb sweep {path}"
        )
    _check_names("SPEC", found, (field.name for field in fields(Specification)), ("experiment", "objective", "search"))
    sampler = found.setdefault("sampler", "random")
    if sampler not in SAMPLERS:
        raise UserError(f"sampler must be one of {', '.join(SAMPLERS)}, but is {sampler!r}")
    if not isinstance(found["experiment"], str):
        raise UserError(f"experiment must be the name of an experiment or a YAML file, but is {found['experiment']!r}")
    settings = found.get("settings") or {}
    _check_mapping("settings", settings)
    spaces = {name: _space(f"search.{name}", space) for name, space in _mapping("search", found["search"]).items()}
    for name in (*settings, *spaces):
        if not isinstance(name, str) or any(f"{name}.".startswith(f"{own}.") for own in OWN):
            raise UserError(f"the settings of a sweep must not contain {name}, which the sweep sets; remove it")
    if both := sorted(settings.keys() & spaces.keys()):
        raise UserError(f"search and settings must not both contain {both[0]}; remove it from one of them")
    found |= {
        "objective": _objective(found["objective"]),
        "search": spaces,
        "settings": settings,
        "asha": None if found.get("asha") is None else _asha(found["asha"]),
    }
    limit = MAX_TRIALS
    if sampler == "grid":
        limit = _grid_size(spaces)
        found.setdefault("trials", limit)
    if "trials" not in found:
        raise UserError("trials must be set, but is missing; try trials: 20")
    for name, (lowest, highest) in {
        "trials": (1, limit),
        "seed": (0, 2**32 - 1),
        "parallel": (1, MAX_TRIALS),
        "threads": (1, 1024),
    }.items():
        if name in found and not (_is_integer(found[name]) and lowest <= found[name] <= highest):
            of_grid = ", the size of the grid," if name == "trials" and sampler == "grid" else ""
            raise UserError(f"{name} must be an integer from {lowest} to {highest:,}{of_grid} but is {found[name]!r}")
    if "parallel" in found and sampler != "tpe":
        raise UserError(f"parallel must not be set with sampler {sampler}, whose trials do not depend on each other")
    return Specification(**found)


def _objective(value: Any) -> Objective:
    found = _mapping("objective", value)
    _check_names("objective", found, (field.name for field in fields(Objective)), ("metric", "mode"))
    metric, mode, reach = found["metric"], found["mode"], found.get("reach")
    if not isinstance(metric, str) or not metric.startswith("val/"):
        raise UserError(
            f"objective.metric must be a metric of the validation, such as val/loss, but is {metric!r}: "
            "settings are chosen on validation data only"
        )
    if mode not in ("min", "max"):
        raise UserError(f"objective.mode must be min or max, but is {mode!r}")
    if reach is not None and not _is_number(reach):
        raise UserError(f"objective.reach must be a number, but is {reach!r}")
    return Objective(metric, mode, reach)


def _asha(value: Any) -> Asha:
    found = _mapping("asha", value)
    _check_names("asha", found, (field.name for field in fields(Asha)), ("min_steps",))
    for name, lowest in (("min_steps", 1), ("reduction_factor", 2)):
        if name in found and not (_is_integer(found[name]) and found[name] >= lowest):
            raise UserError(f"asha.{name} must be an integer of at least {lowest}, but is {found[name]!r}")
    return Asha(**found)


def _space(name: str, value: Any) -> Range | Values:
    """Return the range or the values of a searched setting."""
    found = _mapping(name, value)
    if "values" in found:
        _check_names(name, found, ("values",), ("values",))
        values = found["values"]
        if not isinstance(values, list) or not values:
            raise UserError(f"{name}.values must be a list of values, but is {values!r}")
        for other in values:
            if not isinstance(other, str | bool | int | float) or (
                isinstance(other, float) and not math.isfinite(other)
            ):
                raise UserError(f"{name}.values must be numbers, texts or booleans, but has {other!r}")
        if len({(type(other), other) for other in values}) < len(values):
            raise UserError(f"{name}.values must be different, but one of {values!r} is there twice")
        return Values(tuple(values))
    _check_names(name, found, ("min", "max", "log", "step", "values"), ("min", "max"))
    for bound in ("min", "max", "step"):
        if bound in found and not (_is_number(found[bound]) and math.isfinite(found[bound])):
            hint = "; write 1.0e-4 for 1e-4" if isinstance(found[bound], str) else ""
            raise UserError(f"{name}.{bound} must be a number, but is {found[bound]!r}{hint}")
    space = Range(**found)
    if not isinstance(space.log, bool):
        raise UserError(f"{name}.log must be true or false, but is {space.log!r}")
    if not space.min < space.max:
        raise UserError(f"{name}.min must be below max ({space.max}), but is {space.min}")
    if space.log and (space.min <= 0 or space.step is not None):
        problem = "has a step; remove it" if space.min > 0 else f"begins at {space.min}"
        raise UserError(f"{name} must be above 0 and without a step, since log is true, but {problem}")
    if space.step is not None and not 0 < space.step <= space.max - space.min:
        raise UserError(f"{name}.step must be above 0 and at most max - min, but is {space.step}")
    return space


def _grid_size(spaces: dict[str, Range | Values]) -> int:
    size = 1
    for name, space in spaces.items():
        if space.grid is None:
            raise UserError(f"search.{name} must be values or have a step, since the sampler is grid; try step")
        size *= len(space.grid)
    if size > MAX_TRIALS:
        raise UserError(f"the grid must have at most {MAX_TRIALS:,} points, but has {size:,}; try sampler: random")
    return size


def _mapping(name: str, value: Any) -> dict[str, Any]:
    _check_mapping(name, value)
    if not value:
        raise UserError(f"{name} must not be empty")
    return dict(value)


def _check_mapping(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise UserError(f"{name} must be a mapping, NAME: VALUE, but is {value!r:.50}")


def _check_names(owner: str, found: dict[str, Any], known: Iterable[str], required: Iterable[str]) -> None:
    names = list(known)
    for name in found:
        if name not in names:
            raise UserError(f"{owner} has no setting {name!r}{nearest(str(name), names)}")
    for name in required:
        if name not in found:
            raise UserError(f"{owner} must contain {name}, but does not; add it")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
