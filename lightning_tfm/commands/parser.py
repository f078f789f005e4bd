"""Argument parser of the commands."""

from __future__ import annotations

import os
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from lightning_tfm.config.trust import TRUST_HELP, package_names
from lightning_tfm.errors import UserError, nearest
from lightning_tfm.plots.style import COLUMNS
from lightning_tfm.runs.names import HELP as RUN_HELP
from lightning_tfm.runs.names import named_checkpoint
from lightning_tfm.system.private import actions

FIGURES = (".pdf", ".png", ".svg")
"""Suffixes of figures."""


def check_new_file(option: str, path: Path, overwrite: bool) -> None:
    """Check that a file can be written.

    Raises:
        UserError: if the path is that of a folder or an existing file, or its folder does not exist or is not writable.
    """
    if path.is_dir() or (path.exists() and not overwrite):
        raise UserError(f"{option} must be a new file, but {str(path)!r} exists; name another, or add --overwrite")
    if not path.resolve().parent.is_dir():
        raise UserError(
            f"{option} must lie in a folder that exists, but {str(path.parent)!r} does not; create it first"
        )
    check_writable(option, path.parent)


def checkpoints_to_join(options: Namespace) -> list[Path]:
    """Return the checkpoints that the arguments of `CommandParser.add_checkpoints` name.

    Raises:
        UserError: if `--output` exists, or a run has no checkpoint.
    """
    if options.output.exists():
        raise UserError(f"--output must be a new file, but {str(options.output)!r} exists; choose another")
    return [*map(named_checkpoint, options.checkpoints)]


def check_writable(option: str, folder: Path) -> None:
    """Check that files can be written to a folder, which is created if it does not exist.

    Raises:
        UserError: if the permissions of the folder or of its first parent that exists deny it.
    """
    folder = folder.resolve()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        raise UserError(
            f"{option} must lie in a folder that can be written, but {str(existing)!r} cannot; name another"
        )


def check_figures(options: Namespace, *names: str) -> int | None:
    """Check the options of `CommandParser.add_figures`.

    Args:
        options: the options of the command.
        names: the names of the options that are files of figures.

    Returns:
        The number of columns of a publication that the figures span; None for the screen.

    Raises:
        UserError: if an option is not valid, or is set without a figure.
    """
    paths = {f"--{name}": path for name in names if (path := getattr(options, name)) is not None}
    for name, path in paths.items():
        check_new_file(name, path, options.overwrite)
        if path.suffix not in FIGURES:
            raise UserError(f"{name} must end in {' or '.join(FIGURES)}, but is {str(path)!r}; try {path.stem}.pdf")
    if options.style == "paper" and not paths:
        needed = " or ".join(f"--{name}" for name in names)
        raise UserError(f"--style paper must be set for a figure only, but there is none; add {needed} FILE")
    if options.columns is not None and options.style != "paper":
        raise UserError(f"--columns must be set for --style paper only, but is {options.columns}; add --style paper")
    return (options.columns or 1) if options.style == "paper" else None


class CommandParser(ArgumentParser):
    """ArgumentParser that disables abbreviations, and raises UserError instead of printing the usage and exiting."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog, description=description, allow_abbrev=False)

    def add_trust_package(self) -> None:
        """Add the option `--trust-package` to a command that loads networks of other packages."""
        self.add_argument("--trust-package", type=package_names, default=[], metavar="NAME[,NAME]", help=TRUST_HELP)

    def add_checkpoints(self, result: str) -> None:
        """Add the arguments of a command that joins checkpoints in a new one: RUN and `--output`."""
        self.add_argument("checkpoints", metavar="RUN", nargs="+", help=RUN_HELP)
        self.add_argument("--output", type=Path, metavar="FILE", required=True, help=f"where to write the {result}")

    def add_lines(self, help: str) -> None:
        """Add the arguments of a command that processes lines: TEXT, `--input`, `--output` and `--int8`."""
        self.add_argument("texts", metavar="TEXT", nargs="*", default=[], help=help)
        self.add_argument("--input", type=Path, metavar="FILE", help="read the texts from a file, one per line")
        self.add_argument(
            "--output",
            type=Path,
            metavar="FILE",
            help="write the output to a file; an interrupted command continues it if run again",
        )
        self.add_argument(
            "--int8", action="store_true", help="use 8-bit weights, on the CPU; faster there, but less exact"
        )

    def add_figures(self, **helps: str) -> None:
        """Add an option for the file of each figure, given its help, and `--style`, `--columns` and `--overwrite`."""
        for name, help in helps.items():
            self.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"{help} to a .png, .pdf or .svg file")
        self.add_argument(
            "--style",
            choices=("screen", "paper"),
            default="screen",
            help="style of figures: for a screen, or of the width and the font size of a publication (default: screen)",
        )
        widths = ", or ".join(f"{number}, {inches} inches" for number, inches in COLUMNS.items())
        self.add_argument(
            "--columns",
            type=int,
            choices=[*COLUMNS],
            help=f"columns of the publication that figures span: {widths} (default: 1)",
        )
        self.add_argument("--overwrite", action="store_true", help="replace existing files")

    def options(self) -> list[str]:
        """Return the options."""
        return [option for action in actions(self) for option in action.option_strings]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments as argparse does, but accept underscores in the names of options, as settings have them."""
        hyphenated = {option.replace("-", "_"): option for option in self.options() if option.startswith("--")}

        def spelled(argument: str) -> str:
            name, equals, value = argument.partition("=")
            return hyphenated.get(f"__{name[2:]}", name) + equals + value if name.startswith("--") else argument

        before = [*takewhile("--".__ne__, args)]
        return super().parse_known_args([*map(spelled, before), *args[len(before) :]], namespace)

    def error(self, message: str) -> NoReturn:
        if unknown := re.match(r"unrecognized arguments: (--?[^\s=]+)", message):
            names = [option.removeprefix("--") for option in self.options() if option.startswith("--")]
            has_texts = any(action.dest == "texts" for action in actions(self))
            is_text = has_texts and not unknown[1].startswith("--")
            hint = "; write texts that begin with - after --" if is_text else nearest(unknown[1].lstrip("-"), names)
            message = f"there is no option {unknown[1]!r}{hint}"
        elif message.endswith("expected one argument"):
            message += ", which follows = if it begins with -"
        elif invalid := re.match(r"argument (\S+): invalid (\w+) value: (.*)", message):
            message = f"{invalid[1]} must be of type {invalid[2]}, but is {invalid[3]}"
        raise UserError(f"{self.prog.split()[-1]}: {message}; `{self.prog} --help` lists the settings")


def trust_arguments(packages: Sequence[str]) -> list[str]:
    """Return the arguments by which another command trusts the same packages, none without packages."""
    return ["--trust-package", ",".join(packages)] if packages else []
