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
        begin = rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}"
        lines = [f"% {title}", begin, r"\toprule", first, r"\midrule", *others, r"\bottomrule", r"\end{tabular}"]
        parts.append("".join(f"{line}\n" for line in lines))
    parts.append("".join(f"% {sentence}\n" for sentence in sentences))
    return "\n".join(filter(None, parts))


def _escaped(text: str) -> str:
    """Return a cell in LaTeX."""
    special: dict[str, str | int | None] = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}"}
    special |= {"^": r"\textasciicircum{}", "<": "$<$", ">": "$>$", "\N{OPEN BOX}": r"\textvisiblespace{}"}
    special |= {character: f"\\{character}" for character in "&%$#_{}"}
    text = text.translate(str.maketrans(special)).replace(" to ", " to~")
    return re.sub(r"(?<!\w)-(?=\d)", "$-$", text)
