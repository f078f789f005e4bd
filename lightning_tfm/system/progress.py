"""Progress bars in a terminal."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

FORMAT = "{desc} {n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}"
"""Format of a progress bar, whose bar fills the rest of the line."""


def progress_bar(description: str, shown: bool, **settings: Any) -> tqdm[Any]:
    """Return a progress bar, by default on standard error.

    Args:
        description: the action or the counted unit.
        shown: whether to show the progress bar.
        settings: further arguments of tqdm.
    """
    return tqdm(desc=description, disable=not shown, bar_format=FORMAT, dynamic_ncols=True, **settings)
