"""The command line of a command."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import NoReturn

from lightning_tfm.errors import UserError
from lightning_tfm.trust import ALLOW_HELP, allowed_packages


class CommandParser(ArgumentParser):
    """Raises UserError where argparse would print its usage and exit."""

    def add_allow(self) -> None:
        """Add `--allow`, for commands that use networks of other packages."""
        self.add_argument("--allow", type=allowed_packages, default=[], metavar="NAME[,NAME]", help=ALLOW_HELP)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog.split()[-1]}: {message}; `{self.prog} --help` lists the settings")
