"""Commands in addition to those of LightningCLI, one per module.

The docstring of the module of a command begins with its name and its summary, as in "`lightning-tfm list`: list ...".
The module defines `make_parser() -> CommandParser`, and a function of its own name, which takes the command-line
arguments and returns the exit status. A function with a built-in name ends with an underscore.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

_TITLE = re.compile(r'"""`lightning-tfm (\w+)`: (.+)\.')


def _summaries() -> dict[str, str]:
    """Read the summaries without an import of the modules, which takes seconds."""
    modules = sorted(Path(__file__).parent.glob("*.py"))
    titles = (_TITLE.match(module.read_text(encoding="utf-8")) for module in modules)
    return {title[1]: title[2] for title in titles if title}


SUMMARIES = _summaries()
"""Summaries of the commands, by name."""


def import_command(name: str) -> Callable[[list[str]], int]:
    """Import the function that runs a command."""
    module = import_module(f"{__name__}.{name}")
    function: Callable[[list[str]], int] = getattr(module, f"{name}_" if hasattr(builtins, name) else name)
    return function
