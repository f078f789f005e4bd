"""Tables of texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Table(NamedTuple):
    """Table of texts.

    Attributes:
        title: the title.
        header: the names of the columns.
        rows: the cells.
    """

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def latex(tables: Iterable[Table], sentences: Sequence[str]) -> str:
    """Return tables in LaTeX, which need the package booktabs, and sentences as comments."""
    parts = []
    for title, header, rows in tables:
        first, *others = (" & ".join(map(_escaped, row)) + r" \\" for row in (header, *rows))
        columns = "".join("r" if all(map(_is_number, cells)) else "l" for cells in zip(*rows, strict=True))
        lines = [f"% {' '.join(title.split())}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule", first, r"\midrule"]
        lines += [*others, r"\bottomrule", r"\end{tabular}"]
        parts.append("".join(f"{line}\n" for line in lines))
    parts.append("".join(f"% {sentence}\n" for sentence in sentences))
    return "\n".join(filter(None, parts))


def _is_number(cell: str) -> bool:
    """Return whether a cell is empty, a number or an interval, which is aligned on the right."""
    return re.match(r"[^-+<\d]", cell) is None


def _escaped(text: str) -> str:
    """Return a cell in LaTeX."""
    special: dict[str, str | int | None] = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}"}
    special |= {"^": r"\textasciicircum{}", "<": "$<$", ">": "$>$", "\N{OPEN BOX}": r"\textvisiblespace{}"}
    special |= {"\N{RETURN SYMBOL}": r"$\hookleftarrow$", "\N{RIGHTWARDS ARROW TO BAR}": r"$\rightarrow$"}
    special |= {character: f"\\{character}" for character in "&%$#_{}"}
    text = text.translate(str.maketrans(special)).replace(" to ", " to~")
    return re.sub(r"(?<!\w)-(?=\d)", "$-$", text)
