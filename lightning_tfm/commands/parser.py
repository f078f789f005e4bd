"""The command line of a command."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import NoReturn

from lightning_tfm.errors import UserError


class CommandParser(ArgumentParser):
    """Raises UserError where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog.split()[-1]}: {message}; `{self.prog} --help` lists the settings")
