"""Trials of a sweep: their settings and outcomes, which depend only on the specification and the folders of their runs.

Neither the number of workers nor the order in which they finish trials changes an outcome. The settings of a trial, and
whether it is pruned, depend on the results of certain trials with smaller numbers, and are decided once they are known.
"""

from __future__ import annotations

import json
import math
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from lightning_tfm.config.settings import read_json
from lightning_tfm.errors import UserError
from lightning_tfm.sweeps.specification import Specification
from lightning_tfm.system.files import read_metrics, write_text

State = Literal["finished", "not reached", "pruned", "failed"]

SUMMARY, SETTINGS, FAILURE = "summary.json", "trial.json", "failure.txt"
"""Files in the folder of a trial's run: of a finished run, with the searched settings, and with an error message."""


def trial_name(number: int) -> str:
    """Return the name of the folder of a trial."""
    return f"trial_{number:04}"


class Point(NamedTuple):
    """Validation of a run: the number of training steps before it, and the value of the metric."""

    steps: int
    metric: float


@dataclass(frozen=True)
class Outcome:
    """Outcome of a trial.

    Attributes:
        number: the number of the trial, from 0.
        settings: the searched settings.
        state: "finished", "not reached" (the metric has not reached its goal), "pruned" or "failed".
        value: the value of the objective: the best metric or the number of steps; None unless finished, with a finite
            metric.
        metric: the best metric so far; None if there was no validation with a finite value.
        steps: the number of training steps that the outcome depends on.
        message: why the run has failed.
    """

    number: int
    settings: dict[str, Any]
    state: State
    value: float | None
    metric: float | None
    steps: int
    message: str = ""


