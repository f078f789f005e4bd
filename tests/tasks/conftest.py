"""Fixtures of the runs of all tasks."""

import pytest

from support.experiments import TASKS, trained_run


@pytest.fixture(params=TASKS)
def task(request):
    return request.param


@pytest.fixture
def trained(task, tmp_path_factory):
    return trained_run(task, tmp_path_factory)
