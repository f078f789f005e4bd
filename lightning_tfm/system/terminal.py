"""Output for people: a console that prints names and data as they are, and the format of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
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
    """Print a table, without breaking a word.

    In a file or a pipe, each row is one line, without blanks at its end. In a terminal, cells are wrapped at spaces,
    and if even the longest words of all columns do not fit, the columns that do not fit as a whole are printed below
    each row.
    """
    columns = [[*map(escape_controls, cells)] for cells in zip(header, *rows, strict=True)]
    widths = [max(map(cell_len, cells)) for cells in columns]
    shortest = [max((cell_len(word) for cell in cells for word in cell.split()), default=0) for cells in columns]
    number, whole = len(header), not console.is_terminal
    if not whole and sum(shortest) > console.width - _separators(number):
        while number > 1 and sum(widths[:number]) > console.width - _separators(number):
            number -= 1
    while not whole and sum(widths[:number]) > console.width - _separators(number):
        widest = max(range(number), key=lambda index: (widths[index] > shortest[index], widths[index]))
        if widths[widest] == shortest[widest]:
            break  # a word is wider than the terminal
        widths[widest] -= 1
    names, *cells = zip(*columns, strict=True)
    has_all = number == len(header)
    table = _new_table(names, widths[:number], title, show_edge=has_all)
    for row in cells:
        table.add_row(*row[:number])
        if not has_all:
            console.print(table)
            others = zip(names[number:], row[number:], strict=True)
            if below := "; ".join(f"{name} {cell}" for name, cell in others if cell):
                console.print(Padding(below, (0, 0, 0, 4)))
            table = _new_table(names, widths[:number], show_header=False, show_edge=False)
    if whole:
        with console.capture() as capture:
            console.print(table, soft_wrap=True)
        console.out("\n".join(map(str.rstrip, capture.get().split("\n"))), end="")
    elif has_all:
        console.print(table)


def _new_table(names: Sequence[str], widths: Sequence[int], title: str = "", **settings: Any) -> Table:
    """Return a table without rows that has a column for each width."""
    table = Table(
        title=title or None,
        title_style="bold",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        **settings,
    )
    for name, width in zip(names, widths, strict=False):
        table.add_column(name, overflow="fold", min_width=width, max_width=width)
    return table


def _separators(number: int) -> int:
    """Return the width of the padding, the edges and what separates this number of columns."""
    return 2 * number + 1


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
