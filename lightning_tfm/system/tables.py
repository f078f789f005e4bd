"""Tables of texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

UNBROKEN = 24
"""Maximum length of a text without blanks that is not broken in LaTeX, in characters."""


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
        first, *others = (" & ".join(map(escape_latex, row)) + r" \\" for row in (header, *rows))
        columns = "".join("r" if all(map(_is_number, cells)) else "l" for cells in zip(*rows, strict=True))
        lines = [f"% {' '.join(title.split())}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule", first, r"\midrule"]
        lines += [*others, r"\bottomrule", r"\end{tabular}"]
        parts.append("".join(f"{line}\n" for line in lines))
    parts.append(comments(sentences))
    return "\n".join(filter(None, parts))


def comments(sentences: Iterable[str]) -> str:
    """Return sentences as comments in LaTeX, one per line."""
    return "".join(f"% {' '.join(sentence.split())}\n" for sentence in sentences)


def _is_number(cell: str) -> bool:
    """Return whether a cell is empty, a number or an interval, which is aligned on the right."""
    return re.match(r"[^-+<\d]", cell) is None


def breakable_latex(text: str) -> str:
    """Return a text without blanks, such as a path, in LaTeX; lines may end after punctuation if it is long."""
    escaped = escape_latex(text)
    return escaped if len(text) <= UNBROKEN else re.sub(r"(\\_|\\textbar\{\}|[./])", r"\1\\allowbreak{}", escaped)


def escape_latex(text: str) -> str:
    """Return a text, such as a cell, in LaTeX on one line."""
    special: dict[str, str | int | None] = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}"}
    special |= {"^": r"\textasciicircum{}", "<": "$<$", ">": "$>$", "\N{OPEN BOX}": r"\textvisiblespace{}"}
    special |= {"\N{RETURN SYMBOL}": r"$\hookleftarrow$", "\N{RIGHTWARDS ARROW TO BAR}": r"$\rightarrow$"}
    special |= {"\N{PLUS-MINUS SIGN}": r"$\pm$", "\N{UPWARDS ARROW}": r"$\uparrow$", "|": r"\textbar{}"}
    special |= {"\N{DOWNWARDS ARROW}": r"$\downarrow$"}
    special |= {character: f"\\{character}" for character in "&%$#_{}"}
    text = " ".join(text.split()).translate(str.maketrans(special)).replace(" to ", " to~")
    return re.sub(r"(?<!\w)-(?=\d)", "$-$", text)
