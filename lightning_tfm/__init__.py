"""A PyTorch Lightning research framework for sequence models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_tfm.checkpoint import load

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    """`lightning_tfm.load`, imported when it is asked for: torch takes seconds, which a help text should not."""
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_tfm.checkpoint import load

    return load
