"""Marks of the parameters of a test."""

from collections.abc import Collection, Iterable

import pytest


def soak_except(kept: Collection[str], names: Iterable[str]) -> list:
    """Return the parameters of a test: those of `kept` for `make test-all`, the others for `make test-soak`."""
    names = list(names)
    assert set(kept) <= set(names), set(kept) - set(names)
    return [pytest.param(name, marks=() if name in kept else pytest.mark.soak) for name in names]
