"""Layers of the package, derived from its imports, for the page on the architecture and its test."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The checkout."""

PACKAGE = "lightning_tfm"


def module_of(path: Path) -> str:
    """Return the dotted name of the module in a file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports, inside functions and for type checking too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, "imports are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def members() -> dict[str, Path]:
    """Return the subpackages and modules of the package, by name, with the file that describes each."""
    folders = {path.parent.name: path for path in (ROOT / PACKAGE).glob("*/__init__.py")}
    return folders | {path.stem: path for path in (ROOT / PACKAGE).glob("*.py") if path.stem != "__init__"}


def member_of(module: str) -> str | None:
    """Return the subpackage or module of a dotted name; None outside the package."""
    package, *inside = module.split(".")
    return inside[0] if package == PACKAGE and inside and inside[0] in members() else None


def modules() -> list[str]:
    """Return the modules of the package, except the package itself, each after those that it imports.

    Raises:
        graphlib.CycleError: if modules import each other.
    """
    paths = {module_of(path): path for path in (ROOT / PACKAGE).rglob("*.py")}
    del paths[PACKAGE]
    below = {module: {name for name in imported(path) if name in paths} - {module} for module, path in paths.items()}
    return [*TopologicalSorter(below).static_order()]


def layers() -> list[list[str]]:
    """Return the members from the lowest layer up, each of which imports from lower layers only.

    Raises:
        graphlib.CycleError: if members import each other.
    """
    below: dict[str, set[str]] = {name: set() for name in members()}
    for path in (ROOT / PACKAGE).rglob("*.py"):
        own = member_of(module_of(path))
        if own is not None:  # the package itself exports names of all layers
            below[own] |= {other for name in imported(path) if (other := member_of(name)) not in (None, own)}
    sorter = TopologicalSorter(below)
    sorter.prepare()
    ordered = []
    while sorter.is_active():
        ordered.append(sorted(sorter.get_ready()))
        sorter.done(*ordered[-1])
    return ordered
