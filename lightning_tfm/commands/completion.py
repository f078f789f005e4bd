"""`lightning-tfm completion`: print a shell completion script."""

from __future__ import annotations

import inspect
from argparse import ArgumentParser
from importlib import import_module

import shtab
from lightning import Trainer

from lightning_tfm.commands import SUMMARIES
from lightning_tfm.commands.parser import CommandParser
from lightning_tfm.config.experiments import default_folder, list_experiments
from lightning_tfm.fit.trainer_settings import HIDDEN
from lightning_tfm.system.private import actions

OPTIONS = (
    *("config", "ckpt_path", "name", "seed_everything", "dry-run", "print_config"),
    *("data", "model", "model.network"),
)
"""Options of `fit`, `validate` and `test` in addition to those of the Trainer."""

SEEDS = ("seeds", "jobs")
"""Options of `fit` alone."""

FILES = ("FILE", "GROUP", "RUN", "SPEC")
"""Metavars of arguments that are files or folders."""


def completion(arguments: list[str]) -> int:
    """Print a shell completion script."""
    options = make_parser().parse_args(arguments)
    print(shtab.complete(_all_commands(), options.shell))
    return 0


def make_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        "lightning-tfm completion",
        description='Print a script that completes commands in a shell: `eval "$(lightning-tfm completion bash)"`.',
    )
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS, help="the shell")
    return parser


def _all_commands() -> ArgumentParser:
    """Return a parser of all commands with the options to complete."""
    root = ArgumentParser("lightning-tfm")
    root.add_argument("--version", action="store_true", help="print the version")
    commands = root.add_subparsers(dest="command")
    settings = [f"trainer.{name}" for name in inspect.signature(Trainer).parameters if name not in HIDDEN]
    experiments = [experiment.name for experiment in list_experiments(default_folder())]
    for name in ("fit", "validate", "test", *SUMMARIES):
        made = [import_module(f"lightning_tfm.commands.{name}").make_parser()] if name in SUMMARIES else []
        parser = commands.add_parser(name, parents=made, add_help=False, help=name)  # shtab omits commands without help
        if name in ("fit", "plan"):
            parser.add_argument("experiment", choices=experiments)
        elif name in ("validate", "test"):
            parser.add_argument("run", metavar="RUN")
        if name in ("fit", "plan", "validate", "test"):
            for option in (*OPTIONS, *settings, *(SEEDS if name == "fit" else ())):
                parser.add_argument(f"--{option}")
    for parser in commands.choices.values():
        for action in actions(parser):
            if action.metavar in FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # read by shtab
    return root
