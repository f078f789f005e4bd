"""Specification of a sweep: a YAML file in the format of W&B, of which each part has a counterpart in Optuna."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import BasePruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, PartialFixedSampler, RandomSampler, TPESampler
from optuna.trial import Trial

from lightning_tfm.config.settings import read_yaml
from lightning_tfm.errors import UserError

T = TypeVar("T")
Goal = Literal["minimize", "maximize"]

SERVER_KEYS = ("name", "description", "entity", "project", "program")
"""Keys that only W&B reads."""

METHODS = ("random", "grid", "bayes")

RESERVED = ("checkpoint.monitor", "checkpoint.mode", "ckpt_path", "config", "name", "skip_test", "trainer.logger")
"""Settings of `fit` that a sweep sets itself, or that are not settings of the training."""

ARGS = "${args}"
"""Place of the settings in the command."""

MAX_TRIALS = 10_000

DIGITS = 4
"""Number of significant digits of a sampled float."""


def _quantized(min: float, max: float, q: float = 1) -> BaseDistribution:
    if q <= 0 or any(Decimal(str(bound)) % Decimal(str(q)) for bound in (min, max)):
        raise ValueError(f"min and max must be multiples of q, but are {min} and {max}")
    is_integer = all(isinstance(value, int) for value in (min, max, q))
    return (IntDistribution if is_integer else FloatDistribution)(min, max, step=q)  # type: ignore[arg-type]


def _list(values: Any) -> list[Any]:
    if not isinstance(values, list):
        raise ValueError(f"values must be a list, but is {values!r}")
    return values


DISTRIBUTIONS: dict[str, Callable[..., BaseDistribution]] = {
    "constant": lambda value: CategoricalDistribution([value]),
    "categorical": lambda values: CategoricalDistribution(_list(values)),
    "int_uniform": lambda min, max: IntDistribution(min, max),
    "uniform": lambda min, max: FloatDistribution(min, max),
    "q_uniform": _quantized,
    "log_uniform": lambda min, max: FloatDistribution(math.exp(min), math.exp(max), log=True),
    "log_uniform_values": lambda min, max: FloatDistribution(min, max, log=True),
    "q_log_uniform_values": lambda min, max: IntDistribution(min, max, log=True),
}
"""Distributions of W&B, as functions of their keys. Optuna has no normal and no beta distributions."""

PRUNERS: dict[str, Callable[..., BasePruner]] = {
    "hyperband": lambda min_iter, eta=3: SuccessiveHalvingPruner(min_iter, eta),
    "median": lambda min_iter: MedianPruner(n_warmup_steps=min_iter),
}
"""Types of `early_terminate`, as functions of their keys. W&B has no median pruner."""


@dataclass(frozen=True)
class SweepFile:
    """Specification of a sweep.

    Attributes:
        method: one of METHODS; `bayes` is the Tree-structured Parzen Estimator (Bergstra et al. 2011).
        metric: a metric of the validation, such as `val/loss`.
        goal: whether lower or higher values of the metric are better.
        parameters: the distribution of each setting, by its name on the command line; a constant has a single value.
        pruner: the pruner, whose steps are validations.
        run_cap: the number of trials.
        command: the arguments of `fit`, with ARGS in the place of the settings.
        content: the content of the file, except for `run_cap`, which may change.
    """

    method: str
    metric: str
    goal: Goal
    parameters: dict[str, BaseDistribution]
    pruner: BasePruner
    run_cap: int
    command: tuple[str, ...]
    content: dict[str, Any]

    @property
    def constants(self) -> dict[str, Any]:
        """Return the settings that have a single value."""
        return {name: _bounds(space)[0] for name, space in self.parameters.items() if space.single()}

    def bounds(self) -> Iterator[dict[str, Any]]:
        """Yield settings that together contain all listed values and the bounds of all ranges."""
        bounds = [[(name, value) for value in _bounds(space)] for name, space in self.parameters.items()]
        for settings in itertools.zip_longest(*bounds):
            yield self.constants | dict(filter(None, settings))

    def sampler(self, index: int) -> BaseSampler:
        """Return the sampler of a trial, whose settings depend on its index only unless the method is bayes."""
        seed = int(np.random.SeedSequence((1, index)).generate_state(1)[0])
        if self.method == "bayes":
            return TPESampler(seed=seed, constant_liar=True)
        if self.method == "random":  # at once, since the worker may be killed between two settings
            point = optuna.create_study(sampler=RandomSampler(seed)).ask(self.parameters).params
        else:
            values = next(itertools.islice(itertools.product(*map(_bounds, self.parameters.values())), index, None))
            point = dict(zip(self.parameters, values, strict=True))
        return PartialFixedSampler(point, RandomSampler())

    def suggest(self, trial: Trial) -> dict[str, Any]:
        """Return the settings of a trial. Floats have a few significant digits, so that they can be read and typed."""
        settings: dict[str, Any] = {}
        for name, space in self.parameters.items():
            if isinstance(space, CategoricalDistribution):
                settings[name] = trial.suggest_categorical(name, space.choices)
            elif isinstance(space, IntDistribution):
                settings[name] = trial.suggest_int(name, space.low, space.high, step=space.step, log=space.log)
            elif isinstance(space, FloatDistribution):
                value = trial.suggest_float(name, space.low, space.high, step=space.step, log=space.log)
                rounded = min(max(float(f"{value:.{DIGITS}g}"), space.low), space.high)
                settings[name] = rounded if space.step is None else value
        return settings

    def arguments(self, settings: dict[str, Any]) -> list[str]:
        """Return the arguments of `fit` with some settings."""
        flags = [f"--{name}={v if isinstance(v, str) else json.dumps(v)}" for name, v in settings.items()]
        return [part for word in self.command for part in (flags if word == ARGS else [word])]


def read_sweep_file(path: Path) -> SweepFile:
    """Read the specification of a sweep.

    Args:
        path: the YAML file.

    Raises:
        UserError: if the file is invalid, or uses a part of the format that Optuna does not have. The settings are
            checked later, by the parser of `fit`.
    """
    content = read_yaml(path, "SPEC")
    return _call("SPEC", _sweep_file, {key: value for key, value in content.items() if key not in SERVER_KEYS})


def _sweep_file(
    method: Any, metric: Any, parameters: Any, command: Any, early_terminate: Any = None, run_cap: Any = None
) -> SweepFile:
    content = {key: value for key, value in locals().items() if key != "run_cap"}
    if method not in METHODS:
        raise UserError(f"method must be one of {', '.join(METHODS)}, but is {method!r}")
    words = command if isinstance(command, list) and all(isinstance(word, str) for word in command) else []
    if words[:2] != ["lightning-tfm", "fit"] or [word for word in words if word.startswith("$")] != [ARGS]:
        raise UserError(f"command must be [lightning-tfm, fit, --config, EXPERIMENT, {ARGS}], but is {command!r:.99}")
    if not isinstance(parameters, dict) or not parameters:
        raise UserError(f"parameters must be a mapping, NAME: VALUE, but is {parameters!r:.50}")
    for name in parameters:
        if any(f"{name}.".startswith(f"{other}.") for other in RESERVED):
            raise UserError(f"parameters must not contain {name}, which the sweep sets; remove it")
    spaces = {name: _call(f"parameters.{name}", _distribution, value) for name, value in parameters.items()}
    if method == "grid":
        if ranges := [name for name, space in spaces.items() if not isinstance(space, CategoricalDistribution)]:
            raise UserError(f"parameters.{ranges[0]} must have values with method grid; list them")
        size = math.prod(len(_bounds(space)) for space in spaces.values())
        run_cap = size if run_cap is None else min(run_cap, size)
    if not _is_integer(run_cap) or not 1 <= run_cap <= MAX_TRIALS:
        raise UserError(f"run_cap must be an integer from 1 to {MAX_TRIALS:,}, but is {run_cap!r}; try 20")
    pruner = NopPruner() if early_terminate is None else _call("early_terminate", _pruner, early_terminate)
    settings = _call("metric", _metric, metric)
    return SweepFile(method, *settings, spaces, pruner, run_cap, tuple(command[2:]), content)


def _metric(name: Any, goal: Any = "minimize") -> tuple[str, Goal]:
    if not isinstance(name, str) or not name.startswith("val/"):
        raise ValueError(f"name must be a metric of the validation, such as val/loss, but is {name!r}")
    if goal not in ("minimize", "maximize"):
        raise ValueError(f"goal must be minimize or maximize, but is {goal!r}")
    return name, goal


def _pruner(type: Any, **content: Any) -> BasePruner:
    if not isinstance(type, str) or type not in PRUNERS:
        raise ValueError(f"type must be one of {', '.join(PRUNERS)}, but is {type!r}")
    for key, value in content.items():
        if not _is_integer(value) or value < 1:
            raise ValueError(f"{key} must be an integer of at least 1, but is {value!r}")
    return PRUNERS[type](**content)


def _distribution(distribution: Any = None, **content: Any) -> BaseDistribution:
    if distribution is None:  # the default of W&B
        is_integer = all(isinstance(content.get(key), int) for key in ("min", "max"))
        names = [name for name, key in (("constant", "value"), ("categorical", "values")) if key in content]
        distribution = [*names, "int_uniform" if is_integer else "uniform"][0]
    if not isinstance(distribution, str) or distribution not in DISTRIBUTIONS:
        raise ValueError(f"distribution must be one of {', '.join(DISTRIBUTIONS)}, but is {distribution!r}")
    for key, value in content.items():
        for number in value if isinstance(value, list) else [value]:
            is_number = isinstance(number, int | float) and math.isfinite(number)
            if not is_number and (key not in ("value", "values") or not isinstance(number, str | None)):
                raise ValueError(f"{key} must be a number, such as 1.0e-4, but has {number!r:.50}")
        if distribution == "int_uniform" and not _is_integer(value):
            raise ValueError(f"{key} must be an integer, but is {value!r}")
    return DISTRIBUTIONS[distribution](**content)


def _is_integer(value: Any) -> bool:
    """Return whether a value is an integer; `true` is not one."""
    return isinstance(value, int) and not isinstance(value, bool)


def _bounds(space: BaseDistribution) -> list[Any]:
    """Return the bounds of a range, or all listed values."""
    if isinstance(space, CategoricalDistribution):
        return list(space.choices)
    assert isinstance(space, FloatDistribution | IntDistribution)
    return [space.low, space.high]


def _call(owner: str, function: Callable[..., T], content: Any) -> T:
    """Call a function with a part of the file, whose keys are the arguments.

    Raises:
        UserError: if a key is missing or not supported, or if the function refuses a value.
    """
    if not isinstance(content, dict) or not content:
        raise UserError(f"{owner} must be a mapping, NAME: VALUE, but is {content!r:.50}")
    try:
        return function(**content)
    except UserError:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:
        message = str(error).partition("() ")[2] or str(error)
        message = re.sub(r"missing \d+ required positional arguments?:", "missing", message)
        message = message.replace("got an unexpected keyword argument", "the sweep does not support the key")
        raise UserError(f"{owner}: {message}, in {content!r:.80}") from None
