"""Interactive exploration of trained networks in Python, on a page and in notebooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_tfm.errors import UserError
from lightning_tfm.explore.changes import Changes, Drawn, Patched
from lightning_tfm.explore.explorer import Explorer
from lightning_tfm.inference import Predictor

if TYPE_CHECKING:
    from lightning_tfm.explore.widget import Widget

__all__ = ["Changes", "Drawn", "Explorer", "Patched", "explore"]


def explore(predictor: Predictor | Explorer, *others: Predictor | Explorer) -> Widget:
    """Return the page of the explorer as a notebook widget.

    Args:
        predictor: a model, see `lightning_tfm.load`, or its explorer.
        others: further models, shown side by side.

    Raises:
        UserError: if the package anywidget is missing.
    """
    try:
        from lightning_tfm.explore.widget import Widget
    except ModuleNotFoundError as error:
        raise UserError(f"explore needs the package {error.name!r}; pip install 'lightning_tfm[notebook]'") from None
    names = [f"model {number}" for number in range(1, len(others) + 2)] if others else ["model"]
    return Widget(
        [
            model if isinstance(model, Explorer) else Explorer(model, name)
            for model, name in zip((predictor, *others), names, strict=True)
        ]
    )
