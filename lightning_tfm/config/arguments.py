"""Checks of the arguments of a command before torch is imported, which takes seconds."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from itertools import takewhile
from pathlib import Path

from lightning_tfm.config.experiments import find_experiment
from lightning_tfm.config.settings import read_yaml_text
from lightning_tfm.errors import SYNONYMS, UserError, shell_quote, synonyms

GROUPS = ("checkpoint", "ckpt_path", "data", "heartbeat", "model", "name", "seed_everything", "trainer")
"""Settings of `fit`, `validate` and `test`, of which the first part of a dotted name is one."""

SETTINGS = [name for name in SYNONYMS if name.split(".")[0] in GROUPS]
"""Settings with other names in other projects."""

EXPERIMENTS = {"fit": 1, "plan": 1, "reproduce": None}
"""Number of experiments that a command takes before its options, by command; None for any."""


def check_arguments(command: str, arguments: list[str]) -> None:
    """Check that experiments exist, and that no setting has the name that it has in other projects.

    Args:
        command: the name of the command.
        arguments: its arguments.

    Raises:
        UserError: if an experiment does not exist, or a setting has another name.
    """
    is_of_lightning = command in ("fit", "validate", "test")
    if not (is_of_lightning or command in EXPERIMENTS) or {"-h", "--help", "--help-all"} & set(arguments):
        return
    if not arguments and command != "reproduce":
        kind, listing = ("an experiment", "list") if command in EXPERIMENTS else ("a run", "runs")
        raise UserError(f"lightning-tfm {command} needs the name of {kind}; `lightning-tfm {listing}` shows them")
    if is_of_lightning:
        for argument in arguments:
            check_option(argument)
    names = [*takewhile(lambda argument: not argument.startswith("-"), arguments)][: EXPERIMENTS.get(command, 0)]
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    # The value is optional here, since the parser of `fit` reports a missing one.
    parser.add_argument("-c", "--config", nargs="?", action="append", default=[])
    for name in [*names, *parser.parse_known_args(arguments)[0].config]:
        if name is not None:
            path = experiment_path(name)
            if not path.exists():
                read_yaml_text(path, "--config")


def check_option(argument: str) -> None:
    """Check that an argument does not name a setting as other projects do.

    Raises:
        UserError: if it does.
    """
    name = argument.partition("=")[0].lstrip("-")
    if argument.startswith("-") and name.split(".")[0] not in GROUPS and (settings := synonyms(name, SETTINGS)):
        raise UserError(f"there is no setting {name!r}; did you mean --{settings[0]}?")


def experiment_path(name: str) -> Path:
    """Return the path of a YAML file, which need not exist, or of the experiment of a name.

    Raises:
        UserError: if there is no experiment of this name.
    """
    if name.endswith(".ckpt") or os.path.isdir(name):
        raise UserError(
            f"{name!r} must be a YAML file or the name of an experiment, but is a folder or a checkpoint; to resume a "
            f"run: lightning-tfm fit EXPERIMENT --ckpt_path {shell_quote(name)}"
        )
    is_path = not name or "/" in name or name.endswith((".yaml", ".yml")) or os.path.exists(name)
    return Path(name) if is_path else find_experiment(name)
