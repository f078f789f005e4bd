"""Operators of the ONNX interpreter of pages."""

from __future__ import annotations

import re
from importlib import resources


def supported_operators() -> frozenset[str]:
    """Return the names of the ONNX operators that the interpreter of pages supports.

    Some are supported for certain attributes only; the interpreter rejects other attributes when it reads a graph.
    """
    folder = resources.files("lightning_tfm.explore") / "page"
    files = [file for file in folder.iterdir() if re.fullmatch(r"operators_\w+\.js", file.name)]
    tables = (
        table
        for file in files
        for table in re.findall(r"_OPERATORS = \{\n(.*?)^\};", file.read_text(encoding="utf-8"), re.M | re.S)
    )
    return frozenset(name for table in tables for name in re.findall(r"^  ([A-Z]\w+)[:(,]", table, re.M))
