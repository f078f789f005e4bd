"""The time that is left."""

from io import StringIO

import pytest

from lightning_tfm.system import progress
from lightning_tfm.system.progress import MIN_STEPS, SMOOTHING, StepTime, progress_bar


@pytest.fixture
def clock(monkeypatch):
    """Return a list of which the first value is the time."""
    times = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: times[0])
    return times


def test_the_time_of_a_step_is_unknown_at_first(clock):
    step_time = StepTime()
    for _ in range(MIN_STEPS):
        step_time.update()
        assert step_time.seconds is None
        clock[0] += 2
    step_time.update()
    assert step_time.seconds == pytest.approx(2)


def test_the_time_of_a_step_is_a_mean_and_later_an_exponential_mean(clock):
    step_time, seconds = StepTime(), [float(1 + step % 7) for step in range(300)]
    clock[0] = 1000  # the first step has no weight
    step_time.update()
    for number, each in enumerate(seconds, start=1):
        clock[0] += each
        step_time.update()
        if MIN_STEPS <= number <= 1 / SMOOTHING:
            assert step_time.seconds == pytest.approx(sum(seconds[:number]) / number)
    first = round(1 / SMOOTHING)
    weights = [(1 - SMOOTHING) ** age * SMOOTHING for age in range(len(seconds) - first)]
    expected = sum(weight * each for weight, each in zip(weights, reversed(seconds), strict=False))
    expected += (1 - SMOOTHING) ** (len(seconds) - first) * sum(seconds[:first]) / first
    assert step_time.seconds == pytest.approx(expected)


def test_a_bar_shows_the_time_left_once_it_is_known(clock):
    bar = progress_bar("step", True, total=100, file=StringIO())
    bar.step_time = StepTime()
    assert "left" not in str(bar)
    for _ in range(MIN_STEPS + 1):
        clock[0] += 3
        bar.step_time.update()
        bar.update()
    assert f"| {(100 - MIN_STEPS - 1) * 3 // 60:02d}:{(100 - MIN_STEPS - 1) * 3 % 60:02d} left" in str(bar)
    bar.close()
