"""Checks of the arguments of a command before torch is imported, which takes seconds."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from itertools import takewhile
from pathlib import Path

from lightning_tfm.config.experiments import find_experiment
from lightning_tfm.config.settings import read_yaml, read_yaml_text
from lightning_tfm.errors import SYNONYMS, UserError, nearest, shell_quote, synonyms

GROUPS = (
    *("checkpoint", "ckpt_path", "config", "data", "dry_run", "heartbeat", "model", "name", "num_threads"),
    *("portable", "print_config", "seed_everything", "skip_test", "trainer", "trust_package"),
)
"""Settings of `fit`, `validate` and `test`, of which the first part of a dotted name is one."""

SETTINGS = [name for name in SYNONYMS if name.split(".")[0] in GROUPS]
"""Settings with other names in other projects."""

OPTIONS = {
    "explore": ("help", "no-browser", "output", "overwrite", "port", "trust-package"),
    "inspect": ("against", "examples", "help", "input", "output", "trust-package"),
}
"""Options of the commands whose further options are settings of `test`, by command."""

EXPERIMENTS = {"fit": 1, "plan": 1, "reproduce": None}
"""Number of experiments that a command takes before its options, by command; None for any."""


def check_arguments(command: str, arguments: list[str]) -> None:
    """Check that experiments exist and are whole, and that no option is unknown or has its name in other projects.

    Args:
        command: the name of the command.
        arguments: its arguments.

    Raises:
        UserError: if an experiment does not exist, or has no data or no model; or if an option has another name.
    """
    for argument in arguments if command in OPTIONS else ():
        check_further_option(command, argument)
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
    names += [name for name in parser.parse_known_args(arguments)[0].config if name is not None]
    paths = [*map(experiment_path, names)]
    for path in paths:
        if not path.exists():
            read_yaml_text(path, "--config")
    # A pipe can be read only once.
    if not (paths and EXPERIMENTS.get(command) and all(map(Path.is_file, paths))):
        return
    given = {_group(argument) for argument in arguments if argument.startswith("-")}
    in_files = {_group(str(name)) for path in paths for name in read_yaml(path, "--config")}
    missing = [name for name in ("data", "model") if name not in given | in_files]
    are_known = in_files.issubset(GROUPS)  # otherwise, one may be misspelled, which the parser reports
    if missing and are_known and "print_config" not in given:
        raise UserError(
            f"{' and '.join(missing)} must be set, but {names[0]!r} only sets others; to apply it to an experiment: "
            f"lightning-tfm {command} EXPERIMENT --config {shell_quote(names[0])}"
        )


def _group(name: str) -> str:
    """Return the first part of the name of an option or of a setting, without hyphens and plus signs."""
    return name.partition("=")[0].lstrip("-").split(".")[0].rstrip("+").replace("-", "_")


def check_option(argument: str) -> None:
    """Check that an argument does not name a setting as other projects do.

    Raises:
        UserError: if it does.
    """
    name = argument.partition("=")[0].lstrip("-")
    if argument.startswith("-") and name.split(".")[0] not in GROUPS and (settings := synonyms(name, SETTINGS)):
        raise UserError(f"there is no setting {name!r}; did you mean --{settings[0]}?")


def check_further_option(command: str, argument: str) -> None:
    """Check that an argument of a command in OPTIONS names no other option than its own and those of `test`.

    Raises:
        UserError: if it does.
    """
    name, own = argument.partition("=")[0], OPTIONS[command]
    if name.startswith("--") and _group(name) not in (*GROUPS, *(option.replace("-", "_") for option in own)):
        check_option(argument)
        raise UserError(
            f"there is no option {name!r} of {command}{nearest(name.lstrip('-'), own)}; further options are settings "
            "of test, such as --data.batch_size"
        )


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
