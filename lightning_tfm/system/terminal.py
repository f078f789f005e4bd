"""Console that prints names and data as they are."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from lightning_tfm.errors import escape_controls


class LiteralConsole(Console):
    """Console without markup and emoji codes, which escapes the control characters of strings.

    Args:
        settings: further arguments of rich's Console.

    Note:
        The control characters of a `Text` are not escaped.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        return super().render_str(escape_controls(text), **settings)
