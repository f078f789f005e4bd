"""Output for people: a console that prints names and data as they are, and the format of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
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


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], console: Console, title: str = "") -> None:
    """Print a table; cells are folded in a terminal, but in a file or a pipe, each row is one line."""
    whole = not console.is_terminal
    table = Table(
        title=title or None, title_style="bold", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for cells in zip(header, *rows, strict=True):
        table.add_column(cells[0], overflow="fold", min_width=max(map(len, cells)) if whole else None)
    for row in rows:
        table.add_row(*row)
    console.print(table, soft_wrap=whole)


def format_value(value: float) -> str:
    """Format a metric with four decimals, or with two if it is 10 or more, such as BLEU."""
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"


def format_duration(seconds: float) -> str:
    """Format a duration, such as "12 min 5 s"."""
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    minutes, seconds_left = divmod(whole, 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{minutes} min {seconds_left} s" if minutes < 120 else f"{hours} h {minutes_left} min"
