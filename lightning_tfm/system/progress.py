"""Progress bars of all commands."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm


def progress_bar(description: str, is_shown: bool | None = None, **settings: Any) -> tqdm[Any]:
    """Return a progress bar, whose bar fills the rest of the line, by default on standard error.

    Args:
        description: the action or the counted unit.
        is_shown: whether to show the progress bar; None for in a terminal only.
        settings: further arguments of tqdm.
    """
    layout = "{desc} {n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}"
    disable = None if is_shown is None else not is_shown
    return tqdm(desc=description, disable=disable, bar_format=layout, dynamic_ncols=True, **settings)
