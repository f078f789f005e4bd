"""Progress bars of all commands, and the time that is left."""

from __future__ import annotations

import time
from typing import Any

from tqdm import tqdm

SMOOTHING, MIN_STEPS = 0.02, 5
"""Weight of a step in the mean time of a step, and the number of steps after which it is known."""


class StepTime:
    """Exponential mean of the seconds between the ends of two steps, such as those of a training with validations.

    The first steps have equal weights, and the first of all, which may compile and allocate memory, has none.

    Attributes:
        seconds: the mean; None until it is known.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._mean, self._steps, self._end = 0.0, -1, time.monotonic()

    def update(self) -> None:
        """Add a step that ends now."""
        end = time.monotonic()
        self._steps += 1
        if self._steps:
            self._mean += max(SMOOTHING, 1 / self._steps) * (end - self._end - self._mean)
        self._end = end
        if self._steps >= MIN_STEPS:
            self.seconds = self._mean


class Bar(tqdm):  # type: ignore[type-arg]  # generic in its stub only
    """Progress bar that fills the rest of the line, and shows the time that is left once it is known.

    Args:
        step_time: the time of a step, which the caller updates; None for the exponential mean of tqdm.
        settings: arguments of tqdm.
    """

    def __init__(self, *, step_time: StepTime | None = None, **settings: Any) -> None:
        self.step_time = step_time  # before tqdm draws the bar
        super().__init__(**settings)

    @property
    def format_dict(self) -> dict[str, Any]:
        """Return the values of the layout, with `left`."""
        values = super().format_dict
        seconds = self.step_time.seconds if self.step_time is not None else values["rate"] and 1 / values["rate"]
        is_known = seconds is not None and values["total"] is not None
        left = f" {tqdm.format_interval((values['total'] - values['n']) * seconds)} left" if is_known else ""
        return {**values, "left": left}


def progress_bar(
    description: str, is_shown: bool | None = None, step_time: StepTime | None = None, **settings: Any
) -> Bar:
    """Return a progress bar, by default on standard error.

    Args:
        description: the action or the counted unit.
        is_shown: whether to show the progress bar; None for in a terminal only.
        step_time: see `Bar`.
        settings: further arguments of tqdm.
    """
    layout = "{desc} {n_fmt}/{total_fmt} |{bar}|{left}{postfix}"
    disable = None if is_shown is None else not is_shown
    return Bar(
        step_time=step_time, desc=description, disable=disable, bar_format=layout, dynamic_ncols=True, **settings
    )