class Trials:
    """Trials of a sweep.

    Args:
        specification: the specification of the sweep.
        folder: the folder of the sweep.
        max_steps: the number of training steps of a trial that is not stopped.

    Attributes:
        settings: the searched settings of the first trials; those of later trials depend on results to come.
        outcomes: the outcomes of the trials that are decided, by number.
    """

    def __init__(self, specification: Specification, folder: Path, max_steps: int) -> None:
        self.specification, self.folder = specification, folder
        self.settings: list[dict[str, Any]] = []
        self.outcomes: dict[int, Outcome] = {}
        self._curves: dict[int, tuple[tuple[int, int], list[Point]]] = {}  # by trial, with time and size of the file
        asha = specification.asha
        self._rungs: list[int] = []  # steps
        while asha and (steps := asha.min_steps * asha.reduction_factor ** len(self._rungs)) < max_steps:
            self._rungs.append(steps)
        self._at_rung: list[list[float]] = [[] for _ in self._rungs]  # sorted metrics, times their sign
        self._next = [0 for _ in self._rungs]  # number of the next trial to compare at each rung

    @property
    def is_complete(self) -> bool:
        """Return whether all trials are decided."""
        return len(self.outcomes) == self.specification.trials

    def run(self, number: int) -> Path:
        """Return the folder of a trial's run."""
        return self.folder / trial_name(number)

    def record(self, number: int) -> None:
        """Write the settings of a trial to the folder of its run."""
        settings = json.dumps({"number": number, "settings": self.settings[number]}, indent=2) + "\n"
        write_text(self.run(number) / SETTINGS, settings)

    def update(self) -> list[Outcome]:
        """Read the folders of the runs, and return the newly decided trials."""
        known = set(self.outcomes)
        before = -1
        while before != (before := len(self.outcomes) + len(self.settings)):  # outcomes lead to settings
            self._choose_settings()
            self._compare_at_rungs()
            for number in range(len(self.settings)):
                if number not in self.outcomes and (outcome := self._ended(number)):
                    self.outcomes[number] = outcome
        return [self.outcomes[number] for number in sorted(self.outcomes.keys() - known)]

    def _choose_settings(self) -> None:
        """Choose the settings of the next trials as far as the results that they depend on are known."""
        while (number := len(self.settings)) < self.specification.trials:
            path = self.run(number) / SETTINGS
            if path.is_file():
                settings = read_json(path, settings=dict)["settings"]
                if settings.keys() != self.specification.search.keys():
                    raise UserError(f"{str(path)!r} must hold the settings of the sweep, but holds others; delete it")
            elif self.specification.sampler == "grid":
                point = next(point for index, point in enumerate(self.specification.points()) if index == number)
                settings = dict(zip(self.specification.search, point, strict=True))
            else:
                earlier = max(0, number + 1 - self.specification.parallel)
                if self.specification.sampler == "random":
                    earlier = 0
                elif any(other not in self.outcomes for other in range(earlier)):
                    return
                settings = self._sample(number, [self.outcomes[other] for other in range(earlier)])
            self.settings.append(settings)

    def _sample(self, number: int, earlier: list[Outcome]) -> dict[str, Any]:
        """Sample the settings of a trial, given the outcomes of earlier ones."""
        import optuna

        seed = int(np.random.SeedSequence((self.specification.seed, number)).generate_state(1)[0])
        samplers = {"random": optuna.samplers.RandomSampler, "tpe": optuna.samplers.TPESampler}
        study = optuna.create_study(sampler=samplers[self.specification.sampler](seed=seed))
        study.add_trials([frozen_trial(self.specification, outcome) for outcome in earlier])
        distributions = {name: space.distribution() for name, space in self.specification.search.items()}
        sampled = study.ask(distributions).params
        return {name: space.rounded(sampled[name]) for name, space in self.specification.search.items()}

    def _compare_at_rungs(self) -> None:
        """Prune trials that are not among the best of the trials with smaller numbers at a rung."""
        for index in range(len(self._rungs)):
            end = self._next[index - 1] if index else len(self.settings)
            while self._next[index] < end and self._compare(index, self._next[index]):
                self._next[index] += 1

    def _compare(self, index: int, number: int) -> bool:
        """Compare a trial at a rung; return False if its value is not known yet."""
        rung = self._rungs[index]
        if number in self.outcomes and self.outcomes[number].state == "pruned":
            return True
        curve = self.curve(number)
        found = next((point for point in curve if point.steps >= rung), None)
        # A run that has reached the goal will end without another validation.
        if found is None and self._reached(curve) is None and not self.has_ended(number):
            return False
        point = found or (curve[-1] if curve else None)  # a run that has ended keeps its last value
        if point is None or (found is None and self._has_failed(number)):
            return True
        values = self._at_rung[index]
        value = self.specification.objective.sign * point.metric
        insort(values, value)
        assert self.specification.asha is not None
        promoted = max(1, len(values) // self.specification.asha.reduction_factor)
        if found is not None and value > values[promoted - 1]:
            self.outcomes[number] = self._outcome(number, "pruned", point.steps)
        return True

    def _ended(self, number: int) -> Outcome | None:
        """Return the outcome of a trial whose run has finished or failed and was compared at all rungs before."""
        if not self.has_ended(number):
            return None
        curve = self.curve(number)
        last = curve[-1].steps if curve else 0
        if any(rung <= last and following <= number for rung, following in zip(self._rungs, self._next, strict=True)):
            return None
        if self._has_failed(number):
            return self._outcome(number, "failed", last)
        reached = self._reached(curve)
        if self.specification.objective.reach is not None and reached is None:
            return self._outcome(number, "not reached", last)
        return self._outcome(number, "finished", last if reached is None else reached)

    def _outcome(self, number: int, state: State, steps: int) -> Outcome:
        """Return the outcome of a trial that depends on its first steps."""
        objective = self.specification.objective
        best = min(
            (objective.sign * point.metric for point in self.curve(number) if point.steps <= steps), default=None
        )
        metric = None if best is None or math.isinf(best) else objective.sign * best
        value = None if state != "finished" else metric if objective.reach is None else float(steps)
        path = self.run(number) / FAILURE
        message = path.read_text(encoding="utf-8").strip() if state == "failed" else ""
        return Outcome(number, self.settings[number], state, value, metric, steps, message)

    def has_ended(self, number: int) -> bool:
        """Return whether the run of a trial has finished or failed."""
        return (self.run(number) / SUMMARY).is_file() or self._has_failed(number)

    def _has_failed(self, number: int) -> bool:
        return (self.run(number) / FAILURE).is_file()

    def _reached(self, curve: list[Point]) -> int | None:
        """Return the steps after which the metric has reached its goal; None if it has not, or if there is none."""
        objective = self.specification.objective
        if objective.reach is None:
            return None
        goal = objective.sign * np.float32(objective.reach)  # as precise as the metric
        return next((point.steps for point in curve if objective.sign * np.float32(point.metric) <= goal), None)

    def curve(self, number: int) -> list[Point]:
        """Return the validations of a run so far."""
        path = self.run(number) / "metrics.csv"
        try:
            status = path.stat()
        except OSError:
            return []
        key = (status.st_mtime_ns, status.st_size)
        if number not in self._curves or self._curves[number][0] != key:
            self._curves[number] = key, list(self._read(path))
        return self._curves[number][1]

    def _read(self, path: Path) -> Iterator[Point]:
        objective = self.specification.objective
        try:
            for row in read_metrics(path):
                if row.get(objective.metric):
                    value = float(row[objective.metric])  # NaN, which has no order, counts as the worst value
                    yield Point(int(row["step"]) + 1, objective.sign * math.inf if math.isnan(value) else value)
        except (OSError, KeyError, ValueError):  # the run is rewriting its file
            return


def frozen_trial(specification: Specification, outcome: Outcome) -> Any:
    """Return a decided trial for Optuna, where lower values are better.

    Note:
        A failed trial counts as one that was pruned before its first validation, so that "tpe" avoids its settings.
    """
    import optuna

    sign = specification.objective.sign
    value = outcome.value
    if value is not None and specification.objective.reach is None:
        value *= sign
    intermediate = {} if outcome.metric is None or value is not None else {outcome.steps: sign * outcome.metric}
    return optuna.trial.create_trial(
        state=optuna.trial.TrialState.PRUNED if value is None else optuna.trial.TrialState.COMPLETE,
        value=value,
        params=outcome.settings,
        distributions={name: space.distribution() for name, space in specification.search.items()},
        intermediate_values=intermediate if outcome.state != "failed" else {},
    )
